"""Pages of the Python API reference: the public modules, whose docstrings mkdocstrings renders."""

from pathlib import Path
from typing import NamedTuple

FOLDER = "api"


class ApiPage(NamedTuple):
    """Page of the API reference.

    Attributes:
        title: heading of the page.
        introduction: purpose of the modules in one or two sentences.
        modules: modules to show, in order.
    """

    title: str
    introduction: str
    modules: tuple[str, ...]


API_PAGES: dict[str, ApiPage] = {
    "positions": ApiPage(
        "Encodings, processors, temperatures",
        "Interface of position methods: hooks and declarations. "
        "[Contributing](../contributing.md) explains how to add one.",
        (
            *("megatron.position.encoding", "megatron.position.processor", "megatron.position.temperature"),
            *("megatron.position.base", "megatron.position.bounded_parameter", "megatron.position.facts"),
            *("megatron.position.token_range", "megatron.position.numerics", "megatron.position.series_tails"),
            "megatron.position.rotary_scaling",
        ),
    ),
    "registry": ApiPage(
        "Methods by name",
        "Registered methods, their declarations, and construction of modules.",
        ("megatron.position.registry", "megatron.position.catalog"),
    ),
    "attention": ApiPage(
        "Attention",
        "Reference implementation in plain PyTorch, its inputs, and the interface of faster backends.",
        (
            *("megatron.attention.inputs", "megatron.attention.segments", "megatron.attention.reference"),
            *("megatron.attention.softmax", "megatron.attention.query_rows", "megatron.attention.documents"),
            *("megatron.attention.backends.backend", "megatron.attention.backends.registry"),
        ),
    ),
    "model": ApiPage(
        "Models",
        "Construction of megatron-core's GPT with this project's attention from options.",
        ("megatron.model.build", "megatron.model.gpt"),
    ),
    "data": ApiPage(
        "Data",
        "Conversion of texts to token files, with the tokenizer next to them. [Data](../data.md) is the guide.",
        (
            *("megatron.data.corpus.prepare", "megatron.options.data", "megatron.data.corpus_metadata"),
            *("megatron.data.indexed_dataset", "megatron.data.tokenizers"),
        ),
    ),
    "checkpoints": ApiPage(
        "Runs and checkpoints",
        "Trained runs, found by folder, and loading of their models.",
        ("megatron.checkpoint.trained_run", "megatron.checkpoint.load_model"),
    ),
    "evaluation": ApiPage(
        "Evaluation",
        "Selection of scored tokens, scoring, and records of the results.",
        (
            *("megatron.evaluation.run", "megatron.evaluation.protocols", "megatron.evaluation.perplexity"),
            *("megatron.evaluation.loss_records", "megatron.evaluation.eval_target", "megatron.evaluation.texts"),
            *("megatron.evaluation.needle_map", "megatron.evaluation.accuracy", "megatron.reports.records"),
            *("megatron.reports.comparison_table", "megatron.reports.table_formats", "megatron.reports.plots"),
            "megatron.reports.metrics",
        ),
    ),
    "tasks": ApiPage(
        "Tasks from scratch",
        "Interface of tasks, kinds of tasks, and tasks by name. [Tasks](../tasks.md) lists them.",
        (*("megatron.data.tasks.task", "megatron.data.tasks.needle_task", "megatron.data.tasks.task_config"),),
    ),
    "kernels": ApiPage(
        "Kernels",
        "Operators in Triton and C. `tests/support/kernel_references.py` has their references in plain PyTorch.",
        (
            "megatron.kernels.biased_attention.op",
            *("megatron.kernels.cdape_attention.op", "megatron.kernels.cdape_attention.args"),
            *("megatron.kernels.bias.toeplitz", "megatron.kernels.bias.fire"),
        ),
    ),
}
"""Pages by the stems of their files."""


def list_api_pages(root: Path) -> dict[str, ApiPage]:
    """Return the pages of all existing modules, farfield/ first."""
    modules = tuple(f"farfield.{path.stem}" for path in sorted((root / "farfield").glob("*.py")) if path.stem[0] != "_")
    page = ApiPage("farfield", "Functions for scripts and notebooks.", ("farfield", *modules))
    return {**({"farfield": page} if (root / "farfield" / "__init__.py").is_file() else {}), **API_PAGES}


def write_api_pages(root: Path) -> dict[str, str]:
    """Return the pages by path in the site's docs/, starting with the index."""
    pages = list_api_pages(root)
    entries = [f"[{page.title}]({stem}.md)\n:   {page.introduction}" for stem, page in pages.items()]
    introduction = (
        "Signatures, shapes, errors and sources, from the docstrings. Run Python in the project's root, or add it to "
        "`PYTHONPATH`. Shape letters: B batch, T sequence, H heads, h the heads of one rank, D hidden size, "
        "d head dimension, N distances, V vocabulary, R rows and C columns of a block."
    )
    written = {f"{FOLDER}/index.md": "\n\n".join(["# Python reference", introduction, *entries]) + "\n"}
    for stem, page in pages.items():
        modules = [f"::: {module}\n\nSource: {_link_source(root, module)}\n{{ .facts }}" for module in page.modules]
        written[f"{FOLDER}/{stem}.md"] = "\n\n".join([f"# {page.title}", page.introduction, *modules]) + "\n"
    return written


def _link_source(root: Path, module: str) -> str:
    path = f"{module.replace('.', '/')}.py"
    path = path if (root / path).is_file() else f"{module.replace('.', '/')}/__init__.py"
    return f"[{path}](../../{path})"

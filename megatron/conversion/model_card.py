"""README.md of an export: what the model is, how it was trained, what was measured, how to load it."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.trained_run import TrainedRun
from megatron.conversion.model_family import ModelFamily
from megatron.data.tokenizers import Tokenizer
from megatron.options.model import ffn_hidden_size
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.records import RESULTS_FILE, Record, read_records
from megatron.reports.table_formats import render_comparison_markdown
from megatron.utils.formatting import format_count

PLOT_FILE = "results.png"

_PAGE_TEMPLATE = """---
library_name: transformers
pipeline_tag: text-generation
license: {license}
tags:
- farfield
- length-extrapolation
- {pos_emb}
---

# {title}

A GPT of {parameters} parameters with {positions}, trained on sequences of {length:,} tokens.
{stated}
## Loading

```python
{loading}
```

{remote}
{measured}
## Training

| setting | value |
|---|---|
{settings}
"""

_RESULTS_TEMPLATE = """
## Measured

{tables}

![perplexity by length]({picture})
"""


def render_model_card(
    run: TrainedRun, tokenizer: Tokenizer, family: ModelFamily, *, num_parameters: int, license: str | None, title: str
) -> tuple[str, bytes | None]:
    """The page, and a picture of what was measured, if anything was.

    Args:
        family: that the export is of.
        num_parameters: of the model.
        license: of the weights; None if the user did not say.
        title: the model's name.
    """
    records = _read_results(run)
    page = _PAGE_TEMPLATE.format(
        license=license or "other",
        pos_emb=run.config.position.pos_emb,
        title=title,
        parameters=format_count(num_parameters),
        positions=_describe_positions(run),
        length=run.config.model.seq_length,
        stated="" if license else "Its licence was not stated when it was exported.\n",
        loading=_render_loading_code(trust_remote_code=bool(family.auto_map)),
        remote=_describe_remote_code(run, family),
        measured=_render_results(records),
        settings="\n".join(f"| {name} | {value} |" for name, value in _list_settings(run, tokenizer)),
    )
    return page, _render_plot(records) if records else None


def _read_results(run: TrainedRun) -> list[Record]:
    path = run.folder / RESULTS_FILE
    return read_records(path) if path.is_file() else []


def _render_plot(records: Sequence[Record]) -> bytes:
    from megatron.reports.plots import render_plots_png  # matplotlib takes a while

    return render_plots_png(records)


def _describe_positions(run: TrainedRun) -> str:
    position = run.config.position
    text = f"`{position.pos_emb}` positions"
    if position.score_processor != "none":
        text += f" under `{position.score_processor}`"
    if position.attention_window is not None:
        text += f" in a window of {position.attention_window:,}"
    return text


def _render_loading_code(*, trust_remote_code: bool) -> str:
    flag = ", trust_remote_code=True" if trust_remote_code else ""
    return "\n".join(
        [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this folder, or its name on the Hub',
            f"tokenizer = AutoTokenizer.from_pretrained(folder{flag})",
            f"model = AutoModelForCausalLM.from_pretrained(folder{flag})",
            'tokens = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))",
        ]
    )


def _describe_remote_code(run: TrainedRun, family: ModelFamily) -> str:
    if not family.auto_map:
        difference_note = f"\nBut {family.known_difference}." if family.known_difference else ""
        return f"transformers' own `{family.architecture}` computes this model.{difference_note}"
    text = (
        "The modelling code is in this folder and needs torch and transformers (4.57 or 5).\n"
        "Pad on the left to generate from several prompts: a padded prompt gives what it gives alone.\n"
        "What the code would compute wrongly is refused: masks of rows and columns, foreign `position_ids`, static "
        "caches.\n"
    )
    if run.config.position.randomized_positions is not None:
        text += "Positions are randomized, so there is no cache: `use_cache=True` is refused.\n"
    return text


def _render_results(records: Sequence[Record]) -> str:
    if not records:
        return ""
    tables = "\n".join(render_comparison_markdown(layout) for layout in build_comparison_tables(records))
    return _RESULTS_TEMPLATE.format(tables=tables, picture=PLOT_FILE)


def _list_settings(run: TrainedRun, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    model, training, progress = run.config.model, run.config.training, run.progress
    architecture = f"{model.num_layers} layers, width {model.hidden_size:,}, {model.num_attention_heads} heads"
    options = {**run.config.position.pos_emb_options, **run.config.position.score_processor_options}
    rows = [
        ("shape", f"{architecture}, feed-forward {ffn_hidden_size(model):,}, {model.activation}, {model.norm}"),
        ("options of positions", ", ".join(f"{name} = {value}" for name, value in options.items()) or "defaults"),
        ("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens"),
    ]
    if progress.step:
        optimizer = run.config.optimizer
        rows += [
            ("steps", f"{progress.step:,}"),
            ("tokens seen", f"{progress.consumed_tokens:,}"),
            ("batch", f"{training.train_batch_size:,} sequences" if training.train_batch_size else "as configured"),
            ("precision", training.compute_dtype),
            ("optimizer", f"{optimizer.optimizer.type}, learning rate {optimizer.optimizer.params.lr:g}"),
        ]
    return rows


def write_model_card(folder: Path, page: str, plot: bytes | None) -> None:
    """Write README.md and the picture that it shows."""
    (folder / "README.md").write_text(page, encoding="utf-8")
    if plot is not None:
        (folder / PLOT_FILE).write_bytes(plot)

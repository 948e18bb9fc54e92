"""`./deepy.py evaluate RUN…`: trained runs in, records, a table and files out.

Each model is rebuilt from the configuration in its checkpoint, and every run is scored on the same tokens of the same
text by the same protocol; whatever would prevent that (other tokenizers, other data) is refused before the first
model is loaded. A model whose positions end is scored up to there, which is said, on the same targets as the others.
Files are written after each run, so what was measured is kept whatever happens later. Results of other runs,
protocols and texts that a folder holds stay in its files.
"""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron.config.schema import Config
from megatron.errors import UserError
from megatron.evaluation.progress import Job, Meter
from megatron.evaluation.protocols import Plan, default_targets, make_plan
from megatron.evaluation.request import Request, Run, check_backend, check_device, read_request
from megatron.evaluation.texts import text_of
from megatron.files import write_bytes, write_text
from megatron.reports import layout, tables
from megatron.reports import records as record_files
from megatron.reports.records import RESULTS, Record, replaced

if TYPE_CHECKING:
    import torch

    from megatron.model.gpt import GPT

# What needs torch or matplotlib is imported where it is used: a mistake in what was asked for is told at once.


@dataclass(frozen=True)
class Scoring:
    """What scoring a configuration's model will be, known before there is one."""

    model: GPT  # on the meta device: shapes without weights
    plan: Plan
    flops: float


def evaluate_runs(
    runs: Sequence[str | Path],
    lengths: Sequence[int] | str | None = None,
    protocol: str = "last",
    windows: int | None = None,
    targets: int | None = None,
    *,
    data: str | Path | None = None,
    output: str | Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    backend: str | None = None,
    window: int | None = None,
    batch_tokens: int | None = None,
    console: Console | None = None,
    names: Sequence[str] | None = None,
    show: bool = True,
    progress: Callable[[int, float, float], None] | None = None,
) -> list[Record]:
    """Evaluate runs side by side.

    Args:
        runs: run folders (their latest checkpoint is taken) or checkpoint folders.
        lengths: tokens, or text such as `128,256` or `1x,2x,32x` (multiples of the training length); None means 1× to
            32×.
        protocol, windows, targets: see `megatron.evaluation.protocols`.
        data: a dataset prefix, a corpus folder or a file of text (`megatron.evaluation.texts`) to score instead of each
            run's own test (or else valid) split.
        output: folder for results.json, .csv, .md and .png; a single run folder writes into itself if None. Results
            that are there stay, but for those that this measures again (`megatron.reports.records.replaced`).
        device: auto, cpu or cuda.
        precision: fp32, bf16 or fp16; auto is fp32 on CPU and what the run was trained in on a GPU.
        backend: attention backend; the run's own if None.
        window: attention window instead of each run's own: every token sees the last this many, its own included.
        batch_tokens: input tokens per forward pass.
        console: where the progress, the table and the names of the files go; None is silent.
        names: methods' names, one per run, instead of those made from the configurations.
        show: print the table at the end.
        progress: called as `evaluate` calls it, instead of showing a bar; for callers with a display of their own.

    Returns:
        The records of all runs and lengths.

    Raises:
        UserError: anything that would keep the runs from being compared, before any work.
        RunError: what fails while scoring; the files of finished runs stay.
    """
    asked = read_request(
        runs, lengths, protocol, windows, targets, data=data, output=output, device=device, precision=precision,
        backend=backend, window=window,
    )  # fmt: skip
    opened, wanted, folder = asked.runs, asked.lengths, asked.folder

    import torch

    from megatron.checkpoint.load_model import load_model
    from megatron.evaluation.names import distinct_names
    from megatron.evaluation.perplexity import evaluate, forward_flops

    chosen_device = find_device(device)
    types = [_dtype(precision, run, chosen_device) for run in opened]
    sketches = [_sketch(run.name, run.config, wanted, backend, window) for run in opened]
    if names is None:
        names = distinct_names([run.config for run in opened], [run.name for run in opened], window)
    if console is not None:
        console.print(_fate(asked), highlight=False, markup=False, soft_wrap=True)

    jobs = [
        Job(f"{name} seed {run.config.training.seed}", "evaluate", sum(forward_flops(model, asked.plan).values()))
        for name, run, model in zip(names, opened, sketches, strict=True)
    ]
    if console is not None:
        for run, model in zip(opened, sketches, strict=True):
            if (note := ends_early(run.name, run.config, model, wanted)) is not None:
                console.print(note, highlight=False, markup=False, soft_wrap=True)
    found: list[Record] = []
    digest = asked.text.digest
    with Meter(console if progress is None else None, jobs) as meter:
        for run, name, dtype, job in zip(opened, names, types, jobs, strict=True):
            meter.begin(job, "loading")
            loaded = load_model(run.checkpoint, device=str(chosen_device), dtype=dtype, backend=backend, window=window)
            report = progress or (lambda length, done, total: meter.update(done, f"length {length:,}"))
            scores = evaluate(
                loaded, asked.text.tokens, wanted, protocol, asked.targets, windows, report,
                vocabulary=asked.text.vocabulary, batch_tokens=batch_tokens,
            )  # fmt: skip
            meter.finish()
            about = {
                "method": name,
                "run": run.name,
                "step": run.progress.step,
                "train_tokens": run.progress.consumed_tokens,
                "dataset": asked.text.name,
                "text_digest": digest,
                "tokenizer": asked.text.vocabulary.name,
                "backend": backend or run.config.model.attention_backend,
                "machine": machine(),
                "software": software(),
            }
            found += [record.replace(**about) for record in scores]
            del loaded
            if chosen_device.type == "cuda":
                torch.cuda.empty_cache()  # room for the next model, and for whoever shares the GPU
            if folder is not None:
                record_files.write(folder / RESULTS, replaced(asked.kept, found, one_run=asked.alone))
    if console is not None and show:
        tables.show(console, found)
    if folder is not None:
        written = write_results(folder, replaced(asked.kept, found, one_run=asked.alone))
        if console is not None:
            console.print(f"written: {', '.join(map(str, written))}", highlight=False, markup=False, soft_wrap=True)
    return found


def write_results(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Write results.json, results.csv, results.md and results.png into a folder."""
    from megatron.reports.plots import png

    return [
        record_files.write(folder / RESULTS, records),
        record_files.write_csv(folder / "results.csv", records),
        write_text(folder / "results.md", "\n".join(tables.markdown(group) for group in layout.layouts(records))),
        write_bytes(folder / "results.png", png(records)),
    ]


def find_device(name: str) -> torch.device:
    """The device called auto, cpu, cuda or cuda:1. Raises UserError if it is not there."""
    import torch

    kind, index = check_device(name)
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise UserError(f"device = {name!r}: not there; CUDA devices on this machine: {torch.cuda.device_count()}")
    return torch.device(name)


def plan_for(
    config: Config,
    lengths: Sequence[int],
    protocol: str,
    *,
    windows: int | None = None,
    targets: int | None = None,
    data: str | Path | None = None,
    backend: str | None = None,
    name: str = "this configuration",
) -> Scoring:
    """Check that a model of this configuration can be scored so, before it is trained; raises what scoring would."""
    from megatron.evaluation.perplexity import forward_flops

    model = _sketch(name, config, lengths, backend)
    text = text_of(name, config, data)
    wanted = default_targets(config.model.seq_length, lengths, protocol) if targets is None else targets
    plan = make_plan(len(text.tokens), lengths, protocol, targets=wanted, windows=windows)
    return Scoring(model, plan, sum(forward_flops(model, plan).values()))


def ends_early(name: str, config: Config, model: GPT, lengths: Sequence[int]) -> str | None:
    """One line if the model's positions end before the largest length, else None."""
    from megatron.evaluation.perplexity import known_lengths

    known = known_lengths(model, lengths)
    if len(known) == len(lengths):
        return None
    return f"{name}: {_end(config, model)}; scored at lengths up to {known[-1]:,}"


def _end(config: Config, model: GPT) -> str:
    key = "randomized_positions" if config.position.randomized_positions is not None else "max_position_embeddings"
    return f"pos_emb {config.position.pos_emb} ends at {model.max_length:,} positions ({key})"


def _sketch(name: str, config: Config, lengths: Sequence[int], backend: str | None, window: int | None = None) -> GPT:
    """The model of a configuration without weights. Raises UserError if it cannot be scored at any of the lengths."""
    from megatron.model.build import build_model

    check_backend(backend)
    position = config.position
    if window is not None:
        position = position.model_copy(update={"attention_window": window})
    model = build_model(config.model, position, 1, device="meta", backend=backend)
    if model.max_length is not None and min(lengths) > model.max_length:
        raise UserError(
            f"{name}: {_end(config, model)}, length {min(lengths):,} is past it; use lengths up to "
            f"{model.max_length:,} or leave it out"
        )
    return model


def machine() -> str:
    """Operating system, processor and threads, as records name them."""
    import torch

    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass  # not Linux
    return f"{platform.system()} {platform.machine()}, {processor}, {torch.get_num_threads()} threads"


def software() -> str:
    """Versions, as records name them."""
    import torch

    project = Path(__file__).parents[2] / "pyproject.toml"
    ours = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"] if project.is_file() else "?"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"farfield {ours}, Python {python}, torch {torch.__version__}, megatron-core {version('megatron-core')}"


def _fate(asked: Request) -> str:
    """What will become of the results, said while they can still be given another place."""
    if asked.folder is None:
        return "results will not be written: give --output FOLDER to keep them"
    line = f"results will be written to {asked.folder}"
    if asked.kept:
        line += f"; the {len(asked.kept)} there stay, unless this measures the same again"
    return line


def _dtype(precision: str, run: Run, device: torch.device) -> torch.dtype:
    import torch

    if precision == "auto":
        precision = (run.config.training.precision or "fp32") if device.type == "cuda" else "fp32"
    if precision == "fp16" and device.type == "cpu":
        raise UserError("precision = 'fp16': needs a GPU; on CPU choose fp32 or bf16")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

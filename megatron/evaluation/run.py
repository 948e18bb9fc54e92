"""`./deepy.py evaluate RUN…`: trained runs in, records, a table and files out.

Each model is rebuilt from the configuration in its checkpoint, and every run is scored on the same tokens of the same
text by the same protocol; whatever would prevent that (other tokenizers, other data) is refused before the first
model is loaded. A model whose positions end is scored up to there, which is said, on the same targets as the others.
Files are written after each run, so what was measured is kept whatever happens later.
"""

import os
import platform
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.console import Console

from megatron.checkpoint.folder import CONFIG, resolve
from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.progress import Progress
from megatron.config.schema import Config
from megatron.data.corpus import read_corpus
from megatron.data.datasets import Vocabulary, sequence_range, token_stream, vocabulary
from megatron.data.options import DataOptions
from megatron.data.paths import Split, basename, description_of, split_prefixes
from megatron.errors import UserError
from megatron.evaluation import records as record_files
from megatron.evaluation import tables
from megatron.evaluation.files import write_bytes, write_text
from megatron.evaluation.names import distinct_names
from megatron.evaluation.perplexity import default_lengths, default_targets, evaluate, forward_flops, known_lengths
from megatron.evaluation.plots import png
from megatron.evaluation.progress import Job, Meter
from megatron.evaluation.protocols import Plan, make_plan
from megatron.evaluation.records import Record
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.model.options import ModelOptions

BACKENDS: tuple[str, ...] = get_args(ModelOptions.model_fields["attention_backend"].annotation)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Text:
    """What is scored: a split's tokens, and what they are called."""

    tokens: np.ndarray
    name: str
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Scoring:
    """What scoring a configuration's model will be, known before there is one."""

    model: GPT  # on the meta device: shapes without weights
    plan: Plan
    flops: float


@dataclass(frozen=True)
class Run:
    """A trained model that has not been loaded yet."""

    name: str  # as the user wrote it
    checkpoint: Path
    config: Config
    progress: Progress


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
        data: a dataset prefix or a corpus folder to score instead of each run's own test (or else valid) split.
        output: folder for results.json, .csv, .md and .png; a single run folder writes into itself if None.
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
    if not runs:
        raise UserError("no run given")
    opened = [_open(path) for path in runs]
    if len({run.checkpoint.resolve() for run in opened}) < len(opened):
        raise UserError(f"the same checkpoint is given twice: {', '.join(run.name for run in opened)}")
    chosen_device = find_device(device)
    if window is not None and window < 1:
        raise UserError(f"window = {window}: at least 1 is needed, the token itself")
    types = [_dtype(precision, run, chosen_device) for run in opened]
    wanted = parse_lengths(lengths, [run.config.model.seq_length for run in opened])
    sketches = [_sketch(run.name, run.config, wanted, backend, window) for run in opened]
    text = _common_text(opened, data)
    scored = targets
    if scored is None:
        scored = default_targets(min(run.config.model.seq_length for run in opened), wanted, protocol)
    plan = make_plan(len(text.tokens), wanted, protocol, targets=scored, windows=windows)
    if names is None:
        names = distinct_names([run.config for run in opened], [run.name for run in opened], window)
    folder = Path(output) if output is not None else _own_folder(opened)
    if folder is not None:
        _make_writable(folder)
    if console is not None:
        console.print(_fate(folder), highlight=False, markup=False, soft_wrap=True)

    jobs = [
        Job(f"{name} seed {run.config.training.seed}", "evaluate", sum(forward_flops(model, plan).values()))
        for name, run, model in zip(names, opened, sketches, strict=True)
    ]
    if console is not None:
        for run, model in zip(opened, sketches, strict=True):
            if (note := ends_early(run.name, run.config, model, wanted)) is not None:
                console.print(note, highlight=False, markup=False, soft_wrap=True)
    found: list[Record] = []
    with Meter(console if progress is None else None, jobs) as meter:
        for run, name, dtype, job in zip(opened, names, types, jobs, strict=True):
            meter.begin(job, "loading")
            loaded = load_model(run.checkpoint, device=str(chosen_device), dtype=dtype, backend=backend, window=window)
            report = progress or (lambda length, done, total: meter.update(done, f"length {length:,}"))
            scores = evaluate(
                loaded, text.tokens, wanted, protocol, scored, windows, report,
                vocabulary=text.vocabulary, batch_tokens=batch_tokens,
            )  # fmt: skip
            meter.finish()
            about = {
                "method": name,
                "run": run.name,
                "step": run.progress.step,
                "train_tokens": run.progress.consumed_tokens,
                "dataset": text.name,
                "tokenizer": text.vocabulary.name,
                "backend": backend or run.config.model.attention_backend,
                "machine": machine(),
                "software": software(),
            }
            found += [record.model_copy(update=about) for record in scores]
            del loaded
            if chosen_device.type == "cuda":
                torch.cuda.empty_cache()  # room for the next model, and for whoever shares the GPU
            if folder is not None:
                record_files.write(folder / "results.json", found)
    if console is not None and show:
        tables.show(console, found)
    if folder is not None:
        written = write_results(folder, found)
        if console is not None:
            console.print(f"written: {', '.join(map(str, written))}", highlight=False, markup=False, soft_wrap=True)
    return found


def write_results(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Write results.json, results.csv, results.md and results.png into a folder."""
    return [
        record_files.write(folder / "results.json", records),
        record_files.write_csv(folder / "results.csv", records),
        write_text(folder / "results.md", "\n".join(tables.markdown(layout) for layout in tables.layouts(records))),
        write_bytes(folder / "results.png", png(records)),
    ]


def parse_lengths(lengths: Sequence[int] | str | None, train_lengths: Sequence[int]) -> list[int]:
    """Window lengths in tokens, ascending.

    Args:
        lengths: numbers of tokens; or text of them, separated by commas, each in tokens (`128`) or in training lengths
            (`2x`, `2×`, `1.5x`); None means 1x to 32x.
        train_lengths: training lengths of the runs; multiples need them to be equal.

    Raises:
        UserError: a part that is no length, or multiples for runs of different training lengths.
    """
    alike = len(set(train_lengths)) == 1
    if lengths is None:
        if not alike:
            trained = ", ".join(f"{length:,}" for length in sorted(set(train_lengths)))
            raise UserError(f"lengths: name them in tokens, as the runs were trained at different ones ({trained})")
        return default_lengths(train_lengths[0])
    if not isinstance(lengths, str):
        if not lengths:
            raise UserError("lengths: none given")
        return sorted(set(lengths))
    result = set()
    for part in (part.strip() for part in lengths.split(",")):
        number = part.removesuffix("x").removesuffix("×").replace("_", "")
        try:
            value = float(int(number)) if number == part.replace("_", "") else float(number) * train_lengths[0]
        except (ValueError, OverflowError):
            value = 0.0  # refused below
        if not (1 <= value < 2**40 and value == int(value)):
            raise UserError(f"lengths: {part!r} is not a length; write tokens (128,256) or training lengths (1x,2x)")
        if number != part.replace("_", "") and not alike:
            raise UserError(f"lengths: {part} is ambiguous, as the runs were trained at different lengths; name tokens")
        result.add(int(value))
    return sorted(result)


def find_device(name: str) -> torch.device:
    """The device called auto, cpu, cuda or cuda:1. Raises UserError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UserError(f"device = {name!r}: choose one of auto, cpu, cuda")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
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
    model = _sketch(name, config, lengths, backend)
    options, split = _split(name, config, data)
    tokens = token_stream(options, split)
    wanted = default_targets(config.model.seq_length, lengths, protocol) if targets is None else targets
    plan = make_plan(len(tokens), lengths, protocol, targets=wanted, windows=windows)
    return Scoring(model, plan, sum(forward_flops(model, plan).values()))


def ends_early(name: str, config: Config, model: GPT, lengths: Sequence[int]) -> str | None:
    """One line if the model's positions end before the largest length, else None."""
    known = known_lengths(model, lengths)
    if len(known) == len(lengths):
        return None
    return f"{name}: {_end(config, model)}; scored at lengths up to {known[-1]:,}"


def _end(config: Config, model: GPT) -> str:
    key = "randomized_positions" if config.position.randomized_positions is not None else "max_position_embeddings"
    return f"pos_emb {config.position.pos_emb} ends at {model.max_length:,} positions ({key})"


def _sketch(name: str, config: Config, lengths: Sequence[int], backend: str | None, window: int | None = None) -> GPT:
    """The model of a configuration without weights. Raises UserError if it cannot be scored at any of the lengths."""
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"backend = {backend!r}: choose one of {', '.join(BACKENDS)}")
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
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass  # not Linux
    return f"{platform.system()} {platform.machine()}, {processor}, {torch.get_num_threads()} threads"


def software() -> str:
    """Versions, as records name them."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    ours = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"] if project.is_file() else "?"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"farfield {ours}, Python {python}, torch {torch.__version__}, megatron-core {version('megatron-core')}"


def _open(path: str | Path) -> Run:
    checkpoint = resolve(path)
    return Run(str(path), checkpoint, Config.read(checkpoint / CONFIG), Progress.read(checkpoint))


def _fate(folder: Path | None) -> str:
    """What will become of the results, said while they can still be given another place."""
    if folder is None:
        return "results will not be written: give --output FOLDER to keep them"
    results = folder / "results.json"
    return f"results will be written to {folder}" + (f", in the place of {results}" if results.exists() else "")


def _make_writable(folder: Path) -> None:
    """Find out before the work whether its results can be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: may not be written to")


def _own_folder(runs: Sequence[Run]) -> Path | None:
    """A single run's folder. A checkpoint named directly keeps the results of its run as they are."""
    folder = Path(runs[0].name)
    return folder if len(runs) == 1 and folder.resolve() != runs[0].checkpoint.resolve() else None


def _dtype(precision: str, run: Run, device: torch.device) -> torch.dtype:
    if precision == "auto":
        precision = (run.config.training.precision or "fp32") if device.type == "cuda" else "fp32"
    if precision not in DTYPES:
        raise UserError(f"precision = {precision!r}: choose one of auto, {', '.join(DTYPES)}")
    if precision == "fp16" and device.type == "cpu":
        raise UserError("precision = 'fp16': needs a GPU; on CPU choose fp32 or bf16")
    return DTYPES[precision]


def _common_text(runs: Sequence[Run], data: str | Path | None) -> Text:
    """The text of all runs. Raises UserError if they do not share it, or its tokenizer."""
    first: Text | None = None
    for run in runs:
        options, split = _split(run.name, run.config, data)
        known = vocabulary(options)
        trained = (run.progress.vocabulary or {}).get("name", known.name)
        if known.name != trained:
            source = data if data is not None else f"the {split} data of {run.name}"
            raise UserError(f"{source}: made by tokenizer {known.name}, but {run.name} was trained with {trained}")
        where = ", ".join(str(prefix) for _, prefix in split_prefixes(options, split))
        name = f"{where} ({split} of {options.split})" if options.data_path is not None else where
        if first is not None and (name, known) == (first.name, first.vocabulary):
            continue
        text = Text(token_stream(options, split), name, known)
        if first is None:
            first = text
        elif known.name != first.vocabulary.name:
            raise UserError(
                f"{run.name} was trained with tokenizer {known.name}, {runs[0].name} with {first.vocabulary.name}: "
                "perplexities per token cannot be compared"
            )
        elif not np.array_equal(text.tokens, first.tokens):
            raise UserError(
                f"{run.name} would be scored on {name}, {runs[0].name} on {first.name}: name one text for all with "
                "--data"
            )
    assert first is not None
    return first


def _split(name: str, config: Config, data: str | Path | None) -> tuple[DataOptions, Split]:
    """The data options and the split of them that a run is scored on."""
    own = config.data
    if data is not None:
        prefix = _dataset(Path(data))
        # A tokenizer named in the run's configuration is needed only where the data do not say their own.
        keys = {} if description_of(prefix) else own.model_dump(include={"tokenizer_type", "vocab_file", "merge_file"})
        return DataOptions(test_data_paths=[str(prefix)], **keys), "test"
    for split in ("test", "valid"):
        if own.data_path is not None and sequence_range(own.split, split, 1 << 20) is not None:
            return own, split
        if own.data_path is None and split_prefixes(own, split):
            return own, split
    raise UserError(f"{name}: its configuration names no test or valid data; name a text with --data")


def _dataset(path: Path) -> Path:
    """The prefix meant by `--data`: of a corpus folder, its test split, else its valid split, else all of it."""
    if not path.is_dir():
        return path
    splits = read_corpus(path).splits
    chosen = next((split for split in ("test", "valid", "all") if split in splits), None)
    if chosen is None:
        raise UserError(f"{path}: has only {', '.join(splits)}; name a dataset in it to score that one")
    return path / basename(chosen)

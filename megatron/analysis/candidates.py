"""The models that are looked at: their names side by side, the work that each will be, and how they are opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.analysis.analysis import LayerEncoding, Looked, names, reads
from megatron.analysis.request import Request
from megatron.model.device_dtype import resolve_device, resolve_dtype
from megatron.utils.progress import WorkItem

if TYPE_CHECKING:
    from megatron.config.schema import Config

# torch is imported where it is used: a mistake in what was asked for is told at once.


@dataclass(frozen=True)
class Candidate:
    """A model that is about to be looked at."""

    name: str
    job: WorkItem
    config: Config
    checkpoint: Path | None
    """None for a configuration that was not trained."""


def candidates_of(asked: Request) -> list[Candidate]:
    """The runs, then the configurations, with names that tell them apart."""
    seen: set[str] = set()
    found = []
    for name, other, config, checkpoint in _named(asked):
        unique = name if name not in seen else f"{name} [{other}]"  # seeds share a name elsewhere
        seen.add(unique)
        trained = checkpoint is not None
        work = sum(work_of(analysis, asked, trained) for analysis in asked.options.only or names())
        job = WorkItem(unique, "analyze" if trained else "analyze, untrained", work)
        found.append(Candidate(unique, job, config, checkpoint))
    return found


def _named(asked: Request) -> Iterator[tuple[str, str, Config, Path | None]]:
    """Of each model its method's name, what else it is called by, its configuration and its checkpoint."""
    from megatron.evaluation.names import distinct_names, method_name

    window = asked.options.window
    trained = distinct_names([run.config for run in asked.runs], [run.name for run in asked.runs], window)
    for name, run in zip(trained, asked.runs, strict=True):
        yield name, run.name, run.config, run.checkpoint
    for text, config in asked.untrained:
        yield f"{method_name(config.position, window)} (untrained)", text, config, None


def work_of(analysis: str, asked: Request, trained: bool) -> float:
    """Roughly how long an analysis takes, in units of one that reads nothing."""
    if asked.reading is None or not trained or not reads(analysis):
        return 1.0
    return 1.0 + sum(len(windows) * (length / 512) ** 2 for length, windows in asked.reading.windows.items())


def looked(candidate: Candidate, asked: Request) -> Looked:
    """Load a model, or build the encodings of a configuration. Raises RunError if a checkpoint is damaged."""
    options, config = asked.options, candidate.config
    window = options.window or config.position.attention_window
    if candidate.checkpoint is None:
        return Looked(candidate.name, config, window, _fresh(config), options, asked.lengths)
    from megatron.analysis.observe import attentions
    from megatron.checkpoint.load_model import load_model

    device = resolve_device(options.device)
    loaded = load_model(
        candidate.checkpoint,
        device=str(device),
        dtype=resolve_dtype(options.precision, config.training.precision, device),
        backend="chunked",
        window=options.window,
    )
    model = loaded.model
    encodings = (
        [LayerEncoding(attention.encoding, attention.layer_index) for attention in attentions(model)]
        if model.position is None
        else [LayerEncoding(model.position, None)]
    )
    windows = {} if asked.reading is None else asked.reading.windows
    return Looked(candidate.name, config, window, encodings, options, asked.lengths, model, windows)


def _fresh(config: Config) -> list[LayerEncoding]:
    """The encodings that training would begin with."""
    import torch

    from megatron.model.attention_dims import build_attention_dims
    from megatron.model.position_modules import build_encoding_from_options

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        count = config.model.num_layers if config.position.pos_emb_per_layer else 1
        found = [build_encoding_from_options(config.position, build_attention_dims(config.model)) for _ in range(count)]
    if not config.position.pos_emb_per_layer:
        return [LayerEncoding(found[0], None)]
    return [LayerEncoding(encoding, layer) for layer, encoding in enumerate(found)]

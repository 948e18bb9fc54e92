"""The models that are looked at: their names side by side, the work that each will be, and how they are opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.analysis.analysis import AnalysisContext, LayerEncoding, list_analysis_names, needs_text
from megatron.analysis.request import AnalysisRequest
from megatron.model.device_dtype import resolve_device, resolve_dtype
from megatron.utils.progress import WorkItem

if TYPE_CHECKING:
    from megatron.config.schema import Config

# torch is imported where it is used: a mistake in what was asked for is told at once.


@dataclass(frozen=True)
class AnalysisJob:
    """A model that is about to be looked at."""

    name: str
    job: WorkItem
    config: Config
    checkpoint: Path | None
    """None for a configuration that was not trained."""


def build_jobs(request: AnalysisRequest) -> list[AnalysisJob]:
    """The runs, then the configurations, with names that tell them apart."""
    seen: set[str] = set()
    found = []
    for name, other, config, checkpoint in _assign_names(request):
        unique = name if name not in seen else f"{name} [{other}]"  # seeds share a name elsewhere
        seen.add(unique)
        trained = checkpoint is not None
        work = sum(
            estimate_relative_cost(analysis, request, trained)
            for analysis in request.options.only or list_analysis_names()
        )
        job = WorkItem(unique, "analyze" if trained else "analyze, untrained", work)
        found.append(AnalysisJob(unique, job, config, checkpoint))
    return found


def _assign_names(asked: AnalysisRequest) -> Iterator[tuple[str, str, Config, Path | None]]:
    """Of each model its method's name, what else it is called by, its configuration and its checkpoint."""
    from megatron.evaluation.names import assign_distinct_names, format_method_name

    window = asked.options.window
    trained = assign_distinct_names([run.config for run in asked.runs], [run.name for run in asked.runs], window)
    for name, run in zip(trained, asked.runs, strict=True):
        yield name, run.name, run.config, run.checkpoint
    for text, config in asked.untrained:
        yield f"{format_method_name(config.position, window)} (untrained)", text, config, None


def estimate_relative_cost(analysis: str, request: AnalysisRequest, trained: bool) -> float:
    """Roughly how long an analysis takes, in units of one that reads nothing."""
    if request.inputs is None or not trained or not needs_text(analysis):
        return 1.0
    return 1.0 + sum(len(windows) * (length / 512) ** 2 for length, windows in request.inputs.windows.items())


def load_analysis_context(job: AnalysisJob, request: AnalysisRequest) -> AnalysisContext:
    """Load a model, or build the encodings of a configuration. Raises RunError if a checkpoint is damaged."""
    options, config = request.options, job.config
    window = options.window or config.position.attention_window
    if job.checkpoint is None:
        return AnalysisContext(job.name, config, window, _build_untrained_encodings(config), options, request.lengths)
    from megatron.analysis.observe import list_attention_layers
    from megatron.checkpoint.load_model import load_model

    device = resolve_device(options.device)
    loaded = load_model(
        job.checkpoint,
        device=str(device),
        dtype=resolve_dtype(options.precision, config.training.precision, device),
        backend="chunked",
        window=options.window,
    )
    model = loaded.model
    encodings = (
        [LayerEncoding(attention.encoding, attention.layer_index) for attention in list_attention_layers(model)]
        if model.position is None
        else [LayerEncoding(model.position, None)]
    )
    windows = {} if request.inputs is None else request.inputs.windows
    return AnalysisContext(job.name, config, window, encodings, options, request.lengths, model, windows)


def _build_untrained_encodings(config: Config) -> list[LayerEncoding]:
    """The encodings that training would begin with."""
    import torch

    from megatron.model.position_modules import build_attention_dims, build_encoding_from_options

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        count = config.model.num_layers if config.position.pos_emb_per_layer else 1
        found = [build_encoding_from_options(config.position, build_attention_dims(config.model)) for _ in range(count)]
    if not config.position.pos_emb_per_layer:
        return [LayerEncoding(found[0], None)]
    return [LayerEncoding(encoding, layer) for layer, encoding in enumerate(found)]

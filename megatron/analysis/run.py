"""`./deepy.py analyze RUN…`: trained runs and configurations in, one page with its data out.

Models are looked at one after the other, each by every analysis; then the page shows them side by side. The data of an
analysis are written as soon as a model has been looked at, so what was measured is kept whatever happens later.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.analysis.analysis import Analysis, LayerEncoding, Looked, NotApplicable, Table, analyses, names, reads
from megatron.analysis.options import AnalysisOptions
from megatron.analysis.request import Request, read_request
from megatron.evaluation.provenance import machine, software
from megatron.evaluation.run import saying
from megatron.files import write_text
from megatron.meter import Job, Meter
from megatron.model.placement import compute_type, find_device

if TYPE_CHECKING:
    from rich.console import Console

    from megatron.config.schema import Config

# What needs torch or matplotlib is imported where it is used: a mistake in what was asked for is told at once.

PAGE = "analysis.html"


@dataclass(frozen=True)
class Candidate:
    """A model that is about to be looked at."""

    name: str
    job: Job
    config: Config
    checkpoint: Path | None
    """None for a configuration that was not trained."""


def analyze(
    runs: Sequence[str | Path],
    options: AnalysisOptions | None = None,
    *,
    configs: Sequence[str] = (),
    output: str | Path | None = None,
    console: Console | None = None,
) -> Path:
    """Look at models side by side.

    Args:
        runs: run folders (their latest checkpoint is taken) or checkpoint folders.
        options: what is looked at; the defaults if None.
        configs: configurations to look at untrained, each as `train` takes them.
        output: folder for the page and its data; `analysis` in a single run's folder if None.
        console: where the progress and the names of the files go; None is silent.

    Returns:
        The page.

    Raises:
        UserError: anything that would keep the models from being looked at, before any work.
        RunError: a checkpoint is damaged, or what fails on the way.
    """
    asked = read_request(runs, configs, options or AnalysisOptions(), output)
    say = saying(console)
    say(f"the page will be written to {asked.folder / PAGE}")
    candidates = _candidates(asked)
    chosen = {
        name: each for name, each in analyses().items() if asked.options.only is None or name in asked.options.only
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    missing: dict[str, dict[str, str]] = {name: {} for name in chosen}
    with Meter(console, [candidate.job for candidate in candidates]) as meter:
        for candidate in candidates:
            meter.begin(candidate.job, "loading")
            looked = _looked(candidate, asked)
            done = 0.0
            for name, analysis in chosen.items():
                meter.update(done, analysis.title)

                def told(share: float, done: float = done, name: str = name, title: str = analysis.title) -> None:
                    meter.update(done + share * _work(name, asked), title)

                looked = replace(looked, progress=told)
                try:
                    found[name][candidate.name] = analysis.measure(looked)
                except NotApplicable as reason:
                    missing[name][candidate.name] = str(reason)
                else:
                    write_text(asked.folder / f"{name}.{analysis.data}", _data(analysis, found[name]))
                done += _work(name, asked)
            del looked
            meter.finish()
    page = write_text(asked.folder / PAGE, _page(asked, candidates, chosen, found, missing))
    written = [page, *(asked.folder / f"{name}.{chosen[name].data}" for name, each in found.items() if each)]
    say(f"written: {', '.join(map(str, written))}")
    return page


def _candidates(asked: Request) -> list[Candidate]:
    """The models with names that tell them apart."""
    from megatron.evaluation.names import distinct_names, method_name

    works = [_work(name, asked) for name in asked.options.only or names()]
    trained = distinct_names([run.config for run in asked.runs], [run.name for run in asked.runs], asked.options.window)
    seen: set[str] = set()
    found = []
    for name, run in zip(trained, asked.runs, strict=True):
        unique = name if name not in seen else f"{name} [{run.name}]"  # seeds share a name elsewhere
        seen.add(unique)
        found.append(Candidate(unique, Job(unique, "analyze", sum(works)), run.config, run.checkpoint))
    for text, config in asked.untrained:
        name = f"{method_name(config.position, asked.options.window)} (untrained)"
        unique = name if name not in seen else f"{name} [{text}]"
        seen.add(unique)
        found.append(Candidate(unique, Job(unique, "analyze, untrained", float(len(works))), config, None))
    return found


def _work(name: str, asked: Request) -> float:
    """Roughly how long an analysis takes, in units of one that reads nothing."""
    if asked.reading is None or not reads(name):
        return 1.0
    return 1.0 + sum(len(windows) * (length / 512) ** 2 for length, windows in asked.reading.windows.items())


def _looked(candidate: Candidate, asked: Request) -> Looked:
    options, config = asked.options, candidate.config
    window = options.window or config.position.attention_window
    if candidate.checkpoint is None:
        return Looked(candidate.name, config, window, _fresh(config), options, asked.lengths)
    from megatron.analysis.observe import attentions
    from megatron.checkpoint.load_model import load_model

    device = find_device(options.device)
    loaded = load_model(
        candidate.checkpoint,
        device=str(device),
        dtype=compute_type(options.precision, config.training.precision, device),
        backend="chunked",
        window=options.window,
    )
    model = loaded.model
    encodings = (
        [LayerEncoding(attention.encoding, attention.layer) for attention in attentions(model)]
        if model.position is None
        else [LayerEncoding(model.position, None)]
    )
    windows = {} if asked.reading is None else asked.reading.windows
    return Looked(candidate.name, config, window, encodings, options, asked.lengths, model, windows)


def _fresh(config: Config) -> list[LayerEncoding]:
    """The encodings that training would begin with."""
    import torch

    from megatron.model.methods import encoding_of, position_shape

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        count = config.model.num_layers if config.position.pos_emb_per_layer else 1
        found = [encoding_of(config.position, position_shape(config.model)) for _ in range(count)]
    if not config.position.pos_emb_per_layer:
        return [LayerEncoding(found[0], None)]
    return [LayerEncoding(encoding, layer) for layer, encoding in enumerate(found)]


def _data(analysis: Analysis, found: Mapping[str, Any]) -> str:
    """What an analysis found of all models, `method` first in each row."""
    rows = [{"method": name, **row} for name, each in found.items() for row in analysis.rows(each)]
    if analysis.data == "json":
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n"
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _page(
    asked: Request,
    candidates: Sequence[Candidate],
    chosen: Mapping[str, Analysis],
    found: Mapping[str, Mapping[str, Any]],
    missing: Mapping[str, Mapping[str, str]],
) -> str:
    from megatron.analysis.page import Part, render

    parts = [
        Part(
            name,
            analysis.title,
            analysis.text,
            analysis.show(found[name], [each.name for each in candidates]) if found[name] else [],
            missing[name],
            f"{name}.{analysis.data}" if found[name] else None,
        )
        for name, analysis in chosen.items()
    ]
    named = ", ".join(candidate.name for candidate in candidates[:4])
    title = f"What {named}{' and others' * (len(candidates) > 4)} attend to"
    facts = {
        "machine": machine(),
        "software": software(),
        "made at (UTC)": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    }
    return render(title, _summary(asked), parts, _models(asked, candidates), facts)


def _summary(asked: Request) -> list[str]:
    if asked.reading is None:
        return ["No text was read: what stands here follows from the biases alone."]
    return [f"{asked.reading.told} Layers and heads are counted from 0."]


def _models(asked: Request, candidates: Sequence[Candidate]) -> Table:
    rows = []
    of_runs = {run.checkpoint: run for run in asked.runs}
    for candidate in candidates:
        model = candidate.config.model
        shape = f"{model.num_layers} × {model.hidden_size}, {model.num_attention_heads} heads"
        cells = [candidate.name, shape, f"{model.seq_length:,}"]
        if candidate.checkpoint is None:
            rows.append([*cells, "–", "a configuration, not trained"])
        else:
            run = of_runs[candidate.checkpoint]
            rows.append([*cells, f"{run.progress.step:,}", f"run {run.name}, {candidate.checkpoint.name}"])
    return Table(["method", "layers × width", "training length", "step", "where it comes from"], rows)

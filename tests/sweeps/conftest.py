"""Small sweep file, text to learn, and a replacement of training without processes."""

import io
import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import build_model
from rich.console import Console
from safetensors.torch import save_file

from megatron.checkpoint.compatibility import StoredCheckpoint, compute_origin
from megatron.checkpoint.layout import resolve_checkpoint_path
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.distributed.hardware import LocalHardware
from megatron.evaluation.eval_target import choose_lengths
from megatron.options.evaluation import EvaluationOptions
from megatron.reports import plots
from megatron.reports.records import Record
from megatron.reports.records import write_records as write_records
from megatron.sweeps import member_run
from megatron.sweeps import run_sweep as sweeps
from megatron.training.metrics_log import METRICS_FILE
from megatron.training.resolve_run import resolve_run
from megatron.utils.atomic_io import LOCK
from megatron.utils.errors import RunError

ROOT = Path(__file__).parents[2]

BASE = """
    num_layers: 1
    hidden_size: 16
    num_attention_heads: 2
    seq_length: 16
    train_data_paths: [corpus/train_text_document]
    test_data_paths: [corpus/test_text_document]
    train_iters: 6
    train_micro_batch_size_per_gpu: 4
    optimizer: {type: AdamW, params: {lr: 1e-2}}
    eval_interval: 0
    log_interval: 2
    device: cpu
    use_tensorboard: false
    sweep:
      output: out
      corpus: {sources: [text], folder: corpus, split: [0.5, 0, 0.5]}
      variants:
        rotary: {pos_emb: rotary}
        mine: {pos_emb: alibi, score_processor: cdape, score_processor_options: {width: 4}}
      evaluate: {multiples: [1, 4], windows: 3}
"""

Watch = Callable[[int | None], None]


def write(text: str, name: str = "sweep.yml") -> str:
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return name


def run(*overrides: str, retry_failed: bool = False) -> tuple[list[Record], str]:
    """Run sweep.yml; return its records and output."""
    out = io.StringIO()
    found = sweeps.run_sweep(["sweep.yml"], overrides, Console(file=out, width=200), retry_failed=retry_failed)
    return found, out.getvalue()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty working folder with a little text."""
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "text"
    texts.mkdir()
    for number in range(12):
        lines = (f"line {i} of text {number}: {'abc' * (i % 3)} {i * number}\n" for i in range(12))
        (texts / f"{number}.txt").write_text("".join(lines))
    write(BASE)
    return tmp_path


class Trainer:
    """Replacement of the process of `./deepy.py train FILE` that writes the same checkpoints.

    The training of `fails_at` ends at step 3 with an error, that of `diverges` with a bad loss. `asked` contains the
    requests.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails_at: str | None = None
        self.diverges: str | None = None
        self.steps: tuple[int, ...] = ()  # steps reported by the training

    def train(self, configuration: Path, printed: Path, metrics: Path, watch: Watch) -> None:
        config = resolve_run(read_config(configuration), LocalHardware.detect()).config
        name = config.position.pos_emb
        self.asked.append(f"{name} {config.training.seed} {config.checkpoint.load}")
        for step in (None, *self.steps):
            watch(step)
        stop = 3 if name == self.fails_at else config.training.train_iters
        self.save(config, Path(config.checkpoint.save or ""), stop)
        if stop == 3:
            raise RunError("the disk is full")
        run = Path(config.checkpoint.save or "")
        (run / METRICS_FILE).write_text('{"kind": "train", "step": 2, "loss": 5.0}\n')
        if name == self.diverges:
            config.save(run / "config.yml")
            shutil.rmtree(run / "checkpoints")
            (run / LOCK).touch()
            with open(run / METRICS_FILE, "a") as file:
                file.write('{"kind": "diverged", "step": 3, "reason": "its loss is nan"}\n')
            raise RunError("step 3: its loss is nan; no checkpoint was saved")

    def save(self, config: Config, run: Path, step: int) -> Path:
        origin = None
        if config.checkpoint.load is not None:
            loaded = resolve_checkpoint_path(config.checkpoint.load)
            source = StoredCheckpoint(loaded, load_checkpoint_config(loaded), TrainerState.read(loaded))
            origin = compute_origin(config, source)
        checkpoint = run / "checkpoints" / f"step_{step:07d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        config.save(checkpoint / "config.yml")
        (checkpoint / "progress.json").write_text(json.dumps({"step": step, "origin": origin}))
        (checkpoint / "model.safetensors").write_text("weights")
        return checkpoint

    def calls(self) -> list[str]:
        """Return the requests since the last call."""
        asked, self.asked = self.asked, []
        return asked


class Initialiser(Trainer):
    """Replacement that writes the initial weights of a model, so that it can be evaluated."""

    def save(self, config: Config, run: Path, step: int) -> Path:
        checkpoint = super().save(config, run, step)
        model = build_model(config.model, config.position, 257, seed=config.training.seed)
        TrainerState(step=step, consumed_tokens=step, vocabulary={"size": 257, "name": "bytes"}).write(checkpoint)
        weights = {key: value.detach().clone() for key, value in model.state_dict().items() if torch.is_tensor(value)}
        (checkpoint / "model.safetensors").unlink()
        save_file(weights, checkpoint / "model.safetensors")
        return checkpoint


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing pictures, which costs more than everything else."""
    monkeypatch.setattr(plots, "render_plots_png", lambda *_, **__: b"\x89PNG")


@pytest.fixture
def initialiser(place: Path, without_plots: None, monkeypatch: pytest.MonkeyPatch) -> Initialiser:
    stand_in = Initialiser()
    monkeypatch.setattr(member_run, "train_in_subprocess", stand_in.train)
    return stand_in


@pytest.fixture
def trainer(place: Path, without_plots: None, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Replacement of training; evaluation only records its requests."""
    stand_in = Trainer()
    monkeypatch.setattr(member_run, "train_in_subprocess", stand_in.train)

    def evaluate(
        runs: list[Path], options: EvaluationOptions, *, names: list[str], output: Path, **_: object
    ) -> list[Record]:
        stand_in.asked.append(f"evaluate {runs[0]}")
        known = {"train_length": 16, "protocol": "last", "tokens": 48, "method": names[0], "metric": "perplexity"}
        known |= {"value": 5.0, "seed": int(str(runs[0]).rsplit("_", 1)[1]), "run": str(runs[0])}
        found = [Record(**known, length=length) for length in choose_lengths(options, [16])]
        write_records(output / "results.json", found)
        return found

    monkeypatch.setattr("megatron.evaluation.run.evaluate_runs", evaluate)
    return stand_in

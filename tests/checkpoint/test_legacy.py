"""Checkpoints with DeepSpeed's own files, written by earlier versions, are resumed or rejected with a clear error."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_runs import losses, replace_text, tiny_config, train_with_processes

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.config.schema import Config
from megatron.training.train import train
from megatron.utils.errors import RunError, UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

FORMATS = Path(__file__).parent / "formats"
ONE = FORMATS / "1" / "step_0000002"
"""Written by commit 25a2156: bfloat16, ZeRO 1, dropout, cdape on kerple_log, no biases in attention and MLP."""
TWO = FORMATS / "2" / "step_0000002"
"""Written by commit 0f496fa: two tensor-parallel ranks, ZeRO 1, float32, cdape on kerple_log, swiglu."""
ONE_PER_LAYER = FORMATS / "1" / "per_layer" / "step_0000002"
TWO_PER_LAYER = FORMATS / "2" / "per_layer" / "step_0000002"
"""Written by the same commits: two layers with their own kerple_log, ZeRO 1; bfloat16, and float32."""
NEXT_LOSS = {
    ONE: 4.1172075271606445,
    TWO: 4.061580657958984,
    ONE_PER_LAYER: 4.127436637878418,
    TWO_PER_LAYER: 4.127379894256592,
}
"""Loss of the next step, in the run that wrote each checkpoint."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Run with a checkpoint of format 1."""
    shutil.copytree(ONE, tmp_path / "run" / "checkpoints" / ONE.name)
    return tmp_path / "run"


def resume_legacy_run(corpus: Path, run: Path, stored: Path = ONE, **keys: object) -> Config:
    keep = load_checkpoint_config(stored).to_flat()
    keep |= {"train_data_paths": [str(corpus / "train_text_document")], "valid_data_paths": []}
    return tiny_config(corpus, run, **keep | {"load": str(run), "save": str(run)} | keys)


def test_a_run_of_format_1_resumes_and_writes_the_current_format(run: Path, corpus: Path) -> None:
    train(resume_legacy_run(corpus, run))
    # bfloat16 rounding: another machine may sum in another order
    assert losses(run) == pytest.approx([NEXT_LOSS[ONE]], rel=2**-7)
    newest = layout.resolve_checkpoint_path(run)
    assert manifest.read_format_version(newest) == manifest.FORMAT
    assert not (newest / "deepspeed").exists()


def test_a_run_of_format_2_resumes_in_its_layout(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(TWO, run / "checkpoints" / TWO.name)
    assert train_with_processes(tmp_path / "job", [resume_legacy_run(corpus, run, TWO)]) == [None]
    assert losses(run) == pytest.approx([NEXT_LOSS[TWO]], rel=compute_tolerance(*count_gpt_sums(16, layers=1)))


@pytest.mark.parametrize("stored", [ONE_PER_LAYER, TWO_PER_LAYER])
def test_runs_with_old_names_of_encoding_parameters_resume(stored: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stored, run / "checkpoints" / stored.name)
    train(resume_legacy_run(corpus, run, stored))
    tolerance = 2**-7 if stored is ONE_PER_LAYER else compute_tolerance(*count_gpt_sums(8, layers=2))
    assert losses(run) == pytest.approx([NEXT_LOSS[stored]], rel=tolerance)
    weights = load_file(layout.resolve_checkpoint_path(run) / layout.WEIGHTS)
    names = [name for name in weights if "r1" in name]
    assert names == [f"decoder.layers.{i}.self_attention.core_attention.position.r1.value" for i in range(2)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"precision": "fp32"}, "precision: .* written with bf16, but this run has fp32"),
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization.stage: .* written with 1, but this run has 3"),
    ],
)
def test_states_that_cannot_be_resharded_are_rejected(
    run: Path, corpus: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(resume_legacy_run(corpus, run, **keys))


def test_another_layout_is_rejected(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(TWO, run / "checkpoints" / TWO.name)
    with pytest.raises(UserError, match=r"model_parallel_size: .*was written with 2, but this run has 1"):
        train(resume_legacy_run(corpus, run, TWO, model_parallel_size=1, num_gpus=1))


def states(checkpoint: Path) -> Path:
    return next((checkpoint / "deepspeed").glob("*model_states.pt"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "states cut short": (lambda c: states(c).write_bytes(b"PK\x03\x04"), "model_states.pt: damaged, or contains more"),
    "no states": (
        lambda c: [path.unlink() for path in (c / "deepspeed").iterdir()],
        "it contains no DeepSpeed files",
    ),
    "no optimizer states": (
        lambda c: next((c / "deepspeed").glob("*optim_states.pt")).unlink(),
        "optim_states.pt: not found; the checkpoint is damaged",
    ),
    "states of another step": (
        lambda c: replace_text(c / "progress.json", '"step": 2', '"step": 1'),
        "contains the states of step 2, but progress.json is from step 1",
    ),
    "no progress": (
        lambda c: (c / "progress.json").write_text("[]"),
        "not a checkpoint's progress (not a JSON object)",
    ),
    "random states cut short": (
        lambda c: (c / "random_states" / "rank_00000.pt").write_bytes(b"no"),
        "rank_00000.pt: damaged",
    ),
    "no random states": (lambda c: shutil.rmtree(c / "random_states"), "rank_00000.pt: not found"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_without_checksums_a_failed_load_never_starts_over(run: Path, corpus: Path, damage: str) -> None:
    """Checkpoints of the first versions have no checksums. An unreadable file raises a one-line error."""
    act, words = DAMAGE[damage]
    checkpoint = run / "checkpoints" / ONE.name
    (checkpoint / "manifest.json").unlink()
    act(checkpoint)
    with pytest.raises(RunError, match=checkpoint.name) as caught:
        train(resume_legacy_run(corpus, run))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not (run / "metrics.jsonl").exists()


def test_a_complete_checkpoint_without_checksums_is_used_with_a_note(run: Path, corpus: Path) -> None:
    (run / "checkpoints" / ONE.name / "manifest.json").unlink()
    stream = io.StringIO()
    train(resume_legacy_run(corpus, run), Console(file=stream, width=250))
    assert "step_0000002: has no checksums (written by an earlier version); not verified" in stream.getvalue()
    assert (run / "checkpoints" / layout.format_checkpoint_name(3) / "manifest.json").is_file()


def test_a_pickle_that_would_run_code_is_not_opened(run: Path, corpus: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return open, (str(tmp_path / "trapped"), "w")

    checkpoint = run / "checkpoints" / ONE.name
    (checkpoint / "manifest.json").unlink()
    torch.save({**torch.load(states(checkpoint), weights_only=True), "trap": Trap()}, states(checkpoint))
    with pytest.raises(RunError, match=r"contains more than tensors, numbers and text: _?io\.open; not opened"):
        train(resume_legacy_run(corpus, run))
    assert not (tmp_path / "trapped").exists()

"""A model loaded from a checkpoint equals the trained one, and only plain files are read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import records, tiny_config

from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.trained_run import open_run
from megatron.data.datasets import SampleOrder, build_datasets
from megatron.data.torch_data import build_dataloader
from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import build_single_process_groups
from megatron.training.train import train
from megatron.utils.errors import RunError
from tools.tolerances import compute_tolerance


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (0, {"no_weight_tying": True, "pos_emb": "sinusoidal"}),
        (1, {"score_processor": "cdape", "pos_emb": "t5", "norm": "rmsnorm"}),
        (3, {"score_processor": "dape", "pos_emb_per_layer": True}),
    ],
)
def test_it_scores_as_it_did_in_training(corpus: Path, tmp_path: Path, stage: int, keys: dict[str, object]) -> None:
    """The validation loss of the last step is reproduced from the files alone."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = tiny_config(corpus, tmp_path, eval_interval=4, zero_optimization=zero, **keys)
    train(config)
    run = tmp_path / "checkpoints" / "step_0000004"
    shutil.rmtree(run / "states")
    loaded = load_model(tmp_path)
    assert not loaded.model.training
    assert loaded.run.trainer_state.step == 4
    assert loaded.run.config.get_architecture_keys() == config.get_architecture_keys()
    assert loaded.run.checkpoint == run

    order = SampleOrder(seed=1234, valid_samples=8)
    held_out = build_datasets(config.data, order, seq_length=16, cache=None, groups=build_single_process_groups()).valid
    total, count = 0.0, 0
    for batch, _ in zip(build_dataloader(held_out, micro_batch_size=4, mesh=Mesh()), range(2), strict=False):
        with torch.no_grad():
            loss = loaded.model(batch["tokens"], labels=batch["labels"])
        total, count = total + float(loss.double().sum()), count + loss.numel()
    assert total / count == pytest.approx(
        records(tmp_path, "valid")[4]["loss"], rel=compute_tolerance(count)
    )  # same losses, averaged


def test_types_and_devices(corpus: Path, tmp_path: Path) -> None:
    train(tiny_config(corpus, tmp_path, train_iters=1))
    exact, half = load_model(tmp_path), load_model(str(tmp_path), dtype=torch.bfloat16, backend="eager")
    for one, two in zip(exact.model.parameters(), half.model.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one.bfloat16(), two)
    state = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_damage_is_named(corpus: Path, tmp_path: Path) -> None:
    """Damage in the model's files is reported even without checksums, by the file reader."""
    train(tiny_config(corpus, tmp_path / "run", train_iters=1))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_0000001"
    (checkpoint / "manifest.json").unlink()
    shutil.rmtree(checkpoint / "states")
    assert not load_model(checkpoint).verified
    weights, config, progress = (checkpoint / name for name in ("model.safetensors", "config.yml", "progress.json"))

    def broken(file: Path, content: bytes | None, match: str) -> None:
        before = file.read_bytes()
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(RunError, match=match) as caught:
            load_model(checkpoint)
        assert "\n" not in str(caught.value)
        file.write_bytes(before)

    broken(weights, None, "damaged: model.safetensors is missing; the run has no other checkpoint")
    broken(weights, weights.read_bytes()[:1000], "model.safetensors: cannot be read")
    broken(config, None, "damaged: config.yml is missing")
    wider = config.read_text().replace("hidden_size: 32", "hidden_size: 64").encode()
    broken(config, wider, r"has shape \[.*32.*\]; it must be \[.*64")
    more = config.read_text().replace("num_layers: 2", "num_layers: 3").encode()
    broken(config, more, r"lacks decoder\.layers\.2.* missing, 0 unknown")
    fewer = config.read_text().replace("num_layers: 2", "num_layers: 1").encode()
    broken(config, fewer, r"contains decoder\.layers\.1.*, which the model lacks")
    broken(progress, b"{", "progress.json: not a checkpoint's progress")
    without = json.loads(progress.read_text()) | {"vocabulary": None}
    broken(progress, json.dumps(without).encode(), "has no vocabulary")
    broken(progress, None, "step_0000001: damaged: progress.json is missing")
    load_model(checkpoint)


def test_modified_files_are_rejected(corpus: Path, tmp_path: Path) -> None:
    """Modified files are rejected even if they load: a bit of a weight, another activation, another vocabulary size."""
    train(tiny_config(corpus, tmp_path, train_iters=2, checkpoint_factor=1))
    checkpoint = tmp_path / "checkpoints" / "step_0000002"
    assert load_model(tmp_path).verified
    config, progress, weights = (checkpoint / name for name in ("config.yml", "progress.json", "model.safetensors"))
    changes = {
        config: config.read_bytes().replace(b"activation: gelu", b"activation: relu"),
        progress: progress.read_bytes().replace(b'"consumed_tokens": 128', b'"consumed_tokens": 129'),
        weights: weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 64]),
    }
    for file, content in changes.items():
        before = file.read_bytes()
        assert content != before
        file.write_bytes(content)
        what = f"step_0000002: damaged: {file.name} changed since .* newest undamaged one: step_0000001"
        with pytest.raises(RunError, match=what):
            load_model(tmp_path)
        if file != weights:  # before the model is used
            with pytest.raises(RunError, match=what):
                open_run(tmp_path)
        file.unlink()
        with pytest.raises(RunError, match=f"{file.name} is missing; newest undamaged one: step_0000001"):
            open_run(tmp_path)
        file.write_bytes(before)
    load_model(tmp_path)
    # The named files were verified too.
    weights.write_bytes(changes[weights])
    (checkpoint.with_name("step_0000001") / "config.yml").write_text("seed: 1")
    with pytest.raises(RunError, match=r"step_0000002: damaged: .*; the run's other checkpoints are damaged too"):
        load_model(tmp_path)

"""Every position method and processor trains, is saved completely, and resumes without a difference."""

import shutil
from pathlib import Path

import pytest
import torch
from position_methods import COVERING
from safetensors.torch import load_file
from tiny_runs import losses, tiny_config

from megatron.checkpoint import layout
from megatron.checkpoint.load_model import load_model
from megatron.config.load import load_config
from megatron.position import registry
from megatron.training.train import train
from megatron.utils.errors import UserError
from megatron.utils.project import SHIPPED_CONFIGS

OVERLAYS = sorted((SHIPPED_CONFIGS / "position").glob("*.yml"))
LENGTH = 16


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_every_overlay_trains(overlay: Path, corpus: Path, tmp_path: Path) -> None:
    """Twenty steps lower the loss and change every trainable parameter."""
    options = load_config(["125M", overlay]).config.position
    position = options.model_dump()
    keys = {"train_iters": 20, "checkpoint_factor": 10, "keep_last_n_checkpoints": None, "warmup": 0.0, **position}
    if options.period > 1:
        keys["num_layers"] = options.period if options.period > 2 else 4
    train(tiny_config(corpus, tmp_path, **keys))
    first, *_, last = losses(tmp_path)
    assert last < first - 0.05
    before, after = (
        load_file(layout.resolve_checkpoint_path(tmp_path / "checkpoints" / f"step_{step:07d}") / "model.safetensors")
        for step in (10, 20)
    )
    still = [name for name in before if torch.equal(before[name], after[name])]
    # A constant added to all logits of a head cancels in the softmax: its gradient is zero, or rounding if computed by
    # convolutions.
    assert [name for name in still if not name.endswith("processor.output.bias")] == []


@pytest.mark.parametrize(("encoding", "processor"), COVERING)
def test_a_checkpoint_resumes_as_if_uninterrupted(encoding, processor, corpus: Path, tmp_path: Path) -> None:
    keys = {"pos_emb": encoding, "score_processor": processor, "precision": "bf16", "checkpoint_factor": 2}
    keys |= {"zero_optimization": {"stage": 1}, "make_vocab_size_divisible_by": 1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny_config(corpus, whole, **keys))
    # As if killed immediately after its first checkpoint.
    shutil.copytree(whole / "checkpoints" / "step_0000002", parts / "checkpoints" / "step_0000002")
    train(tiny_config(corpus, parts, **keys, load=str(parts)))
    one, two = (load_file(layout.resolve_checkpoint_path(run) / "model.safetensors") for run in (whole, parts))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)

    loaded = load_model(parts).model
    assert all(torch.equal(weight, two[name]) for name, weight in loaded.named_parameters())
    x = torch.randint(0, 61, (1, 32 * LENGTH))
    with torch.no_grad():
        if registry.build_encoding(encoding, loaded.position.dims).max_length is None:
            assert loaded(x).isfinite().all(), "32 times the training length"
        else:
            with pytest.raises(UserError, match=f"end at {LENGTH}.* length {32 * LENGTH} was given"):
                loaded(x)

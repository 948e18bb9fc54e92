"""CDAPE can be added to a trained model without initial effect: the loss at step 0 does not change."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import losses, tiny_config

from megatron.checkpoint import layout
from megatron.checkpoint.load_model import load_model
from megatron.position import registry
from megatron.position.facts import AttentionDims
from megatron.training.train import train
from megatron.utils.errors import RunError, UserError


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained")
    train(tiny_config(corpus, run, train_iters=12))
    return run


def finetuned(corpus: Path, run: Path, trained: Path, **keys: object) -> list[float]:
    keys = {"train_iters": 3, "optimizer": {"params": {"lr": 1e-2}}, **keys}
    train(tiny_config(corpus, run, load=str(trained), finetune=True, **keys))
    return losses(run)


WITHOUT_EFFECT = {
    "cdape": {"zero_init": True}, "dape": {"zero_init": True}, "mta": {"group_norm": False}, "talking_heads": {},
}  # fmt: skip
"""Options with which processors start as the identity."""


def test_other_processors_have_an_initial_effect() -> None:
    dims = AttentionDims(num_heads=2, head_dim=4, hidden_size=8, train_length=8, max_length=8)
    for name in set(registry.list_processors()) - WITHOUT_EFFECT.keys():
        assert registry.load_processor_class(name)(dims, has_bias=True).has_effect()


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("processor", WITHOUT_EFFECT)
def test_it_keeps_the_loss_and_then_learns(processor, per_layer: bool, corpus, trained: Path, tmp_path: Path) -> None:
    """The model keeps its loss and then learns; shared position parameters may become per-layer at the same time."""
    zero = {"score_processor": processor, "score_processor_options": WITHOUT_EFFECT[processor]}
    plain = finetuned(corpus, tmp_path / "plain", trained)
    given = finetuned(corpus, tmp_path / "given", trained, **zero, pos_emb_per_layer=per_layer)
    assert given[0] == plain[0]
    assert given[2] != plain[2]
    weights = load_file(layout.resolve_checkpoint_path(tmp_path / "given") / "model.safetensors")
    learned = [weights[name] for name in weights if ".processor." in name and name.endswith("weight")]
    assert len(learned) >= 4  # in two layers
    assert all(weight.any() for weight in learned)
    assert sum(name.endswith("r1.value") for name in weights) == (2 if per_layer else 1)


@pytest.mark.parametrize(
    ("options", "place"), [({}, {}), ({"zero_init": True, "residual_bias": False}, {}), ({"zero_init": False}, {})]
)
def test_processors_with_an_initial_effect_are_rejected(
    options: dict, place: dict, corpus, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"trained without one; to add cdape, set .*zero_init: true"):
        finetuned(corpus, tmp_path, trained, score_processor="cdape", score_processor_options=options, **place)
    assert not (tmp_path / "checkpoints").exists()


def test_nothing_else_may_change(corpus: Path, trained: Path, tmp_path: Path) -> None:
    zero = {"score_processor": "cdape", "score_processor_options": {"zero_init": True}}
    given = tmp_path / "given"
    finetuned(corpus, given, trained, pos_emb_per_layer=True, **zero)
    with pytest.raises(UserError, match="score_processor: this run has none"):
        finetuned(corpus, tmp_path / "taken", given, pos_emb_per_layer=True)
    with pytest.raises(UserError, match="pos_emb_per_layer: this run has false"):
        finetuned(corpus, tmp_path / "shared", given, **zero)
    with pytest.raises(UserError, match="score_processor: this run has cdape"):
        train(tiny_config(corpus, trained, load=str(trained), train_iters=20, **zero))


def test_a_window_needs_no_weights(corpus: Path, trained: Path, tmp_path: Path) -> None:
    assert finetuned(corpus, tmp_path / "wide", trained, attention_window=16) == finetuned(
        corpus, tmp_path / "plain", trained
    )
    assert finetuned(corpus, tmp_path / "narrow", trained, attention_window=2) != losses(tmp_path / "plain")
    x = torch.arange(16)[None]
    with torch.no_grad():
        own, windowed = load_model(trained), load_model(trained, window=2)
        assert windowed.position.attention_window == 2
        assert windowed.run.config == own.run.config
        assert torch.equal(windowed.model(x)[:, :2], own.model(x)[:, :2])
        assert not torch.equal(windowed.model(x)[:, 2:], own.model(x)[:, 2:])


def test_bounds_hold_after_loading(trained: Path, tmp_path: Path) -> None:
    """Loaded weights may exceed the bounds; the used and the saved values do not."""
    checkpoint = layout.resolve_checkpoint_path(trained)
    for name in ("config.yml", "progress.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    weights = load_file(checkpoint / "model.safetensors")
    weights["position.r1.value"] = torch.tensor([-3.0, 0.5])
    save_file(weights, tmp_path / "model.safetensors")
    encoding = load_model(tmp_path).model.position
    expected = torch.tensor([0.01, 0.5])
    assert torch.equal(encoding.r1.value, expected)
    assert torch.equal(encoding.r1(), expected)


def test_a_missing_weight_is_still_an_error(corpus: Path, trained: Path, tmp_path: Path) -> None:
    """Only the weights of an added processor may be missing from the file."""
    zero = {"score_processor": "cdape", "score_processor_options": {"zero_init": True}, "train_iters": 1}
    run = tmp_path / "run"
    train(tiny_config(corpus, run, **zero))
    checkpoint = layout.resolve_checkpoint_path(run)
    weights = load_file(checkpoint / "model.safetensors")
    del weights["decoder.layers.0.self_attention.core_attention.processor.output.bias"]
    save_file(weights, checkpoint / "model.safetensors")
    (checkpoint / "manifest.json").unlink()
    shutil.rmtree(checkpoint / "states")
    with pytest.raises(RunError, match=r"lacks decoder\.layers\.0"):
        finetuned(corpus, tmp_path / "next", run, **zero)


def test_equivalent_configurations_are_the_same_model(corpus: Path, tmp_path: Path) -> None:
    """Explicit defaults, and options that only affect initialization, do not change the model."""
    keys = {"score_processor": "cdape", "train_iters": 1}
    start = {"zero_init": True, "width": 32}
    train(tiny_config(corpus, tmp_path / "a", score_processor_options=start, **keys))
    train(
        tiny_config(
            corpus, tmp_path / "b", load=str(tmp_path / "a"), finetune=True, pos_emb_options={"r1_below": 1.5},
            score_processor_options={"kernel_size": 3}, **keys,
        )
    )  # fmt: skip
    with pytest.raises(UserError, match=r"score_processor_options: .*finetuning cannot change this"):
        train(
            tiny_config(
                corpus, tmp_path / "c", load=str(tmp_path / "a"), finetune=True,
                score_processor_options={"kernel_size": 5}, **keys,
            )
        )  # fmt: skip


def test_failed_and_empty_runs_leave_no_files(corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not use positions"):
        train(tiny_config(corpus, tmp_path / "none", pos_emb="none", randomized_positions=64))
    assert not (tmp_path / "none" / "data_cache").exists()
    run = tmp_path / "run"
    train(tiny_config(corpus, run, train_iters=3, lr_decay_iters=3))
    before = (run / "config.yml").read_text()
    train(tiny_config(corpus, run, train_iters=2, lr_decay_iters=3, load=str(run)))
    assert (run / "config.yml").read_text() == before

"""Finetuning can change the encoding on request, and reports which weights are new and which are dropped."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import losses, tiny_config, train_with_processes

from megatron.checkpoint import layout
from megatron.checkpoint.load_model import load_model
from megatron.config.schema import Config
from megatron.position import registry
from megatron.training.train import train
from megatron.utils.console import run_console
from megatron.utils.errors import UserError

ROTARY = {"pos_emb": "rotary", "pos_emb_options": {"fraction": 0.5}}


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of rotary, kerple_log and t5."""
    runs = {name: tmp_path_factory.mktemp(name) for name in ("rotary", "kerple_log", "t5")}
    for name, run in runs.items():
        train(tiny_config(corpus, run, train_iters=2, **(ROTARY if name == "rotary" else {"pos_emb": name})))
    return runs


def tuned(corpus: Path, run: Path, source: Path, **keys: object) -> str:
    """Finetune for one step and return the output."""
    log = run.parent / f"{run.name}.txt"
    keys = {"train_iters": 1, "load": str(source), "finetune": True, **keys}
    with run_console(log) as console:
        train(tiny_config(corpus, run, **keys), console)
    return " ".join(log.read_text().split())


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(layout.resolve_checkpoint_path(run) / "model.safetensors")


@pytest.mark.parametrize("name", [name for name in registry.list_encodings() if name != "rotary"])
def test_rotary_becomes_any_encoding(name: str, corpus: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    output = tuned(corpus, tmp_path / "run", trained["rotary"], pos_emb=name)
    own = [key for key in weights(tmp_path / "run") if key.startswith("position.")]
    assert f"pos_emb rotary → {name}" in output
    assert ("fresh: nothing" in output) == (own == [])
    assert all(key in output for key in own)
    assert "dropped: nothing" in output
    assert load_model(tmp_path / "run").run.config.position.pos_emb == name


def test_the_rest_of_the_model_stays(corpus: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    """With a tiny learning rate, all other weights equal the source's except for the last bit."""
    still = {"optimizer": {"params": {"lr": 1e-12}}, "weight_decay": 0.0}
    output = tuned(corpus, tmp_path / "run", trained["kerple_log"], pos_emb="alibi", **still)
    assert "fresh: nothing; dropped: position.r1.value, position.r2.value" in output
    before, after = weights(trained["kerple_log"]), weights(tmp_path / "run")
    assert before.keys() - after.keys() == {"position.r1.value", "position.r2.value"}
    for key, value in after.items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=1e-11 + 2**-24 * float(value.abs().max()))


def test_weights_of_the_same_name_mean_something_else(corpus: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    """kerple_log and kerple_power both have parameters r1 and r2 for every head, with different meanings."""
    still = {"optimizer": {"params": {"lr": 1e-12}}}
    options = {"r1_below": 0.02, "r2_below": 0.02}
    output = tuned(
        corpus, tmp_path / "run", trained["kerple_log"], pos_emb="kerple_power", pos_emb_options=options, **still
    )
    names = "position.r1.value, position.r2.value"
    assert f"fresh: {names}; dropped: {names}" in output
    assert weights(tmp_path / "run")["position.r1.value"].max() <= 0.02


def test_another_base_needs_no_weight_and_other_buckets_do(corpus, trained: dict[str, Path], tmp_path: Path) -> None:
    scaled = {"fraction": 0.5, "scaling": "linear", "factor": 4.0}
    output = tuned(corpus, tmp_path / "scaled", trained["rotary"], pos_emb="rotary", pos_emb_options=scaled)
    assert "scaling: linear, factor: 4.0" in output
    assert "fresh: nothing; dropped: nothing" in output
    buckets = {"pos_emb": "t5", "pos_emb_options": {"num_buckets": 16}}
    for per_layer in (False, True):
        run = tmp_path / f"buckets {per_layer}"
        output = tuned(corpus, run, trained["t5"], pos_emb_per_layer=per_layer, **buckets)
        own = "layers.*.position.bias.value" if per_layer else "position.bias.value"
        assert f"fresh: {own}; dropped: position.bias.value" in output


def test_an_encoding_and_a_processor_can_change_together(
    corpus: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    zero = {"score_processor": "cdape", "score_processor_options": {"zero_init": True}}
    output = tuned(corpus, tmp_path / "run", trained["rotary"], pos_emb="kerple_log", pos_emb_per_layer=True, **zero)
    assert "score_processor none → cdape, score_processor_options {} → {zero_init: true}; fresh" in output
    assert "layers.*.processor.output.weight" in output
    with pytest.raises(UserError, match="zero_init: true"):
        tuned(corpus, tmp_path / "other", trained["rotary"], pos_emb="kerple_log", score_processor="cdape")


def test_another_temperature_is_fresh_and_the_old_one_dropped(corpus, trained: dict[str, Path], tmp_path: Path) -> None:
    own = "layers.*.temperature.s.value"
    still = {"pos_emb": "rotary", "pos_emb_options": {"fraction": 0.5}, "optimizer": {"params": {"lr": 1e-12}}}
    options = {"attention_temperature_options": {"s": 0.5}}
    output = tuned(corpus, tmp_path / "on", trained["rotary"], attention_temperature="ssmax", **options, **still)
    assert "attention_temperature none → ssmax" in output
    assert f"fresh: {own}; dropped: nothing" in output
    learned = [value for key, value in weights(tmp_path / "on").items() if ".temperature." in key]
    assert len(learned) == 2
    for value in learned:
        torch.testing.assert_close(value, torch.full_like(value, 0.5), rtol=0, atol=1e-7)
    output = tuned(corpus, tmp_path / "off", tmp_path / "on", attention_temperature="logn", **still)
    assert f"fresh: nothing; dropped: {own}" in output
    keys = {"train_iters": 1, "load": str(tmp_path / "on"), **still}
    with pytest.raises(UserError, match=r"attention_temperature: this run has none.*set it explicitly to change it"):
        train(unnamed(tiny_config(corpus, tmp_path / "a", finetune=True, **keys), "attention_temperature"))
    with pytest.raises(
        UserError,
        match=r"attention_temperature: this run has llama4.*resume with another architecture; .* set finetune=true",
    ):
        train(tiny_config(corpus, tmp_path / "b", attention_temperature="llama4", **keys))
    assert not any((tmp_path / name / "checkpoints").exists() for name in "ab")


def unnamed(config: Config, *keys: str) -> Config:
    """Return the configuration without some explicitly set position keys."""
    given = {key: value for key, value in config.position.model_dump(exclude_unset=True).items() if key not in keys}
    return config.model_copy(update={"position": type(config.position).model_validate(given)})


def test_unset_method_keys_are_rejected(corpus: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    keys = {"train_iters": 1, "load": str(trained["rotary"]), "finetune": True}
    with pytest.raises(UserError, match=r"pos_emb: this run has learned.*set it explicitly to change it"):
        train(unnamed(tiny_config(corpus, tmp_path / "a", **keys), "pos_emb"))
    with pytest.raises(UserError, match=r"pos_emb_options: .*fraction: 0\.5.*set it explicitly"):
        train(tiny_config(corpus, tmp_path / "b", pos_emb="rotary", **keys))
    with pytest.raises(UserError, match=r"num_layers: this run has 3.*finetuning cannot change this"):
        train(tiny_config(corpus, tmp_path / "c", pos_emb="alibi", num_layers=3, **keys))
    with pytest.raises(
        UserError, match=r"pos_emb: this run has alibi.*resume with another architecture; to start .* finetune=true"
    ):
        train(tiny_config(corpus, tmp_path / "d", pos_emb="alibi", **{**keys, "finetune": False}))
    assert not any((tmp_path / name / "checkpoints").exists() for name in "abcd")


def test_several_ranks_start_like_one(corpus: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    """Several ranks start as one does: each stage and rank drops and creates its own parameters of the encoding."""
    keys = {
        "load": str(trained["t5"]), "finetune": True, "pos_emb": "kerple_log", "train_iters": 2,
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    train(tiny_config(corpus, tmp_path / "one", **keys))
    layouts = {"pipe_parallel_size": 2, "model_parallel_size": 2}
    configs = [tiny_config(corpus, tmp_path / name, num_gpus=2, **keys, **{name: 2}) for name in layouts]
    assert train_with_processes(tmp_path / "job", configs) == [None, None]
    for name in layouts:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)

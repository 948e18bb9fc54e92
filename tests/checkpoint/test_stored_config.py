"""Checkpoints of every earlier format can be read, despite removed keys and stricter checks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import losses, same_weights, tiny_config, write_corpora

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.config.schema import list_config_keys
from megatron.conversion.export_model import HFWeights
from megatron.conversion.families.farfield import FARFIELD
from megatron.options.model import get_ffn_hidden_size
from megatron.training.train import train
from megatron.utils.console import run_console
from megatron.utils.errors import RunError
from tools.tolerances import compute_tolerance, count_gpt_sums

FORMATS = Path(__file__).parent / "formats"
ONE = FORMATS / "1" / "step_0000002"
"""Written by commit 25a2156: bfloat16, ZeRO 1, dropout, cdape on kerple_log, no biases in attention and MLP."""


def test_there_is_a_checkpoint_of_every_earlier_format() -> None:
    assert sorted(int(path.name) for path in FORMATS.iterdir()) == list(range(1, manifest.FORMAT))


def test_the_model_of_format_1_is_rebuilt() -> None:
    loaded = load_model(ONE)
    assert loaded.verified
    assert not any(name.endswith(("linear_qkv.bias", "fc1.bias")) for name, _ in loaded.model.named_parameters())
    assert loaded.model(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()


def test_gated_layers_keep_their_width() -> None:
    """Until format 3, intermediate_size was the width of gated layers itself, or 4 × hidden_size by default."""
    three = load_model(FORMATS / "3" / "step_0000002")  # written by commit bc16b4e: geglu, intermediate_size 12
    assert three.run.config.model.intermediate_size == 36
    assert get_ffn_hidden_size(three.run.config.model) == 12
    assert three.model.state_dict()["decoder.layers.0.mlp.linear_fc2.weight"].shape == (16, 12)
    two = load_checkpoint_config(FORMATS / "2" / "step_0000002").model  # swiglu, no intermediate_size
    assert (two.intermediate_size, get_ffn_hidden_size(two)) == (3 * 64, 64)


FOUR = FORMATS / "4" / "step_0000002"
"""Written by commit 4732db2: two layers with a kerple_log each, cdape, ZeRO 1. Layers called their encoding `_own`."""


def to_new_name(name: str) -> str:
    return name.replace("core_attention._own.", "core_attention.position.")


def write_with_new_names(run: Path) -> None:
    """Rewrite the checkpoint of format 4 with the tensor names of a later format."""
    checkpoint = run / "checkpoints" / FOUR.name
    shutil.copytree(FOUR, checkpoint)
    for path in (checkpoint / "model.safetensors", checkpoint / "states" / "rank_00000.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = {key: to_new_name(value) for key, value in file.metadata().items()}
        save_file({to_new_name(name): tensor for name, tensor in load_file(path).items()}, path, metadata)
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest.write_manifest(checkpoint, manifest.compute_checksums(checkpoint, files))


def test_weights_of_layers_own_encodings_are_read_by_their_old_name() -> None:
    stored = load_file(FOUR / "model.safetensors")
    assert sum("._own." in name for name in stored) == 4
    weights = load_model(FOUR).model.state_dict()
    assert {to_new_name(name) for name in stored} <= weights.keys()
    for name, tensor in stored.items():
        assert torch.equal(weights[to_new_name(name)], tensor), name


FIVE = FORMATS / "5" / "step_0000002"
"""Written by commit fad96ac: one layer with cope, whose products of queries and table were divided by √d."""


def test_cope_of_format_5_computes_as_it_did() -> None:
    loaded = load_model(FIVE)
    assert loaded.run.config.position.pos_emb_options == {"positions": 4, "scaled": True}
    with torch.no_grad():
        loaded.model.position.vectors.value.mul_(10_000)  # two steps leave the table small
        logits = loaded.model(torch.arange(8)[None])[0, -1, :4]
    torch.testing.assert_close(
        logits, torch.tensor([-0.0412932672, -0.0872654319, -0.0698667616, 0.0453056730]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("written", [3, 4])
def test_a_run_resumes_from_states_with_old_names(written: int, tmp_path: Path) -> None:
    """Resuming with old names of weights and optimizer states equals resuming with new ones, bit for bit.

    The differences of format 3 do not concern this configuration.
    """
    corpus = write_corpora(tmp_path / "corpus")
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(FOUR, old / "checkpoints" / FOUR.name)
    listing = old / "checkpoints" / FOUR.name / "manifest.json"
    listing.write_text(json.dumps(json.loads(listing.read_text()) | {"format": written}))
    write_with_new_names(new)
    for run in (old, new):
        keys = load_checkpoint_config(FOUR).to_flat() | {"load": str(run), "save": str(run)}
        keys |= {"train_data_paths": [str(corpus / "train_text_document")]}
        train(tiny_config(corpus, run, **keys))
    assert (
        losses(old)
        == losses(new)
        == pytest.approx([4.141845703125], rel=compute_tolerance(*count_gpt_sums(8, layers=2)))
    )
    assert same_weights(old, new)
    states = [
        load_file(layout.resolve_checkpoint_path(run) / "states" / "rank_00000.safetensors") for run in (old, new)
    ]
    assert states[0].keys() == states[1].keys()
    moments = [name for name in states[0] if name.startswith("exp_avg")]
    assert any("core_attention.position." in name for name in moments)
    assert all(torch.equal(states[0][name], states[1][name]) for name in moments)


def test_finetuning_drops_the_encoding_of_an_old_layer(tmp_path: Path) -> None:
    """Finetuning loads an old layer's encoding into per-layer encodings, or drops it for another encoding and reports
    it.
    """
    corpus = write_corpora(tmp_path / "corpus")
    keys = load_checkpoint_config(FOUR).to_flat() | {"load": str(FOUR), "finetune": True, "train_iters": 1}
    keys |= {"train_data_paths": [str(corpus / "train_text_document")], "lr_decay_iters": None}
    stored = load_model(FOUR).model.state_dict()
    train(tiny_config(corpus, **keys | {"save": str(tmp_path / "same"), "optimizer": {"params": {"lr": 1e-12}}}))
    weights = load_file(layout.resolve_checkpoint_path(tmp_path / "same") / "model.safetensors")
    for name in (name for name in stored if ".position." in name):
        torch.testing.assert_close(weights[name], stored[name], rtol=1e-6, atol=1e-9)
    with run_console(tmp_path / "log.txt") as console:
        train(tiny_config(corpus, **keys | {"save": str(tmp_path / "other"), "pos_emb": "t5"}), console)
    output = " ".join((tmp_path / "log.txt").read_text().split())
    assert "dropped: layers.*.position.r1.value, layers.*.position.r2.value" in output


def test_an_old_checkpoint_is_exported_by_the_names_it_has(tmp_path: Path) -> None:
    write_with_new_names(tmp_path / "run")
    config, new_file = load_checkpoint_config(FOUR), tmp_path / "run" / "checkpoints" / FOUR.name / "model.safetensors"
    old, new = (HFWeights(path, FARFIELD, config) for path in (FOUR / "model.safetensors", new_file))
    names = old.get_tensor_sizes().keys()
    assert names == new.get_tensor_sizes().keys()
    assert "model.layers.1.attention.encoding.r1.value" in names
    assert all(torch.equal(old[name], new[name]) for name in names)


def test_removed_keys_and_stricter_checks_keep_checkpoints_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints stay readable after a key is removed and a check becomes stricter, as in a future format."""
    checkpoint, today = tmp_path / "step_0000002", load_checkpoint_config(ONE).to_flat()
    shutil.copytree(ONE, checkpoint)
    (checkpoint / "config.yml").write_text((ONE / "config.yml").read_text() + "given_up: 3\n")
    with pytest.raises(RunError, match="unknown key 'given_up' for checkpoint format 1"):
        load_checkpoint_config(checkpoint)

    def migrate(values: dict[str, object]) -> None:
        del values["given_up"]
        values["use_bias_in_mlp"] = False

    monkeypatch.setattr(manifest, "MIGRATIONS", {1: migrate})
    monkeypatch.setattr(
        "megatron.config.validation.VALIDATORS", (lambda config: iter([("seq_length", "never again")]),)
    )
    assert load_checkpoint_config(checkpoint).to_flat() == today


def test_a_configuration_of_this_format_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, use_bias_in_attn_linear=False, extra_save_iters=[3], activation="swiglu")
    config.save(tmp_path / "config.yml")
    manifest.write_manifest(tmp_path, {})
    assert load_checkpoint_config(tmp_path) == config
    assert len(load_checkpoint_config(tmp_path).to_flat()) == len({path[0] for path in list_config_keys()})


@pytest.mark.parametrize(
    ("text", "output"),
    [
        (
            "num_layers: two\n",
            "config.yml: not a checkpoint's configuration: num_layers is 'two'; it must",
        ),
        ("num_layers: [\n", "config.yml: not a checkpoint's configuration: config.yml:2: not valid YAML"),
        (None, "config.yml: not found; the checkpoint is damaged"),
    ],
)
def test_invalid_inputs_are_reported_in_one_line(text: str | None, output: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.yml").write_text(text)
    with pytest.raises(RunError) as caught:
        load_checkpoint_config(tmp_path)
    assert output.replace("config.yml:2", f"{tmp_path}/config.yml:2") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_later_version_is_distinguished_from_damage(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_0000002"
    shutil.copytree(ONE, checkpoint)
    content = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"format": manifest.FORMAT + 1}))
    output = f"written by a later version of this program \\(format {manifest.FORMAT + 1}\\); this version reads up to"
    with pytest.raises(RunError, match=output):
        load_checkpoint_config(checkpoint)
    with pytest.raises(RunError, match=output):
        load_model(checkpoint)

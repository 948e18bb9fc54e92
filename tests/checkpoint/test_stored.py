"""Checkpoints of every format that there was are still read, whatever became of the keys and checks since."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_config

from megatron.checkpoint import manifest, stored_config
from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.stored_config import load_checkpoint_config
from megatron.config.schema import list_config_keys
from megatron.options.model import ffn_hidden_size
from megatron.utils.errors import RunError

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
    """Until format 3 intermediate_size was that width itself, and 4 × hidden_size where it was absent."""
    three = load_model(FORMATS / "3" / "step_0000002")  # written by commit bc16b4e: geglu, intermediate_size 12
    assert three.config.model.intermediate_size == 36
    assert ffn_hidden_size(three.config.model) == 12
    assert three.model.state_dict()["decoder.layers.0.mlp.linear_fc2.weight"].shape == (16, 12)
    two = load_checkpoint_config(FORMATS / "2" / "step_0000002").model  # swiglu, none
    assert (two.intermediate_size, ffn_hidden_size(two)) == (3 * 64, 64)


def test_a_key_that_is_gone_and_a_stricter_check_lose_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the next format had given up one key and found a value wrong that this one allowed."""
    checkpoint, today = tmp_path / "step_0000002", load_checkpoint_config(ONE).to_flat()
    shutil.copytree(ONE, checkpoint)
    (checkpoint / "config.yml").write_text((ONE / "config.yml").read_text() + "given_up: 3\n")
    with pytest.raises(RunError, match="no checkpoint of format 1 has the key 'given_up'"):
        load_checkpoint_config(checkpoint)

    def migrate(values: dict[str, object]) -> None:
        del values["given_up"]
        values["use_bias_in_mlp"] = False

    monkeypatch.setattr(stored_config, "MIGRATIONS", {1: migrate})
    monkeypatch.setattr("megatron.config.checks.VALIDATORS", (lambda config: iter([("seq_length", "never again")]),))
    assert load_checkpoint_config(checkpoint).to_flat() == today


def test_a_configuration_of_this_format_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, use_bias_in_attn_linear=False, extra_save_iters=[3], activation="swiglu")
    config.save(tmp_path / "config.yml")
    manifest.write_manifest(tmp_path, {})
    assert load_checkpoint_config(tmp_path) == config
    assert len(load_checkpoint_config(tmp_path).to_flat()) == len({path[0] for path in list_config_keys()})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "num_layers: two\n",
            "config.yml: not the configuration of a checkpoint: num_layers is two; it must",
        ),
        ("num_layers: [\n", "config.yml: not the configuration of a checkpoint: config.yml:2: not valid YAML"),
        (None, "config.yml: is missing; the checkpoint is damaged"),
    ],
)
def test_what_is_none_is_said_in_one_line(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.yml").write_text(text)
    with pytest.raises(RunError) as caught:
        load_checkpoint_config(tmp_path)
    assert said.replace("config.yml:2", f"{tmp_path}/config.yml:2") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_later_version_is_told_from_damage(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_0000002"
    shutil.copytree(ONE, checkpoint)
    content = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"format": manifest.FORMAT + 1}))
    said = f"a later version of this program wrote it \\(format {manifest.FORMAT + 1}\\); this one reads up to"
    with pytest.raises(RunError, match=said):
        load_checkpoint_config(checkpoint)
    with pytest.raises(RunError, match=said):
        load_model(checkpoint)

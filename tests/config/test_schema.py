"""Combined configuration: one owner per key, saving and reloading, architecture."""

import importlib
import inspect
import math
import os
from dataclasses import replace
from pathlib import Path
from pkgutil import iter_modules
from typing import get_args

import pytest
from pydantic import ValidationError

from megatron import options
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.execution import resolve_config
from megatron.config.load import load_config, read_config
from megatron.config.schema import SECTIONS, Config, list_config_keys, map_key_owners, parse_section
from megatron.config.yaml_files import format_value
from megatron.options.section import ChangePolicy, ConfigSection, read_docstring
from megatron.utils.errors import UserError

SMALL = ["num_layers=2", "hidden_size=24", "num_attention_heads=3", "seq_length=17", "train_iters=5"]


def small(*overrides: str) -> Config:
    return load_config([], [*SMALL, *overrides]).config


def test_every_key_has_one_owner():
    names = [name for section in SECTIONS.values() for name in section.model_fields]
    assert len(names) == len(set(names)) == len(map_key_owners())


def test_headings_are_read_from_the_source_without_docstrings(monkeypatch):
    whole, headings = small().to_yaml(), {name: read_docstring(section) for name, section in SECTIONS.items()}
    assert all(headings.values())
    for section in SECTIONS.values():
        monkeypatch.setattr(section, "__doc__", None)  # python -OO
    assert {name: read_docstring(section) for name, section in SECTIONS.items()} == headings
    assert small().to_yaml() == whole


def test_every_section_comes_from_the_options_package():
    for section in SECTIONS.values():
        assert section.__module__.startswith("megatron.options."), section
        assert issubclass(section, ConfigSection)


def test_every_key_is_documented_and_defaults_are_valid():
    for key in list_config_keys().values():
        assert len(key.doc) > 4, key.name
    assert small().to_flat()["hidden_dropout"] == 0.0


def list_float_options() -> list[tuple[type[ConfigSection], str]]:
    """Return every option and key that is a number, or a list of numbers, with its section."""
    modules = [importlib.import_module(f"megatron.options.{each.name}") for each in iter_modules(options.__path__)]
    sections = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return [
        (section, name)
        for section in sections
        if issubclass(section, ConfigSection)
        for name, field in section.model_fields.items()
        if "float" in str(field.annotation) and "dict" not in str(field.annotation)
    ]


def test_numbers_are_finite() -> None:
    """Every option and key rejects NaN and infinity, whatever its bounds, and says so."""
    floats = list_float_options()
    assert {"figure_width", "max_change", "lr", "temperature", "min_loss_scale"} <= {name for _, name in floats}
    for section, name in floats:
        for value in (math.nan, math.inf, -math.inf):
            problems = ""
            for given in (value, [value]):
                with pytest.raises(UserError) as error:
                    parse_section(section, {name: given})
                problems += str(error.value)
            assert f"{name} is {format_value(value)}; it must be a finite number" in problems, (section, problems)
    with pytest.raises(UserError, match="option base of rotary is nan; it must be a finite number"):
        small("pos_emb=rotary", "pos_emb_options.base=.nan")


def test_a_copy_with_replaced_keys_equals_a_new_configuration() -> None:
    """A copy with replaced keys equals a configuration built with them; unaffected sections are shared."""
    given = ("pos_emb=rotary", "pos_emb_options={fraction: 0.5}")
    config = small(*given)
    copy = config.replace(hidden_dropout=0.25, train_batch_size=6)
    assert copy == small(*given, "hidden_dropout=0.25", "train_batch_size=6")
    assert copy.position is config.position
    assert config == small(*given)
    with pytest.raises(ValueError, match="hidden_dropout"):
        config.replace(hidden_dropout="much")
    with pytest.raises(KeyError):
        config.replace(no_such_key=1)


def test_saved_configuration_reloads_to_an_equal_one(tmp_path: Path):
    config = small(
        "pos_emb=rotary", "pos_emb_options={fraction: 0.5, base: 500}", "score_processor=cdape", "lr=3e-5",
        "score_processor_options.kernel_size=5", "precision=bfloat16", "train_data_paths=[a, 'b: c']", "save=é/x",
        "train_data_weights=[1, 0.25]", "num_gpus=2", "train_batch_size=24", "train_micro_batch_size_per_gpu=3",
    )  # fmt: skip
    path = tmp_path / "run" / "config.yml"
    config.save(path)
    assert read_config(path) == config
    assert load_config([path]).notes == ()
    settled = resolve_config(config, 2).config
    settled.save(path)
    assert read_config(path) == settled
    assert settled.training.gradient_accumulation_steps == 4
    assert [p.name for p in path.parent.iterdir()] == ["config.yml"]  # no temporary file is left
    read_config(path).save(path)  # overwrites the old file
    assert read_config(path) == settled


def test_saving_without_permission_is_reported(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        small().save(tmp_path / "file" / "config.yml")


def test_saved_files_respect_the_umask(tmp_path: Path):
    old = os.umask(0o022)
    try:
        small().save(tmp_path / "config.yml")
    finally:
        os.umask(old)
    assert (tmp_path / "config.yml").stat().st_mode & 0o777 == 0o644


def test_replace_validates():
    config = small().replace(seed=3, num_gpus=2)
    assert (config.training.seed, config.launch.num_gpus) == (3, 2)
    assert config.model == small().model
    with pytest.raises(ValidationError):
        config.replace(seed="three")
    with pytest.raises(KeyError):
        config.replace(sed=3)


def test_configuration_is_frozen():
    with pytest.raises(ValidationError):
        small().training.seed = 3


@pytest.mark.parametrize(
    "change",
    [
        "hidden_size=27", "num_layers=3", "norm=rmsnorm", "no_weight_tying=true", "pos_emb=rotary", "pos_emb=alibi",
        "pos_emb_options.std=0.5", "score_processor=dape", "gpt_j_residual=true",
        "make_vocab_size_divisible_by=64", "layernorm_epsilon=1e-6", "intermediate_size=50",
    ],
)  # fmt: skip
def test_architecture_depends_on_keys_that_determine_the_function(change):
    assert small(change).get_architecture_keys() != small().get_architecture_keys()


def test_architecture_depends_on_whose_parameters_the_encoding_has():
    per_layer, shared = (small("pos_emb=t5", f"pos_emb_per_layer={value}") for value in ("true", "false"))
    assert per_layer.get_architecture_keys() != shared.get_architecture_keys()


@pytest.mark.parametrize(
    "change",
    [
        "attention_backend=eager", "attention_chunk_rows=7", "checkpoint_activations=true", "hidden_dropout=0.5",
        "attention_dropout=0.5", "train_iters=9", "seed=1", "lr=1", "precision=bf16", "num_gpus=2", "save=x",
        "init_method=small_init", "data_path=elsewhere", "tokenizer_type=bytes",
    ],
)  # fmt: skip
def test_architecture_ignores_other_keys(change):
    assert small(change).get_architecture_keys() == small().get_architecture_keys()


def test_no_section_has_a_secret():
    for name in map_key_owners():
        assert not any(word in name for word in ("token", "password", "secret", "api_key")) or name in (
            "tokenizer_type",
            "end_token",
        )


def test_every_key_has_one_policy():
    config = small()
    of_policies = [config.get_keys_by_policy(policy) for policy in get_args(ChangePolicy)]
    assert sorted(name for found in of_policies for name in found) == sorted(
        k.name for k in list_config_keys().values() if not k.opens
    )
    assert config.get_keys_by_policy("schedule")["optimizer.params.lr"] == config.optimizer.optimizer.params.lr


@pytest.mark.parametrize("change", ["hidden_dropout=0.5", "fp16.loss_scale=8", "lr=1", "seq_length=32", "split='9,1'"])
def test_training_digest_depends_on_relevant_keys(change):
    assert small(change).get_training_fingerprint() != small().get_training_fingerprint()
    assert small(change).compute_training_digest() != small().compute_training_digest()


@pytest.mark.parametrize("change", ["attention_backend=eager", "num_gpus=2", "log_interval=7", "save=x"])
def test_training_digest_does_not_depend_on_the_machine(change):
    assert (
        small(change, "train_batch_size=8").get_training_fingerprint()
        == small("train_batch_size=8").get_training_fingerprint()
    )


def test_the_training_digest_is_the_same_for_all_seeds():
    assert small("seed=7", "save=x").compute_training_digest() == small("seed=8").compute_training_digest()
    assert small().compute_training_digest(origin=None) == small().compute_training_digest()
    assert small().compute_training_digest(origin="a") != small().compute_training_digest(origin="b")


def test_the_checkpoint_digest_includes_more_than_keys():
    relative, absolute = small("train_data_paths=[text/train]"), small("train_data_paths=[/text/train]")
    state = TrainerState(directory="/here", vocabulary={"size": 9, "name": "bytes"})
    for change in (
        {"directory": "/there"},  # another text with this name
        {"vocabulary": {"size": 9, "name": "HFTokenizer-0123456789ab"}},
        {"method_digests": {"encodings/mine.py": "0123"}},
        {"origin": "0123 at step 5"},
    ):
        assert replace(state, **change).compute_training_digest(relative) != state.compute_training_digest(relative)
    for same in ({"directory": "/there"}, {"step": 7, "world": 2, "zero_stage": 1}):
        assert replace(state, **same).compute_training_digest(absolute) == state.compute_training_digest(absolute)

"""Facts read from the source files agree with the registry after import."""

import pytest

from megatron.config import method_names, reference
from megatron.config.load import load_config
from megatron.position import catalog, registry
from megatron.utils.errors import UserError


def test_names_match_the_registry():
    assert catalog.list_encodings() == registry.list_encodings()
    assert method_names.list_processor_values() == ["none", *registry.list_processors()]


def test_options_match_the_registry():
    for name in catalog.list_encodings():
        assert set(method_names.list_encoding_options(name)) == set(registry.load_encoding_class(name).options()), name
    for name in method_names.list_processor_values():
        known = set() if name == "none" else set(registry.load_processor_class(name).options())
        assert set(method_names.list_processor_options(name)) == known, name
    for name in method_names.list_temperature_values():
        known = set() if name == "none" else set(registry.load_temperature_class(name).options())
        assert set(method_names.list_temperature_options(name)) == known, name


def test_each_other_name_belongs_to_one_method():
    ours = {*registry.list_encodings(), *registry.list_processors(), *registry.list_temperatures()}
    every = [name for method in ours for name in method_names.list_other_names(method)]
    assert len(every) > 20
    assert len(set(map(method_names.normalize_name, every))) == len(every)
    assert not set(every) & ours


FIELD = [  # as written in papers
    ("RoPE", "pos_emb", "rotary"),
    ("rope", "pos_emb", "rotary"),
    ("NoPE", "pos_emb", "none"),
    ("nope", "pos_emb", "none"),
    ("ALiBi", "pos_emb", "alibi"),
    ("T5-RPE", "pos_emb", "t5"),
    ("t5_rpe", "pos_emb", "t5"),
    ("FIRE", "pos_emb", "fire"),
    ("CoPE", "pos_emb", "cope"),
    ("Transformer-XL", "pos_emb", "transformer_xl"),
    ("Kerple-Log", "pos_emb", "kerple_log"),
    ("APE", "pos_emb", "learned"),
    ("DAPE V2", "score_processor", "cdape"),
    ("dapev1", "score_processor", "dape"),
    ("SSMax", "attention_temperature", "ssmax"),
    ("log-n", "attention_temperature", "logn"),
]
SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=2", "seq_length=8", "train_iters=1"]


@pytest.mark.parametrize(("name", "key", "ours"), FIELD)
def test_common_names_are_resolved(name, key, ours):
    assert method_names.find_method(name) == (key, ours)
    with pytest.raises(UserError, match=rf"{key}: no method is called '{name}'; Farfield calls it {ours}$"):
        load_config([], [*SHAPE, f"{key}={name}"])
    missing = rf"^{name}: no such configuration file, .*; the method {name} is called {ours}$"
    with pytest.raises(UserError, match=missing):
        load_config([name])
    if name.islower():
        assert f"{key}: {ours}" in [row[0] for row in reference.find_keys(name)]


def test_methods_of_each_kind_are_suggested_for_the_other():
    with pytest.raises(UserError, match=r"pos_emb: 'cdape' is a value of another key, score_processor: .*=cdape"):
        load_config([], [*SHAPE, "pos_emb=cdape"])
    with pytest.raises(UserError, match="score_processor: 'rope' is a value of another key, pos_emb: pos_emb=rotary"):
        load_config([], [*SHAPE, "score_processor=rope"])


def test_names_of_other_projects_are_reported_with_the_file():
    with pytest.raises(UserError, match=r"kerple_capev2: no such .*; it is a value: pos_emb=kerple_capev2"):
        load_config(["kerple_capev2"])
    rows = {row[0]: row[3] for row in reference.find_keys("kerple_capev2")}
    meaning = "pos_emb: kerple_log, score_processor: cdape, pos_emb_per_layer: true, decay_positions: true"
    assert rows == {"pos_emb: kerple_capev2": meaning}


def test_unknown_names_are_not_resolved():
    assert method_names.find_method("rotory") is None
    assert method_names.find_method("") is None
    with pytest.raises(UserError, match=r"pos_emb: xpos is not supported; .*rotary"):
        load_config([], [*SHAPE, "pos_emb=xpos"])

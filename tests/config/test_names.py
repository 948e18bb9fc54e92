"""What is read off the files agrees with what the registry says after importing them."""

from megatron.config import names
from megatron.position import registry


def test_names_are_the_registrys():
    assert names.encodings() == registry.encodings()
    assert names.processors() == ["none", *registry.processors()]


def test_options_are_the_registrys():
    for name in names.encodings():
        assert set(names.encoding_options(name)) == set(registry.encoding_class(name).options()), name
    for name in names.processors():
        known = set() if name == "none" else set(registry.processor_class(name).options())
        assert set(names.processor_options(name)) == known, name

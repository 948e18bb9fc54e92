"""Errors as a person reads them."""

from megatron.errors import describe


def test_describe_is_one_short_line() -> None:
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 1000))) < 330

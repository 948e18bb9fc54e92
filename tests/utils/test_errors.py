"""Errors as a person reads them."""

from megatron.utils.errors import describe_error


def test_describe_is_one_short_line() -> None:
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_error(ValueError()) == "ValueError"
    assert len(describe_error(ValueError("x" * 1000))) < 330

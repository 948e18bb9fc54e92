"""Documents cut from a text: whole definitions, without loss."""

from hypothesis import given
from hypothesis import strategies as st

from tools.bench.document_perplexity import cut_definitions

TEXT = '''"""Head."""
import os

@cached
def first():
    return 1

class Second:
    """Of two."""

    def third(self):
        def inner():
            return 2
        return inner

x = 3
'''


def test_a_file_is_split_at_definitions() -> None:
    begins = [part.split("\n")[0] for part in cut_definitions(TEXT)]
    assert begins == ['"""Head."""', "@cached", "class Second:", "    def third(self):"]


@given(st.lists(st.sampled_from(["\n", "\n\n", "def f():\n", "  @x\n", "text\n", "class A:\n"])))
def test_parts_are_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    parts = list(cut_definitions(text))
    assert "".join(parts).split() == text.split()
    assert all(part.strip() for part in parts)

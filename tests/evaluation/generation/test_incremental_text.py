"""Incremental decoding: concatenated pieces equal the text decoded at once, for any split."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import SAMPLE, open_tokenizers, write_tokenizers

from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.text_generator import IncrementalDetokenizer, StopStrings

KINDS = ["bytes", "HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"]


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return open_tokenizers(write_tokenizers(tmp_path_factory.mktemp("tokenizers")))


def pieces(tokenizer: Tokenizer, tokens: list[int], before: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer.decode, before)
    return [*(stream.push(token) for token in tokens), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pieces_equal_the_text(all_tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = all_tokenizers[kind]
    characters = (
        st.characters(exclude_categories=["Cs"]) if kind != "SPMTokenizer" else st.sampled_from("".join(SAMPLE) + "  ")
    )

    @given(st.text(characters, max_size=12), st.text(characters, max_size=40))
    @settings(max_examples=200, deadline=None)
    def check(prompt: str, text: str) -> None:
        before, tokens = tokenizer.encode(prompt), tokenizer.encode(text)
        whole = tokenizer.decode([*before, *tokens])
        found = pieces(tokenizer, tokens, before)
        assert tokenizer.decode(before) + "".join(found) == whole
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in found)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pieces_of_any_tokens_equal_their_text(all_tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Pieces of arbitrary tokens join to their text, including invalid UTF-8."""
    tokenizer = all_tokenizers[kind]
    ids = st.integers(0, tokenizer.vocab_size - 1).filter(lambda token: token != tokenizer.eod)

    @given(st.lists(ids, max_size=40))
    @settings(max_examples=200, deadline=None)
    def check(tokens: list[int]) -> None:
        before = tokenizer.encode(SAMPLE[0])
        found = "".join(pieces(tokenizer, tokens, before))
        assert tokenizer.decode(before) + found == tokenizer.decode([*before, *tokens])

    check()


def test_characters_are_returned_when_complete() -> None:
    tokenizer = open_tokenizers_of_bytes()
    assert pieces(tokenizer, list("a€é".encode()), []) == ["a", "", "", "€", "", "é", ""]
    assert pieces(tokenizer, list("€".encode()[:2]), []) == ["", "", "\ufffd"]


def open_tokenizers_of_bytes() -> Tokenizer:
    from megatron.data.tokenizers import ByteTokenizer

    return ByteTokenizer()


def ended(text: str, stops: list[str]) -> str:
    """Return the text before the first complete stop string, character by character."""
    for end in range(len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)]
    return text


@given(
    text=st.text("ab", max_size=16),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 16), max_size=6),
)
@settings(max_examples=1000, deadline=None)
def test_stop_positions_do_not_depend_on_the_split(text: str, stops: list[str], cuts: list[int]) -> None:
    texts = StopStrings(stops)
    found = [texts.push(text[start:end]) for start, end in pairwise(sorted([0, *cuts, len(text)]))]
    assert "".join(found) + texts.flush() == ended(text, stops)
    assert texts.stopped == any(stop in text for stop in stops)


def test_only_possible_prefixes_of_stop_strings_are_withheld() -> None:
    texts = StopStrings(["\n\n"])
    assert [texts.push(piece) for piece in ("one", "\n", "two\n", "\nthree", "four")] == ["one", "", "\ntwo", "", ""]
    assert texts.flush() == ""

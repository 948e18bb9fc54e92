"""The transformers tokenizer of an export gives our tokens for any text."""

from pathlib import Path
from typing import Any

import pytest
from full_disk import full_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_files import open_tokenizers, write_tokenizers

from megatron.conversion.hf_tokenizer import write_hf_tokenizer
from megatron.data.tokenizers import Tokenizer

KINDS = ("bytes", "HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer")
TEXTS = [
    "",
    " ",
    "a  b",
    "<|endoftext|>",
    "def f(x):\n\treturn x\r\n",
    "Grüße 東京 🙂",
    "\u0000\ufeff\u200b",
    "don't",
    "Ā <0x00>",
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Our tokenizer and transformers', by type."""
    import transformers

    folder, found = tmp_path_factory.mktemp("tokenizers"), {}
    for kind, ours in open_tokenizers(write_tokenizers(folder)).items():
        place = folder / kind
        place.mkdir()
        write_hf_tokenizer(ours, place, 64)
        found[kind] = ours, transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=True)
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.sampled_from(TEXTS), st.text()))
def test_the_same_tokens(kind: str, pairs: dict[str, tuple[Tokenizer, Any]], text: str) -> None:
    ours, theirs = pairs[kind]
    ids = ours.encode(text)
    assert theirs(text)["input_ids"] == ids
    plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    assert theirs.decode(ids, **plain) == ours.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_an_error_of_the_system(kind: str, tmp_path: Path) -> None:
    """A full disk raises OSError, so that `export` can name the folder; tokenizers raises a generic Exception."""
    ours = open_tokenizers(write_tokenizers(tmp_path))[kind]
    (tmp_path / "export").mkdir()
    with full_disk(500), pytest.raises(OSError, match="File too large"):
        write_hf_tokenizer(ours, tmp_path / "export", 64)


@pytest.mark.parametrize("kind", KINDS)
def test_ends_and_padding(kind: str, pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, theirs = pairs[kind]
    assert theirs.eos_token_id == ours.eod
    assert theirs.pad_token_id != ours.eod  # else finetuning, which skips padding, never teaches to stop
    assert theirs.model_max_length == 64
    if theirs.pad_token_id is None:
        theirs.pad_token = theirs.eos_token
    batch = theirs(["the", "the there"], padding=True)
    first, second = batch["attention_mask"]
    assert first[0] == 0
    assert first[-1] == 1
    assert set(second) == {1}
    assert len(theirs) <= ours.vocab_size

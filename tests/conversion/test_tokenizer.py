"""The transformers tokenizer of an export gives our tokens for any text."""

import copy
from pathlib import Path
from typing import Any

import pytest
from full_disk import full_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_files import open_tokenizers, write_tokenizers

from megatron.conversion.hf_tokenizer import write_hf_tokenizer
from megatron.conversion.import_model import resolve_tokenizer
from megatron.conversion.model_family import ModelSource
from megatron.data.tokenizers import Tokenizer, load_tokenizer_from_files

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


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_have_ids_of_their_own(kind: str, pairs: dict[str, tuple[Tokenizer, Any]], tmp_path: Path) -> None:
    import transformers

    ours, theirs = pairs[kind]
    theirs = copy.deepcopy(theirs)
    for number, name in enumerate(("<turn>", "<call>")):
        assert theirs.add_tokens([name], special_tokens=True) == 1
        assert theirs.convert_tokens_to_ids(name) == ours.vocab_size + number
    assert len(theirs) == ours.vocab_size + 2
    theirs.split_special_tokens = False
    theirs.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    for tokenizer in (theirs, loaded):
        ids = tokenizer("the<turn>")["input_ids"]
        assert ids == [*ours.encode("the"), ours.vocab_size]
        assert tokenizer.decode(ids).replace(" ", "") == "the<turn>"


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("kind", ["HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"])
def test_a_saved_tokenizer_adds_the_same_token(kind: str, adds_bos: bool, tmp_path: Path) -> None:
    """transformers 5 does not write add_bos_token."""
    import transformers

    files = open_tokenizers(write_tokenizers(tmp_path))[kind].files.values()
    ours = load_tokenizer_from_files(kind, *files)
    ours.bos = {"HFTokenizer": 0, "GPT2BPETokenizer": 0, "SPMTokenizer": 1}[kind] if adds_bos else None
    folder = tmp_path / "export"
    folder.mkdir()
    write_hf_tokenizer(ours, folder, None)
    for _ in range(3):
        theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert theirs("the there")["input_ids"] == ours.encode_with_bos("the there")
        folder = tmp_path / f"{folder.name} again"
        theirs.save_pretrained(folder)
    if kind == "SPMTokenizer":
        assert resolve_tokenizer(ModelSource(folder, "", {}, None, folder), None, None, None).bos == ours.bos  # type: ignore[arg-type]

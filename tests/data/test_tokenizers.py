import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import SAMPLE, open_tokenizers, write_tokenizers

from megatron.data.load_tokenizer import load_tokenizer
from megatron.data.tokenizers import END_OF_DOCUMENT, load_tokenizer_from_files, train_bpe
from megatron.utils.errors import UserError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tokenizers(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="module")
def all_tokenizers(files):
    return open_tokenizers(files)


@pytest.mark.parametrize("kind", ["bytes", "HFTokenizer", "GPT2BPETokenizer"])
def test_decoding_undoes_encoding(all_tokenizers, kind):
    tokenizer = all_tokenizers[kind]

    @given(st.text(max_size=60))
    @settings(max_examples=150, deadline=None)
    def check(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == text
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for i in ids)

    check()


@pytest.mark.parametrize("kind", ["bytes", "HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"])
def test_batches_encode_as_single_texts_do(all_tokenizers, kind):
    texts = [*SAMPLE, "", "x", "ß"]
    batch = all_tokenizers[kind].encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [all_tokenizers[kind].encode(text) for text in texts]


def test_bytes_are_the_utf8_bytes():
    tokenizer = load_tokenizer_from_files("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.name) == (257, 256, "bytes")
    assert tokenizer.encode("aß") == [97, 0xC3, 0x9F]
    assert tokenizer.decode([97, 256, 0xC3]) == "a\ufffd"  # no end token; bad bytes are marked


def test_sentencepiece_agrees_with_its_library(all_tokenizers, files):
    tokenizer, library = all_tokenizers["SPMTokenizer"], sentencepiece.SentencePieceProcessor(str(files / "spm.model"))
    assert tokenizer.encode("the then there") == library.encode("the then there")
    assert tokenizer.decode(tokenizer.encode("the then there")) == "the then there"
    assert tokenizer.eod == library.eos_id()
    assert tokenizer.vocab_size == library.vocab_size()


def test_merges_are_used_and_special_tokens_in_text_follow_neox(all_tokenizers):
    learned, gpt2 = all_tokenizers["HFTokenizer"], all_tokenizers["GPT2BPETokenizer"]
    assert len(learned.encode("the then there")) < 14
    assert learned.encode("a<|endoftext|>")[-1] == learned.eod
    assert learned.decode([learned.eod]) == "<|endoftext|>"
    assert gpt2.eod not in gpt2.encode("a<|endoftext|>")
    assert gpt2.encode("the then there") == learned.encode("the then there")


def test_training_is_deterministic_across_processes(tmp_path, files):
    program = (
        "import sys; from pathlib import Path; from megatron.data.tokenizers import train_bpe; "
        f"train_bpe({SAMPLE!r}, 300, Path(sys.argv[1]))"
    )
    for threads in ("1", "3"):
        out = tmp_path / f"{threads}.json"
        env = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PATH": "", "PYTHONPATH": str(Path.cwd())}
        subprocess.run([sys.executable, "-c", program, str(out)], check=True, env=env)
        assert out.read_bytes() == (files / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("eod", END_OF_DOCUMENT)
def test_the_end_of_documents_is_found_by_its_names(tmp_path, eod):
    path = tmp_path / "tokenizer.json"
    hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 5, eod: 3}, unk_token="a")).save(str(path))
    tokenizer = load_tokenizer_from_files("HFTokenizer", path)
    assert (tokenizer.eod, tokenizer.vocab_size) == (3, 6)  # ids may have gaps


def test_names_distinguish_tokenizers(all_tokenizers, tmp_path, files):
    assert len({tokenizer.name for tokenizer in all_tokenizers.values()}) == 4
    all_tokenizers["HFTokenizer"].copy_files(tmp_path)
    assert (
        load_tokenizer_from_files("HFTokenizer", tmp_path / "tokenizer.json").name == all_tokenizers["HFTokenizer"].name
    )
    train_bpe(SAMPLE, 290, tmp_path / "tokenizer.json")
    assert (
        load_tokenizer_from_files("HFTokenizer", tmp_path / "tokenizer.json").name != all_tokenizers["HFTokenizer"].name
    )


def test_errors_name_the_cause(tmp_path, files):
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "no-end.json"))
    for arguments, message in [
        (("HFTokeniser", broken), r"unknown value 'HFTokeniser'; did you mean HFTokenizer\? choose from bytes, HF"),
        (("HFTokenizer",), "vocab_file: tokenizer HFTokenizer needs its tokenizer.json"),
        (("HFTokenizer", tmp_path / "none"), "vocab_file: .*none: no such file"),
        (("HFTokenizer", tmp_path), "is a folder"),
        (
            ("HFTokenizer", broken, files / "merges.txt"),
            r"merge_file: .*merges\.txt: tokenizer HFTokenizer has no such",
        ),
        (("HFTokenizer", broken), r"tokenizer\.json: not a Hugging Face tokenizer\.json"),
        (
            ("HFTokenizer", tmp_path / "no-end.json"),
            r"no-end\.json: no end-of-document token found; looked for <\|endoftext\|>, ",
        ),
        (("GPT2BPETokenizer", files / "vocab.json"), r"merge_file: tokenizer GPT2BPETokenizer needs its merges\.txt"),
        (("GPT2BPETokenizer", broken, files / "merges.txt"), "not GPT-2 vocab and merges"),
        (("SPMTokenizer", broken), "not a SentencePiece model"),
        (("bytes", broken), "vocab_file: .*: tokenizer bytes has no such file"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            load_tokenizer_from_files(*arguments)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"vocab_size: 256 is too small.*257"):
        train_bpe(SAMPLE, 256, tmp_path / "small.json")
    with pytest.raises(UserError, match=r"corpus\.json: no such file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"])
def test_damaged_files_work_or_are_rejected_in_one_line(tmp_path, all_tokenizers, kind):
    rng = np.random.default_rng(0)
    whole = {name: path.read_bytes() for name, path in all_tokenizers[kind].files.items()}
    refused = 0
    for turn in range(60):
        for name, content in whole.items():
            damaged = bytearray(content)
            for place in rng.integers(0, len(content), size=int(rng.integers(1, 4))):
                damaged[place] = rng.integers(32, 127)  # printable, because data that are not text are rejected at once
            (tmp_path / name).write_bytes(damaged[: rng.integers(1, len(damaged))] if turn % 3 == 0 else damaged)
        try:
            tokenizer = load_tokenizer_from_files(kind, *(tmp_path / name for name in whole))
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017
            assert str(tmp_path) in str(error)  # noqa: PT017
        else:
            assert max(tokenizer.encode(SAMPLE[0]), default=0) < tokenizer.vocab_size
            assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert refused >= 20  # at least the truncated ones


def test_ids_beyond_all_memory_are_rejected(tmp_path):
    path = tmp_path / "tokenizer.json"
    hf.Tokenizer(hf.models.WordLevel({"a": 0, "</s>": 4_321}, unk_token="a")).save(str(path))
    path.write_text(path.read_text().replace("4321", "4000000000"))  # a serialized form would count up to this id
    with pytest.raises(UserError, match=r"tokenizer\.json: a token has id 4000000000; at most 16,777,216 tokens"):
        load_tokenizer_from_files("HFTokenizer", path)


def test_an_exponential_regex_is_reported_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A panic of the regex library becomes a one-line error, instead of sixty lines and a BaseException."""
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex("(a+)+$"), "isolated")
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(["abc"], hf.trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer_from_files("HFTokenizer", tmp_path / "tokenizer.json")
    assert tokenizer.encode("aab")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match=r"tokenizer.json: cannot apply its regular expressions to a text: Onig"):
            encode("a" * 40 + "!")
    assert capfd.readouterr().err == ""

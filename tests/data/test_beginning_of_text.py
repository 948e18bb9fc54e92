"""The token before a text is determined once, and all readers of text follow it; compared with transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers as hf
from tokenizer_files import SAMPLE

from megatron.conversion.hf_tokenizer import write_hf_tokenizer
from megatron.conversion.import_model import resolve_tokenizer
from megatron.conversion.model_family import ModelSource
from megatron.data.corpus.prepare import prepare_corpus
from megatron.data.load_tokenizer import load_run_tokenizer, read_vocabulary, save_tokenizer
from megatron.data.tokenizers import Tokenizer, load_tokenizer_from_files
from megatron.evaluation.harness import HarnessModel
from megatron.evaluation.text_generator import TextGenerator
from megatron.options.commands import GenerationOptions
from megatron.options.data import CorpusOptions, DataOptions
from megatron.utils.errors import UserError
from tools.export.cases import ExportCase, build_gpt

TEXTS = ["the then there", "Grüße, 東京!", "def encode(text):"]


def byte_level(folder: Path, special: list[str], before: str | None) -> None:
    """Write a random byte-level BPE like those of Llama 3 and GPT-NeoX."""
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    trainer = hf.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(SAMPLE, trainer)
    if before is not None:
        template = hf.processors.TemplateProcessing(
            single=[before, "$A"], pair=[before, "$A", before, "$B:1"], special_tokens=[(before, special.index(before))]
        )
        made.post_processor = hf.processors.Sequence([hf.processors.ByteLevel(trim_offsets=False), template])
    made.save(str(folder / "tokenizer.json"))


def pieces(folder: Path) -> None:
    """Write a SentencePiece model like Llama 2's."""
    (folder / "text").write_text("\n".join(SAMPLE * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=80, model_type="bpe",
        hard_vocab_limit=False, minloglevel=9,
    )  # fmt: skip


def write_style(style: str, folder: Path) -> None:
    """Write the tokenizer of a published model in the layout that transformers expects."""
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if style == "Llama 3":
        names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        byte_level(folder, list(names.values()), names["bos_token"])
        config = {**names, "tokenizer_class": "PreTrainedTokenizerFast"}
    elif style == "GPT-NeoX":
        byte_level(folder, ["<|endoftext|>"], None)
        config = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>") | {"tokenizer_class": "GPTNeoXTokenizer"}
    elif style == "OPT":
        byte_level(folder, ["<s>", "</s>"], None)
        hf.Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
        (folder / "tokenizer.json").unlink()
        config |= {"bos_token": "</s>", "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    else:
        pieces(folder)
        config |= {"add_bos_token": style == "Llama 2", "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


STYLES = {"Llama 3": 0, "Llama 2": 1, "GPT-NeoX": None, "OPT": 1, "Llama 2 without": None}
"""Token before a text, by style."""


@pytest.fixture(scope="module", params=STYLES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("published")
    write_style(request.param, folder)
    return request.param, folder


def source(folder: Path) -> ModelSource:
    return ModelSource(folder, "a", {}, None, folder, ())  # type: ignore[arg-type]


def of_transformers(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def test_an_import_reads_as_the_source_and_so_does_its_export(published: tuple[str, Path], tmp_path: Path) -> None:
    style, folder = published
    tokenizer = resolve_tokenizer(source(folder), None, None, None)
    assert tokenizer.bos == STYLES[style]
    theirs = of_transformers(folder)
    if tokenizer.type != "SPMTokenizer":  # no class of transformers reads a raw SentencePiece file
        for text in TEXTS:
            assert tokenizer.encode_with_bos(text) == theirs(text).input_ids
    copy = load_run_tokenizer(save_tokenizer(tokenizer, tmp_path / "run").parent, DataOptions(), None)
    assert (copy.bos, copy.name) == (tokenizer.bos, tokenizer.name)
    (tmp_path / "export").mkdir()
    write_hf_tokenizer(copy, tmp_path / "export", 64)
    exported = of_transformers(tmp_path / "export")
    for text in TEXTS:
        assert exported(text).input_ids == copy.encode_with_bos(text)
        assert exported(text, add_special_tokens=False).input_ids == copy.encode(text)
    assert exported.bos_token_id == tokenizer.bos
    again = resolve_tokenizer(source(tmp_path / "export"), None, None, None)
    assert again.bos == tokenizer.bos
    other = resolve_tokenizer(source(folder), None, None, None, add_bos=tokenizer.bos is None)
    assert (other.bos is None) == (tokenizer.bos is not None)
    (tmp_path / "other").mkdir()
    write_hf_tokenizer(other, tmp_path / "other", 64)  # the run's decision overrides the file
    assert of_transformers(tmp_path / "other")("the").input_ids == other.encode_with_bos("the")


def test_prompts_and_tasks_begin_like_the_text(published: tuple[str, Path]) -> None:
    style, folder = published
    tokenizer = resolve_tokenizer(source(folder), None, None, None)
    begin = [] if STYLES[style] is None else [STYLES[style]]
    gpt = build_gpt(ExportCase("none", {"pos_emb": "none"}), tokenizer.vocab_size)
    writer = TextGenerator(gpt, tokenizer, GenerationOptions())
    assert writer.encode("the") == [*begin, *tokenizer.encode("the")]
    assert writer.encode("") == (begin or [tokenizer.eod])
    harness = HarnessModel(gpt, tokenizer, 32)
    assert harness.tok_encode("the") == [*begin, *tokenizer.encode("the")]
    assert harness.tok_encode("the", add_special_tokens=False) == list(tokenizer.encode("the"))
    assert [harness.prefix_token_id] == (begin or [tokenizer.eod])


def prepared(folder: Path, output: Path, **keys: Any) -> Path:
    if not (folder / "texts.jsonl").exists():
        (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    options = CorpusOptions(
        sources=[str(folder / "texts.jsonl")], tokenizer="HFTokenizer", vocab_file=str(folder / "tokenizer.json"),
        split=None, workers=1, **keys,
    )  # fmt: skip
    return prepare_corpus(options, output).folder


@pytest.mark.parametrize("add_bos", [None, False])
def test_documents_begin_with_the_token(tmp_path: Path, add_bos: bool | None) -> None:
    write_style("Llama 3", tmp_path)
    corpus = prepared(tmp_path, tmp_path / "corpus", add_bos=add_bos)
    tokenizer = load_tokenizer_from_files("HFTokenizer", tmp_path / "tokenizer.json", bos=add_bos)
    assert tokenizer.bos == (0 if add_bos is None else None)
    prefix = next(corpus.glob("*.bin")).with_suffix("")
    found = np.memmap(f"{prefix}.bin", dtype=np.uint16)
    expected = [number for text in TEXTS for number in [*tokenizer.encode_with_bos(text), tokenizer.eod]]
    assert sorted(found) == sorted(expected)
    assert read_vocabulary(DataOptions(train_data_paths=[str(prefix)])).bos == tokenizer.bos
    with pytest.raises(UserError, match="made with other settings"):
        prepared(tmp_path, corpus, add_bos=add_bos is not None)


def test_corpora_with_different_begin_tokens_do_not_mix(tmp_path: Path) -> None:
    write_style("Llama 3", tmp_path)
    one, other = (prepared(tmp_path, tmp_path / str(add), add_bos=add) for add in (True, False))
    paths = [str(next(corpus.glob("*.bin")).with_suffix("")) for corpus in (one, other)]
    with pytest.raises(
        UserError, match=r"its documents begin without a special token, but those of .* with token 0; prepare bo"
    ):
        read_vocabulary(DataOptions(train_data_paths=paths))


def test_invalid_begin_tokens_are_rejected(tmp_path: Path) -> None:
    byte_level(tmp_path, ["<|endoftext|>"], None)
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"add_bos: tokenizer HFTokenizer-\w+ has no beginning-of-text token"):
        load_tokenizer_from_files("HFTokenizer", path, bos=True)
    content = json.loads(path.read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="adds 2 tokens before a text, but at most one is supported; use false"):
        load_tokenizer_from_files("HFTokenizer", path)
    assert load_tokenizer_from_files("HFTokenizer", path, bos=False).bos is None


def test_an_end_of_an_unusual_name_is_named(tmp_path: Path) -> None:
    byte_level(tmp_path, ["<|fin|>"], None)
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"no end-of-document token found; looked for .*; set it with end_token"):
        load_tokenizer_from_files("HFTokenizer", path)
    with pytest.raises(UserError, match=r"end_token: .* has no token '<\|fim\|>'; did you mean <\|fin\|>"):
        load_tokenizer_from_files("HFTokenizer", path, end_token="<|fim|>")
    tokenizer = load_tokenizer_from_files("HFTokenizer", path, end_token="<|fin|>")
    assert tokenizer.eod == 0
    copy: Tokenizer = load_run_tokenizer(save_tokenizer(tokenizer, tmp_path / "run").parent, DataOptions(), None)
    assert (copy.eod, copy.end_token) == (0, "<|fin|>")
    corpus = prepared(tmp_path, tmp_path / "corpus", end_token="<|fin|>")
    prefix = next(corpus.glob("*.bin")).with_suffix("")
    assert read_vocabulary(DataOptions(train_data_paths=[str(prefix)])).eod == 0
    assert int(np.memmap(f"{prefix}.bin", dtype=np.uint16)[-1]) == 0

"""A run's tokenizer as transformers reads it, giving the same tokens for every text.

| ours | written | read as |
|---|---|---|
| bytes | tokenizer.json: a BPE of the 256 bytes without merges | PreTrainedTokenizerFast |
| HFTokenizer | its tokenizer.json, with what the run puts before a text | PreTrainedTokenizerFast |
| GPT2BPETokenizer | tokenizer.json made of vocab and merges | PreTrainedTokenizerFast |
| SPMTokenizer | tokenizer.model, and a class around it | FarfieldTokenizer, by remote code |

Our own files lie beside, and tokenizer_config.json says our name of the kind, so that an import has the same tokenizer
again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers as hf

from megatron.data.tokenizers import END_OF_DOCUMENT, Tokenizer
from megatron.export.bundle import HERE, name_by_content
from megatron.formats.farfield import TOKENIZER_KIND

CLASS_FILE = HERE / "tokenization_farfield.py"


def write_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write a tokenizer's files.

    Args:
        longest: tokens of a training sequence, which transformers warns beyond.
    """
    tokenizer.copy_files(folder)
    config = _WRITERS[tokenizer.type](tokenizer, folder)
    known = {
        TOKENIZER_KIND: tokenizer.type,
        "add_bos_token": tokenizer.bos is not None,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**known, **config}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _bytes(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    characters = _byte_characters()
    model = hf.models.BPE({character: byte for byte, character in enumerate(characters)}, [])
    made = hf.Tokenizer(model)
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens([hf.AddedToken(END_OF_DOCUMENT[0], normalized=False, special=True)])
    (folder / "tokenizer.json").write_text(made.to_str(pretty=True), encoding="utf-8")  # with Python's errors
    return _fast(made, tokenizer, parses=False)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where it can be printed, else one from U+0100
    on, in order (GPT-2's released code)."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def _tokenizer_json(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    read = hf.Tokenizer.from_file(str(path))
    wanted = [] if tokenizer.bos is None else [tokenizer.bos]
    if tokenizer.added_before() != wanted:  # the run's decision is another than the file's
        content = json.loads(path.read_text(encoding="utf-8"))
        content["post_processor"] = _post_processor(read, tokenizer.bos)
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return _fast(read, tokenizer, parses=True)


def _post_processor(read: hf.Tokenizer, bos: int | None) -> dict[str, Any] | None:
    """What puts a token before every text, as tokenizer.json has it; None if nothing does."""
    if bos is None:
        return None
    read.post_processor = _template(read.id_to_token(bos), bos)
    return json.loads(read.to_str())["post_processor"]


def _template(token: str | None, number: int) -> hf.processors.TemplateProcessing:
    assert token is not None
    return hf.processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, number)]
    )


def _gpt2(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    ids, merges = hf.models.BPE.read_file(*(str(path) for path in tokenizer.files.values()))
    made = hf.Tokenizer(hf.models.BPE(ids, merges))
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    end = made.id_to_token(tokenizer.eod)
    made.add_special_tokens([hf.AddedToken(end, normalized=False, special=True)])
    if tokenizer.bos is not None:
        made.post_processor = _template(made.id_to_token(tokenizer.bos), tokenizer.bos)
    (folder / "tokenizer.json").write_text(made.to_str(pretty=True), encoding="utf-8")  # with Python's errors
    return _fast(made, tokenizer, parses=False)


def _sentencepiece(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    import sentencepiece

    files, suffix = name_by_content({CLASS_FILE.name: CLASS_FILE.read_text(encoding="utf-8")})
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return {
        "tokenizer_class": "FarfieldTokenizer",
        "auto_map": {"AutoTokenizer": [f"{CLASS_FILE.stem}{suffix}.FarfieldTokenizer", None]},
        **_special(pieces.id_to_piece, tokenizer),
    }


def _fast(made: hf.Tokenizer, tokenizer: Tokenizer, *, parses: bool) -> dict[str, Any]:
    """parses: do special tokens in a text become their ids?"""
    special = _special(made.id_to_token, tokenizer)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": not parses, **special}


def _special(name: Callable[[int], str | None], tokenizer: Tokenizer) -> dict[str, Any]:
    end = name(tokenizer.eod)
    begin = {} if tokenizer.bos is None else {"bos_token": name(tokenizer.bos)}
    return {"eos_token": end, "pad_token": end, **begin}  # padding is masked, whatever its token


_WRITERS: dict[str, Callable[[Tokenizer, Path], dict[str, Any]]] = {
    "bytes": _bytes,
    "HFTokenizer": _tokenizer_json,
    "GPT2BPETokenizer": _gpt2,
    "SPMTokenizer": _sentencepiece,
}

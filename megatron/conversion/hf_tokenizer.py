"""Export of a run's tokenizer for transformers, with identical tokens for every text.

| our type         | exported files                                       | class in transformers             |
|------------------|------------------------------------------------------|-----------------------------------|
| bytes            | tokenizer.json: a BPE of the 256 bytes, no merges    | PreTrainedTokenizerFast           |
| HFTokenizer      | its tokenizer.json, with the run's prefix token      | PreTrainedTokenizerFast           |
| GPT2BPETokenizer | tokenizer.json, built from vocab and merges          | PreTrainedTokenizerFast           |
| SPMTokenizer     | tokenizer.model, and code of a class that wraps it   | FarfieldTokenizer, by remote code |

The original files are included, and tokenizer_config.json stores our name of the type, so that an import restores the
same tokenizer.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers as hf

from megatron.conversion.families.farfield import ADD_BOS_KEY, TOKENIZER_CONFIG_FILE, TOKENIZER_TYPE_KEY
from megatron.conversion.modeling_code import BUNDLED_FOLDER, add_content_digest
from megatron.data.tokenizers import END_OF_DOCUMENT, Tokenizer

TOKENIZATION_FILE = BUNDLED_FOLDER / "tokenization_farfield.py"
PADDING_TOKENS = ("<|padding|>", "<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>")
"""Names of padding tokens. If the vocabulary has none of them, a zero byte is used, which no text contains."""


def write_hf_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int | None) -> int | None:
    """Write a tokenizer's files and return the id of the padding token, or None if there is none.

    Args:
        max_length: longest input of the model, in tokens, or None if it has no limit. transformers warns about longer
            inputs, and its pipelines cut them.
    """
    tokenizer.copy_files(folder)
    config = _WRITERS[tokenizer.type](tokenizer, folder)
    padding_id = config.pop("pad_token_id", None)  # it belongs in the model's configuration
    common_keys = {
        TOKENIZER_TYPE_KEY: tokenizer.type,
        "add_bos_token": tokenizer.bos is not None,
        ADD_BOS_KEY: tokenizer.bos is not None,
        **({} if max_length is None else {"model_max_length": max_length}),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / TOKENIZER_CONFIG_FILE).write_text(
        json.dumps({**common_keys, **config}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return padding_id


def _write_byte_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    characters = _list_byte_characters()
    model = hf.models.BPE({character: byte for byte, character in enumerate(characters)}, [])
    hf_tokenizer = hf.Tokenizer(model)
    hf_tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf_tokenizer.decoder = hf.decoders.ByteLevel()
    hf_tokenizer.add_special_tokens([hf.AddedToken(END_OF_DOCUMENT[0], normalized=False, special=True)])
    (folder / "tokenizer.json").write_text(hf_tokenizer.to_str(pretty=True), encoding="utf-8")  # raises Python errors
    return _fast_tokenizer_config(hf_tokenizer, tokenizer, parse_special_tokens=False)


def _list_byte_characters() -> list[str]:
    """Return the character for each byte in byte-level BPE: itself if printable, else one from U+0100 on, in order.

    The mapping is that of GPT-2's released code.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def _write_json_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    hf_tokenizer = hf.Tokenizer.from_file(str(path))
    expected_prefix = [] if tokenizer.bos is None else [tokenizer.bos]
    if tokenizer.get_prefix_tokens() != expected_prefix:  # the run's setting differs from the file's
        content = json.loads(path.read_text(encoding="utf-8"))
        content["post_processor"] = _build_post_processor(hf_tokenizer, tokenizer.bos)
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return _fast_tokenizer_config(hf_tokenizer, tokenizer, parse_special_tokens=True)


def _build_post_processor(hf_tokenizer: hf.Tokenizer, bos: int | None) -> dict[str, Any] | None:
    """Return the post_processor of tokenizer.json that adds a token before every text, or None without one."""
    if bos is None:
        return None
    hf_tokenizer.post_processor = _build_template(hf_tokenizer.id_to_token(bos), bos)
    return json.loads(hf_tokenizer.to_str())["post_processor"]


def _build_template(token: str | None, token_id: int) -> hf.processors.TemplateProcessing:
    assert token is not None
    return hf.processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, token_id)]
    )


def _write_gpt2_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    vocab, merges = hf.models.BPE.read_file(*(str(path) for path in tokenizer.files.values()))
    hf_tokenizer = hf.Tokenizer(hf.models.BPE(vocab, merges))
    hf_tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf_tokenizer.decoder = hf.decoders.ByteLevel()
    end_token = hf_tokenizer.id_to_token(tokenizer.eod)
    hf_tokenizer.add_special_tokens([hf.AddedToken(end_token, normalized=False, special=True)])
    if tokenizer.bos is not None:
        hf_tokenizer.post_processor = _build_template(hf_tokenizer.id_to_token(tokenizer.bos), tokenizer.bos)
    (folder / "tokenizer.json").write_text(hf_tokenizer.to_str(pretty=True), encoding="utf-8")  # raises Python errors
    return _fast_tokenizer_config(hf_tokenizer, tokenizer, parse_special_tokens=False)


def _write_sentencepiece_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    import sentencepiece

    files, suffix = build_tokenization_code()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return {
        "tokenizer_class": "FarfieldTokenizer",
        "auto_map": name_tokenizer_class(suffix),
        **_special_token_config(processor.id_to_piece, tokenizer, (*PADDING_TOKENS, "<0x00>")),
    }


def build_tokenization_code() -> tuple[dict[str, str], str]:
    """Return the code of SPMTokenizer for an export, and the suffix of its names."""
    return add_content_digest({TOKENIZATION_FILE.name: TOKENIZATION_FILE.read_text(encoding="utf-8")})


def name_tokenizer_class(suffix: str) -> dict[str, list[str | None]]:
    """Return the `auto_map` of tokenizer_config.json for that code."""
    return {"AutoTokenizer": [f"{TOKENIZATION_FILE.stem}{suffix}.FarfieldTokenizer", None]}


def _fast_tokenizer_config(
    hf_tokenizer: hf.Tokenizer, tokenizer: Tokenizer, *, parse_special_tokens: bool
) -> dict[str, Any]:
    """Return the tokenizer_config.json keys of a PreTrainedTokenizerFast.

    parse_special_tokens: True if special tokens in a text become their ids.
    """
    # A parsed padding token must not occur in texts, which rules out the character of a byte.
    padding_tokens = PADDING_TOKENS if parse_special_tokens else (*PADDING_TOKENS, _list_byte_characters()[0])
    special_tokens = _special_token_config(hf_tokenizer.id_to_token, tokenizer, padding_tokens)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "split_special_tokens": not parse_special_tokens,
        **special_tokens,
    }


def _special_token_config(
    id_to_token: Callable[[int], str | None], tokenizer: Tokenizer, padding_tokens: Sequence[str]
) -> dict[str, Any]:
    """Return the special tokens.

    Padding is never the end token: finetuning masks padding, and the model would not learn to stop. If the vocabulary
    has none of `padding_tokens`, there is no padding token.
    """
    tokens: dict[str, Any] = {"eos_token": id_to_token(tokenizer.eod)}
    names = {id_to_token(i): i for i in range(tokenizer.vocab_size) if i != tokenizer.eod}
    if (padding := next((name for name in padding_tokens if name in names), None)) is not None:
        tokens |= {"pad_token": padding, "pad_token_id": names[padding]}
    if tokenizer.bos is not None:
        tokens["bos_token"] = id_to_token(tokenizer.bos)
    return tokens


_WRITERS: dict[str, Callable[[Tokenizer, Path], dict[str, Any]]] = {
    "bytes": _write_byte_tokenizer,
    "HFTokenizer": _write_json_tokenizer,
    "GPT2BPETokenizer": _write_gpt2_tokenizer,
    "SPMTokenizer": _write_sentencepiece_tokenizer,
}

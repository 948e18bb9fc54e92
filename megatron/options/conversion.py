"""How models are converted: the options of `./deepy.py import` and `./deepy.py export`."""

from megatron.options.section import Section, key


class ImportOptions(Section):
    """What a foreign checkpoint does not say of itself."""

    config: list[str] = key(list, "GPT-NeoX's configuration files, if SOURCE has none", metavar="FILE")
    tokenizer: str | None = key(
        None, "one of bytes, HFTokenizer, GPT2BPETokenizer and SPMTokenizer; the one in SOURCE if absent"
    )
    vocab_file: str | None = key(None, "tokenizer.json, vocab.json or .model file")
    merge_file: str | None = key(None, "merges.txt of GPT2BPETokenizer")
    end_token: str | None = key(None, "the token that ends a document, if it has none of the usual names")
    add_bos: bool | None = key(
        None, "put the tokenizer's token for the beginning of a text before each; as its file says if absent"
    )


class ExportOptions(Section):
    """What an exported folder holds."""

    native: bool = key(False, "as a model of transformers' own, where one computes the same")
    dtype: str = key("float32", "of the weights: float32 (exact), bfloat16 or float16")
    shard: str = key("2GB", "the largest file of weights, which is also what memory holds")
    license: str | None = key(None, "of the weights, for the model card: apache-2.0, …")
    overwrite: bool = key(False, "replace an export that is there")

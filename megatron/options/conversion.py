"""How models are converted: the options of `./deepy.py import` and `./deepy.py export`."""

from megatron.options.section import ConfigSection, config_field


class ImportOptions(ConfigSection):
    """What a foreign checkpoint does not say of itself."""

    config: list[str] = config_field(list, "GPT-NeoX's configuration files, if SOURCE has none", metavar="FILE")
    tokenizer: str | None = config_field(
        None, "one of bytes, HFTokenizer, GPT2BPETokenizer and SPMTokenizer; the one in SOURCE if absent"
    )
    vocab_file: str | None = config_field(None, "tokenizer.json, vocab.json or .model file")
    merge_file: str | None = config_field(None, "merges.txt of GPT2BPETokenizer")
    end_token: str | None = config_field(None, "the token that ends a document, if it has none of the usual names")
    add_bos: bool | None = config_field(
        None, "put the tokenizer's token for the beginning of a text before each; as its file says if absent"
    )


class ExportOptions(ConfigSection):
    """What an exported folder holds."""

    native: bool = config_field(False, "as a model of transformers' own, where one computes the same")
    dtype: str = config_field("float32", "of the weights: float32 (exact), bfloat16 or float16")
    shard: str = config_field("2GB", "the largest file of weights, which is also what memory holds")
    license: str | None = config_field(None, "of the weights, for the model card: apache-2.0, …")
    overwrite: bool = config_field(False, "replace an export that is there")

"""Keys that decide what text is read, in which order, and how it was turned into tokens."""

from typing import Literal

from megatron.options import Section, key

TokenizerType = Literal["bytes", "HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"]


class DataOptions(Section):
    """Indexed datasets (megatron-core's .bin/.idx, named by their prefix) and the tokenizer that made them."""

    data_path: str | None = key(None, "one indexed dataset for everything, divided by `split`", role="data")
    split: str = key("969,30,1", "train, valid and test shares of data_path", role="data")
    train_data_paths: list[str] = key(list, "indexed datasets to train on", role="data")
    valid_data_paths: list[str] = key(list, "indexed datasets to validate on", role="data")
    test_data_paths: list[str] = key(list, "indexed datasets to test on; `evaluate` reads these", role="data")
    train_data_weights: list[float] = key(list, "blend weights of train_data_paths; equal if absent", role="data")
    valid_data_weights: list[float] = key(list, "blend weights of valid_data_paths; equal if absent", role="data")
    test_data_weights: list[float] = key(list, "blend weights of test_data_paths; equal if absent", role="data")
    data_cache: str | None = key(None, "folder for the sample indices; in the run's folder if absent", role="machine")
    data_impl: Literal["mmap"] = key(
        "mmap", "format of the indexed datasets; GPT-NeoX's infer and mmap mean this one", role="data"
    )
    tokenizer_type: TokenizerType | None = key(
        None, "the tokenizer that made the data; read from the data's own corpus.json if absent", role="data"
    )
    vocab_file: str | None = key(None, "tokenizer.json, vocab.json or .model file of the tokenizer", role="data")
    merge_file: str | None = key(None, "merges.txt of GPT2BPETokenizer", role="data")
    eod_mask_loss: bool = key(False, "do not score the token that follows the end of a document", role="data")
    num_workers: int = key(0, "processes that load batches", ge=0, le=1024, role="machine")

"""The `sweep:` part of a sweep file: which variants to train, how to score them, where to put it all."""

from typing import Annotated, Any

from pydantic import Field

from megatron.evaluation.options import EvaluationOptions
from megatron.options import Section, key
from megatron.training.options import LARGEST_SEED


class CorpusOptions(Section):
    """A corpus to prepare if it is not there yet; the meaning is `./deepy.py prepare`'s."""

    sources: list[str] = key(..., "files, folders, or python (the standard library)", min_length=1)
    folder: str = key(..., "the corpus folder", min_length=1)
    tokenizer: str = key("bytes", "bytes, HFTokenizer, GPT2BPETokenizer, SPMTokenizer, or bpe (trained on the corpus)")
    vocab_file: str | None = key(None, "tokenizer.json, vocab.json or .model file of the tokenizer")
    merge_file: str | None = key(None, "merges.txt of GPT2BPETokenizer")
    vocab_size: int | None = key(None, "tokens of a tokenizer trained here", ge=257)
    split: list[float] = key(lambda: [0.9, 0.05, 0.05], "train, valid and test shares", min_length=3, max_length=3)
    seed: int = key(1234, "seeds the division into splits", ge=0)
    workers: int | None = key(None, "processes; as many as cores and text are worth if absent", ge=1)


class SweepOptions(Section):
    """Variants × seeds, trained and scored alike."""

    output: str = key(..., "folder for runs and results", min_length=1)
    variants: dict[str, dict[str, Any]] = key(
        ..., "name → keys that this variant changes; the name becomes a folder and the method", min_length=1
    )
    seeds: list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]] = key(
        lambda: [1234], "every variant is trained with each", min_length=1
    )
    corpus: CorpusOptions | None = key(None, "a corpus to prepare first")
    evaluate: EvaluationOptions = key(EvaluationOptions, "how trained models are scored")

"""The `sweep:` part of a sweep file: which variants to train, how to score them, where to put it all."""

from typing import Annotated, Any

from pydantic import Field

from megatron.options.data import CorpusOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import Section, key
from megatron.options.training import LARGEST_SEED


class SweepCorpusOptions(CorpusOptions):
    """A corpus to prepare if it is not there yet; the meaning is `./deepy.py prepare`'s."""

    folder: str = key(..., "the corpus folder", min_length=1)


class PublishedOptions(Section):
    """A table of somebody else's, to stand beside the own one."""

    source: str = key(..., "paper and table, and the corpus they used", min_length=1)
    train_length: int = key(..., "their training length, in tokens", ge=1)
    metric: str = key("perplexity", "what their numbers are, by our name of the metric")
    lengths: list[int] = key(..., "their lengths, in tokens", min_length=1)
    rows: dict[str, list[float | None]] = key(
        ..., "variant → their values at those lengths; null where they have none", min_length=1
    )


class SweepOptions(Section):
    """Variants × seeds, trained and scored alike."""

    output: str = key(..., "folder for runs and results", min_length=1)
    name: str | None = key(None, "a folder inside output, for sweeps that share one", min_length=1)
    variants: dict[str, dict[str, Any]] = key(
        ..., "name → keys that this variant changes; the name becomes a folder and the method", min_length=1
    )
    seeds: list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]] = key(
        lambda: [1234], "every variant is trained with each", min_length=1
    )
    corpus: SweepCorpusOptions | None = key(None, "a corpus to prepare first")
    runs: str | None = key(
        None, "folder for the trained runs, by what they are, so that sweeps share them; inside output if absent"
    )
    title: str | None = key(None, "heading of the report")
    against: str | None = key(None, "the variant that the report compares the others with")
    published: list[PublishedOptions] = key(list, "tables of papers that the report puts beside its own")
    differences: list[str] = key(list, "what is done otherwise than in the papers, sentences of the report")
    evaluate: EvaluationOptions = key(EvaluationOptions, "how trained models are scored")

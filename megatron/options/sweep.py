"""The `sweep:` part of a sweep file: which variants to train, how to score them, where to put it all."""

from typing import Annotated, Any

from pydantic import Field

from megatron.options.data import CorpusOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import ConfigSection, config_field
from megatron.options.training import MAX_SEED


class SweepCorpusOptions(CorpusOptions):
    """A corpus to prepare if it is not there yet; the meaning is `./deepy.py prepare`'s."""

    folder: str = config_field(..., "the corpus folder", min_length=1)


class PublishedOptions(ConfigSection):
    """A table of somebody else's, to stand beside the own one."""

    source: str = config_field(..., "paper and table, and the corpus they used", min_length=1)
    train_length: int = config_field(..., "their training length, in tokens", ge=1)
    metric: str = config_field("perplexity", "what their numbers are, by our name of the metric")
    lengths: list[int] = config_field(..., "their lengths, in tokens", min_length=1)
    rows: dict[str, list[float | None]] = config_field(
        ..., "variant → their values at those lengths; null where they have none", min_length=1
    )


class SweepOptions(ConfigSection):
    """Variants × seeds, trained and scored alike."""

    output: str = config_field(..., "folder for runs and results", min_length=1)
    name: str | None = config_field(None, "a folder inside output, for sweeps that share one", min_length=1)
    variants: dict[str, dict[str, Any]] = config_field(
        ..., "name → keys that this variant changes; the name becomes a folder and the method", min_length=1
    )
    seeds: list[Annotated[int, Field(ge=0, le=MAX_SEED)]] = config_field(
        lambda: [1234], "every variant is trained with each", min_length=1
    )
    corpus: SweepCorpusOptions | None = config_field(None, "a corpus to prepare first")
    runs: str | None = config_field(
        None, "folder for the trained runs, by what they are, so that sweeps share them; inside output if absent"
    )
    title: str | None = config_field(None, "heading of the report")
    against: str | None = config_field(None, "the variant that the report compares the others with")
    published: list[PublishedOptions] = config_field(list, "tables of papers that the report puts beside its own")
    differences: list[str] = config_field(list, "what is done otherwise than in the papers, sentences of the report")
    evaluate: EvaluationOptions = config_field(EvaluationOptions, "how trained models are scored")

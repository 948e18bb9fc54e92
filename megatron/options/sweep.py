"""The `sweep:` part of a sweep file: which variants to train, how to score them, where to put it all."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatron.options.data import CorpusOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import MAX_STEPS, ConfigSection, config_field
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


BRANCH = "branch"
"""The key of a variant that says what it branches from."""


class BranchOptions(ConfigSection):
    """`branch` of a variant: it begins with every state of another variant's checkpoint of the same seed."""

    variant: str = config_field(..., "the variant whose keys it has, but for those that it names, and that it goes on")
    step: int = config_field(..., "of that variant's checkpoint, which is saved for it", ge=1, le=MAX_STEPS)


SEEDS = "seeds"
"""The key of a variant that says which seeds it is trained with, in place of the sweep's."""


class FurtherEvaluationOptions(EvaluationOptions):
    """Another evaluation of runs that are scored already: of other lengths, or read otherwise."""

    variants: list[str] | None = config_field(None, "which variants it scores; all if absent", min_length=1)


class BenchmarkOptions(ConfigSection):
    """A further training of every variant, on a task for example, and how it is scored."""

    keys: dict[str, Any] = config_field(
        ..., "ordinary keys, which stand in place of the shared ones; a variant's keys come on top of them"
    )
    variants: list[str] | None = config_field(
        None, "which variants it trains; all but those with a branch if absent", min_length=1
    )
    seeds: list[Annotated[int, Field(ge=0, le=MAX_SEED)]] | None = config_field(
        None, "each variant is trained with these, in place of its own", min_length=1
    )
    evaluate: EvaluationOptions = config_field(EvaluationOptions, "how its trained models are scored")
    evaluations: dict[str, FurtherEvaluationOptions] = config_field(dict, "name → a further evaluation of its runs")


class LeaderboardOptions(ConfigSection):
    """What a report says of many methods at once, in ranks and in words."""

    ablations: list[str] = config_field(
        list,
        "processors and temperatures: variants with one are compared with the variant that differs in nothing else",
    )
    num_shown: int = config_field(6, "the best methods that its pictures show, beside those of `against`", ge=1)


class SweepOptions(ConfigSection):
    """Variants × seeds, trained and scored alike."""

    output: str = config_field(..., "folder for runs and results", min_length=1)
    name: str | None = config_field(None, "a folder inside output, for sweeps that share one", min_length=1)
    variants: dict[str, dict[str, Any]] = config_field(
        ...,
        "name → keys that this variant changes; the name becomes a folder and the method; `branch` makes it go on from "
        "another's checkpoint, `seeds` trains it with others than the sweep's",
        min_length=1,
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
    evaluations: dict[str, FurtherEvaluationOptions] = config_field(
        dict, "name → a further evaluation of the same runs; read otherwise, it has a row of its own: VARIANT (NAME)"
    )
    benchmarks: dict[str, BenchmarkOptions] = config_field(dict, "name → a further training of every variant")
    leaderboard: LeaderboardOptions | None = config_field(
        None, "ranks over all that was measured, and answers in words, at the head of the report"
    )
    jobs: Annotated[int, Field(ge=1)] | Literal["auto"] = config_field(
        1, "runs at once on this machine, each with its share of the cores; auto: one for each core"
    )

    @property
    def branches(self) -> dict[str, BranchOptions]:
        """What each variant that is a branch begins from."""
        return {
            name: BranchOptions.model_validate(keys[BRANCH]) for name, keys in self.variants.items() if BRANCH in keys
        }

    def get_seeds(self, variant: str) -> list[int]:
        """That a variant is trained with."""
        return self.variants[variant].get(SEEDS, self.seeds)

    @property
    def has_own_seeds(self) -> bool:
        """Have variants or benchmarks seeds of their own?"""
        benchmarks = any(benchmark.seeds is not None for benchmark in self.benchmarks.values())
        return benchmarks or any(SEEDS in keys for keys in self.variants.values())

    def list_unbranched(self) -> list[str]:
        """The variants that begin from nothing, which benchmarks train if they name none."""
        return [name for name, keys in self.variants.items() if BRANCH not in keys]

    def sort_variants(self) -> list[str]:
        """The variants, each behind the one that it branches from, else in the order of the file; those that branch
        from themselves in the end are left out."""
        branches, order = self.branches, []
        waiting = list(self.variants)
        while ready := [name for name in waiting if name not in branches or branches[name].variant in order]:
            order.append(ready[0])
            waiting.remove(ready[0])
        return order

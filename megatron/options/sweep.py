"""Options in `sweep:` of a sweep file: variants to train, their evaluation, and the output folder."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megatron.options.data import CorpusOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import MAX_STEPS, ConfigSection, config_field
from megatron.options.training import MAX_SEED


class SweepCorpusOptions(CorpusOptions):
    """Corpus to prepare unless it exists; the options are those of `./deepy.py prepare`."""

    folder: str = config_field(..., "folder of the corpus", min_length=1)


class PublishedOptions(ConfigSection):
    """Published table to compare with."""

    source: str = config_field(..., "paper, table and corpus", min_length=1)
    train_length: int = config_field(..., "training length of the paper, in tokens", ge=1)
    metric: str = config_field("perplexity", "name of the metric in Farfield")
    lengths: list[int] = config_field(..., "lengths of the table, in tokens", min_length=1)
    rows: dict[str, list[float | None]] = config_field(
        ..., "variant → values at these lengths; null if missing", min_length=1
    )


BRANCH = "branch"
"""Key of a variant that names the checkpoint it branches from."""


class BranchOptions(ConfigSection):
    """`branch` of a variant: it starts from another variant's checkpoint with the same seed, including all states."""

    variant: str = config_field(..., "variant to branch from; the branch has its keys unless it sets them")
    step: int = config_field(..., "step of the checkpoint to start from, which is saved for it", ge=1, le=MAX_STEPS)


SEEDS = "seeds"
"""Key of a variant that replaces the sweep's seeds."""


class FurtherEvaluationOptions(EvaluationOptions):
    """Additional evaluation of the same runs, with other lengths or overrides."""

    variants: list[str] | None = config_field(None, "variants to score; all if absent", min_length=1)


class BenchmarkOptions(ConfigSection):
    """Additional training of every variant, for example on a task, and its evaluation."""

    keys: dict[str, Any] = config_field(
        ..., "ordinary keys that replace the shared ones; a variant's keys override them"
    )
    variants: list[str] | None = config_field(None, "variants to train; all without a branch if absent", min_length=1)
    seeds: list[Annotated[int, Field(ge=0, le=MAX_SEED)]] | None = config_field(
        None, "seeds of every variant; its own if absent", min_length=1
    )
    evaluate: EvaluationOptions = config_field(EvaluationOptions, "evaluation of the trained models")
    evaluations: dict[str, FurtherEvaluationOptions] = config_field(dict, "name → additional evaluation of its runs")


class LeaderboardOptions(ConfigSection):
    """Leaderboard of a report: ranks of many methods, and conclusions in words."""

    ablations: list[str] = config_field(
        list,
        "processors and temperatures; a variant with one is compared with the otherwise equal variant without it",
    )
    num_shown: int = config_field(6, "number of best methods in its figures, in addition to those of `against`", ge=1)


def _check_part(part: Any) -> Any:
    words = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part) if isinstance(part, str) else None
    if part is not None and (words is None or int(words[1]) > int(words[2])):
        raise PydanticCustomError("part", "it must be PART/PARTS, such as 1/2 and 2/2 for two machines")
    return part


class SweepOptions(ConfigSection):
    """Variants × seeds, all trained and evaluated in the same way."""

    output: str = config_field(..., "folder of runs and results", min_length=1)
    name: str | None = config_field(None, "folder inside output, for sweeps that share it", min_length=1)
    variants: dict[str, dict[str, Any]] = config_field(
        ...,
        "name → keys that the variant changes; the name becomes its folder and method; `branch` starts it from the "
        "checkpoint of another variant, `seeds` replaces the sweep's seeds",
        min_length=1,
    )
    seeds: list[Annotated[int, Field(ge=0, le=MAX_SEED)]] = config_field(
        lambda: [1234], "seeds that every variant is trained with", min_length=1
    )
    corpus: SweepCorpusOptions | None = config_field(None, "corpus to prepare first")
    runs: str | None = config_field(
        None, "folder of trained runs, named by their configuration so that sweeps share them; inside output if absent"
    )
    records: str | None = config_field(
        None,
        "folder of small files with the results of finished and diverged runs, which are not repeated; none if absent",
    )
    part: Annotated[str | None, BeforeValidator(_check_part)] = config_field(
        None, "PART/PARTS, such as 2/3: train only this part of the runs, if several machines share sweep.records"
    )
    title: str | None = config_field(None, "heading of the report")
    against: str | None = config_field(None, "baseline variant of the report")
    published: list[PublishedOptions] = config_field(list, "published tables to show next to the report's own")
    differences: list[str] = config_field(list, "differences from the papers, as sentences of the report")
    evaluate: EvaluationOptions = config_field(EvaluationOptions, "evaluation of the trained models")
    evaluations: dict[str, FurtherEvaluationOptions] = config_field(
        dict,
        "name → additional evaluation of the same runs, with the keys of `evaluate`, and `variants` to score (all if "
        "absent); with overrides it has its own row: VARIANT (NAME)",
    )
    benchmarks: dict[str, BenchmarkOptions] = config_field(dict, "name → additional training of every variant")
    leaderboard: LeaderboardOptions | None = config_field(
        None, "ranks over all measurements, and conclusions in words, at the top of the report"
    )
    jobs: Annotated[int, Field(ge=1)] | Literal["auto"] = config_field(
        1, "concurrent runs on this machine, which share its cores evenly; auto: one per core"
    )

    @property
    def branches(self) -> dict[str, BranchOptions]:
        """Branch options of each variant that has them."""
        return {
            name: BranchOptions.model_validate(keys[BRANCH]) for name, keys in self.variants.items() if BRANCH in keys
        }

    def get_seeds(self, variant: str) -> list[int]:
        """Return the seeds of a variant."""
        return self.variants[variant].get(SEEDS, self.seeds)

    @property
    def has_own_seeds(self) -> bool:
        """True if variants or benchmarks set their own seeds."""
        benchmarks = any(benchmark.seeds is not None for benchmark in self.benchmarks.values())
        return benchmarks or any(SEEDS in keys for keys in self.variants.values())

    def list_root_variants(self) -> list[str]:
        """List the variants without a branch, which benchmarks train by default."""
        return [name for name, keys in self.variants.items() if BRANCH not in keys]

    def sort_variants(self) -> list[str]:
        """List the variants in the order of the file, each after the one it branches from.

        Cyclic branches are left out.
        """
        branches, order = self.branches, []
        waiting = list(self.variants)
        while ready := [name for name in waiting if name not in branches or branches[name].variant in order]:
            order.append(ready[0])
            waiting.remove(ready[0])
        return order

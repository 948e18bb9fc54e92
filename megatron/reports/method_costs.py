"""Costs of methods relative to a baseline: times of a training step and of scoring, memory, and parameters."""

import statistics
from dataclasses import dataclass

from megatron.reports.comparison_table import ComparisonTable

MIN_SECONDS = 1e-9
"""Shortest time that counts as measured, in seconds. Shorter times are not compared."""


@dataclass(frozen=True)
class MethodCost:
    """Costs of a method relative to the baseline; memory in GiB. None if unknown."""

    parameters: int | None
    step: float | None
    scoring: float | None
    """Duration of scoring at the largest length, relative to the baseline."""
    train_memory: float | None
    scoring_memory: float | None

    @property
    def has_times(self) -> bool:
        return self.step is not None and self.scoring is not None


def measure_costs(table: ComparisonTable, baseline: str) -> dict[str, MethodCost]:
    """Compute the costs of the methods in a table of perplexities.

    Models on CPUs are compared by CPU time, which other processes hardly affect; models on a GPU by wall time.
    """
    last, prefix = table.x_values[-1], "cpu_" if has_cpu_times(table) else ""

    def get_median(method: str, field: str, *, at_last: bool = False) -> float | None:
        values = [
            value
            for record in table.records
            if record.method == method and (not at_last or record.x_value == last)
            and (value := getattr(record, field)) is not None
        ]  # fmt: skip
        return statistics.median(values) if values else None

    def compare(method: str, field: str, *, at_last: bool = False) -> float | None:
        value = get_median(method, field, at_last=at_last)
        base = get_median(baseline, field, at_last=at_last)
        return None if value is None or base is None or base < MIN_SECONDS else value / base

    costs = {}
    for method in table.methods:
        parameters = get_median(method, "parameters")
        costs[method] = MethodCost(
            None if parameters is None else round(parameters),
            compare(method, f"step_{prefix}seconds"),
            compare(method, f"{prefix}seconds", at_last=True),
            get_median(method, "train_memory_gib"),
            get_median(method, "memory_gib", at_last=True),
        )
    return costs


def has_cpu_times(table: ComparisonTable) -> bool:
    """Return True if all records of models are from CPUs and include CPU times."""
    records = [record for record in table.records if not record.is_trivial_baseline]
    return all(
        record.device == "cpu" and record.step_cpu_seconds is not None and record.cpu_seconds is not None
        for record in records
    )

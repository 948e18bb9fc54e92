"""What scoring a model costs, and at which lengths it can be scored: known from its shape, without its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron.evaluation.protocols import ScoringPlan
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.model.gpt import GPT


def limit_lengths(model: GPT, lengths: Iterable[int]) -> list[int]:
    """Those of the lengths that the model has positions for, ascending. Raises UserError if there is none."""
    lengths = sorted(lengths)
    known = [length for length in lengths if model.max_length is None or length <= model.max_length]
    if not known:
        raise UserError(f"its positions end at {model.max_length:,}, length {lengths[0]:,} is past them")
    return known


def count_forward_flops(model: GPT, tokens: int, sequences: int) -> float:
    """FLOPs of scoring so many sequences of so many tokens: a third of those of forward and backward."""
    return model.flops_per_token(tokens) / 3 * tokens * sequences


def count_plan_flops(model: GPT, plan: ScoringPlan) -> dict[int, float]:
    """Those of each length of a plan that the model has positions for. Raises UserError if there is none."""
    return {n: count_forward_flops(model, n, plan.select_windows(n)) for n in limit_lengths(model, plan.lengths)}

"""What trained models read while they are looked at: windows of a text, or sequences of the task that they learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.evaluation.exercise import Questions
from megatron.evaluation.protocols import make_plan
from megatron.evaluation.texts import Text


@dataclass(frozen=True)
class Reading:
    """Windows of tokens that all models read."""

    told: str
    """What they are, in a sentence."""
    windows: Mapping[int, Sequence[np.ndarray]]
    """Length in tokens, ascending → the windows, each [length]; as many of every length."""


def of_text(text: Text, lengths: Sequence[int], count: int) -> Reading:
    """Windows of a text, as protocol `last` chooses them. Raises UserError if the text is too short."""
    plan = make_plan(len(text.tokens), lengths, "last", targets=[1], windows=count)
    windows = {
        length: [np.asarray(text.tokens[start : start + length]) for start in plan.starts[length].tolist()]
        for length in plan.lengths
    }
    told = (
        f"Windows of {_listed(lengths)} tokens of {text.name} (tokenizer {text.vocabulary.name}), "
        f"{len(windows[plan.lengths[0]])} of each length; those of all lengths end at the same tokens."
    )
    return Reading(told, windows)


def of_task(asked: Questions) -> Reading:
    """Fresh sequences of a task at each length of its input, placeholders and answers included."""
    drawn = {length: asked.draw(length).tokens for length in asked.lengths}
    windows = {tokens.shape[1]: list(tokens) for tokens in drawn.values()}
    told = (
        f"Fresh sequences of the task {asked.exercise.identity}, {asked.count} at each length of its input "
        f"({_listed(asked.lengths)}); with the places of the answers they have {_listed(list(windows))} tokens."
    )
    return Reading(told, windows)


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)

"""What trained models read while they are looked at: windows of a text, or sequences of the task that they learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.evaluation.exercise import TaskEval
from megatron.evaluation.protocols import build_scoring_plan
from megatron.evaluation.texts import EvalText


@dataclass(frozen=True)
class AnalysisInputs:
    """Windows of tokens that all models read."""

    description: str
    """What they are, in a sentence."""
    windows: Mapping[int, Sequence[np.ndarray]]
    """Length in tokens, ascending → the windows, each [length]; as many of every length."""


def inputs_from_text(text: EvalText, lengths: Sequence[int], count: int) -> AnalysisInputs:
    """Windows of a text, as protocol `last` chooses them. Raises UserError if the text is too short."""
    plan = build_scoring_plan(len(text.tokens), lengths, "last", targets=[1], windows=count)
    windows = {
        length: [np.asarray(text.tokens[start : start + length]) for start in plan.starts[length].tolist()]
        for length in plan.lengths
    }
    told = (
        f"Windows of {_format_lengths(lengths)} tokens of {text.name} (tokenizer {text.vocabulary.name}), "
        f"{len(windows[plan.lengths[0]])} of each length; those of all lengths end at the same tokens."
    )
    return AnalysisInputs(told, windows)


def inputs_from_task(asked: TaskEval) -> AnalysisInputs:
    """Fresh sequences of a task at each length of its input, placeholders and answers included."""
    drawn = {length: asked.sample_batch(length).tokens for length in asked.lengths}
    windows = {tokens.shape[1]: list(tokens) for tokens in drawn.values()}
    told = (
        f"Fresh sequences of the task {asked.task_config.label}, {asked.count} at each length of its input "
        f"({_format_lengths(asked.lengths)}); with the places of the answers they have "
        f"{_format_lengths(list(windows))} tokens."
    )
    return AnalysisInputs(told, windows)


def _format_lengths(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)

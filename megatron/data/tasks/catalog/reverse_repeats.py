"""Reversal of repetitive strings."""

from megatron.data.tasks.catalog.copy_repeats import CopyRepeats
from megatron.data.tasks.task import Array


class ReverseRepeats(CopyRepeats):
    """`$ string | gnirts .`: n letters in repeated pieces; the answer is the reversed letters and a stop token."""

    title = "n letters in repeated pieces, reversed, and a stop token"

    def compute_answer(self, string: Array) -> Array:
        return string[:, ::-1]

"""Reversal of repetitive strings."""

from megatron.tasks.repetitive_strings import RepetitiveStringTask
from megatron.tasks.task import Array


class ReverseRepeats(RepetitiveStringTask):
    """`$ string | gnirts .`: n letters in repeated pieces; the answer is the reversed letters and a stop token."""

    title = "n letters in repeated pieces, reversed, and a stop token"

    def order_answer(self, string: Array) -> Array:
        return string[:, ::-1]

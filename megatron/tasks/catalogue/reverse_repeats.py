"""Reversing strings that repeat themselves."""

from megatron.tasks.repetitive_strings import RepetitiveStringTask
from megatron.tasks.task import Array


class ReverseRepeats(RepetitiveStringTask):
    """`$ string | gnirts .`: n letters in pieces that come again and again; the same backwards and a full stop."""

    title = "n letters of pieces that repeat, backwards, and a full stop"

    def order_answer(self, string: Array) -> Array:
        return string[:, ::-1]

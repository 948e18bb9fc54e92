"""Copying strings that repeat themselves."""

from megatron.tasks.repetitive_strings import RepetitiveStringTask
from megatron.tasks.task import Array


class CopyRepeats(RepetitiveStringTask):
    """`$ string | string .`: n letters in pieces that come again and again; the same letters and a full stop."""

    title = "n letters of pieces that repeat, again, and a full stop"

    def order_answer(self, string: Array) -> Array:
        return string

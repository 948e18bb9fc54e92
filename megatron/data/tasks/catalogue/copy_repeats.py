"""Copying of repetitive strings."""

from megatron.data.tasks.autoregressive_task import RepetitiveStringTask
from megatron.data.tasks.task import Array


class CopyRepeats(RepetitiveStringTask):
    """`$ string | string .`: n letters in repeated pieces; the answer is the same letters and a stop token."""

    title = "n letters in repeated pieces, copied, and a stop token"

    def compute_answer(self, string: Array) -> Array:
        return string

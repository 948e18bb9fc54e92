"""Flip-flop: the most recently written bit, among bits to ignore."""

import numpy as np

from megatron.data.tasks.task import Array, Task, TaskBatch
from megatron.options.section import config_field

WRITE, READ, IGNORE, FIRST_BIT = range(4)


class FlipFlop(Task):
    """Instructions, each followed by a bit: `w 1 i 0 i 1 r 1 w 0 … r 0`; the answer at `r` is the last bit written.

    The first instruction is w, the last r. Others are i with probability `ignore`, else w or r with equal probability.
    Bits after w and i are uniform. FFL(T, p) of the paper has T tokens and p = `ignore`. It trains at 512 and 0.8, and
    evaluates at 0.98, where the last w is far (sparse), and at 0.1 (dense), with `evaluate --task-options ignore=0.98`.
    The input length is that of the sequence, and even.

    Vocabulary: w, r, i, 0, 1.
    """

    title = "the last bit written, at every read"
    paper = "Liu et al. (2023), Exposing Attention Glitches with Flip-Flop Language Modeling"

    ignore: float = config_field(0.8, "probability of an ignore instruction", ge=0, le=1)

    @property
    def vocab_size(self) -> int:
        return FIRST_BIT + 2

    @property
    def answer_ids(self) -> range:
        return range(FIRST_BIT, FIRST_BIT + 2)

    def describe_unsupported_length(self, length: int) -> str | None:
        return None if length >= 4 and length % 2 == 0 else "it must be even and at least 4, for a write and a read"

    def get_sequence_length(self, length: int) -> int:
        return length

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        shape = (count, length // 2)
        instructions = np.where(generator.random(shape) < self.ignore, IGNORE, generator.integers(2, size=shape))
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        drawn = generator.integers(FIRST_BIT, FIRST_BIT + 2, size=shape)
        last_write = np.maximum.accumulate(np.where(instructions == WRITE, np.arange(shape[1]), 0), axis=1)
        written = np.take_along_axis(drawn, last_write, axis=1)
        bits = np.where(instructions == READ, written, drawn)
        tokens = np.stack([instructions, bits], axis=2).reshape(count, length)
        labels = np.repeat(bits, 2, axis=1)
        mask = tokens == READ
        return TaskBatch(tokens, labels, mask, mask)

    def compute_baseline_predictions(self, batch: TaskBatch) -> dict[str, Array]:
        return {"the bit before": np.roll(batch.tokens, 1, axis=1).clip(FIRST_BIT)}

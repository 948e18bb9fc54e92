"""Addition of two decimal numbers, in standard notation or in formats that help transformers to carry."""

from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.task import Array, AutoregressiveTask, TaskBatch
from megatron.options.section import config_field

PLUS = 10
FIRST_HINT = 11


class Addition(AutoregressiveTask):
    """`$ 6 5 3 + 0 4 9 | 0 7 0 2 .`: two numbers of n digits each, and the n + 1 digits of their sum.

    Digits are uniform; the example is 653 + 49, zero-padded to n digits. The sum is written as follows:

        order: plain       highest digit first, the standard notation
        order: reversed    lowest digit first, so that a carry is known when it is needed; the summands do not change

    `index_hints` inserts before every digit, including those of the sum, a symbol for its power of ten. Symbols are
    consecutive, from a random one on (Zhou et al. 2023). `positions: coupled` gives the model position ids instead of
    symbols: digits of one power of ten have the same position in all three numbers, + and | have the position after the
    lowest digit, and $ has 0. Positions are consecutive, from a random one on for each sequence (Cho et al. 2024,
    2405.20671). Both support numbers of up to `max_digits` digits. Accuracy counts only digits, not hints or the stop
    token.

    Vocabulary: ten digits, +, the hints if enabled, and three special tokens.
    """

    title = "the digits of the sum of two n-digit numbers, and a stop token"
    paper = "Zhou et al. (2023), What Algorithms can Transformers Learn? A Study in Length Generalization"

    order: Literal["plain", "reversed"] = config_field("plain", "write the sum from its highest or its lowest digit")
    index_hints: bool = config_field(False, "insert a symbol for the power of ten before each digit")
    positions: Literal["indices", "coupled"] = config_field(
        "indices", "position ids: token indices, or powers of ten (for encodings that support position ids)"
    )
    max_digits: int = config_field(200, "maximum number of digits with hints or coupled positions", ge=1, le=10**5)

    @model_validator(mode="after")
    def _check_hints(self) -> Self:
        if self.index_hints and self.positions == "coupled":
            raise ValueError("index_hints and positions: coupled are redundant; choose one")
        return self

    @property
    def num_letters(self) -> int:
        return FIRST_HINT + (self.max_digits + 1 if self.index_hints else 0)

    @property
    def position_limit(self) -> int | None:
        return self.max_digits + 3 if self.positions == "coupled" else None

    def describe_unsupported_length(self, length: int) -> str | None:
        if length > self.max_digits and (self.index_hints or self.positions == "coupled"):
            return f"numbers have at most {self.max_digits} digits (task_options.max_digits)"
        return None if length >= 1 else "numbers have at least 1 digit"

    def get_sequence_length(self, length: int) -> int:
        return 3 + (3 * length + 1) * (1 + self.index_hints)

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        numbers = generator.integers(10, size=(2, count, length))
        total = add_digits(numbers)
        powers = np.arange(length, -1, -1)  # powers of ten of the digits of the sum
        if self.order == "reversed":
            total, powers = total[:, ::-1], powers[::-1]
        first = generator.integers(self.max_digits + 1 - length, size=(count, 1))
        if self.index_hints:
            symbols = FIRST_HINT + first + np.arange(length, -1, -1)
            numbers = np.stack([_interleave(symbols[:, 1:], number) for number in numbers])
            total = _interleave(FIRST_HINT + first + powers, total)
        begin, plus, separator = (
            np.full((count, 1), token) for token in (self.begin_token, PLUS, self.separator_token)
        )
        batch = self.build_batch(np.concatenate([begin, numbers[0], plus, numbers[1], separator], axis=1), total)
        is_digit = batch.loss_mask & (batch.labels < PLUS)
        batch = batch._replace(accuracy_mask=is_digit)
        if self.positions == "indices":
            return batch
        # The position of the digit of 10^k is `units` − k.
        units = 1 + first + length
        places = [units - np.arange(length - 1, -1, -1), units + 1]
        return batch._replace(
            position_ids=np.concatenate([np.zeros_like(first), *places, *places, units - powers], axis=1)
        )

    def compute_baseline_predictions(self, batch: TaskBatch) -> dict[str, Array]:
        step = 1 + self.index_hints
        length = ((batch.tokens.shape[1] - 3) // step - 1) // 3
        starts = (step, 1 + step * (length + 1))
        first, second = (batch.tokens[:, start : start + step * length : step] for start in starts)
        sums = np.pad((first + second) % 10, ((0, 0), (1, 0)))
        answers = np.zeros_like(batch.tokens)
        places = np.flatnonzero(batch.accuracy_mask[0])
        answers[:, places] = sums[:, ::-1] if self.order == "reversed" else sums
        return {"the sum without carries": answers}


def add_digits(numbers: Array) -> Array:
    """Add pairs of numbers, int64 [2, B, n], highest digit first; returns digits [B, n + 1]."""
    sums = numbers.sum(axis=0)
    digits = np.zeros((len(sums), sums.shape[1] + 1), dtype=np.int64)
    carry = np.zeros(len(sums), dtype=np.int64)
    for column in range(sums.shape[1] - 1, -1, -1):
        carry, digits[:, column + 1] = np.divmod(sums[:, column] + carry, 10)
    digits[:, 0] = carry
    return digits


def _interleave(hints: Array, digits: Array) -> Array:
    """Insert a hint before each digit; returns [B, 2n]."""
    return np.stack(np.broadcast_arrays(hints, digits), axis=2).reshape(len(digits), -1)

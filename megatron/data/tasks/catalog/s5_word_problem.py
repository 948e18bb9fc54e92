"""Word problem of S₅, the group of permutations of five elements."""

from functools import cache
from itertools import permutations
from typing import ClassVar

import numpy as np

from megatron.data.tasks.task import Array, Task, TaskBatch


class S5WordProblem(Task):
    """n of the 120 elements g₁ … g_n of S₅; the answer at each is the product so far, applying g₁ first.

    A permutation p of 0 … 4 is written (p(0), …, p(4)), and elements are numbered in lexicographic order. The answer
    after g_t is the number of the permutation that maps x to g_t(… g₂(g₁(x))). As far as is known, transformers of
    fixed depth cannot track non-solvable groups at every length (unless NC¹ = TC⁰). The length of words that a model
    tracks thus shows how it uses its depth.
    """

    title = "the running product of n elements of S₅, the permutations of five elements"
    paper = "Merrill et al. (2024), The Illusion of State in State-Space Models"
    even_only: ClassVar[bool] = False
    """True if only even permutations are elements."""

    @property
    def vocab_size(self) -> int:
        return len(list_permutations(self.even_only))

    @property
    def answer_ids(self) -> range:
        return range(self.vocab_size)

    def get_sequence_length(self, length: int) -> int:
        return length

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        tokens = generator.integers(self.vocab_size, size=(count, length))
        products = build_product_table(self.even_only)
        labels = tokens.copy()
        for place in range(1, length):
            labels[:, place] = products[labels[:, place - 1], tokens[:, place]]
        mask = np.ones(tokens.shape, dtype=bool)
        return TaskBatch(tokens, labels, mask, mask)

    def compute_baseline_predictions(self, batch: TaskBatch) -> dict[str, Array]:
        pairs = build_product_table(self.even_only)[np.roll(batch.tokens, 1, axis=1), batch.tokens]
        pairs[:, 0] = batch.tokens[:, 0]
        return {"the product of the last two": pairs}


@cache
def list_permutations(even_only: bool) -> Array:
    """List the permutations of 0 … 4 in lexicographic order, int64 [120 or 60, 5]."""
    every = np.array(list(permutations(range(5))))
    inversions = sum((every[:, i] > every[:, j]).astype(np.int64) for i in range(5) for j in range(i + 1, 5))
    return every[inversions % 2 == 0] if even_only else every


@cache
def build_product_table(even_only: bool) -> Array:
    """Build a table with the number of the permutation x ↦ b(a(x)) at row a and column b."""
    elements = list_permutations(even_only)
    composed = elements[:, elements].transpose(1, 0, 2)  # [a, b, x] = b[a[x]]
    weights = 5 ** np.arange(4, -1, -1)
    numbers = {code: number for number, code in enumerate((elements @ weights).tolist())}
    return np.array([[numbers[code] for code in row] for row in (composed @ weights).tolist()])

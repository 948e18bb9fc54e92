"""Multi-query associative recall: the values of keys that occur again."""

from typing import Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.sampling import sample_distinct
from megatron.data.tasks.task import Task, TaskBatch
from megatron.options.section import config_field


class MQAR(Task):
    """D different keys, each followed by its value; each key occurs again later, and the answer there is its value.

        k₁ v₁ k₂ v₂ … k_D v_D   · k₂ · · · k₁ · …        answers: v₂ at k₂, v₁ at k₁

    A query with gap g = 1, 2, … is at 2·(g − 1) tokens after the end of the pairs. Gaps are drawn without replacement,
    with probability proportional to g^(a − 1), where a is `power`. Tokens between queries are uniform over the whole
    vocabulary. Keys are the first half of the vocabulary except 0, and values the second half. No value occurs twice
    among the pairs. The input length is that of the sequence.
    """

    title = "the values of keys that occur again after all key-value pairs"
    paper = "Arora et al. (2023), Zoology"

    vocabulary: int = config_field(8192, "number of symbols, half keys and half values; even", ge=4, le=10**6)
    pairs: int = config_field(8, "number of key-value pairs, and of queries", ge=1, le=10**6)
    power: float = config_field(
        0.01, "gaps g between pairs and queries have probability ∝ g^(power − 1); 1 is uniform", gt=0, le=100
    )

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.vocabulary % 2:
            raise ValueError(f"vocabulary is {self.vocabulary}; it must be even: half are keys, half are values")
        if self.pairs >= self.vocabulary // 2:
            raise ValueError(
                f"pairs is {self.pairs}; a vocabulary of {self.vocabulary} has {self.vocabulary // 2 - 1} keys"
            )
        return self

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def answer_ids(self) -> range:
        return range(self.vocabulary)

    def describe_unsupported_length(self, length: int) -> str | None:
        if length < 4 * self.pairs or length % 2:
            return f"{self.pairs} pairs and their queries need an even length of at least {4 * self.pairs}"
        return None

    def get_sequence_length(self, length: int) -> int:
        return length

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        half = self.vocabulary // 2
        keys = 1 + sample_distinct(generator, count, self.pairs, half - 1)
        values = half + sample_distinct(generator, count, self.pairs, self.vocabulary - half)
        tokens = generator.integers(self.vocabulary, size=(count, length))
        tokens[:, 0 : 2 * self.pairs : 2], tokens[:, 1 : 2 * self.pairs : 2] = keys, values
        # The largest values of log p plus Gumbel noise are a sample without replacement, in order.
        num_gaps = length // 2 - self.pairs
        log_weights = (self.power - 1) * np.log(np.arange(1, num_gaps + 1))
        gaps = np.argsort(-(log_weights + generator.gumbel(size=(count, num_gaps))), axis=1)[:, : self.pairs]
        positions = 2 * (self.pairs + gaps)
        labels, mask = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(tokens, positions, keys, axis=1)
        np.put_along_axis(labels, positions, values, axis=1)
        np.put_along_axis(mask, positions, True, axis=1)
        return TaskBatch(tokens, labels, mask, mask)

    def get_baseline_accuracies(self, length: int) -> dict[str, float]:
        return {"one of the sequence's values": 1 / self.pairs}

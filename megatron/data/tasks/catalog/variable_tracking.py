"""Variable tracking: all variables with a given value, directly or through other variables."""

from typing import Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.needle_task import RulerTask, build_question_batch
from megatron.data.tasks.sampling import insert_statements, sample_distinct
from megatron.data.tasks.task import TaskBatch
from megatron.options.section import config_field


class VariableTracking(RulerTask):
    """Chains of assignments among noise; the answer is the variables of the chain with a given value (RULER's vt).

        · · x₁ = v · · y₁ = u · x₂ = x₁ · x₃ = x₂ · · y₂ = y₁ …   ? v x₁ x₂ x₃ …

    The assignments of a chain are in order, and chains are interleaved randomly. The variables are expected in chain
    order (RULER accepts any order), each given the correct ones before it. The length of the haystack is the input
    length.

    Vocabulary: noise words, variables, values, equals sign, question mark.
    """

    title = "the variables with a given value after assignments, in a haystack of n words"

    num_chains: int = config_field(2, "number of chains, one of which is queried", ge=1, le=10**4)
    num_hops: int = config_field(2, "number of assignments between variables in each chain", ge=0, le=10**4)
    noise_words: int = config_field(32, "number of different noise words", ge=1, le=10**6)
    variables: int = config_field(64, "number of different variables", ge=2, le=10**6)
    values: int = config_field(64, "number of different values", ge=1, le=10**6)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.num_statements > self.variables:
            raise ValueError(
                f"{self.num_statements} assignments need that many variables, but there are {self.variables}"
            )
        if self.num_chains > self.values:
            raise ValueError(f"num_chains is {self.num_chains}, but values is {self.values}")
        return self

    @property
    def num_statements(self) -> int:
        """Number of assignments, of three tokens each."""
        return self.num_chains * (self.num_hops + 1)

    @property
    def equals_token(self) -> int:
        """Equals sign of assignments."""
        return self.noise_words + self.variables + self.values

    @property
    def vocab_size(self) -> int:
        return self.equals_token + 2

    @property
    def answer_ids(self) -> range:
        return range(self.noise_words, self.noise_words + self.variables)

    def describe_unsupported_length(self, length: int) -> str | None:
        needed = 3 * self.num_statements
        return None if length >= needed else f"{self.num_statements} assignments need at least {needed} tokens"

    def get_sequence_length(self, length: int) -> int:
        return length + 2 + self.num_hops

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        chains, links = self.num_chains, self.num_hops + 1
        names = self.noise_words + sample_distinct(generator, count, chains * links, self.variables)
        names = names.reshape(count, chains, links)
        values = self.answer_ids.stop + sample_distinct(generator, count, chains, self.values)[:, :, None]
        sources = np.concatenate([values, names[:, :, :-1]], axis=2)
        statements = np.stack([names, np.full_like(names, self.equals_token), sources], axis=3)
        # The chain of each position is random; the first position of a chain is its first assignment.
        owners = generator.permuted(np.tile(np.repeat(np.arange(chains), links), (count, 1)), axis=1)
        placed = np.zeros((count, chains * links, 3), dtype=np.int64)
        order = np.argsort(owners, axis=1, kind="stable")[:, :, None]
        np.put_along_axis(placed, np.broadcast_to(order, placed.shape), statements.reshape(placed.shape), axis=1)
        haystack = insert_statements(generator, placed, length, self.noise_words)
        mark = np.full((count, 1, 1), self.equals_token + 1)
        # Chains are interchangeable, so the first one is queried.
        return build_question_batch(haystack, np.concatenate([mark, values[:, :1], names[:, :1]], axis=2))

    def get_baseline_accuracies(self, length: int) -> dict[str, float]:
        return {"one of the variables": 1 / self.num_statements}

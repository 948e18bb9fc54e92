"""Tasks with a text as answer, predicted letter by letter, given the correct letters before."""

from typing import Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.sampling import sample_repetitive_strings
from megatron.data.tasks.task import Array, Task, TaskBatch
from megatron.options.section import config_field


class AutoregressiveTask(Task):
    """Base class of tasks with a question, and an answer that ends with a stop token.

    The model receives the correct answer so far (teacher forcing). All letters are correct if and only if greedy
    decoding generates the whole answer.
    """

    scores_exact_match = True

    @property
    def num_letters(self) -> int:
        """Number of letters, whose ids are 0, 1, …; the vocabulary has three more tokens."""
        raise NotImplementedError

    @property
    def begin_token(self) -> int:
        """Token at the start of a sequence."""
        return self.num_letters

    @property
    def separator_token(self) -> int:
        """Token between the string and what follows it."""
        return self.num_letters + 1

    @property
    def stop_token(self) -> int:
        """Token at the end of an answer."""
        return self.num_letters + 2

    @property
    def vocab_size(self) -> int:
        return self.num_letters + 3

    @property
    def answer_ids(self) -> range:
        return range(self.vocab_size)

    def build_batch(self, question: Array, answer: Array) -> TaskBatch:
        """Build sequences from questions [B, q] and the letters of answers [B, r].

        Each letter is the label of the token before it, and the stop token is the label of the last letter.
        """
        first, count = question.shape[1] - 1, len(question)
        tokens = np.concatenate([question, answer], axis=1)
        labels = np.full(tokens.shape, self.stop_token)
        labels[:, first:-1] = answer
        mask = np.zeros((count, tokens.shape[1]), dtype=bool)
        mask[:, first:] = True
        return TaskBatch(tokens, labels, mask, mask)


class StringTask(AutoregressiveTask):
    """Base class of tasks whose question is a string of letters."""

    paper = "Jelassi et al. (2024), Repeat After Me"

    letters: int = config_field(26, "size of the alphabet", ge=2, le=10**6)

    @property
    def num_letters(self) -> int:
        return self.letters

    def build_string_batch(self, string: Array, answer: Array) -> TaskBatch:
        """Build sequences `$ string | answer .` from the letters of both, [B, n] and [B, r]."""
        begin, separator = (np.full((len(string), 1), token) for token in (self.begin_token, self.separator_token))
        return self.build_batch(np.concatenate([begin, string, separator], axis=1), answer)


class RepetitiveStringTask(StringTask):
    """Base class of tasks `$ string | answer .` whose string consists of repeated pieces.

    A string of distinct letters can be copied by looking up the previous letter (induction), at any distance and
    without positions. In a string of `pieces` different pieces in random order, the same letters have several
    continuations, and only the position determines which. A trivial baseline shows the accuracy of a lookup of as many
    letters as a piece has.
    """

    paper = "Zhou et al. (2023), What Algorithms can Transformers Learn? A Study in Length Generalization"
    note = "Zhou et al. repeat single letters of a small alphabet; here pieces of several letters are repeated."

    pieces: int = config_field(4, "number of different pieces per string", ge=1, le=10**4)
    piece_length: int = config_field(3, "number of letters per piece", ge=1, le=10**4)

    @model_validator(mode="after")
    def _check_pieces(self) -> Self:
        if self.letters**self.piece_length < 2 * self.pieces:
            possible = self.letters**self.piece_length
            raise ValueError(f"{self.pieces} pieces are more than half of the {possible} possible pieces")
        return self

    def compute_answer(self, string: Array) -> Array:
        """Return the answers [B, n] to strings [B, n]."""
        raise NotImplementedError

    def get_sequence_length(self, length: int) -> int:
        return 2 * length + 2

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        string = sample_repetitive_strings(
            generator, count, length, letters=self.letters, pieces=self.pieces, piece_length=self.piece_length
        )
        return self.build_string_batch(string, self.compute_answer(string))

    def predict_trivially(self, batch: TaskBatch) -> dict[str, Array]:
        length = batch.tokens.shape[1] // 2 - 1
        source, written = self.compute_answer(batch.tokens[:, 1 : length + 1]), batch.tokens[:, length + 1 :]
        answers = np.full(batch.tokens.shape, self.stop_token)
        answers[:, length + 1] = source[:, 0]
        for place in range(1, length):
            known = min(place, self.piece_length)
            windows = np.lib.stride_tricks.sliding_window_view(source[:, :-1], known, axis=1)
            found = (windows == written[:, None, place - known + 1 : place + 1]).all(axis=2)
            answers[:, length + 1 + place] = np.take_along_axis(source, found.argmax(axis=1)[:, None] + known, 1)[:, 0]
        return {f"what first follows the last {self.piece_length} letters": answers}

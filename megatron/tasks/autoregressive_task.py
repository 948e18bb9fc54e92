"""Tasks with a text as answer, predicted letter by letter, given the correct letters before."""

import numpy as np

from megatron.options.section import config_field
from megatron.tasks.task import Array, Task, TaskBatch


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

    def ask_string(self, string: Array, answer: Array) -> TaskBatch:
        """Build sequences `$ string | answer .` from the letters of both, [B, n] and [B, r]."""
        begin, separator = (np.full((len(string), 1), token) for token in (self.begin_token, self.separator_token))
        return self.build_batch(np.concatenate([begin, string, separator], axis=1), answer)

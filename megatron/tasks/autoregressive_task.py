"""Tasks that are answered by a text, letter by letter, each letter given the right ones before it."""

import numpy as np

from megatron.options.section import config_field
from megatron.tasks.task import Array, Task, TaskBatch


class AutoregressiveTask(Task):
    """Base of the tasks of this form: a question, and a text that answers it and ends with a full stop.

    The model reads the right answer while it writes it. That all of its letters are right by themselves is therefore
    the same as that the whole text, written one likeliest letter after the other, is right.
    """

    scores_exact_match = True

    @property
    def num_letters(self) -> int:
        """Letters, whose ids are 0, 1, …: all tokens but three."""
        raise NotImplementedError

    @property
    def begin_token(self) -> int:
        """Begins a sequence."""
        return self.num_letters

    @property
    def separator_token(self) -> int:
        """Stands between the string and what follows it."""
        return self.num_letters + 1

    @property
    def stop_token(self) -> int:
        """Ends an answer."""
        return self.num_letters + 2

    @property
    def vocab_size(self) -> int:
        return self.num_letters + 3

    @property
    def answer_ids(self) -> range:
        return range(self.vocab_size)

    def build_batch(self, question: Array, answer: Array) -> TaskBatch:
        """Sequences of a question [B, q] and the letters of its answer [B, r]: each letter is the label of the token
        before it, and the full stop that of the last letter."""
        first, count = question.shape[1] - 1, len(question)
        tokens = np.concatenate([question, answer], axis=1)
        labels = np.full(tokens.shape, self.stop_token)
        labels[:, first:-1] = answer
        mask = np.zeros((count, tokens.shape[1]), dtype=bool)
        mask[:, first:] = True
        return TaskBatch(tokens, labels, mask, mask)


class StringTask(AutoregressiveTask):
    """Base of those whose question is a string of letters."""

    paper = "Jelassi et al. (2024), Repeat After Me"

    letters: int = config_field(26, "letters of the alphabet", ge=2, le=10**6)

    @property
    def num_letters(self) -> int:
        return self.letters

    def ask_string(self, string: Array, answer: Array) -> TaskBatch:
        """`$ string | answer .`, from the letters of both, [B, n] and [B, r]."""
        begin, separator = (np.full((len(string), 1), token) for token in (self.begin_token, self.separator_token))
        return self.build_batch(np.concatenate([begin, string, separator], axis=1), answer)

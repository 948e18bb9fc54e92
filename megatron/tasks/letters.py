"""Strings of letters that are gone on with letter by letter, each letter given the right ones before it."""

from typing import ClassVar

import numpy as np

from megatron.options.section import key
from megatron.tasks.task import Array, Drawn, Task


class Letters(Task):
    """Base of the tasks of this form: a question, and a text that answers it and ends with a full stop.

    The model reads the right answer while it writes it. That all of its letters are right by themselves is therefore
    the same as that the whole text, written one likeliest letter after the other, is right.
    """

    source = "Jelassi et al. (2024), Repeat After Me"
    whole: ClassVar[bool] = True

    letters: int = key(26, "letters of the alphabet", ge=2, le=10**6)

    @property
    def begin(self) -> int:
        """Stands at the beginning of a sequence."""
        return self.letters

    @property
    def bar(self) -> int:
        """Stands between the string and what follows it."""
        return self.letters + 1

    @property
    def stop(self) -> int:
        """Ends an answer."""
        return self.letters + 2

    @property
    def size(self) -> int:
        return self.letters + 3

    @property
    def answers(self) -> range:
        return range(self.size)

    def asked_for(self, question: Array, answer: Array) -> Drawn:
        """Sequences of a question [B, q] and the letters of its answer [B, r], of which each is asked for one place
        before it stands, and the full stop at the last of them."""
        first, count = question.shape[1] - 1, len(question)
        tokens = np.concatenate([question, answer], axis=1)
        labels = np.full(tokens.shape, self.stop)
        labels[:, first:-1] = answer
        asked = np.zeros((count, tokens.shape[1]), dtype=bool)
        asked[:, first:] = True
        return Drawn(tokens, labels, asked, asked)

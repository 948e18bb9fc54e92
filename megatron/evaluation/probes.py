"""Probes: what a model makes of text that is made up, and needs no corpus.

    repeated    random tokens, the last of which stood once before: how far back can the model copy from?
                (Olsson et al. 2022, 2209.11895, measure induction heads on random tokens that are repeated)
    passkey     five digits hidden in filler, asked for at the end: at which depth are they found?
                (Mohtashami and Jaggi 2023, 2305.16300; here the digits' likelihood, not whether they are written)

A probe asks about the same target tokens at every place and every length: what stands before them differs alone. Its
sequences are drawn from a fixed seed, the same for every run with the tokenizer. Losses are in nats per target.

N sequences, L window length.
"""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron.data.tokenizers import Tokenizer
from megatron.data.vocabulary import Vocabulary
from megatron.errors import RunError, UserError
from megatron.evaluation.measures import summary_of
from megatron.evaluation.options import EvaluationOptions
from megatron.reports.bootstrap import quantiles, resampled
from megatron.reports.records import Record

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.evaluation.perplexity import Progress
    from megatron.model.gpt import GPT

# torch is imported where it is used: a mistake in what was asked for is told at once.

SEQUENCES = 64
SEED = 20_220_924

COPIED = 16
"""Tokens that are copied, unless said otherwise."""

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the key: the share of the filler that stands before it."""

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is "
"""Of 2305.16300, section 4.2."""


class Probe(ABC):
    """What models are asked, at each place of each length.

    Args:
        lengths: of windows, in tokens, ascending.
        count: N.
        vocabulary: of the models.
    """

    name: ClassVar[str]
    axis: ClassVar[str]

    def __init__(self, lengths: Sequence[int], count: int, vocabulary: Vocabulary) -> None:
        self.lengths, self.count, self.vocabulary = tuple(lengths), count, vocabulary

    @property
    def places(self) -> Sequence[int]:
        return self.lengths

    @property
    @abstractmethod
    def scored(self) -> int:
        """Targets at the end of each window."""

    @abstractmethod
    def marks(self, length: int) -> tuple[float, ...]:
        """On the axis, for windows of that length."""

    @abstractmethod
    def sequences(self, length: int, place: float) -> np.ndarray:
        """int64 [N, L + 1]: the input and, shifted by one, the targets; the last `scored + 1` are always the same."""

    @property
    @abstractmethod
    def remark(self) -> str:
        """What is told under every table."""

    def check(self) -> None:
        """Raises UserError if a length has no place."""
        for length in self.lengths:
            if not self.marks(length):
                raise UserError(
                    f"protocol {self.name}: windows of {length:,} tokens are too short for it; use greater lengths"
                )

    def work(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""
        from megatron.evaluation.perplexity import known_lengths

        return {
            length: model.flops_per_token(length) / 3 * length * self.count * len(self.marks(length))
            for length in known_lengths(model, self.lengths)
        }

    def score(
        self,
        loaded: LoadedModel,
        *,
        about: Mapping[str, Any],
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> list[Record]:
        """The loss at each place of each length that the model has positions for.

        Raises:
            UserError: the model has positions for none of the lengths.
            RunError: a loss is not finite, or the memory is too small.
        """
        from megatron.evaluation.perplexity import about_model, window_losses

        work = self.work(loaded.model)
        shared = {**about_model(loaded), **about, **self._about()}
        found: list[Record] = []
        done, total = 0.0, sum(work.values())
        for length, flops in work.items():
            marks = self.marks(length)
            for place in marks:
                sequences = self.sequences(length, place)
                starts = np.arange(self.count, dtype=np.int64) * (length + 1)
                begun = time.perf_counter()
                losses = window_losses(
                    loaded.model, sequences.reshape(-1), starts, length, self.scored, batch_tokens=batch_tokens
                )
                if not np.isfinite(losses).all():
                    raise RunError(f"{shared['method']}: the loss at {self.axis} {place:g} of {length:,} is not finite")
                done += flops / len(marks)
                if progress is not None:
                    progress(length, done, total)
                own: dict[str, Any] = {
                    "length": length,
                    "place": float(place),
                    "seconds": round(time.perf_counter() - begun, 3),
                    "flops": flops / len(marks),
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                found.append(Record(**shared, **own, **_measured(losses)))
        return found

    def beside(self) -> list[Record]:
        return []

    def _about(self) -> dict[str, Any]:
        longest = self.lengths[-1]
        targets = self.sequences(longest, self.marks(longest)[0])[:, -self.scored :]
        digest = hashlib.sha256(f"{self.name} {self.vocabulary.name}".encode() + targets.astype("<i8").tobytes())
        return {
            "protocol": self.name,
            "axis": self.axis,
            "metric": "loss",
            "targets": self.scored,
            "windows": self.count,
            "blocks": self.count,
            "dataset": f"probe {self.name}",
            "text_digest": digest.hexdigest()[:16],
            "target_digest": digest.hexdigest()[:16],
            "tokenizer": self.vocabulary.name,
            "remark": self.remark,
        }


class Repeated(Probe):
    """Random tokens; the last ones stood `distance` tokens before already."""

    name, axis = "repeated", "distance"

    def __init__(self, lengths: Sequence[int], count: int, vocabulary: Vocabulary, copied: int) -> None:
        super().__init__(lengths, count, vocabulary)
        self.copied = copied

    @property
    def scored(self) -> int:
        return self.copied

    @property
    def remark(self) -> str:
        chance = math.log(self.vocabulary.size - (self.vocabulary.eod is not None))
        return (
            f"The last {self.copied} tokens of a window of random tokens, each of which followed the token before it "
            f"once already, so many tokens back; a model that copies nothing cannot be below {chance:.2f}."
        )

    def marks(self, length: int) -> tuple[float, ...]:
        """Doubles of the copy's length that leave room for both copies, and the largest distance there is."""
        least, most = self.copied + 1, length - self.copied
        if most < least:
            return ()
        found = {float(least), float(most)}
        distance = 2 * self.copied
        while distance < most:
            found.add(float(distance))
            distance *= 2
        return tuple(sorted(found))

    def sequences(self, length: int, place: float) -> np.ndarray:
        copy = self._random(self.copied + 1, 0)
        made = self._random(length + 1, length)
        first = length - self.copied - round(place)
        made[:, first : first + self.copied + 1] = copy
        made[:, -self.copied - 1 :] = copy
        return made

    def _random(self, tokens: int, stream: int) -> np.ndarray:
        """[N, tokens], uniform on the vocabulary but for the end of documents."""
        generator = np.random.Generator(np.random.PCG64([SEED, stream]))
        eod = self.vocabulary.eod
        drawn = generator.integers(self.vocabulary.size - (eod is not None), size=(self.count, tokens))
        return drawn if eod is None else drawn + (drawn >= eod)


class Passkey(Probe):
    """Five digits in filler, asked for at the end.

    Args:
        tokenizer: of the models.
    """

    name, axis = "passkey", "depth"

    def __init__(self, lengths: Sequence[int], count: int, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
        super().__init__(lengths, count, vocabulary)
        self.tokenizer = tokenizer
        generator = np.random.Generator(np.random.PCG64(SEED))
        keys = [f"{key:05d}" for key in generator.permutation(100_000)[: 20 * count].tolist()]
        answers = {key: self._answer(key) for key in keys}
        usual = Counter(len(answer) for answer in answers.values()).most_common(1)[0][0]
        # Every window has as many targets: of a tokenizer that joins digits, keys with the usual number of tokens.
        self.answers = {key: answer for key, answer in answers.items() if len(answer) == usual}
        self.answers = dict(list(self.answers.items())[:count])
        if len(self.answers) < count:
            raise UserError(f"protocol passkey: tokenizer {vocabulary.name} has too few keys of as many tokens")

    def _answer(self, key: str) -> list[int]:
        """The tokens that the key adds to the question."""
        whole, asked = self.tokenizer.encode(QUESTION + key), self.tokenizer.encode(QUESTION.rstrip())
        return list(whole[len(asked) :]) if list(whole[: len(asked)]) == list(asked) else []

    @property
    def scored(self) -> int:
        return len(next(iter(self.answers.values())))

    @property
    def remark(self) -> str:
        return (
            "The five digits of a pass key (and the space before them) at the end of the window; the key stands in the "
            "filler at that share of it. Guessed digits have ln 10 = 2.30 for each token of one digit."
        )

    def marks(self, length: int) -> tuple[float, ...]:
        return DEPTHS if length >= self._least() else ()

    def _least(self) -> int:
        key = next(iter(self.answers))
        return len(self.tokenizer.encode(NEEDLE.format(key=key) + QUESTION)) + 2 * self.scored

    def sequences(self, length: int, place: float) -> np.ndarray:
        filler = list(self.tokenizer.encode(FILLER))
        asked = list(self.tokenizer.encode(QUESTION.rstrip()))
        rows = []
        for key, answer in self.answers.items():
            needle = list(self.tokenizer.encode(NEEDLE.format(key=key)))
            room = length + 1 - len(needle) - len(asked) - len(answer)
            before = round(place * room)
            padding = (filler * (room // len(filler) + 1))[:room]
            rows.append([*padding[:before], *needle, *padding[before:], *asked, *answer])
        return np.array(rows, dtype=np.int64)


def probe_of(options: EvaluationOptions, lengths: Sequence[int], vocabulary: Vocabulary, tokenizer: Tokenizer) -> Probe:
    """The probe that options ask for.

    Raises:
        UserError: an option that says which text is scored, or lengths that are too short.
    """
    for name in ("data", "stride", "measures"):
        if getattr(options, name) is not None:
            raise UserError(
                f"{name} says which text is scored, and protocol {options.protocol} makes its own: leave it out"
            )
    count = options.windows or SEQUENCES
    probe: Probe
    if options.protocol == Repeated.name:
        if len(options.targets or ()) > 1:
            raise UserError("targets: protocol repeated copies one number of tokens; give one")
        probe = Repeated(lengths, count, vocabulary, (options.targets or [COPIED])[0])
    else:
        if options.targets is not None:
            raise UserError("targets: protocol passkey scores the key's digits; leave it out")
        probe = Passkey(lengths, count, vocabulary, tokenizer)
    probe.check()
    return probe


def _measured(losses: np.ndarray) -> dict[str, Any]:
    """Value and interval of losses [N, targets]; sequences are the independent samples."""
    sums, counts = losses.sum(axis=1), np.full(len(losses), losses.shape[1])
    summary, draws = summary_of(sums, counts), resampled(sums[None], counts)
    found: dict[str, Any] = {"value": summary.nll, "nll": summary.nll, "tokens": summary.tokens}
    if draws is not None:
        low, high = quantiles(draws[0])
        found |= {"stderr": summary.stderr, "low": low, "high": high}
    return found

"""A model that continues prompts: tokens are sampled, turned into text piece by piece, and ended where they should be.

A piece of text is returned only when no later token can change it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from megatron.data.tokenizers import Tokenizer
from megatron.generation.decoding import decode_tokens, group_prompts
from megatron.generation.sampling import TokenSampler
from megatron.model.gpt import GPT
from megatron.options.commands import GenerationOptions

NUM_CONTEXT_TOKENS = 16
"""Tokens before the first new one that decoding is given: SentencePiece drops a blank at the beginning of a text, and
only there."""

FinishReason = Literal["eod", "stop", "length"]
"""Why a text ended: the model wrote the end of the document, one of the stop strings, or as many tokens as it might."""


@dataclass
class Completion:
    """The text that is written after one prompt."""

    prompt_index: int
    tokens: list[int] = field(default_factory=list)
    """The end of the document is not among them."""
    text: str = ""
    finish_reason: FinishReason | None = None
    """None while it is being written."""


class TextGenerator:
    """Continues prompts.

    Args:
        model: in evaluation mode.
        tokenizer: of its training.
        options: how tokens are chosen, and when a text ends.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: GenerationOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._sampler = TokenSampler(tokenizer.vocab_size, options.temperature, options.top_k, options.top_p)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; for an empty one, the end of the document before, where training begins too."""
        return self.tokenizer.encode_with_bos(prompt) or [self.tokenizer.eod]

    def generate(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[Completion, str]]:
        """Continue prompts, some of them together.

        Each prompt has random numbers of its own, which follow from the seed and the prompt's index.

        Args:
            prompts: the tokens of each, at least one.

        Yields:
            A completion and the piece that it has grown by; the last piece of a text, which may be empty, comes with a
            finish reason. Pieces of prompts that are read together alternate.

        Raises:
            UserError: the model has no positions for so many tokens.
            RunError: its logits are not numbers.
        """
        for indices in group_prompts(self.model, [len(prompt) for prompt in prompts], self.options.batch_size):
            yield from self._generate_group(indices, [prompts[index] for index in indices])

    def _generate_group(
        self, indices: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Completion, str]]:
        generators = [np.random.default_rng([self.options.seed, index]) for index in indices]

        def choose_token(logits: torch.Tensor) -> torch.Tensor:
            uniforms = torch.tensor([generator.random() for generator in generators], dtype=torch.float64)
            return self._sampler.sample(logits, uniforms)

        rows = [
            _CompletionBuilder(self, Completion(index), prompt) for index, prompt in zip(indices, prompts, strict=True)
        ]
        steps = self.options.maximum_tokens
        for step, tokens in enumerate(decode_tokens(self.model, prompts, steps, choose_token), start=1):
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if row.completion.finish_reason is None:
                    yield row.completion, row.add_token(token, last=step == steps)
            if all(row.completion.finish_reason is not None for row in rows):
                return


class _CompletionBuilder:
    """One text while it is written."""

    def __init__(self, generator: TextGenerator, completion: Completion, prompt: Sequence[int]) -> None:
        self.completion = completion
        self._eod = generator.tokenizer.eod
        self._detokenizer = IncrementalDetokenizer(generator.tokenizer.decode, prompt)
        self._stops = StopStrings(generator.options.stop)

    def add_token(self, token: int, *, last: bool) -> str:
        """Add a token; returns the text that is certain now."""
        if token == self._eod:
            return self._finish("eod")
        self.completion.tokens.append(token)
        piece = self._stops.push(self._detokenizer.push(token))
        self.completion.text += piece
        if self._stops.stopped:
            self.completion.finish_reason = "stop"
            return piece
        return piece + self._finish("length") if last else piece

    def _finish(self, reason: FinishReason) -> str:
        piece = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self.completion.text += piece
        self.completion.finish_reason = "stop" if self._stops.stopped else reason
        return piece


class IncrementalDetokenizer:
    """The text of tokens that come one by one. The pieces, joined, are what decoding all tokens at once gives.

    A token may end in the middle of a character, whose bytes decode to U+FFFD until the rest has come.
    Such text is held back.

    Args:
        decode: a tokenizer's.
        prompt: the tokens before the first one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(prompt[-NUM_CONTEXT_TOKENS:])
        """Tokens whose text was returned; the last few are decoded again, so that the next have their context."""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Take a token; returns the text that is certain now and was not returned yet."""
        self._pending.append(token)
        text = self._decode_pending()
        if not text or text.endswith("\ufffd"):
            return ""
        # A blank at the beginning would be dropped, so that the context must be more than blanks.
        self._context, self._pending = self._pending if text.strip() else self._context + self._pending, []
        return text

    def flush(self) -> str:
        """The text that is still held back, when no more tokens will come."""
        text = self._decode_pending()
        self._context, self._pending = self._context + self._pending, []
        return text

    def _decode_pending(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]


class StopStrings:
    """Ends a text where one of some strings occurs in it: before the one that is complete first, and of those that are
    at once, before the longest. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.stopped = False
        """Has one occurred? Nothing is returned any more then."""

    def push(self, text: str) -> str:
        """Take text; returns what is certainly before any of the stop strings."""
        if self.stopped:
            return ""
        text = self._pending + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._pending = True, ""
            return text[: min(matches)[1]]
        overlap = max((self._measure_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - overlap :]
        return text[: len(text) - overlap]

    def flush(self) -> str:
        """What is held back, when no more text will come."""
        text, self._pending = self._pending, ""
        return text

    @staticmethod
    def _measure_overlap(text: str, stop: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

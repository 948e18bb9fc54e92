"""Streaming text generation: sampled tokens are decoded piece by piece until a stop condition is met.

A piece of text is returned once no later token can change it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.forward_passes import TokenSampler, decode_tokens, group_prompts
from megatron.model.gpt import GPT
from megatron.options.commands import GenerationOptions

NUM_CONTEXT_TOKENS = 16
"""Number of context tokens decoded before the first new token.

SentencePiece drops a space at the beginning of a text, and only there.
"""

FinishReason = Literal["eod", "stop", "length"]
"""Reason for the end of a text: end-of-document token, stop string, or maximum number of tokens."""


@dataclass
class Completion:
    """Generated continuation of one prompt."""

    prompt_index: int
    tokens: list[int] = field(default_factory=list)
    """Generated tokens, without the end-of-document token."""
    text: str = ""
    finish_reason: FinishReason | None = None
    """Reason for the end, or None while the text is being generated."""


class TextGenerator:
    """Generator that continues prompts.

    Args:
        model: model in evaluation mode.
        tokenizer: tokenizer that the model was trained with.
        options: sampling and stop options.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: GenerationOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._sampler = TokenSampler(tokenizer.vocab_size, options.temperature, options.top_k, options.top_p)

    def encode(self, prompt: str) -> list[int]:
        """Tokenize a prompt. An empty prompt becomes an end-of-document token, as at the start of training."""
        return self.tokenizer.encode_with_bos(prompt) or [self.tokenizer.eod]

    def generate(
        self, prompts: Sequence[Sequence[int]], selected: Sequence[int] | None = None
    ) -> Iterator[tuple[Completion, str]]:
        """Continue prompts, in batches.

        Each prompt has its own random numbers, determined by the seed and the prompt's index.

        Args:
            prompts: at least one token for each prompt.
            selected: indices of the prompts to continue; all if None.

        Yields:
            A completion and its new piece of text. The last piece, which may be empty, has a finish reason. Pieces of
            prompts in a batch are interleaved.

        Raises:
            UserError: the model has too few positions.
            RunError: a logit is NaN or +∞.
        """
        chosen = range(len(prompts)) if selected is None else selected
        for group in group_prompts(self.model, [len(prompts[index]) for index in chosen], self.options.batch_size):
            indices = [chosen[position] for position in group]
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
        steps = self.options.max_new_tokens
        for step, tokens in enumerate(decode_tokens(self.model, prompts, steps, choose_token), start=1):
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if row.completion.finish_reason is None:
                    yield row.completion, row.add_token(token, last=step == steps)
            if all(row.completion.finish_reason is not None for row in rows):
                return


class _CompletionBuilder:
    def __init__(self, generator: TextGenerator, completion: Completion, prompt: Sequence[int]) -> None:
        self.completion = completion
        self._eod = generator.tokenizer.eod
        self._detokenizer = IncrementalDetokenizer(generator.tokenizer.decode, prompt)
        self._stops = StopStrings(generator.options.stop)

    def add_token(self, token: int, *, last: bool) -> str:
        """Add a token, and return the text that is now final."""
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
    """Incremental decoder of tokens to text. The joined pieces equal the text of all tokens decoded at once.

    A token may end inside a character, whose bytes decode to U+FFFD until the rest arrives. Such text is withheld.

    Args:
        decode: decoding function of the tokenizer.
        prompt: tokens before the first new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(prompt[-NUM_CONTEXT_TOKENS:])
        """Tokens whose text was returned. They are decoded again as context of the next tokens."""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Add a token, and return the text that became final."""
        self._pending.append(token)
        text = self._decode_pending()
        if not text or text.endswith("\ufffd"):
            return ""
        # Decoding drops a space at the beginning, so the context must contain more than spaces.
        self._context, self._pending = self._pending if text.strip() else self._context + self._pending, []
        return text

    def flush(self) -> str:
        """Return the text still withheld at the end of the tokens."""
        text = self._decode_pending()
        self._context, self._pending = self._context + self._pending, []
        return text

    def _decode_pending(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]


class StopStrings:
    """Truncates a text before the first complete stop string, or the longest of those completed at once.

    Text that may be the beginning of a stop string is withheld.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.stopped = False
        """True if a stop string has occurred; no more text is returned."""

    def push(self, text: str) -> str:
        """Add text, and return the part that certainly precedes any stop string."""
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
        """Return the text still withheld for a possible stop string."""
        text, self._pending = self._pending, ""
        return text

    @staticmethod
    def _measure_overlap(text: str, stop: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

"""A model that goes on with prompts: tokens are chosen, decoded, turned into text, and ended where they should be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from megatron.data.tokenizers import Tokenizer
from megatron.generation.decode import decode_tokens, group_prompts
from megatron.generation.sampling import TokenSampler
from megatron.generation.stream import IncrementalDetokenizer, StopStrings
from megatron.model.gpt import GPT
from megatron.options.generation import GenerationOptions

FinishReason = Literal["eod", "stop", "length"]
"""Why a text ended: the model wrote the end of the document, one of the stops, or all tokens that it might."""


@dataclass
class Completion:
    """What is written after one prompt."""

    prompt: int
    """Its number."""
    tokens: list[int] = field(default_factory=list)
    """The end of the document is not among them."""
    text: str = ""
    reason: FinishReason | None = None
    """None while it is being written."""


class TextGenerator:
    """Goes on with prompts.

    Args:
        model: in evaluation mode.
        tokenizer: of its training.
        options: how tokens are chosen, and when a text ends.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: GenerationOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._sampling = TokenSampler(tokenizer.vocab_size, options.temperature, options.top_k, options.top_p)

    def encode(self, prompt: str) -> list[int]:
        """The tokens that stand for a prompt; for none, the end of the document before, where training begins too."""
        return self.tokenizer.encode_with_bos(prompt) or [self.tokenizer.eod]

    def generate(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[Completion, str]]:
        """Go on with prompts, some of them together.

        Each prompt has random numbers of its own, which follow from the seed and the prompt's number.

        Args:
            prompts: the tokens of each, at least one.

        Yields:
            A text and the piece that it has grown by; the last piece of a text, which may be empty, comes with a reason
            why it ends. Pieces of prompts that are read together alternate.

        Raises:
            UserError: the model has no positions for so many tokens.
            RunError: its logits are not numbers.
        """
        for numbers in group_prompts(self.model, [len(prompt) for prompt in prompts], self.options.batch_size):
            yield from self._generate_group(numbers, [prompts[number] for number in numbers])

    def _generate_group(
        self, numbers: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Completion, str]]:
        draws = [np.random.default_rng([self.options.seed, number]) for number in numbers]

        def choose(logits: torch.Tensor) -> torch.Tensor:
            return self._sampling.choose(logits, torch.tensor([draw.random() for draw in draws], dtype=torch.float64))

        rows = [
            _CompletionState(self, Completion(number), prompt) for number, prompt in zip(numbers, prompts, strict=True)
        ]
        steps = self.options.maximum_tokens
        for step, chosen in enumerate(decode_tokens(self.model, prompts, steps, choose), start=1):
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if row.text.reason is None:
                    yield row.text, row.add_token(token, last=step == steps)
            if all(row.text.reason is not None for row in rows):
                return


class _CompletionState:
    """One text while it is written."""

    def __init__(self, writer: TextGenerator, text: Completion, prompt: Sequence[int]) -> None:
        self.text = text
        self._eod = writer.tokenizer.eod
        self._stream = IncrementalDetokenizer(writer.tokenizer.decode, prompt)
        self._stops = StopStrings(writer.options.stop)

    def add_token(self, token: int, *, last: bool) -> str:
        """Add a token; returns the text that is certain now."""
        if token == self._eod:
            return self.finish("eod")
        self.text.tokens.append(token)
        piece = self._stops.push(self._stream.push(token))
        self.text.text += piece
        if self._stops.found:
            self.text.reason = "stop"
            return piece
        return piece + self.finish("length") if last else piece

    def finish(self, reason: FinishReason) -> str:
        piece = self._stops.push(self._stream.flush()) + self._stops.flush()
        self.text.text += piece
        self.text.reason = "stop" if self._stops.found else reason
        return piece

"""Forward passes of evaluation: in batches that fit in memory, token by token with a cache, or capturing attention.

B sequences, V padded vocabulary, v tokens of the tokenizer. Rows of the output layer beyond the tokenizer's vocabulary
are padding, and are never sampled. Probabilities are float64, so that equal logits give equal samples.

A backend receives everything needed to compute attention as one value, `AttentionInputs`. A wrapper that passes this
value to a hook, and then calls the real backend, observes each layer of the actual forward pass without reimplementing
it. Maps are computed from `AttentionInputs` in row blocks, so that no full map is ever in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron.attention.backends.backend import AttentionBackend, AttentionFormula
from megatron.attention.inputs import AttentionInputs
from megatron.model.attention import PositionedAttention
from megatron.model.gpt import GPT
from megatron.utils.errors import RunError, UserError, is_out_of_memory
from megatron.utils.formatting import format_quantity

DEFAULT_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Default number of input tokens per forward pass. Larger batches only use more memory."""


def choose_batch_tokens(device: torch.device, batch_tokens: int | None) -> int:
    """Return the input tokens per forward pass; the default of the device if `batch_tokens` is None."""
    return batch_tokens or DEFAULT_BATCH_TOKENS.get(device.type, DEFAULT_BATCH_TOKENS["cuda"])


def run_batched(
    num_rows: int,
    length: int,
    device: torch.device,
    forward: Callable[[slice], None],
    *,
    too_large: str,
    batch_tokens: int | None = None,
    on_batch_done: Callable[[int], None] | None = None,
) -> None:
    """Compute all rows in batches of consecutive rows.

    If a batch runs out of memory, halve the batch size from there on.

    Args:
        num_rows: number of rows.
        length: tokens per row.
        device: device of the computation.
        forward: computes the rows of a slice and stores their results.
        too_large: error message if a single row does not fit.
        batch_tokens: input tokens per batch; a batch has at least one row.
        on_batch_done: called with the number of rows of each finished batch.

    Raises:
        RunError: a single row does not fit in device memory.
    """
    batch_size = max(1, choose_batch_tokens(device, batch_tokens) // length)
    start = 0
    while start < num_rows:
        rows = slice(start, min(start + batch_size, num_rows))
        try:
            forward(rows)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if batch_size == 1:
                raise RunError(too_large) from None
            batch_size = (rows.stop - rows.start + 1) // 2
            if device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        start = rows.stop
        if on_batch_done is not None:
            on_batch_done(rows.stop - rows.start)


@dataclass(frozen=True)
class TokenSampler:
    """Sampler of the next token. It applies `temperature`, then `top_k`, then `top_p` to the remaining probability.

    Args:
        vocab_size: size of the tokenizer's vocabulary, v.
        temperature: divisor of the logits; 0 selects the likeliest token.
        top_k: number of likeliest tokens to sample from; 0 for all.
        top_p: sample from the smallest set of likeliest tokens with at least this total probability; 1 for all.
    """

    vocab_size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """Compute the sampled distribution, float64 [B, v], from logits [B, V]. The temperature must not be 0.

        Raises:
            RunError: a logit is NaN or +∞.
        """
        scores = self._drop_padding(logits).double()
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature  # first: 1e-300 is a valid temperature
        sorted_scores, order = scores.sort(dim=-1, descending=True, stable=True)
        if 0 < self.top_k < self.vocab_size:
            sorted_scores[:, self.top_k :] = -torch.inf
        probabilities = sorted_scores.softmax(-1)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities  # total probability of likelier tokens
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
            probabilities /= probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Sample the next token of each row.

        Args:
            logits: [B, V].
            uniforms: random numbers in [0, 1), float64 [B]; ignored by greedy decoding.

        Returns:
            int64 [B], each less than v.

        Raises:
            RunError: a logit is NaN or +∞.
        """
        if self.temperature == 0:
            return self._drop_padding(logits).argmax(-1)
        cumulative = self.compute_probabilities(logits).cumsum(-1)
        total = cumulative[:, -1]
        # First token with a larger cumulative sum, guarded against rounding past the last token with nonzero
        # probability.
        thresholds = torch.minimum(uniforms.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]

    def _drop_padding(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokenizer's own tokens, [B, v].

        Raises:
            RunError: a logit is NaN or +∞.
        """
        logits = logits[:, : self.vocab_size]
        if (logits.isnan() | logits.isposinf()).any():
            raise RunError("the model's logits are NaN or infinite; check its weights, or use a higher precision")
        return logits


ChooseToken = Callable[[Tensor], Tensor]
"""Function that maps the logits [B, V] at the last position to the next tokens, int64 [B]."""


def check_prompt_length(model: GPT, prompt_length: int, max_new_tokens: int) -> None:
    """Check that a model has enough positions for a prompt and its continuation.

    Raises:
        UserError: the model's maximum length is too small.
    """
    needed = prompt_length + max_new_tokens - 1  # the last token is generated but never an input
    if model.max_length is not None and needed > model.max_length:
        room = model.max_length + 1 - prompt_length
        hint = f"use --max-new-tokens {room} or less" if room > 0 else "the prompt alone is too long"
        raise UserError(
            f"the model has {format_quantity(model.max_length, 'position')}; a prompt of "
            f"{format_quantity(prompt_length, 'token')} and {format_quantity(max_new_tokens, 'new token')} need "
            f"{needed:,}; {hint}"
        )


def group_prompts(model: GPT, lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group prompts into batches of similar length, given as lists of at most `batch_size` indices.

    Left padding does not change the results of a row. With randomized positions, prompts of different lengths draw
    different positions, so batches then contain prompts of equal length. If the model also masks documents, each prompt
    is alone: a finished row of a batch would continue in another document, which a cache does not support.
    """
    if model.randomized is not None and model.end_of_document is not None:
        batch_size = 1
    indices = sorted(range(len(lengths)), key=lengths.__getitem__) if batch_size > 1 else list(range(len(lengths)))
    groups: list[list[int]] = []
    for index in indices:
        group = groups[-1] if groups else []
        if 0 < len(group) < batch_size and (model.randomized is None or lengths[group[0]] == lengths[index]):
            group.append(index)
        else:
            groups.append([index])
    return groups


def pad_left(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad sequences to a batch.

    Returns:
        Tokens, int64 [B, T], with zeros to the left of shorter sequences; and the number of these zeros, int64 [B, 1].
    """
    paddings = [max(map(len, sequences)) - len(sequence) for sequence in sequences]
    tokens = [[0] * padding + list(sequence) for padding, sequence in zip(paddings, sequences, strict=True)]
    return torch.tensor(tokens, device=device), torch.tensor(paddings, device=device)[:, None]


@torch.no_grad()
def decode_tokens(
    model: GPT, prompts: Sequence[Sequence[int]], max_new_tokens: int, choose_token: ChooseToken
) -> Iterator[Tensor]:
    """Continue prompts token by token. A caller can close the iterator early.

    Randomized positions are drawn once for the prompt and all steps together, as training draws them for a sequence.
    No tensor is an inference tensor, so that a model can be trained afterwards.

    Args:
        model: model in evaluation mode.
        prompts: at least one token for each prompt; equal lengths if the model's positions are randomized.
        max_new_tokens: number of decoding steps.
        choose_token: see `ChooseToken`.

    Yields:
        Tokens chosen by `choose_token` at each step, int64 [B].

    Raises:
        UserError: the model has too few positions.
    """
    prompt_length, device = max(map(len, prompts)), next(model.parameters()).device
    check_prompt_length(model, prompt_length, max_new_tokens)
    tokens, paddings = pad_left(prompts, device)
    is_padded = bool(paddings.any())
    cache = model.create_kv_cache(prompt_length + max_new_tokens - 1)
    for _ in range(max_new_tokens):
        mask = torch.arange(cache.length + tokens.shape[1], device=device) >= paddings if is_padded else None
        next_tokens = choose_token(model(tokens, num_logits=1, attention_mask=mask, kv_cache=cache)[:, -1])
        yield next_tokens
        tokens = next_tokens[:, None]


AttentionHook = Callable[[int, AttentionInputs], None]
"""Callback that receives a layer's index, from 0, and its attention inputs."""

MAX_BLOCK_ELEMENTS = 1 << 20
"""Maximum number of elements in a block of the score matrix, over all heads."""


class CapturingBackend:
    """Backend that passes its inputs to a hook, and then calls another backend."""

    def __init__(self, backend: AttentionBackend, layer: int, hook: AttentionHook) -> None:
        self.backend, self.layer, self.hook = backend, layer, hook

    def describe_unsupported(self, formula: AttentionFormula) -> str | None:
        return self.backend.describe_unsupported(formula)

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        self.hook(self.layer, inputs)
        return self.backend(inputs)


def list_attention_layers(model: GPT) -> list[PositionedAttention]:
    return [layer.self_attention.core_attention for layer in model.local_layers]


@contextmanager
def capture_attention(model: GPT, hook: AttentionHook) -> Iterator[None]:
    """Call a hook for each layer of every forward pass inside this context."""
    backends = [(attention, attention.backend) for attention in list_attention_layers(model)]
    for attention, backend in backends:
        attention.backend = CapturingBackend(backend, attention.layer_index, hook)
    try:
        yield
    finally:
        for attention, backend in backends:
            attention.backend = backend


@torch.no_grad()
def run_forward(model: GPT, tokens: np.ndarray, hook: AttentionHook) -> None:
    """Run a forward pass over one window of tokens [L], and call the hook for each layer."""
    device = next(model.parameters()).device
    with capture_attention(model, hook):
        model.compute_hidden_states(torch.from_numpy(tokens.astype(np.int64))[None].to(device))


def slice_from_row(inputs: AttentionInputs, first: int) -> AttentionInputs:
    """Return the attention inputs of the query rows from index `first` on."""
    num_skipped = min(max(first - inputs.query.start, 0), inputs.query.length)
    query = replace(inputs.query, start=inputs.query.start + num_skipped, length=inputs.query.length - num_skipped)
    mask = inputs.key_mask
    if mask is not None and mask.dim() == 3:
        mask = mask[:, num_skipped:]
    document_starts = None if inputs.document_starts is None else inputs.document_starts[:, num_skipped:]
    row_bias = None if inputs.row_bias is None else inputs.row_bias[:, :, num_skipped:]
    return replace(
        inputs,
        q=inputs.q[:, :, num_skipped:],
        query=query,
        key_mask=mask,
        document_starts=document_starts,
        row_bias=row_bias,
        preceding_q=inputs.select_preceding_rows(num_skipped),
    )


def choose_block_size(inputs: AttentionInputs) -> int:
    """Return the number of rows per block that bounds the size of the score matrices."""
    return max(1, MAX_BLOCK_ELEMENTS // (inputs.q.shape[0] * inputs.q.shape[1] * inputs.key.length))

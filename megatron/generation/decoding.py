"""Running a model token by token. B sequences, V padded vocabulary."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.utils.errors import UserError

ChooseToken = Callable[[Tensor], Tensor]
"""The next tokens, int64 [B], from the logits [B, V] of the last ones."""


def check_prompt_length(model: GPT, prompt_length: int, max_new_tokens: int) -> None:
    """Raises UserError if a model has no positions for a prompt of that length and so many tokens after it."""
    needed = prompt_length + max_new_tokens - 1  # the last token is written and never read
    if model.max_length is not None and needed > model.max_length:
        room = model.max_length + 1 - prompt_length
        hint = f"choose --maximum-tokens {room} or less" if room > 0 else "the prompt alone is too long"
        raise UserError(
            f"the model has {model.max_length:,} positions; {prompt_length:,} tokens of a prompt and "
            f"{max_new_tokens:,} more need {needed:,}: {hint}"
        )


def group_prompts(model: GPT, lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Which prompts are read together, as lists of their indices: `batch_size` at most, of similar length.

    A row that is padded on the left computes what it would compute alone. Only where positions are randomized, prompts
    of another length draw other positions, so that those of equal length are read together.
    """
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
    """Sequences as one batch, so that all end together.

    Returns:
        The tokens, int64 [B, T], with zeros on the left of shorter ones; and the number of these zeros, int64 [B, 1].
    """
    paddings = [max(map(len, sequences)) - len(sequence) for sequence in sequences]
    tokens = [[0] * padding + list(sequence) for padding, sequence in zip(paddings, sequences, strict=True)]
    return torch.tensor(tokens, device=device), torch.tensor(paddings, device=device)[:, None]


@torch.inference_mode()
def decode_tokens(
    model: GPT, prompts: Sequence[Sequence[int]], max_new_tokens: int, choose_token: ChooseToken
) -> Iterator[Tensor]:
    """Continue prompts token by token; a caller that has enough closes the iterator.

    Randomized positions are drawn once, for the prompt and all steps together, as training draws them for a sequence.

    Args:
        model: in evaluation mode.
        prompts: the tokens of each, at least one; of equal length if the model's positions are randomized.
        max_new_tokens: steps of decoding.
        choose_token: see `ChooseToken`.

    Yields:
        The tokens that `choose_token` chose at each step, int64 [B].

    Raises:
        UserError: there are no positions for so many tokens.
    """
    prompt_length, device = max(map(len, prompts)), next(model.parameters()).device
    check_prompt_length(model, prompt_length, max_new_tokens)
    tokens, paddings = pad_left(prompts, device)
    is_padded = bool(paddings.any())
    cache = model.new_kv_cache(prompt_length + max_new_tokens - 1)
    for _ in range(max_new_tokens):
        mask = torch.arange(cache.length + tokens.shape[1], device=device) >= paddings if is_padded else None
        next_tokens = choose_token(model(tokens, num_logits=1, attention_mask=mask, kv_cache=cache)[:, -1])
        yield next_tokens
        tokens = next_tokens[:, None]

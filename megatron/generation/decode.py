"""Running a model token by token. B sequences, V padded vocabulary."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.utils.errors import UserError

ChooseToken = Callable[[Tensor], Tensor]
"""The next tokens, int64 [B], from the logits [B, V] of the last ones."""


def check_prompt_length(model: GPT, prompt: int, tokens: int) -> None:
    """Raises UserError if a model has no positions for a prompt of that length and so many tokens after it."""
    needed = prompt + tokens - 1  # the last token is written and never read
    if model.max_length is not None and needed > model.max_length:
        fit = model.max_length + 1 - prompt
        hint = f"choose --maximum-tokens {fit} or less" if fit > 0 else "the prompt alone is too long"
        raise UserError(
            f"the model has {model.max_length:,} positions; {prompt:,} tokens of a prompt and {tokens:,} more need "
            f"{needed:,}: {hint}"
        )


def group_prompts(model: GPT, lengths: Sequence[int], most: int) -> list[list[int]]:
    """Which prompts are read together, as lists of their numbers: `most` at a time, and those of similar length.

    A row that is padded on the left computes what it would compute alone. Only where positions are randomized, prompts
    of another length have other draws, so that those of equal length are read together.
    """
    numbers = sorted(range(len(lengths)), key=lengths.__getitem__) if most > 1 else list(range(len(lengths)))
    found: list[list[int]] = []
    for number in numbers:
        last = found[-1] if found else []
        fits = 0 < len(last) < most and (model.randomized is None or lengths[last[0]] == lengths[number])
        if fits:
            last.append(number)
        else:
            found.append([number])
    return found


def pad_left(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequences as one batch, so that all end together.

    Returns:
        The tokens, int64 [B, T], with zeros on the left of shorter ones; and how many zeros those are, int64 [B, 1].
    """
    paddings = [max(map(len, sequences)) - len(sequence) for sequence in sequences]
    tokens = [[0] * padding + list(sequence) for padding, sequence in zip(paddings, sequences, strict=True)]
    return torch.tensor(tokens, device=device), torch.tensor(paddings, device=device)[:, None]


@torch.inference_mode()
def decode_tokens(model: GPT, prompts: Sequence[Sequence[int]], steps: int, choose: ChooseToken) -> Iterator[Tensor]:
    """Go on with prompts for some steps; whoever has enough stops asking.

    Randomized positions are drawn once, for the prompt and all steps together, as training draws them for a sequence.

    Args:
        model: in evaluation mode.
        prompts: the tokens of each, at least one; of equal length if the model's positions are randomized.
        steps: tokens at most.
        choose: see `ChooseToken`.

    Yields:
        The tokens that `choose` chose at each step, int64 [B].

    Raises:
        UserError: there are no positions for so many tokens.
    """
    width = max(map(len, prompts))
    check_prompt_length(model, width, steps)
    room, device = width + steps - 1, next(model.parameters()).device
    tokens, paddings = pad_left(prompts, device)
    mask_needed = bool(paddings.any())
    cache = model.new_kv_cache(room)
    for _ in range(steps):
        seen = torch.arange(cache.length + tokens.shape[1], device=device) >= paddings if mask_needed else None
        chosen = choose(model(tokens, num_logits=1, attention_mask=seen, kv_cache=cache)[:, -1])
        yield chosen
        tokens = chosen[:, None]

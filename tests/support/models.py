"""Models for tests in a single process."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.process_groups import build_single_process_groups
from megatron.model import build
from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.processor import Processor
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

VOCABULARY = 40
TERMS, SUMS = count_gpt_sums(24, layers=2)
"""Rounding parameters of `small_gpt`, for `tools.tolerances`."""


def build_model(*args: Any, **choices: Any) -> GPT:
    """Call `megatron.model.build.build_model` for a single process."""
    return build.build_model(*args, groups=build_single_process_groups(), **choices)


def small_gpt(length: int, encoding: str | list[str], processor: str, **place: object) -> GPT:
    """Build a model in evaluation mode for sequences of this length, with attention in several chunks of rows."""
    model = ModelOptions(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        seq_length=length,
        max_position_embeddings=length + 20,
        attention_chunk_rows=8,
        init_method_std=0.2,  # large enough for attention to matter
        make_vocab_size_divisible_by=8,
    )
    position = PositionOptions(pos_emb=encoding, score_processor=processor, **place)
    gpt = build_model(model, position, VOCABULARY, seed=5).eval()
    for module in gpt.modules():
        if isinstance(module, Processor):
            disturb(module)
    return gpt


def disturb(processor: Processor) -> Processor:
    """Return the processor with random values instead of constant initial ones, because identities hide errors."""
    for parameter in processor.parameters():
        is_constant, is_binary = (parameter == parameter.flatten()[0]).all(), (parameter * (1 - parameter) == 0).all()
        if parameter.numel() > 1 and bool(is_constant | is_binary):
            torch.nn.init.normal_(parameter, std=0.3)
    return processor


def check_reading_in_parts(gpt: GPT, x: Tensor, *, has_sampled_positions: bool) -> None:
    """Check a model's outputs on partial inputs against the whole.

    It checks a cache filled step by step, the last tokens alone, and a padded sequence in a batch. A following token
    must not change anything, bit for bit.

    Args:
        gpt: model with the sizes of `small_gpt`.
        x: tokens [2, 26], below VOCABULARY − 1.
        has_sampled_positions: True if positions are randomized, so that shorter sequences have others.
    """
    whole, length = gpt(x), x.shape[1]
    cache, parts = gpt.create_kv_cache(length), []
    for size in (7, 1, 6, 1, 1, 10):
        parts.append(gpt(x[:, cache.length : cache.length + size], kv_cache=cache))
    assert_close_in_rounding(torch.cat(parts, dim=1), whole, TERMS, SUMS)
    assert_close_in_rounding(gpt(x, num_logits=9), whole[:, -9:], TERMS, SUMS)
    if not has_sampled_positions:
        mask = torch.ones_like(x, dtype=torch.bool)
        mask[0, :6] = False
        assert_close_in_rounding(gpt(x, attention_mask=mask)[:1, 6:], gpt(x[:1, 6:]), TERMS, SUMS)
    changed = x.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % (VOCABULARY - 1)
    assert torch.equal(gpt(changed)[:, :15], whole[:, :15]), "a later token is seen"


def check_masked_documents(gpt: GPT, x: Tensor) -> None:
    """Check that the documents of packed rows have the logits of separate rows.

    Args:
        gpt: model with the sizes of `small_gpt` and document masking.
        x: tokens [2, 26], below VOCABULARY − 1, which ends documents here.
    """
    end, packed = VOCABULARY - 1, x.clone()
    packed[0, [4, 15]] = packed[1, [7, 8]] = end
    gpt.end_of_document = end
    whole = gpt(packed)
    gpt.end_of_document = None
    for row, edges in ((0, [0, 5, 16, x.shape[1]]), (1, [0, 8, 9, x.shape[1]])):
        for first, stop in pairwise(edges):
            alone = gpt(packed[row : row + 1, first:stop])
            assert_close_in_rounding(whole[row : row + 1, first:stop], alone, TERMS, SUMS)

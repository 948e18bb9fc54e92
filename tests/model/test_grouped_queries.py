"""Grouped queries: a model with fewer key-value heads equals one with a copy of them for each query head."""

import pytest
import torch
from models import build_model
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

VOCABULARY, WIDTH, HEADS, LENGTH = 40, 32, 4, 18
TERMS, SUMS = count_gpt_sums(WIDTH, layers=2)
METHODS = [
    ("rotary", "none"), ("kerple_log", "cdape"), ("cope", "none"), ("transformer_xl", "dape"), ("none", "none"),
    ("pope", "cdape"),
]  # fmt: skip


def built(groups: int, pos_emb: str, processor: str, **keys: object) -> GPT:
    model = ModelOptions(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=HEADS, num_kv_heads=groups, seq_length=LENGTH,
        attention_chunk_rows=5, init_method_std=0.2, make_vocab_size_divisible_by=8, **keys,
    )  # fmt: skip
    gpt = build_model(model, PositionOptions(pos_emb=pos_emb, score_processor=processor), VOCABULARY, seed=5)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases too
    return gpt


def apart(grouped: Tensor, groups: int) -> Tensor:
    """Convert [groups·(H/groups + 2)·d, …] of a grouped model to [H·3·d, …] with keys and values for every head."""
    each = HEADS // groups
    of_group = grouped.view(groups, each + 2, WIDTH // HEADS, *grouped.shape[1:])
    heads = [[of_group[g, h], of_group[g, each], of_group[g, each + 1]] for g in range(groups) for h in range(each)]
    return torch.stack([part for head in heads for part in head]).reshape(-1, *grouped.shape[1:])


def together(gradient: Tensor, groups: int) -> Tensor:
    """Return the gradient of the grouped parameter: the sum of the gradients of its copies."""
    each, d = HEADS // groups, WIDTH // HEADS
    q, k, v = gradient.view(groups, each, 3, d, *gradient.shape[1:]).unbind(2)
    return torch.cat([q, k.sum(1, keepdim=True), v.sum(1, keepdim=True)], 1).reshape(-1, *gradient.shape[1:])


def twins(groups: int, method: tuple[str, str], **keys: object) -> tuple[GPT, GPT]:
    """Build a grouped model and an equivalent one with separate keys and values for each head."""
    grouped, full = built(groups, *method, **keys), built(HEADS, *method, **keys)
    state = {name: value for name, value in grouped.state_dict().items() if value is not None}
    full.load_state_dict(
        {name: apart(value, groups) if "linear_qkv" in name else value for name, value in state.items()}, strict=False
    )
    return grouped, full


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_grouped_queries_share_keys_and_values(method: tuple[str, str], groups: int) -> None:
    grouped, full = twins(groups, method)
    x, labels = torch.randint(VOCABULARY, (2, 2, LENGTH))
    assert_close_in_rounding(grouped(x), full(x), TERMS, SUMS)
    for gpt in (grouped, full):
        gpt(x, labels).mean().backward()
    largest = max(p.grad.abs().max().item() for p in full.parameters())
    for (name, ours), theirs in zip(grouped.named_parameters(), full.parameters(), strict=True):
        wanted = together(theirs.grad, groups) if "linear_qkv" in name else theirs.grad
        assert_close_in_rounding(ours.grad, wanted, TERMS, 2 * SUMS, size=largest / 100)
    assert full.num_parameters() > grouped.num_parameters()


@pytest.mark.parametrize("backend", ["eager", "chunked", "sdpa"])
def test_every_backend(backend: str) -> None:
    grouped, full = twins(2, ("rotary", "none"), attention_backend=backend)
    x = torch.randint(VOCABULARY, (2, LENGTH))
    assert_close_in_rounding(grouped(x), full(x), TERMS, SUMS)


@torch.inference_mode()
def test_the_cache_holds_the_groups_alone() -> None:
    grouped, full = (gpt.eval() for gpt in twins(2, ("rotary", "cdape")))
    x = torch.randint(VOCABULARY, (2, LENGTH))
    caches = [gpt.create_kv_cache(LENGTH) for gpt in (grouped, full)]
    ours, theirs = (
        torch.cat([gpt(part, kv_cache=cache) for part in x.split([7, 1, 1, 9], 1)], 1)
        for gpt, cache in zip((grouped, full), caches, strict=True)
    )
    assert_close_in_rounding(ours, theirs, TERMS, SUMS)
    assert_close_in_rounding(ours, grouped(x), TERMS, SUMS)
    assert caches[0].count_bytes() * HEADS == caches[1].count_bytes() * 2


@pytest.mark.parametrize(("qkv", "biases"), [(None, set()), (True, {"linear_qkv"}), (False, set())])
def test_bias_of_queries_keys_and_values_alone(qkv: bool | None, biases: set[str]) -> None:
    gpt = built(2, "rotary", "none", use_bias_in_attn_linear=False, use_bias_in_qkv=qkv)
    names = {name for name, _ in gpt.named_parameters()}
    found = {part for part in ("linear_qkv", "linear_proj") if f"decoder.layers.0.self_attention.{part}.bias" in names}
    assert found == biases


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_kv_heads": 3}, "num_attention_heads 4 is not divisible by num_kv_heads 3; use 2"),
        ({"use_bias_in_qkv": False}, "use_bias_in_qkv: false needs use_bias_in_attn_linear: false"),
    ],
)
def test_invalid_configurations_are_rejected(keys: dict[str, object], message: str) -> None:
    model = ModelOptions(num_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS, seq_length=8, **keys)
    with pytest.raises(UserError, match=message):
        build_model(model, PositionOptions(pos_emb="none"), VOCABULARY)

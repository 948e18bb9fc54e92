"""Position ids of a batch: equal to indices in the plain case, with the required invariances otherwise."""

import pytest
import torch
from models import build_model

from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.temperatures.llama4 import Llama4
from megatron.utils.errors import UserError

LENGTH = 12
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 40}
TOKENS = torch.randint(0, 9, (3, LENGTH), generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 30, (3, LENGTH), generator=torch.Generator().manual_seed(1))
ROUNDING = {"atol": 2e-5, "rtol": 0.0}
"""Tolerance for logits of size 1 and below, after a few hundred float32 operations."""


def build(name: str, **position: object) -> GPT:
    model = build_model(
        ModelOptions(seq_length=LENGTH, **SHAPE), PositionOptions(pos_emb=name, **position), 9, seed=3
    ).eval()
    for parameter in model.parameters():  # large enough for positions to matter
        parameter.data.mul_(4.0)
    return model


@pytest.mark.parametrize("name", ["learned", "sinusoidal", "rotary"])
@torch.no_grad()
def test_indices_and_rows(name: str) -> None:
    model = build(name)
    indices = torch.arange(LENGTH).expand(3, LENGTH)
    torch.testing.assert_close(model(TOKENS, position_ids=indices), model(TOKENS), **ROUNDING)
    together = model(TOKENS, position_ids=IDS)
    assert (together - model(TOKENS)).abs().max() > 1e-3
    for row in range(3):
        alone = model(TOKENS[row : row + 1], position_ids=IDS[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, **ROUNDING)


@torch.no_grad()
def test_a_learned_table_is_read_at_the_ids() -> None:
    """Reading p at arbitrary ids equals reading the rows p[ids] in order, for one sequence."""
    model, other = build("learned"), build("learned")
    other.position.vectors.weight[:LENGTH] = model.position.vectors.weight[IDS[0]]
    torch.testing.assert_close(model(TOKENS[:1], position_ids=IDS[:1]), other(TOKENS[:1]), **ROUNDING)


@torch.no_grad()
def test_rotary_depends_on_differences_of_ids_alone() -> None:
    model, none = build("rotary"), build("none")
    torch.testing.assert_close(
        model(TOKENS, position_ids=IDS + 7), model(TOKENS, position_ids=IDS), atol=1e-4, rtol=0.0
    )
    none.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(TOKENS, position_ids=torch.full_like(IDS, 5)), none(TOKENS), atol=1e-4, rtol=0.0)


@torch.no_grad()
def test_gradients_reach_the_rows_of_the_ids() -> None:
    model = build("learned")
    with torch.enable_grad():
        model(TOKENS, labels=TOKENS, position_ids=IDS).sum().backward()
    gradient = model.position.vectors.weight.grad
    read = set(IDS.flatten().tolist())
    assert {row for row in range(40) if bool(gradient[row].any())} == read


@pytest.mark.parametrize("name", ["rotary", "learned"])
@torch.no_grad()
def test_a_temperature_receives_the_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's factor depends on its id, and on the number of keys it sees, which does not depend on ids."""
    model = build(name, attention_temperature="llama4", attention_temperature_options={"floor_scale": 3})
    indices = torch.arange(LENGTH).expand(3, LENGTH)
    torch.testing.assert_close(model(TOKENS, position_ids=indices), model(TOKENS), **ROUNDING)
    received = []

    def record(module: Llama4, positions: torch.Tensor, num_keys: torch.Tensor) -> torch.Tensor:
        received.append((positions, num_keys))
        return (1 + 0.1 * torch.log1p(torch.floor((IDS.float() + 1) / 3)))[None]

    found = model(TOKENS, position_ids=IDS)
    monkeypatch.setattr(Llama4, "forward", record)
    torch.testing.assert_close(found, model(TOKENS, position_ids=IDS), **ROUNDING)
    for positions, num_keys in received:
        assert torch.equal(positions, IDS.float())
        assert torch.equal(num_keys.expand(3, -1), indices.float() + 1)


def test_methods_without_position_ids() -> None:
    for name in ("alibi", "fire", "kerple_log", "t5"):
        with pytest.raises(UserError, match="supports only consecutive positions"):
            build(name)(TOKENS, position_ids=IDS)
    with pytest.raises(RuntimeError, match="no randomized positions"):
        build("rotary", randomized_positions=50)(TOKENS, position_ids=IDS)

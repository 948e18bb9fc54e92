"""One behaviour from all of DeepSpeed's optimizers: the updates of a plain PyTorch loop, whatever the ZeRO stage."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import build_model
from position_methods import SHAPE
from tiny_runs import VOCABULARY, tiny_config
from torch import nn

from megatron.checkpoint.weights import held_weights
from megatron.config.schema import Config
from megatron.model.parameters import parameter_groups
from megatron.parallel.mesh import Sizes
from megatron.parallel.place import Place
from megatron.parallel.processes import join
from megatron.position import registry
from megatron.position.parameters import Bounded
from megatron.training.engine import Engine
from megatron.training.optimizer import BoundedAdamW
from tools.rounding import apart, sums_of_gpt

STAGES = (0, 1, 2, 3)
BOUNDED = [
    name
    for name in registry.encodings()
    if any(
        isinstance(module, Bounded) and not (math.isinf(module.low) and math.isinf(module.high))
        for module in registry.build_encoding(name, SHAPE).modules()
    )
]
TOKENS = torch.randint(0, VOCABULARY, (6, 2, 17), generator=torch.Generator().manual_seed(5))
MASKS = (torch.rand(6, 2, 16, generator=torch.Generator().manual_seed(6)) < 0.7).float()


TERMS, SUMS = sums_of_gpt(32, layers=2)


def config(stage: int, precision: str, eps: float = 1e-4, **keys: object) -> Config:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    # A large epsilon: Adam would blow the rounding of a gradient that is nearly zero up to a whole step.
    optimizer = {"params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": eps}}
    return tiny_config(
        Path(), zero_optimization=zero, precision=precision, score_processor="dape", optimizer=optimizer, **keys
    )


def gpt(config: Config) -> nn.Module:
    return build_model(config.model, config.position, VOCABULARY, seed=1)


def start(config: Config, build: Callable[[], nn.Module] | None = None) -> Engine:
    """An engine around the configuration's GPT, or what `build` makes."""
    processes = join(Place(), Sizes(), device="cpu", backend="gloo")
    engine = Engine(config, gpt(config) if build is None else build(), processes)
    engine.model.train()
    return engine


def batch(i: int, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tokens": TOKENS[i, :, :-1].contiguous(), "labels": TOKENS[i, :, 1:].contiguous(), "loss_mask": mask}


def run(engine: Engine, steps: int, lr: float, accumulate: int, sign: int = 1) -> list[float]:
    """Loss of each step over micro-batches of TOKENS, round and round; sign −1 climbs."""
    losses = []
    for step in range(steps):
        chosen = [(step * accumulate + i) % len(TOKENS) for i in range(accumulate)]
        counted = int(MASKS[chosen].sum())
        losses.append(sign * float(engine.accumulate([batch(i, sign * MASKS[i]) for i in chosen], counted)))
        engine.step(lr)
    return losses


def plain(
    config: Config, steps: int, lr: float, accumulate: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of the same training without DeepSpeed."""
    model = gpt(config).train()
    eps = config.optimizer.optimizer.params.eps
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.optimizer.weight_decay), lr=lr, betas=(0.9, 0.95), eps=eps
    )
    losses, norms = [], []
    for step in range(steps):
        chosen = [(step * accumulate + i) % len(TOKENS) for i in range(accumulate)]
        batch, mask = torch.cat([TOKENS[i] for i in chosen]), torch.cat([MASKS[i] for i in chosen])
        loss = (model(batch[:, :-1].contiguous(), labels=batch[:, 1:].contiguous()) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.gradient_clipping)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_every_zero_stage_trains_as_plain_pytorch_does(stage: int) -> None:
    """Weight decay, clipping, masks of different sizes and accumulation included; Adam's steps counted from one."""
    chosen = config(
        stage, "fp32", eps=1e-2, gradient_clipping=0.5, weight_decay=0.2, train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=3, train_batch_size=6,
    )  # fmt: skip
    losses, norms, weights = plain(chosen, 5, 1e-2, 3)
    engine = start(chosen)
    assert run(engine, 5, 1e-2, 3) == pytest.approx(losses, rel=apart(TERMS, SUMS))
    assert float(engine.grad_norm) == pytest.approx(norms[-1], rel=apart(TERMS, 2 * SUMS))
    assert norms[-1] > 0.5  # so clipping was needed
    got = held_weights(engine.deepspeed, keep=True)
    engine.close()
    assert got is not None
    assert set(got) == set(weights)
    # An error of a gradient moves a weight by lr/eps of itself at most, in each step; clipped, gradients are below 0.5.
    moved = 5 * 1e-2 / 1e-2 * 0.5 * apart(TERMS, 2 * SUMS)
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=moved, msg=name)


def beyond_and_on_bounds(engine: Engine) -> tuple[int, int]:
    """How many values of the float32 masters lie outside their bounds, and how many exactly on one."""
    weights = held_weights(engine.deepspeed, keep=True)
    assert weights is not None
    beyond = on = 0
    for name, module in engine.model.named_modules():
        if isinstance(module, Bounded):
            value = weights[f"{name}.value"]
            low, high = (torch.tensor(bound, dtype=torch.float32) for bound in (module.low, module.high))
            assert value.dtype == torch.float32
            beyond += int(((value < low) | (value > high)).sum())
            on += int(((value == low) | (value == high)).sum())
    return beyond, on


class EveryBound(nn.Module):
    """Every bounded parameter of every encoding, and nothing else: the loss of a token is the sum of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(registry.build_encoding(name, SHAPE) for name in BOUNDED)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, draw: None) -> torch.Tensor:
        values = [module().float().sum() for module in self.modules() if isinstance(module, Bounded)]
        return torch.stack(values).sum().expand(labels.shape)


def after_hard_pushes(config: Config, build: Callable[[], nn.Module]) -> tuple[int, int]:
    """Steps of about 1 at bounds of 0.01 and 2, down the loss and up again: one of the two goes outward."""
    counts = []
    for sign in (1, -1):
        engine = start(config, build)
        run(engine, 6, 1.0, 1, sign)
        counts.append(beyond_and_on_bounds(engine))
        engine.close()
    return sum(beyond for beyond, _ in counts), sum(on for _, on in counts)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_float32_masters_stay_within_bounds(stage: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(stage, precision, train_micro_batch_size_per_gpu=2, train_batch_size=2)
    beyond, on = after_hard_pushes(chosen, EveryBound)
    assert beyond == 0
    assert on > 0  # to the bit: the projection, not the parameter's own clamp
    monkeypatch.setattr(BoundedAdamW, "project", lambda self: None)
    assert after_hard_pushes(chosen, EveryBound)[0] > 0


@pytest.mark.parametrize(
    ("encoding", "stage", "precision"),
    [(name, STAGES[i % 4], ("fp32", "bf16")[i // 4 % 2]) for i, name in enumerate(BOUNDED)],
)
def test_the_bounds_of_an_encoding_hold_within_a_gpt(encoding: str, stage: int, precision: str) -> None:
    chosen = config(stage, precision, train_micro_batch_size_per_gpu=2, train_batch_size=2, pos_emb=encoding)
    beyond, on = after_hard_pushes(chosen, lambda: gpt(chosen))
    assert beyond == 0
    assert on > 0


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(stage: int, precision: str) -> None:
    engine = start(config(stage, precision, train_micro_batch_size_per_gpu=2, train_batch_size=2))
    run(engine, 2, 1e-2, 1)
    assert not engine.skipped
    before = held_weights(engine.deepspeed, keep=True)
    engine.accumulate([batch(0, torch.full_like(MASKS[0], math.inf))], 32)
    engine.step(1e-2)
    assert engine.skipped
    assert engine.deepspeed.skipped_steps == 1
    after = held_weights(engine.deepspeed, keep=True)
    assert before is not None
    assert after is not None
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(torch.tensor(run(engine, 2, 1e-2, 1))))
    assert not engine.skipped
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_stays_near_float32(stage: int) -> None:
    """Accumulation over three micro-steps included; 0.02 is bfloat16's rounding of a loss of about 4."""
    keys = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": 6}
    losses, _, _ = plain(config(stage, "fp32", **keys), 6, 1e-2, 3)
    engine = start(config(stage, "bf16", **keys))
    assert run(engine, 6, 1e-2, 3) == pytest.approx(losses, abs=0.02)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    engine.close()

"""All of DeepSpeed's optimizers give the updates of a plain PyTorch loop, at any ZeRO stage."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from master_weights import masters
from models import build_model
from position_methods import SHAPE
from tiny_runs import VOCABULARY, tiny_config
from torch import nn
from torch.distributed.pipelining import _utils as pipelining

from megatron.checkpoint.engine_state import list_optimizer_shards
from megatron.config.schema import Config
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import Axis, Mesh, ParallelSizes
from megatron.distributed.process_groups import init_distributed
from megatron.model.parameter_groups import build_parameter_groups
from megatron.position import registry
from megatron.position.bounded_parameter import BoundedParameter
from megatron.training.engine import Engine, build_deepspeed_config
from megatron.training.pipeline import ALLOCATES_ON_RECEIPT, BufferedStage, count_in_flight
from megatron.training.projected_optimizers import ProjectedAdamW
from tools.tolerances import compute_tolerance, count_gpt_sums

STAGES = (0, 1, 2, 3)
BOUNDED = [
    name
    for name in registry.list_encodings()
    if any(
        isinstance(module, BoundedParameter) and not (math.isinf(module.low) and math.isinf(module.high))
        for module in registry.build_encoding(name, SHAPE).modules()
    )
]
TOKENS = torch.randint(0, VOCABULARY, (6, 2, 17), generator=torch.Generator().manual_seed(5))
MASKS = (torch.rand(6, 2, 16, generator=torch.Generator().manual_seed(6)) < 0.7).float()


TERMS, SUMS = count_gpt_sums(32, layers=2)


OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**OPTIMIZER, "offload_param": {"device": "cpu"}}


def config(stage: int, precision: str, eps: float = 1e-4, zero: dict[str, Any] | None = None, **keys: object) -> Config:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})}
    # A large epsilon keeps Adam from amplifying the rounding of a nearly zero gradient to a whole step.
    optimizer = {"params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": eps}}
    return tiny_config(
        Path(), zero_optimization=zero, precision=precision, score_processor="dape", optimizer=optimizer, **keys
    )


def gpt(config: Config) -> nn.Module:
    return build_model(config.model, config.position, VOCABULARY, seed=1)


def start(config: Config, build: Callable[[], nn.Module] | None = None) -> Engine:
    """Start an engine with the configuration's GPT, or the model from `build`."""
    processes = init_distributed(RankInfo(), ParallelSizes(), device="cpu", backend="gloo")
    engine = Engine(config, gpt(config) if build is None else build(), processes)
    engine.model.train()
    return engine


def batch(i: int, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tokens": TOKENS[i, :, :-1].contiguous(), "labels": TOKENS[i, :, 1:].contiguous(), "loss_mask": mask}


def run(engine: Engine, steps: int, lr: float, accumulate: int, sign: int = 1) -> list[float]:
    """Train cyclically on micro-batches of TOKENS; return the loss of each step. Sign −1 increases the loss."""
    losses = []
    for step in range(steps):
        chosen = [(step * accumulate + i) % len(TOKENS) for i in range(accumulate)]
        counted = int(MASKS[chosen].sum())
        losses.append(sign * float(engine.forward_backward([batch(i, sign * MASKS[i]) for i in chosen], counted)))
        engine.step(lr)
    return losses


def plain(
    config: Config, steps: int, lr: float, accumulate: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses, gradient norms and weights of the same training without DeepSpeed."""
    model = gpt(config).train()
    eps = config.optimizer.optimizer.params.eps
    optimizer = torch.optim.AdamW(
        build_parameter_groups(model, config.optimizer.weight_decay), lr=lr, betas=(0.9, 0.95), eps=eps
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


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        *((stage, {}) for stage in STAGES),
        (1, {**OPTIMIZER, "overlap_comm": True}),
        (2, {**OPTIMIZER, "contiguous_gradients": False, "reduce_scatter": False, "reduce_bucket_size": 100}),
        (2, {"contiguous_gradients": False, "overlap_comm": True, "allgather_bucket_size": 100}),
        (3, {**BOTH, "sub_group_size": 500, "overlap_comm": True}),
        (3, {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}),
    ],
)
def test_every_zero_stage_trains_as_plain_pytorch_does(stage: int, zero: dict[str, Any]) -> None:
    """Every ZeRO stage trains like plain PyTorch.

    This includes weight decay, clipping, masks of different sizes, accumulation, and Adam's step count from one.
    """
    chosen = config(
        stage, "fp32", eps=1e-2, gradient_clipping=0.5, weight_decay=0.2, train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=3, train_batch_size=6, zero=zero,
    )  # fmt: skip
    losses, norms, weights = plain(chosen, 5, 1e-2, 3)
    engine = start(chosen)
    assert run(engine, 5, 1e-2, 3) == pytest.approx(losses, rel=compute_tolerance(TERMS, SUMS))
    assert float(engine.grad_norm) == pytest.approx(norms[-1], rel=compute_tolerance(TERMS, 2 * SUMS))
    assert norms[-1] > 0.5  # clipping has an effect
    got = masters(engine.deepspeed)
    engine.close()
    assert set(got) == set(weights)
    # An error in a gradient moves a weight by at most lr/eps times itself per step; clipped gradients are below 0.5.
    moved = 5 * 1e-2 / 1e-2 * 0.5 * compute_tolerance(TERMS, 2 * SUMS)
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=moved, msg=name)


@pytest.mark.parametrize(
    ("stage", "precision", "accumulate", "zero"),
    [
        (1, "bf16", 1, {}),
        (1, "fp32", 3, {"reduce_bucket_size": 3000}),
        (1, "bf16", 3, {}),
        (2, "bf16", 1, {"reduce_bucket_size": 3000}),
        (2, "bf16", 3, {}),
        (2, "fp32", 2, {"reduce_scatter": False}),
    ],
)
def test_grouped_gradients_match_deepspeed(
    stage: int, precision: str, accumulate: int, zero: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient lists match DeepSpeed's loop bit for bit: losses, norms, masters and moments.

    This includes a step without clipping and a skipped step.
    """
    monkeypatch.setattr("megatron.training.zero_optimizer.CAST_ELEMENTS", 1000)  # tensors above and below this size
    chosen = config(
        stage, precision, gradient_clipping=0.5, weight_decay=0.2, train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=accumulate, train_batch_size=2 * accumulate, zero=zero,
    )  # fmt: skip

    def train(*, by_deepspeed: bool = False) -> tuple[list[float], list[float], dict[str, torch.Tensor], list[bool]]:
        engine = start(chosen)
        if by_deepspeed:
            del engine.deepspeed.allreduce_no_retain
        norms, skipped, losses = [], [], []
        for factor in (1.0, 1e-3, math.inf, 1.0):
            micro_batches = [batch(i, MASKS[i] * factor) for i in range(accumulate)]
            losses.append(float(engine.forward_backward(micro_batches, 32)))
            engine.step(1e-2)
            norms.append(float(engine.grad_norm))
            skipped.append(engine.skipped)
        states = {
            f"{shard.name} {kind}": tensor.clone()
            for shard in list_optimizer_shards(engine.deepspeed)
            for kind, tensor in {"master": shard.master, **shard.moments}.items()
        }
        engine.close()
        return losses, norms, states, skipped

    losses, norms, states, skipped = train()
    monkeypatch.setattr("megatron.training.zero_optimizer.can_flatten", lambda optimizer: False)
    wanted_losses, wanted_norms, wanted_states, wanted_skipped = train(by_deepspeed=True)
    assert skipped == wanted_skipped == [False, False, True, False]
    assert norms == wanted_norms
    assert norms[0] > 0.5 > norms[1]
    assert [x for x in losses if math.isfinite(x)] == [x for x in wanted_losses if math.isfinite(x)]
    assert states.keys() == wanted_states.keys()
    for name, state in states.items():
        assert torch.equal(state, wanted_states[name]), name


@pytest.mark.parametrize(("index", "micro_batches"), [(0, 6), (1, 6), (1, 2), (3, 6)])
def test_a_pipeline_stage_has_buffers_for_the_micro_batches_in_flight(index: int, micro_batches: int) -> None:
    """A pipeline stage has one buffer for each micro-batch in flight.

    In 1F1B, stage i of 4 receives micro-batch j after the backward pass of j − (4 − i), and the gradient of j after
    that of j − 1. A buffer is only then overwritten.
    """
    init_distributed(RankInfo(), ParallelSizes(), device="cpu", backend="gloo")
    hidden = torch.empty(5, 3, device="meta", requires_grad=True)
    stage = BufferedStage(nn.Linear(3, 3), index, 4, torch.device("cpu"), input_args=hidden, output_args=hidden)
    stage.in_flight = count_in_flight(Axis(index, 4), micro_batches)
    if hasattr(pipelining, "InferenceMode"):
        stage._inference_mode = pipelining.InferenceMode.STATIC
        stage._prepare_forward_infra(micro_batches, None, has_backward=True)
    else:  # torch 2.11: shapes that are given are always static
        stage._prepare_forward_infra(micro_batches, (None,))
    stage._prepare_backward_infra(micro_batches)
    activations, gradients = (
        [
            info.buffer.data_ptr()
            for i in range(micro_batches)
            for info in infos[i]
            if getattr(info, "buffer", None) is not None
        ]
        for infos in (stage.args_recv_info, stage.grad_recv_info)
    )
    in_flight = min(4 - index, micro_batches)
    assert stage.chunks == micro_batches
    if ALLOCATES_ON_RECEIPT:  # then every buffer is freed after its use, and none is there before
        assert activations == gradients == []
        return
    assert len(set(activations)) == (in_flight if index else 0)
    assert all(len(set(activations[i : i + in_flight])) in (0, min(in_flight, len(activations) - i))
               for i in range(len(activations)))  # fmt: skip
    assert gradients == gradients[:1] * (0 if index == 3 else micro_batches)


def test_zero_3_gathers_the_output_layer_for_each_piece_of_the_loss() -> None:
    chosen = config(3, "fp32", eps=1e-2)
    losses, norms, _ = plain(chosen, 3, 1e-2, 1)
    engine = start(chosen)
    engine.model.max_logits = 500
    assert engine.model.max_logits < TOKENS[0, :, 1:].numel() * VOCABULARY / 2  # so the loss is chunked
    assert run(engine, 3, 1e-2, 1) == pytest.approx(losses, rel=compute_tolerance(TERMS, SUMS))
    assert float(engine.grad_norm) == pytest.approx(norms[-1], rel=compute_tolerance(TERMS, 2 * SUMS))
    engine.close()


def beyond_and_on_bounds(engine: Engine) -> tuple[int, int]:
    """Count values of float32 masters outside their bounds, and exactly on a bound."""
    weights = masters(engine.deepspeed)
    beyond = on = 0
    for name, module in engine.model.named_modules():
        if isinstance(module, BoundedParameter):
            value = weights[f"{name}.value"]
            low, high = (torch.tensor(bound, dtype=torch.float32) for bound in (module.low, module.high))
            assert value.dtype == torch.float32
            beyond += int(((value < low) | (value > high)).sum())
            on += int(((value == low) | (value == high)).sum())
    return beyond, on


class EveryBound(nn.Module):
    """Model with every bounded parameter of every encoding and nothing else; a token's loss is the sum of their
    values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(registry.build_encoding(name, SHAPE) for name in BOUNDED)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, position_seed: None, *, with_log_z: bool
    ) -> torch.Tensor:
        values = [module().float().sum() for module in self.modules() if isinstance(module, BoundedParameter)]
        return torch.stack(values).sum().expand(labels.shape)


def after_hard_pushes(config: Config, build: Callable[[], nn.Module]) -> tuple[int, int]:
    """Take steps of about 1 with bounds of 0.01 and 2, down the loss and up again, so that one direction leaves the
    bounds.
    """
    counts = []
    for sign in (1, -1):
        engine = start(config, build)
        run(engine, 6, 1.0, 1, sign)
        counts.append(beyond_and_on_bounds(engine))
        engine.close()
    return sum(beyond for beyond, _ in counts), sum(on for _, on in counts)


@pytest.mark.parametrize(
    ("stage", "precision", "zero"),
    [
        *((stage, precision, {}) for stage in STAGES for precision in ("fp32", "bf16")),
        (2, "bf16", OPTIMIZER),
        (3, "bf16", {**BOTH, "sub_group_size": 5}),
    ],
)
def test_float32_masters_stay_within_bounds(
    stage: int, precision: str, zero: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(stage, precision, train_micro_batch_size_per_gpu=2, train_batch_size=2, zero=zero)
    beyond, on = after_hard_pushes(chosen, EveryBound)
    assert beyond == 0
    assert on > 0  # bit for bit: the projection, not the parameter's own clamp
    monkeypatch.setattr(ProjectedAdamW, "clamp_masters", lambda self: None)
    assert after_hard_pushes(chosen, EveryBound)[0] > 0


@pytest.mark.parametrize(
    ("encoding", "stage", "precision"),
    [(name, STAGES[i % 4], ("fp32", "bf16")[i // 4 % 2]) for i, name in enumerate(BOUNDED)],
)
def test_the_bounds_of_an_encoding_hold_within_a_gpt(encoding: str, stage: int, precision: str) -> None:
    start_options = {"exponent_init": 2.5} if encoding == "bam" else {}  # the others start near a bound
    chosen = config(
        stage, precision, train_micro_batch_size_per_gpu=2, train_batch_size=2, pos_emb=encoding,
        pos_emb_options=start_options,
    )  # fmt: skip
    beyond, on = after_hard_pushes(chosen, lambda: gpt(chosen))
    assert beyond == 0
    assert on > 0


@pytest.mark.parametrize(
    ("stage", "precision", "zero", "steps"),
    [
        (0, "fp32", {}, 1),
        (0, "bf16", {}, 1),
        (1, "fp32", {}, 1),
        (1, "bf16", {}, 2),
        (2, "bf16", {}, 1),
        (2, "bf16", {}, 2),
        (3, "fp32", {}, 1),
        (1, "fp32", OPTIMIZER, 2),
        (1, "bf16", OPTIMIZER, 2),  # without the care of `Engine`, every later step would be skipped too
        (2, "bf16", OPTIMIZER, 2),
        (3, "bf16", BOTH, 2),
    ],
)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(
    stage: int, precision: str, zero: dict[str, Any], steps: int
) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * steps, "gradient_accumulation_steps": steps}
    engine = start(config(stage, precision, zero=zero, **sizes))
    run(engine, 2, 1e-2, steps)
    assert not engine.skipped
    before = masters(engine.deepspeed)
    engine.forward_backward([batch(0, torch.full_like(MASKS[0], math.inf))] * steps, 32)
    engine.step(1e-2)
    assert engine.skipped
    assert engine.deepspeed.skipped_steps == 1
    after = masters(engine.deepspeed)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for _ in range(2):
        assert math.isfinite(run(engine, 1, 1e-2, steps)[0])
        assert not engine.skipped
    engine.close()


@pytest.mark.parametrize(
    ("stage", "zero"), [*((stage, {}) for stage in STAGES), (1, OPTIMIZER), (2, OPTIMIZER), (3, BOTH)]
)
def test_bfloat16_stays_near_float32(stage: int, zero: dict[str, Any]) -> None:
    """Includes accumulation over three micro-batches; 0.02 is bfloat16's rounding of a loss of about 4."""
    keys = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": 6, "zero": zero
    }  # fmt: skip
    losses, _, _ = plain(config(stage, "fp32", **keys), 6, 1e-2, 3)
    engine = start(config(stage, "bf16", **keys))
    assert run(engine, 6, 1e-2, 3) == pytest.approx(losses, abs=0.02)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    engine.close()


@pytest.mark.parametrize("scale", [{}, {"loss_scale": 512}], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_float16_scales_the_loss_and_reports_unscaled_norms(
    stage: int, scale: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradient norms stay near those in float32, and gradients are clipped as in float32.

    A large epsilon makes each update proportional to the clipped gradient. 0.01 is a few times float16's rounding of a
    loss of about 4.
    """
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    keys = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": 6,
        "gradient_clipping": 0.5, "fp16": scale,
    }  # fmt: skip
    losses, norms, _ = plain(config(stage, "fp32", eps=1.0, **{**keys, "fp16": {}}), 4, 0.3, 3)
    engine = start(config(stage, "fp16", eps=1.0, **keys))
    assert engine.loss_scale == scale.get("loss_scale", 4096)
    for step, (expected, norm) in enumerate(zip(losses, norms, strict=True)):
        chosen = [(3 * step + i) % len(TOKENS) for i in range(3)]
        loss = engine.forward_backward([batch(i, MASKS[i]) for i in chosen], int(MASKS[chosen].sum()))
        engine.step(0.3)
        assert float(loss) == pytest.approx(expected, abs=0.01)
        assert float(engine.grad_norm) == pytest.approx(norm, rel=0.01)
        assert not engine.skipped
    engine.close()


def test_deepspeed_config_matches_the_configuration() -> None:
    """DeepSpeed gets the configuration's values.

    Buckets are allocated completely, so none exceeds the model, and DeepSpeed gathers only an even number of elements.
    """
    own = {
        "stage": 3, "overlap_comm": True, "reduce_scatter": False, "contiguous_gradients": False,
        "allgather_partitions": False, "reduce_bucket_size": 70, "allgather_bucket_size": 80, "sub_group_size": 90,
        "stage3_param_persistence_threshold": 1, "stage3_max_live_parameters": 2, "stage3_max_reuse_distance": 3,
        "stage3_prefetch_bucket_size": 4, "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip

    def reported(zero: dict[str, Any], parameters: int) -> dict[str, Any]:
        found = build_deepspeed_config(
            tiny_config(Path(), zero_optimization=zero), Mesh(0, ParallelSizes()), parameters, 1.0
        )
        return dict(found["zero_optimization"])

    assert reported(own, 1000) == own
    capped = reported(own, 75)
    assert capped == {**own, "allgather_bucket_size": 76}
    large = reported({"stage": 1}, 75)
    assert [large[f"{name}_bucket_size"] for name in ("allgather", "reduce", "stage3_prefetch")] == [76, 76, 76]
    assert not {"offload_optimizer", "offload_param"} & set(large)

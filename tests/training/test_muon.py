"""Muon and Lion, compared with their papers' formulas, torch's own Muon and plain PyTorch.

Every layout orthogonalizes whole matrices, and a run resumes from a checkpoint of any layout.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from master_weights import masters
from models import build_model
from safetensors.torch import load_file
from tiny_runs import VOCABULARY, records, same_weights, tiny_config, train_with_processes, write_corpora
from torch import Tensor, nn

from megatron.checkpoint import layout
from megatron.config.schema import Config
from megatron.config.validation import validate_config
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import Axis, ParallelSizes
from megatron.distributed.process_groups import init_distributed
from megatron.model.parameter_groups import HiddenMatrix, build_parameter_groups, list_hidden_matrices
from megatron.options.optimizer import OptimizerChoice
from megatron.training.engine import Engine
from megatron.training.projected_optimizers import COEFFICIENTS, ProjectedLion, list_matrix_shards, orthogonalize
from megatron.training.train import train
from megatron.utils.errors import UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

GROUPED: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "activation": "swiglu", "score_processor": "cdape",
}  # fmt: skip
STEEPEST = COEFFICIENTS[0] ** 5
"""Largest amplification of an error in a normalized matrix by five iterations: their slope at 0."""
TERMS, SUMS = count_gpt_sums(32, layers=2)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_newton_schulz_is_its_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = (left * values) @ right
    error = (orthogonalize(matrix, 5, torch.float32) - expected).abs().max()
    assert error < compute_tolerance(40, 15) * STEEPEST / 10
    halves = (orthogonalize(1e6 * matrix, 5, torch.float16) - expected).norm()  # beyond float16's range
    assert halves < 0.05 * expected.norm()
    # torch iterates in bfloat16; each of 15 products rounds the whole matrix.
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = matrix
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    ours = -0.2 * math.sqrt(max(shape)) * orthogonalize(matrix, 5, torch.bfloat16).float()
    assert (parameter.detach() - ours).norm() < 0.05 * ours.norm()
    assert 0.1 < ours.square().mean().sqrt() < 0.3  # AdamW's, 0.2


def test_split_matrices_match_the_layer() -> None:
    """Matrices from `split` recombine to the weight with which the layer computes: queries, keys, values, halves of a
    gated layer.
    """
    config = tiny_config(Path(), **GROUPED)
    model = build_model(config.model, config.position, VOCABULARY, seed=1)
    matrices = {id(matrix.parameter): matrix for matrix in list_hidden_matrices(model)}
    seen: dict[str, Any] = {}
    attention, mlp = model.decoder.layers[0].self_attention, model.decoder.layers[0].mlp
    attention.linear_qkv.register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0]))
    attention.core_attention.register_forward_pre_hook(lambda _, args: seen.update(qkv=args[:3]))
    with torch.no_grad():
        attention.linear_qkv.bias.zero_()
        model(torch.arange(12)[None])
        parts = matrices[id(attention.linear_qkv.weight)].split(attention.linear_qkv.weight)
        for part, made in zip(parts, seen["qkv"], strict=True):
            torch.testing.assert_close((seen["hidden"] @ part.T).view(made.shape), made)
        gated = matrices[id(mlp.linear_fc1.weight)]
        gate, inner = (torch.randn(1, 1, 32) @ part.T for part in gated.split(mlp.linear_fc1.weight))
        assert [part.shape for part in parts] == [(32, 32), (16, 32), (16, 32)]
        assert gate.shape == inner.shape == (1, 1, mlp.linear_fc2.weight.shape[1])
    for matrix in matrices.values():
        weight = matrix.parameter.detach()
        assert torch.equal(matrix.join(matrix.split(weight)), weight)
    assert len(matrices) == 4 * 2


def test_shards_of_all_ranks_cover_every_element_once() -> None:
    matrices = [HiddenMatrix(nn.Parameter(torch.randn(shape)), 1, shape[:1]) for shape in ((3, 5), (7, 2), (4, 4))]
    whole = torch.cat([matrix.parameter.detach().view(-1) for matrix in matrices])
    for ranks in (1, 2, 3, 7, 20):
        size = -(-whole.numel() // ranks)
        padded = nn.functional.pad(whole, (0, ranks * size - whole.numel()))
        found = [torch.zeros_like(matrix.parameter).view(-1) for matrix in matrices]
        holders = [0] * len(matrices)
        for rank in range(ranks):
            for index, piece in enumerate(list_matrix_shards(matrices, [padded.split(size)[rank]], Axis(rank, ranks))):
                if piece.values is not None:
                    found[index].narrow(0, piece.start, piece.values.numel()).add_(piece.values)
                    holders[index] += 1
                assert piece.is_cut or piece.values is None or piece.values.numel() == piece.matrix.parameter.numel()
        assert all(torch.equal(a, b.parameter.detach().view(-1)) for a, b in zip(found, matrices, strict=True))
        assert (max(holders) == 1) == (ranks == 1)


MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_num_layers": 1, "mup_depth_alpha": 0.5}


def choose(algorithm: str, **keys: Any) -> Config:
    params = {"lr": 1e-3, "betas": [0.9, 0.95], **({} if algorithm == "Lion" else {"eps": 1e-2})}
    return tiny_config(
        Path(), optimizer={"type": algorithm, "params": params}, weight_decay=0.2,
        gradient_clipping=0.5, **{**GROUPED, **keys},
    )  # fmt: skip


BATCHES = torch.randint(0, VOCABULARY, (4, 4, 17), generator=torch.Generator().manual_seed(5))


def step_by_hand(model: nn.Module, config: Config, lr: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after one step per batch, from autograd's gradients and the papers' formulas in float64.

    The second value is the smallest size of what Lion took the sign of, relative to the largest gradient of the weight.
    """
    params, algorithm = config.optimizer.optimizer.params, config.optimizer.optimizer.type
    is_muon = algorithm == "Muon"
    hidden = {id(matrix.parameter): matrix for matrix in list_hidden_matrices(model)} if is_muon else {}
    groups = {
        id(p): g for g in build_parameter_groups(model, 0.2, config.optimizer.optimizer.algorithm) for p in g["params"]
    }
    first = {id(p): torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()}
    second = {id(p): torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()}
    smallest = {id(p): torch.full_like(p, math.inf) for p in model.parameters()}
    for number, batch in enumerate(BATCHES, start=1):
        model.zero_grad()
        model(batch[:, :-1].contiguous(), labels=batch[:, 1:].contiguous()).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            g, m, v, w = p.grad.double(), first[id(p)], second[id(p)], p.detach().double()
            group = groups[id(p)]
            rate, eps = lr * group["lr_scale"], params.eps * group["eps_scale"]
            w = w - rate * group["weight_decay"] * w
            b1, b2 = params.betas
            if id(p) in hidden:
                m.mul_(0.95).add_(0.05 * g)
                parts = []
                for part in hidden[id(p)].split(0.95 * m + 0.05 * g):
                    left, values, right = torch.linalg.svd(part, full_matrices=False)
                    values = values / values.norm()
                    for _ in range(5):
                        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
                    parts.append(0.2 * math.sqrt(max(part.shape)) * (left * values) @ right)
                w = w - rate * hidden[id(p)].join(parts)
            elif algorithm != "Lion":
                m.mul_(b1).add_((1 - b1) * g)
                v.mul_(b2).add_((1 - b2) * g * g)
                w = w - rate * (m / (1 - b1**number)) / ((v / (1 - b2**number)).sqrt() + eps)
            else:
                direction = b1 * m + (1 - b1) * g
                w = w - rate * direction.sign()
                is_zero = direction == 0  # exactly, as a convolution's gradient while the next one is zero
                size = (direction / g.abs().max()).abs().masked_fill(is_zero, math.inf)
                smallest[id(p)] = torch.minimum(smallest[id(p)], size)
                m.mul_(b2).add_((1 - b2) * g)
            p.data.copy_(w)
    named = dict(model.named_parameters())
    return {name: p.detach().clone() for name, p in named.items()}, {name: smallest[id(p)] for name, p in named.items()}


@pytest.mark.parametrize(
    ("algorithm", "stage", "keys"),
    [
        ("Muon", 0, {}),
        ("Muon", 1, MUP),
        ("Muon", 2, {"zero_optimization": {"stage": 2, "overlap_comm": True}}),
        ("AdamW", 0, MUP),
        ("AdamW", 3, MUP),
        ("Lion", 0, {}),
        ("Lion", 2, {}),
        ("Lion", 3, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_each_engine_steps_as_the_formulas_do(algorithm: str, stage: int, keys: dict[str, Any]) -> None:
    # Lion uses the sign, which rounding may flip for a nearly zero gradient. That of a key's bias is always zero.
    biases, lr = ({"use_bias_in_attn_linear": False}, 1e-5) if algorithm == "Lion" else ({}, 1e-3)
    config = choose(algorithm, **{"zero_optimization": {"stage": stage}, **biases, **keys})
    expected, smallest = step_by_hand(
        build_model(config.model, config.position, VOCABULARY, seed=1).train(), config, lr
    )
    processes = init_distributed(RankInfo(), ParallelSizes(), device="cpu", backend="gloo")
    engine = Engine(config, build_model(config.model, config.position, VOCABULARY, seed=1), processes)
    engine.model.train()
    for batch in BATCHES:
        inputs = {"tokens": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous()}
        engine.forward_backward([{**inputs, "loss_mask": torch.ones(4, 16)}], 64)
        engine.step(lr)
    found = masters(engine.deepspeed)
    engine.close()
    # The error of an orthogonalized matrix is at most its slope at zero times the error of the gradient.
    rounding = compute_tolerance(TERMS, 2 * SUMS)
    # AdamW's step changes by lr/eps times the error, here lr/(eps·eps_scale); Lion's is one of two values.
    allowed = {
        "Muon": 4 * lr * 0.2 * rounding * STEEPEST,
        "AdamW": 4 * lr / (1e-2 / 2.9) * rounding,
        "Lion": 4 * compute_tolerance(1, 4),
    }[algorithm]
    certain = []
    for name, weight in expected.items():
        if algorithm == "Lion" and name.endswith("processor.output.bias"):
            continue  # added to all scores of a row, which the softmax ignores: its gradient is rounding alone
        is_certain = smallest[name] > rounding
        certain.append(is_certain.flatten())
        assert (found[name] - weight).abs()[is_certain].max() < allowed, name
    assert torch.cat(certain).float().mean() > 0.8


def test_lion_keeps_bounds_and_leaves_them_again() -> None:
    bounded = nn.Parameter(torch.full((3,), 0.1))
    optimizer = ProjectedLion(
        [{"params": [bounded], "weight_decay": 0.0, "low": 0.05, "high": 1.0}], lr=0.02, betas=(0.9, 0.99)
    )
    for _ in range(6):
        bounded.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(bounded.detach(), torch.full((3,), 0.05))
    for _ in range(20):
        bounded.grad = -torch.ones(3)
        optimizer.step()
    assert bool((bounded > 0.05).all())


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"num_gpus": 1},
    "data, ZeRO 0": {"train_micro_batch_size_per_gpu": 2},
    "data, ZeRO 1": {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}},
    "tensor, ZeRO 2": {"model_parallel_size": 2, "zero_optimization": {"stage": 2}},
    "pipeline, ZeRO 1": {
        "pipe_parallel_size": 2, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
    },
}  # fmt: skip
PAIRS = [
    ("one rank", "one rank"), ("one rank", "tensor, ZeRO 2"), ("tensor, ZeRO 2", "data, ZeRO 1"),
    ("data, ZeRO 1", "one rank"), ("data, ZeRO 0", "pipeline, ZeRO 1"), ("pipeline, ZeRO 1", "data, ZeRO 0"),
]  # fmt: skip
MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "eps": 1e-2}}, **GROUPED}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the corpus, the runs of all pairs, and `unbroken`, trained by one process."""
    where = tmp_path_factory.mktemp("muon")
    corpus = write_corpora(where / "corpus")

    def train_all(job: str, layouts: dict[str, str], **keys: dict[str, Any]) -> None:
        configs: dict[int, list[Config]] = {1: [], 2: []}
        for run, name in layouts.items():
            chosen = {"num_gpus": 2, **MUON, **LAYOUTS[name], **keys.get(run, keys.get("every", {}))}
            configs[chosen["num_gpus"]].append(tiny_config(corpus, where / run, **chosen))
        for config in configs[1]:
            train(config)
        assert train_with_processes(where / job, configs[2]) == [None] * len(configs[2])

    train_all("first", {f"begun {name}": name for name in LAYOUTS}, every={"train_iters": 2, "lr_decay_iters": 4})
    goes_on = {f"{one} to {other}": {"load": str(where / f"begun {one}")} for one, other in PAIRS}
    train_all("second", {f"{one} to {other}": other for one, other in PAIRS}, **goes_on)
    train(tiny_config(corpus, where / "unbroken", **MUON))
    return where


def measure_difference(run: Path, unbroken: Path) -> float:
    """Return the largest difference of a weight from the unbroken run, relative to rounding."""
    limit = 4 * 1e-2 * 0.2 * STEEPEST * compute_tolerance(TERMS, 2 * SUMS)
    mine, wanted = (load_file(layout.resolve_checkpoint_path(each) / layout.WEIGHTS) for each in (run, unbroken))
    assert mine.keys() == wanted.keys()
    return max(float((mine[name] - wanted[name]).abs().max()) for name in mine) / limit


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_it_resumes_in_any_layout(runs: Path, one: str, other: str) -> None:
    assert measure_difference(runs / f"{one} to {other}", runs / "unbroken") < 1
    assert list(records(runs / f"{one} to {other}")) == [3, 4]
    table = (runs / f"{one} to {other}" / "parameter_groups.txt").read_text()
    assert table == (runs / "unbroken" / "parameter_groups.txt").read_text()
    elements = 2 * (64 * 32 + 32 * 32 + 84 * 32 + 32 * 42)
    assert re.search(rf"^hidden matrices +Muon +0\.1 +{elements:,}$", table, re.MULTILINE), table


def test_it_resumes_bitwise_in_the_same_layout(runs: Path) -> None:
    assert same_weights(runs / "one rank to one rank", runs / "unbroken")


@pytest.mark.parametrize("wrong", ["halves", "stacked", "no momentum"])
def test_the_comparison_can_fail(runs: Path, tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong orthogonalization (each rank's shard, or joint queries, keys and values) or lost momentum far exceeds
    rounding.
    """
    keys = dict(MUON)
    if wrong == "no momentum":
        keys["load"] = str(runs / "begun one rank")
        monkeypatch.setattr("megatron.checkpoint.sharded_state.ShardReader.read_range", lambda *_: torch.zeros(()))
    else:
        parts = {"halves": 2, "stacked": 1}[wrong]

        def list_wrong_matrices(model: nn.Module) -> list[HiddenMatrix]:
            weights = [matrix.parameter for matrix in list_hidden_matrices(model)]
            return [HiddenMatrix(weight, 1, (weight.shape[0] // parts,) * parts) for weight in weights]

        monkeypatch.setattr("megatron.model.parameter_groups.list_hidden_matrices", list_wrong_matrices)
    train(tiny_config(runs / "corpus" / "corpus", tmp_path / "run", **keys))
    assert measure_difference(tmp_path / "run", runs / "unbroken") > 10


def test_invalid_settings_are_rejected(runs: Path, tmp_path: Path) -> None:
    corpus = runs / "corpus" / "corpus"
    with pytest.raises(UserError, match=r"optimizer\.type: this run has Adam, but .* contains the moments of Muon"):
        train(tiny_config(corpus, tmp_path, load=str(runs / "unbroken"), train_iters=8, **GROUPED))
    for zero, reason in (
        ({"stage": 3}, "zero_optimization.stage 3: Muon orthogonalizes whole matrices"),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "Muon's matrix products would run on the CPU"),
    ):
        (problem,) = (text for _, text in validate_config(tiny_config(corpus, zero_optimization=zero, **MUON)))
        assert reason in problem
    lion = {"type": "Lion", "params": {"momentum": 0.9}}
    (problem,) = (text for _, text in validate_config(tiny_config(corpus, optimizer=lion)))
    assert problem == "optimizer.params.momentum is 0.9, which optimizer.type Lion does not read"
    betas = [OptimizerChoice.model_validate({"type": kind}).params.betas for kind in ("AdamW", "Lion")]
    assert betas == [[0.9, 0.95], [0.9, 0.99]]

"""Step time: identities of the estimate, and published measurements."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_model
from tiny_runs import tiny_config
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.distributed.hardware import GpuSpec, get_gpu_spec
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.model.parameter_groups import HiddenMatrix, list_hidden_matrices
from megatron.planning import step_time
from megatron.planning.model_costs import estimate_forward_flops, list_layer_weights, plan_model
from megatron.planning.parallel_layouts import build_configured_layout
from megatron.planning.step_time import (
    LINK_EFFICIENCY,
    MAX_COUNTED_LAYERS,
    Cluster,
    StepTime,
    count_muon_work,
    estimate_step_time,
)
from megatron.training import projected_optimizers
from megatron.training.pipeline import compute_bubble

VOCABULARY = 50257
A100 = get_gpu_spec("a100-40gb")


def timed(sizes: ParallelSizes, method: str = "rotary", **keys: Any) -> StepTime:
    flat = {
        "precision": "bf16", "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
        "checkpoint_activations": False, "train_batch_size": 8 * sizes.data,
    }  # fmt: skip
    config = load_config(["2-7B", method]).config.replace(**(flat | keys))
    return estimate_step_time(plan_model(config), sizes, VOCABULARY, Cluster(A100, sizes.world_size))


def test_one_gpu_computes_at_its_mfu() -> None:
    found = timed(ParallelSizes(), "none")
    assert (found.waiting, found.communicating) == (0, 0)
    # Fused attention recomputes q·k: half of the forward FLOPs of the scores.
    one = estimate_forward_flops(plan_model(load_config(["2-7B", "none"]).config), VOCABULARY)
    again = 0.5 * one.attention * one.num_layers / one.training_flops_per_token
    assert found.mfu == pytest.approx(0.45 / (1 + again))


def test_recomputed_layers_cost_a_third_of_theirs_more() -> None:
    one = estimate_forward_flops(plan_model(load_config(["2-7B", "none"]).config), VOCABULARY)
    forward = one.num_layers * (one.linear + one.attention)
    plain, again = (timed(ParallelSizes(), "none", checkpoint_activations=value) for value in (False, True))
    tokens = 8 * 2048
    assert again.total - plain.total == pytest.approx(forward * tokens / (0.45 * 312e12))


def test_recomputed_attention_costs_its_scores_and_exchanges_once_more() -> None:
    one = estimate_forward_flops(plan_model(load_config(["2-7B", "none"]).config), VOCABULARY)
    plain, again = (timed(ParallelSizes(), "none", checkpoint_activations=value) for value in (False, "selective"))
    assert again.total - plain.total == pytest.approx(
        one.num_layers * one.attention * 8 * 2048 / (0.45 * 312e12), rel=1e-6
    )
    # Tensor ranks do not repeat sums of activations; context ranks gather keys and values again.
    tensor, context = (
        [timed(sizes, "none", checkpoint_activations=value).communicating for value in (False, "selective", True)]
        for sizes in (ParallelSizes(tensor=2), ParallelSizes(context=2))
    )
    assert tensor[0] == tensor[1] < tensor[2]
    assert context[0] < context[1] == context[2]


def test_a_chunked_output_layer_is_recomputed() -> None:
    one = estimate_forward_flops(plan_model(load_config(["2-7B", "none"]).config), VOCABULARY)
    # 10 sequences of 2,048 tokens have fewer than 2^30 logits, 11 have more.
    fits, exceeds = (
        timed(ParallelSizes(), "none", train_micro_batch_size_per_gpu=n, train_batch_size=8 * n) for n in (10, 11)
    )
    more = exceeds.computing - fits.computing * 11 / 10
    assert more == pytest.approx(one.output * 8 * 11 * 2048 / (0.45 * 312e12))


@pytest.mark.parametrize("steps", [4, 32])
def test_a_pipeline_waits_for_its_bubble(steps: int) -> None:
    found = timed(ParallelSizes(pipeline=4), gradient_accumulation_steps=steps, train_batch_size=steps)
    assert found.waiting / found.total == pytest.approx(
        compute_bubble(4, steps), abs=0.01
    )  # besides the transfer of states


def test_context_ranks_divide_the_work() -> None:
    one, four = timed(ParallelSizes(), "cdape_kerple_log"), timed(ParallelSizes(context=4), "cdape_kerple_log")
    assert four.computing == pytest.approx(one.computing / 4, rel=0.01)  # its blocks differ
    assert four.communicating > 0


def test_tensor_ranks_divide_the_work_and_exchange_heads_for_rows() -> None:
    def divided(method: str) -> float:
        return timed(ParallelSizes(tensor=4), method).computing / timed(ParallelSizes(), method).computing

    assert divided("rotary") == pytest.approx(0.25)
    assert divided("cdape_kerple_log") == pytest.approx(0.25, rel=0.01)  # its blocks differ
    plain, processed = (timed(ParallelSizes(tensor=4), m).communicating for m in ("kerple_log", "cdape_kerple_log"))
    # A quarter of queries and output, whole keys and values, three times for each of six sums of activations.
    assert processed / plain == pytest.approx(1 + 3 * (2 / 4 + 2) / (6 * 2), rel=1e-3)


def test_bytes_of_gradients() -> None:
    """2.78e9 parameters in bf16 over 16 GPUs on two nodes, at 25 GB/s."""
    zero = [
        timed(
            ParallelSizes(data=16),
            zero_optimization={"stage": stage},
            gradient_accumulation_steps=4,
            train_batch_size=64,
        )
        for stage in range(4)
    ]
    once = 2 * 2.78e9 * 15 / 16 / (LINK_EFFICIENCY * 25e9)
    times = [step.communicating / once for step in zero]
    assert times == pytest.approx([2, 2, 5, 12], rel=0.01)


GATED = tiny_config(
    Path(), num_layers=3, num_attention_heads=8, num_kv_heads=4, activation="swiglu", intermediate_size=192
)


@cache
def build_gated_model() -> nn.Module:
    """Build the gated model without memory."""
    with torch.device("meta"):
        return build_model(GATED.model, GATED.position, 61, seed=1)


def list_local_matrices(tensor: int) -> list[HiddenMatrix]:
    """List the local shards of the matrices of a tensor-parallel rank."""
    model = build_gated_model()
    found = []
    for matrix in list_hidden_matrices(model):
        rows, columns = matrix.parameter.shape
        is_output = matrix.blocks == 1 and len(matrix.sizes) == 1 and columns != GATED.model.hidden_size
        is_output |= any(matrix.parameter is layer.self_attention.linear_proj.weight for layer in model.decoder.layers)
        shape = (rows, columns // tensor) if is_output else (rows // tensor, columns)
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
        parameter.tensor_model_parallel = True
        parameter.partition_dim = int(is_output)
        parameter.partition_stride = 1 if is_output or matrix.blocks > 1 else len(matrix.sizes)
        found.append(HiddenMatrix(parameter, matrix.blocks, matrix.sizes))
    return found


class Ranks:
    """Replacement of `ProcessGroups` with the attributes that Muon needs."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.device = mesh, torch.device("meta")


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        (ParallelSizes(), 0),
        (ParallelSizes(data=2, context=2), 0),
        (ParallelSizes(data=3), 1),
        (ParallelSizes(data=8, context=2), 2),
        (ParallelSizes(tensor=2), 0),
        (ParallelSizes(tensor=2, data=3), 1),
        (ParallelSizes(tensor=4, data=2), 2),
    ],
)
@pytest.mark.parametrize("at_once", [1 << 25, 9000])
def test_newton_schulz_flops_match_the_rank_with_the_most(
    sizes: ParallelSizes, zero: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate equals torch's count of products on the rank with most work, without the exchange of matrices."""
    for module in (projected_optimizers, step_time):
        monkeypatch.setattr(module, "MUON_MATRICES_AT_ONCE", at_once)
    exchanged: list[int] = []

    def all_gather(values: Tensor, dim: int, ranks: Ranks, *names: str, reduce_grad: bool) -> Tensor:
        exchanged.append(values.numel() * ranks.mesh.tensor.size)
        return values.repeat(ranks.mesh.tensor.size, 1)

    summed: list[int] = []
    monkeypatch.setattr(projected_optimizers, "all_gather", all_gather)
    monkeypatch.setattr(
        projected_optimizers,
        "all_reduce_sum_",
        lambda t, ranks, *names: summed.append(t.numel()) if "data" in names else None,
    )
    matrices = list_local_matrices(sizes.tensor)
    total = sum(matrix.parameter.numel() for matrix in matrices)
    num_shards = sizes.data * sizes.context if zero else 1
    flops, gathered, cut = [], [], []
    for rank in range(sizes.world_size):
        optimizer = object.__new__(projected_optimizers.MuonWithAdamW)
        optimizer._ranks, optimizer._ns_steps = Ranks(Mesh(rank, sizes)), 5  # type: ignore[assignment]
        optimizer._dtype = optimizer._exchange_dtype = torch.float32
        updates = [torch.empty_like(matrix.parameter) for matrix in matrices]
        if num_shards > 1:
            updates = [torch.empty(2 * -(-total // (2 * num_shards)), device="meta")]
        exchanged.clear()
        summed.clear()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            optimizer._orthogonalize_group(matrices, updates)
        flops.append(counter.get_total_flops())
        gathered.append(sum(exchanged))
        cut.append(sum(summed))
    count_muon_work.cache_clear()
    work = count_muon_work(list_layer_weights(GATED.model), 3, 5, num_shards, sizes.tensor)
    assert work.flops == max(flops)
    assert sizes.tensor == 1 or work.num_orthogonalized == max(gathered)
    assert work.num_shared == max(cut)
    count_muon_work.cache_clear()


def test_muon_products_and_exchanges_count_once_per_step() -> None:
    adam, lion, one = (
        timed(ParallelSizes(), optimizer={"type": name, "params": {"lr": 1e-3}}) for name in ("AdamW", "Lion", "Muon")
    )
    assert adam == lion
    width, layers = 2560, 32
    square, wide = 4 * 6 * width**3, 2 * (4 * 4 + 2) * width**3  # queries, keys, values, output; feed-forward
    expected = 5 * layers * (square + wide) / (0.45 * 312e12)
    assert one.computing - adam.computing == pytest.approx(expected)
    assert one.communicating == 0
    more = timed(ParallelSizes(), optimizer={"type": "Muon", "params": {"lr": 1e-3, "ns_steps": 10}})
    assert more.computing - adam.computing == pytest.approx(2 * expected)
    eight, five = (
        timed(ParallelSizes(data=n), zero_optimization={"stage": 1}, optimizer={"type": "Muon", "params": {"lr": 1e-3}})
        for n in (8, 5)
    )
    assert eight.computing - adam.computing == pytest.approx(expected / 8)  # four whole layers each
    assert expected / 5 < five.computing - adam.computing < 1.1 * expected / 5  # some matrices are computed twice
    weights = list_layer_weights(load_config(["2-7B"]).config.model)
    whole = count_muon_work(weights, MAX_COUNTED_LAYERS, 5, 64, 2)
    assert count_muon_work(weights, 4 * MAX_COUNTED_LAYERS, 5, 64, 2).flops == pytest.approx(4 * whole.flops)


def test_groups_that_leave_a_node_share_its_network() -> None:
    cluster = Cluster(GpuSpec(1, 1, 1, nvlink_gb_per_s=300), num_gpus=64, gpus_per_node=8, network_gb_per_s=40)
    inside, over, four = (
        cluster.compute_ring_bandwidth(1, 8),
        cluster.compute_ring_bandwidth(1, 64),
        cluster.compute_ring_bandwidth(4, 16),
    )
    assert [rate / LINK_EFFICIENCY / 1e9 for rate in (inside, over, four)] == [300, 40, 10]
    assert cluster.compute_ring_bandwidth(32, 2) / LINK_EFFICIENCY / 1e9 == 5  # every GPU of the node has its own peer


PYTHIA = {
    "410M": (24, 1024, 16, 32, 32, 1, 1, 2540),
    "1.0B": (16, 2048, 8, 64, 16, 1, 1, 4830),
    "1.4B": (24, 2048, 16, 64, 16, 1, 1, 7120),
    "2.8B": (32, 2560, 32, 64, 16, 1, 1, 14240),
    "6.9B": (32, 4096, 32, 128, 8, 2, 2, 33500),
}
"""Layers, hidden size, heads, GPUs, micro-batch, tensor ranks, micro-batches per step, GPU hours on 40 GB A100s.
Source: Biderman et al. 2023 (arXiv 2304.01373, appendix); layouts from the configuration files of its repository."""


def pythia(layers: int, width: int, heads: int, micro: int, tensor: int, steps: int) -> Config:
    return Config.from_flat({
        "num_layers": layers, "hidden_size": width, "num_attention_heads": heads, "seq_length": 2048,
        "pos_emb": "rotary", "no_weight_tying": True, "gpt_j_residual": True, "precision": "fp16",
        "zero_optimization": {"stage": 1}, "checkpoint_activations": True, "model_parallel_size": tensor,
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps, "train_batch_size": 1024,
        "train_iters": 143000,
    })  # fmt: skip


@pytest.mark.parametrize("name", PYTHIA)
def test_published_gpu_hours(name: str) -> None:
    """Estimates are within 15% from 1.0B on; the smaller model took a third longer than its FLOPs suggest."""
    layers, width, heads, gpus, micro, tensor, steps, hours = PYTHIA[name]
    config = pythia(layers, width, heads, micro, tensor, steps)
    found = build_configured_layout(config, 50277, Cluster(A100, gpus, network_gb_per_s=50))
    ours = found.step_time.total * 143000 * gpus / 3600
    assert ours == pytest.approx(hours, rel=0.25 if name == "410M" else 0.15)

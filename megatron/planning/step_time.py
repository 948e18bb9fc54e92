"""Estimate of the time of an optimizer step: compute, pipeline bubble and communication, one after another.

    computing       FLOPs of the slowest pipeline stage, including recomputation, at `mfu` × the GPU's peak.
                    Recomputed are: the forward pass of layers or of attention (`checkpoint_activations`), the scores
                    of recomputed row blocks, half the scores of fused attention, and the output layer if the loss
                    processes tokens in chunks. Muon adds once per step the Newton-Schulz products (`MuonWork`) of
                    the rank that has the most.
    waiting         the pipeline bubble: P - 1 micro-batches of the slowest stage in addition to the m of the step
    communicating   bytes of each collective over the bandwidth of its link, without overlap

Bytes that a rank sends in a ring, with p parameters of the rank, n tokens of a micro-batch, D hidden size, K width of
keys (D without grouped queries), b bytes of the compute type, N = data × context ranks, T and C tensor and context
ranks, m micro-batches per step:

| transfer                   | bytes                                                                              |
|----------------------------|------------------------------------------------------------------------------------|
| ZeRO 0, 1: gradients       | 2 · p · b · (N - 1) / N, once per step                                             |
| ZeRO 2                     | p · b · (N - 1) / N per micro-batch, and once more for the weights                 |
| ZeRO 3                     | 3 · p · b · (N - 1) / N per micro-batch: weights twice, gradients once             |
| tensor: activation sums    | 2 · n · D · b · (T - 1) / T, four times per layer and micro-batch; six times if    |
|                            | whole layers are recomputed                                                        |
| tensor: score processor    | n · b · (2 · D / T + 2 · K) · (T - 1) / T, as often as in the next row: queries    |
|                            | and output exchange heads for rows; keys and values of all heads                   |
| context: keys and values   | n · K · b · (C - 1) for each (without a processor K / T), twice per layer and      |
|                            | micro-batch; three times if layers or attention are recomputed                     |
| pipeline: hidden states    | n · D · b to the next stage, and the same back                                     |
| Muon, ZeRO 1 and 2         | 2 · e · b · (N - 1) / N, e elements of the matrices that several ranks update, and |
|                            | tensor: 3 · e · b · (T - 1) / T, e of those that a rank updates; once per step     |

Ranks of a group inside one node communicate over the GPUs' links. A group that spans nodes shares each node's network
with all parallel groups that do so. Collectives reach `LINK_EFFICIENCY` of either bandwidth.

Not included: the rest of the optimizer step, data loading, kernel launches, CPU offloading, and the low efficiency of
small matrices. Small models, small micro-batches and long sequences with score matrices are therefore slower than
estimated. The estimate serves to compare layouts and to give the order of magnitude. docs/planning.md compares it with
published times.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from megatron.distributed.hardware import GpuSpec
from megatron.distributed.mesh import Axis, ParallelSizes
from megatron.options.model import MAX_LOGITS, get_kv_hidden_size, get_padded_vocab_size
from megatron.planning import activations
from megatron.planning.activations import BYTES_PER_ELEMENT
from megatron.planning.memory_estimate import MUON_MATRICES_AT_ONCE
from megatron.planning.model_costs import (
    TRAINING_TO_FORWARD_RATIO,
    PlannedModel,
    Shapes,
    count_rank_parameters,
    estimate_forward_flops,
    estimate_layer_flops,
    list_distinct_pipeline_stages,
    list_layer_weights,
)

LINK_EFFICIENCY = 0.75
"""Fraction of a link's nominal bandwidth that collectives reach; NCCL's tests show this for large messages."""


@dataclass(frozen=True)
class Cluster:
    """Cluster that a plan is made for."""

    gpu: GpuSpec
    num_gpus: int
    gpus_per_node: int = 8
    network_gb_per_s: float = 25.0
    """Bandwidth between nodes in GB/s, per node and direction: 25 for one 200 Gbit/s adapter, 200 for eight."""
    mfu: float = 0.45
    """Fraction of its peak that a GPU reaches while computing; recomputation counts as work."""
    gpu_options: str = ""
    """Command-line options that selected the GPU, reused in suggested commands."""

    @property
    def gpu_bytes(self) -> int:
        """Memory of one GPU, in bytes."""
        return round(self.gpu.gib * 2**30)

    def compute_ring_bandwidth(self, stride: int, size: int) -> float:
        """Return the bytes per second that each of `size` ranks, `stride` apart, can send in a ring."""
        if stride * size <= self.gpus_per_node:
            return LINK_EFFICIENCY * self.gpu.nvlink_gb_per_s * 1e9
        num_rings = min(stride, self.gpus_per_node)  # parallel groups that leave a node
        return LINK_EFFICIENCY * min(self.gpu.nvlink_gb_per_s, self.network_gb_per_s / num_rings) * 1e9


@dataclass(frozen=True)
class StepTime:
    """Time of one optimizer step, in seconds."""

    computing: float
    waiting: float
    communicating: float
    mfu: float
    """Useful FLOPs of the step over the FLOPs that all GPUs could compute in this time, as a run reports MFU."""

    @property
    def total(self) -> float:
        return self.computing + self.waiting + self.communicating


def estimate_step_time(
    planned: PlannedModel, sizes: ParallelSizes, vocab_size: int, cluster: Cluster, *, backend: str | None = None
) -> StepTime:
    """Estimate the time of one step of a layout.

    Args:
        planned: model of a configuration with resolved batch sizes (`megatron.config.execution.resolve_config`).
        sizes: sizes of the mesh.
        vocab_size: vocabulary size of the tokenizer.
        cluster: cluster to run on.
        backend: attention backend; overrides the configuration's.
    """
    config = planned.config
    training = config.training
    num_micro_batches, global_batch_size = training.gradient_accumulation_steps, training.train_batch_size or 0
    peak_tflops = config.logging.peak_tflops or cluster.gpu.get_peak_tflops(training.compute_dtype)
    pipeline_stages = list_distinct_pipeline_stages(config, sizes.pipeline)
    stages = [_StageEstimator(planned, sizes, vocab_size, cluster, stage, backend) for stage in pipeline_stages]
    flops_per_second = cluster.mfu * peak_tflops * 1e12
    compute_seconds, estimate_communication_seconds = max(
        ((stage.count_flops() / flops_per_second, stage.estimate_communication_seconds()) for stage in stages),
        key=lambda seconds: seconds[0] + seconds[1],
    )
    bubble_seconds = (sizes.pipeline - 1) * (compute_seconds + estimate_communication_seconds)
    total_communication_seconds = num_micro_batches * estimate_communication_seconds + max(
        stage.estimate_gradient_sync_seconds() + stage.estimate_muon_communication_seconds() for stage in stages
    )
    total_compute_seconds = (
        num_micro_batches * compute_seconds + max(stage.muon_work.flops for stage in stages) / flops_per_second
    )
    total = total_compute_seconds + bubble_seconds + total_communication_seconds
    useful_flops = (
        estimate_forward_flops(planned, vocab_size).training_flops_per_token
        * global_batch_size
        * config.model.seq_length
    )
    return StepTime(
        total_compute_seconds,
        bubble_seconds,
        total_communication_seconds,
        useful_flops / (total * sizes.world_size * peak_tflops * 1e12),
    )


@dataclass(frozen=True)
class MuonWork:
    """Work of Muon on whole matrices in one step, each value on the rank that has the most (`MuonWithAdamW`)."""

    flops: float = 0.0
    """FLOPs of Newton-Schulz. Each iteration on m × n, with r = min(m, n) and R = max(m, n), multiplies X·Xᵀ, squares
    it and multiplies both with X: 4·r²·R + 2·r³."""
    num_orthogonalized: int = 0
    """Elements of the matrices that a rank orthogonalizes, over all tensor ranks."""
    num_shared: int = 0
    """Elements of a tensor rank in matrices that several ranks orthogonalize."""


MAX_COUNTED_LAYERS = 1024
"""Largest number of layers whose matrices are counted one by one; more layers are extrapolated."""


@cache
def count_muon_work(
    weights: tuple[Shapes, ...], num_layers: int, ns_steps: int, num_shards: int, tensor: int
) -> MuonWork:
    """Return Muon's work on the matrices of a pipeline stage.

    ZeRO concatenates the matrices and gives each rank the same number of elements. A rank orthogonalizes every matrix
    that contains any of its elements, so several ranks may orthogonalize the same matrix. Without ZeRO each rank
    orthogonalizes all matrices. Among the weights that are processed together, tensor rank i modulo their number
    orthogonalizes the i-th matrix.

    Args:
        weights: weights of a layer (`list_layer_weights`).
        num_layers: layers of the stage.
        ns_steps: Newton-Schulz iterations.
        num_shards: ranks that ZeRO shards the optimizer states over.
        tensor: number of tensor ranks.
    """
    counted = min(num_layers, MAX_COUNTED_LAYERS)
    numels = [sum(rows * columns for rows, columns in shapes) // tensor for shapes in weights]
    size = 2 * -(-counted * sum(numels) // (2 * num_shards))  # DeepSpeed's shards have an even size
    flops: dict[int, list[float]] = defaultdict(lambda: [0.0] * tensor)
    # Index of the rank's next matrix among those that are processed together.
    indices: dict[int, int] = defaultdict(int)
    stepped: dict[int, int] = defaultdict(int)
    position, together, cut = 0, 0, 0
    for _ in range(counted):
        for shapes, numel in zip(weights, numels, strict=True):
            if together and together + numel * tensor > MUON_MATRICES_AT_ONCE:
                together = 0
                indices.clear()
            together += numel * tensor
            first, last = position // size, (position + numel - 1) // size
            cut += numel if last > first else 0
            for rank in range(first, last + 1):
                stepped[rank] += numel * tensor
                for rows, columns in shapes:
                    short, long = min(rows, columns), max(rows, columns)
                    flops[rank][indices[rank] % tensor] += ns_steps * (4.0 * short * short * long + 2.0 * short**3)
                    indices[rank] += 1
            position += numel
    scale = num_layers / counted
    return MuonWork(scale * max(map(max, flops.values())), round(scale * max(stepped.values())), cut)


class _StageEstimator:
    def __init__(
        self,
        planned: PlannedModel,
        sizes: ParallelSizes,
        vocab_size: int,
        cluster: Cluster,
        pipeline_stage: int,
        backend: str | None,
    ) -> None:
        config, self.backend = planned.config, backend
        self.config, self.sizes, self.cluster, self.pipeline_stage = config, sizes, cluster, pipeline_stage
        stage = Axis(pipeline_stage, sizes.pipeline)
        self.forward_flops = estimate_forward_flops(planned, vocab_size, stage)
        self.layer_types = planned.count_layer_types(stage)
        self.num_layers = sum(count for _, count in self.layer_types)
        self.num_tokens = config.training.train_micro_batch_size_per_gpu * config.model.seq_length // sizes.context
        self.bytes_per_element = BYTES_PER_ELEMENT[config.training.compute_dtype]
        self.key_bytes = self.num_tokens * get_kv_hidden_size(config.model) * self.bytes_per_element
        self.num_recomputed_passes = int(config.model.checkpoint_activations is True)
        self.num_attention_passes = int(config.model.checkpoint_activations is not False)
        """Recomputed forward passes: of whole layers, and of attention."""
        logits = self.num_tokens * get_padded_vocab_size(config.model, vocab_size) // sizes.tensor
        self.num_recomputed_logits = 1 if logits > MAX_LOGITS else 0
        self.num_processors = sum(count for layer, count in self.layer_types if layer.processor is not None)
        self.num_parameters = count_rank_parameters(planned, sizes, vocab_size, pipeline_stage)

    def count_flops(self) -> float:
        """Return the FLOPs of one rank for one micro-batch, including recomputation."""
        tensor, forward = self.sizes.tensor, self.forward_flops
        num_passes = TRAINING_TO_FORWARD_RATIO + self.num_recomputed_passes
        layer_flops = 0.0
        for layer, count in self.layer_types:
            num_score_passes = (
                TRAINING_TO_FORWARD_RATIO
                + self.num_attention_passes
                + activations.estimate_layer_activations(layer, self.sizes, self.backend).recomputed_fraction
            )
            score_flops = self.forward_flops if len(self.layer_types) == 1 else estimate_layer_flops(layer, 1)
            layer_flops += count * (
                forward.linear * num_passes / tensor
                + (score_flops.attention + score_flops.processor) * num_score_passes / tensor
            )
        is_last = self.pipeline_stage == self.sizes.pipeline - 1
        return self.num_tokens * (
            layer_flops + is_last * (TRAINING_TO_FORWARD_RATIO + self.num_recomputed_logits) * forward.output / tensor
        )

    def estimate_communication_seconds(self) -> float:
        """Return the communication time of one micro-batch, in seconds."""
        sizes, cluster = self.sizes, self.cluster
        hidden_bytes, seconds = self.num_tokens * self.config.model.hidden_size * self.bytes_per_element, 0.0
        num_passes, num_attention_passes = 2 + self.num_recomputed_passes, 2 + self.num_attention_passes
        if sizes.tensor > 1:
            all_reduce_bytes = 2 * hidden_bytes * (2 * num_passes)
            exchanged_bytes = 2 * hidden_bytes / sizes.tensor + 2 * self.key_bytes
            processor_bytes = exchanged_bytes * num_attention_passes
            sent_bytes = self.num_layers * all_reduce_bytes + self.num_processors * processor_bytes
            seconds += sent_bytes * (sizes.tensor - 1) / sizes.tensor / cluster.compute_ring_bandwidth(1, sizes.tensor)
        if sizes.context > 1:
            num_plain = self.num_layers - self.num_processors
            key_bytes = self.num_processors * self.key_bytes + num_plain * self.key_bytes / sizes.tensor
            sent_bytes = 2 * key_bytes * (sizes.context - 1) * num_attention_passes
            seconds += sent_bytes / cluster.compute_ring_bandwidth(sizes.tensor, sizes.context)
        if sizes.pipeline > 1:
            seconds += (
                2 * hidden_bytes / cluster.compute_ring_bandwidth(sizes.world_size // sizes.pipeline, sizes.pipeline)
            )
        return seconds

    @property
    def muon_work(self) -> MuonWork:
        """Work of Muon; zero for other algorithms."""
        options, sizes = self.config.optimizer.optimizer, self.sizes
        if options.algorithm != "Muon":
            return MuonWork()
        num_shards = sizes.data * sizes.context if self.config.training.zero_optimization.stage else 1
        weights = list_layer_weights(self.config.model)
        return count_muon_work(weights, self.num_layers, options.params.ns_steps, num_shards, sizes.tensor)

    def estimate_muon_communication_seconds(self) -> float:
        """Return the time to exchange matrices in one step, in seconds."""
        sizes, cluster, work = self.sizes, self.cluster, self.muon_work
        num_ranks, seconds = sizes.data * sizes.context, 0.0
        # Matrices are exchanged before normalization, in float32 if the compute type's range is too small.
        exchanged = 2 if self.config.training.compute_dtype == "bf16" else 4
        if work.num_shared:
            sent_bytes = 2 * work.num_shared * exchanged * (num_ranks - 1) / num_ranks
            seconds += sent_bytes / cluster.compute_ring_bandwidth(sizes.tensor, num_ranks)
        if sizes.tensor > 1:
            sent_bytes = (
                work.num_orthogonalized * (exchanged + 2 * self.bytes_per_element) * (sizes.tensor - 1) / sizes.tensor
            )
            seconds += sent_bytes / cluster.compute_ring_bandwidth(1, sizes.tensor)
        return seconds

    def estimate_gradient_sync_seconds(self) -> float:
        """Return the time to synchronize gradients, and weights that ZeRO shards, in one step, in seconds."""
        sizes, training = self.sizes, self.config.training
        num_ranks = sizes.data * sizes.context
        if num_ranks == 1:
            return 0.0
        num_micro_batches, stage = training.gradient_accumulation_steps, training.zero_optimization.stage
        num_transfers = 2 if stage < 2 else num_micro_batches + 1 if stage == 2 else 3 * num_micro_batches
        sent_bytes = num_transfers * self.num_parameters * self.bytes_per_element * (num_ranks - 1) / num_ranks
        return sent_bytes / self.cluster.compute_ring_bandwidth(sizes.tensor, num_ranks)

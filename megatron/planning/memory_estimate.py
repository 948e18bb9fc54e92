"""Device memory of training on one GPU: the peak over a few phases of a step.

Symbols: P parameters of a rank, N = data × context ranks (ZeRO shards over these), b bytes of the compute type, K
elements of a bucket (`reduce_bucket_size`, at most P). Weights and optimizer states take memory at all times, in bytes
per parameter:

| ZeRO             | weights | optimizer                                                                     |
|------------------|---------|-------------------------------------------------------------------------------|
| 0                | b       | 8 for Adam's two moments; 12 with the float32 masters of a half type          |
| 1, 2             | b       | 12 / N                                                                        |
| 3                | b / N   | 12 / N                                                                        |

Lion stores one moment instead of two, and Muon one for the layers' matrices: 4 bytes less for each of these parameters.
Their step creates float32 updates of the same size. Muon also gathers the matrices that it orthogonalizes together
(`training/projected_optimizers.py`): two float32 copies and at most four in the compute type.

During the backward pass gradients grow while activations are freed (a test sums the tensors of real engines):

| ZeRO                | before the backward | in the         | while they are    | in the step  |
|                     | pass, if they       | backward pass  | reduced           |              |
|                     | accumulate          |                |                   |              |
|---------------------|---------------------|----------------|-------------------|--------------|
| 0                   | b                   | b              | b more, at most   | b and, in    |
|                     |                     |                | 500 M elements    | half, 4 more |
| 1                   | b                   | b              | 4 / N, and b · K  | 4 / N        |
|                     |                     |                | if N > 1          |              |
| 1, bf16 that        | 4 and b; in a       | the same       | b · K             | the same     |
| accumulates         | pipeline 4          |                |                   |              |
| 2                   | 4 / N (fp16: b / N) | b · K more     | b · K more if N>1 | 4 / N        |
| 3                   | bf16 4 / N, else    | and b · K, and gathered weights    | 4 / N        |
|                     | b / N               |                                    |              |

Gradients accumulate with more than one micro-batch per step or with a pipeline. Tensors offloaded to the CPU take no
device memory, with three exceptions: a buffer for the gradient of the largest parameter (ZeRO 1 and 2), the float32
sums of bf16 gradients (ZeRO 2), and accumulated gradients with one bucket of their type between micro-batches (ZeRO 1).
ZeRO 3 keeps its shard of the gradients at all times. At the loss it also keeps its bucket and the gathered weights that
are reused within `stage3_max_reuse_distance` elements; nothing releases these, and they amount to half that distance.
The estimate excludes the memory of CUDA, NCCL and the allocator, for which `fits` reserves a tenth.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes
from megatron.options.model import compute_loss_chunk_length, get_padded_vocab_size
from megatron.planning import activations
from megatron.planning.activations import BYTES_PER_ELEMENT, DEFAULT_GPU_BYTES
from megatron.planning.model_costs import (
    PlannedModel,
    count_layer_parameters,
    count_rank_parameters,
    list_distinct_pipeline_stages,
    list_layer_matrices,
)

RESERVED_FRACTION = 0.1
"""Fraction of a GPU's memory reserved for everything that the formulas do not count."""

MUON_MATRICES_AT_ONCE = 1 << 25
"""Elements of the matrices that Muon gathers and orthogonalizes together; a larger matrix is processed alone."""

ALLREDUCE_BUCKET_SIZE = 500_000_000
"""Elements of DeepSpeed's bucket without ZeRO."""

CAST_ELEMENTS = 1 << 25
"""Fewest elements of gradients that are cast together, before an exchange or a sum in another type."""


@dataclass(frozen=True)
class StepPhase:
    """Memory in one phase of a step, in bytes, without weights and optimizer states."""

    name: str
    gradients: int = 0
    buffers: int = 0
    """Buckets, gathered parameters, and buffers between pipeline stages."""
    activations: int = 0
    """Tensors saved for the backward pass by all micro-batches in flight."""
    logits: int = 0
    """Logits, copies of them, and the gradient."""
    workspace: int = 0
    """Workspace of a layer's backward pass: recomputed activations, gradients inside it, score matrices."""
    step: int = 0
    """Float32 gradients that the optimizer step reads."""

    @property
    def total(self) -> int:
        return self.gradients + self.buffers + self.activations + self.logits + self.workspace + self.step


VALIDATION = "validation"
"""Phase between steps. It uses no memory of CUDA graphs."""
COMPONENTS = ("gradients", "buffers", "activations", "logits", "workspace", "step")
"""Components of a phase, which add up to its total."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated device memory of one rank, in bytes."""

    stage: int
    """Index of the pipeline stage."""
    weights: int
    optimizer: int
    """Moments and float32 masters."""
    phases: tuple[StepPhase, ...]
    saved_maps: int
    """Score matrices among the activations, including a score processor's feature maps."""
    workspace_maps: int
    """Score matrices in the largest `workspace`, including a processor's, and their gradients."""
    graphs: int = 0
    """Memory reserved by the CUDA graphs of both passes: the peak of a micro-batch, with its gradients."""

    @property
    def total_with_graphs(self) -> int:
        """Upper bound of peak memory with CUDA graphs; gradients may be part of their memory."""
        rest = max(x.total if x.name == VALIDATION else x.gradients + x.buffers + x.step for x in self.phases)
        return self.weights + self.optimizer + self.graphs + rest

    @property
    def peak(self) -> StepPhase:
        """Phase with the highest memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def total(self) -> int:
        """Peak memory of the rank, in bytes."""
        return self.weights + self.optimizer + self.peak.total

    def get_largest(self, part: str) -> int:
        """Return the largest value of a component (`COMPONENTS`) over all phases."""
        return max(getattr(phase, part) for phase in self.phases)

    def drop_score_matrices(self) -> "MemoryEstimate":
        """Return a lower bound for any attention backend: the estimate without saved or temporary score matrices."""
        phases = tuple(
            replace(
                phase,
                activations=max(0, phase.activations - self.saved_maps),
                workspace=max(0, phase.workspace - self.workspace_maps),
            )
            for phase in self.phases
        )
        graphs = max(0, self.graphs - self.saved_maps - self.workspace_maps)
        return replace(self, phases=phases, saved_maps=0, workspace_maps=0, graphs=graphs)

    def fits(self, gpu_gib: float, reserved_fraction: float = RESERVED_FRACTION) -> bool:
        """Return True if the estimate leaves `reserved_fraction` of a GPU of `gpu_gib` GiB free."""
        return self.total <= (1 - reserved_fraction) * gpu_gib * 2**30

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: each component at its largest, and the name of the peak phase."""
        parts = {part: self.get_largest(part) for part in COMPONENTS}
        maps = {"saved_maps": self.saved_maps, "workspace_maps": self.workspace_maps}
        states = {"stage": self.stage, "weights": self.weights, "optimizer": self.optimizer}
        maps |= {"graphs": self.graphs, "total_with_graphs": self.total_with_graphs}
        return states | parts | maps | {"peak_phase": self.peak.name, "total": self.total}


def estimate_memory(
    planned: PlannedModel,
    sizes: ParallelSizes,
    vocab_size: int,
    *,
    backend: str | None = None,
    pipeline_stage: int | None = None,
    gpu_bytes: int = DEFAULT_GPU_BYTES,
) -> MemoryEstimate:
    """Estimate the memory of a layout on one GPU.

    Args:
        planned: model of a configuration resolved by `megatron.training.resolve_run` (batch sizes and ZeRO stage).
        sizes: sizes of the mesh.
        vocab_size: vocabulary size of the tokenizer.
        backend: attention backend; overrides the configuration's.
        pipeline_stage: index of the pipeline stage; the one with the highest memory if None.
        gpu_bytes: device memory, by which kernels size their workspace.
    """
    if pipeline_stage is None:
        stages = list_distinct_pipeline_stages(planned.config, sizes.pipeline)
    else:
        stages = [pipeline_stage]
    estimates = [_StageMemory(planned, sizes, vocab_size, backend, stage, gpu_bytes).estimate() for stage in stages]
    return max(estimates, key=lambda estimate: estimate.total)


class _StageMemory:
    """Memory of one pipeline stage."""

    def __init__(
        self,
        planned: PlannedModel,
        sizes: ParallelSizes,
        vocab_size: int,
        backend: str | None,
        pipeline_stage: int,
        gpu_bytes: int,
    ) -> None:
        config = planned.config
        model = config.model
        self.config, self.sizes, self.stage = config, sizes, pipeline_stage
        self.num_parameters = count_rank_parameters(planned, sizes, vocab_size, pipeline_stage)
        types = planned.count_layer_types(Axis(pipeline_stage, sizes.pipeline))
        self.layer_parameters = max(count_layer_parameters(layer, sizes.tensor) for layer, _ in types)
        self.bytes_per_element = BYTES_PER_ELEMENT[config.training.compute_dtype]
        self.micro_batch_size = config.training.train_micro_batch_size_per_gpu
        self.num_tokens = self.micro_batch_size * model.seq_length // sizes.context
        self.hidden_bytes = self.num_tokens * model.hidden_size * self.bytes_per_element
        self.local_vocab_size = get_padded_vocab_size(model, vocab_size) // sizes.tensor
        self.is_first, self.is_last = pipeline_stage == 0, pipeline_stage == sizes.pipeline - 1
        self.num_layers = sum(count for _, count in types)
        self.num_micro_batches = config.training.gradient_accumulation_steps
        # 1F1B: each stage has one more micro-batch in flight than it has stages after it.
        self.num_in_flight = min(self.num_micro_batches, sizes.pipeline - pipeline_stage)
        context_ranks = {0, sizes.context - 1}  # the context ranks that differ most
        layers = [
            [activations.estimate_layer_activations(layer, sizes, backend, index, gpu_bytes) for index in context_ranks]
            for layer, _ in types
        ]

        def get_largest(name: str) -> list[int]:
            return [max(getattr(layer, name) for layer in of_type) for of_type in layers]

        # Layers may differ: saved memory is their mean, workspace is that of the largest.
        self.saved, self.saved_maps = (
            -(-sum(size * count for size, (_, count) in zip(get_largest(name), types, strict=True)) // self.num_layers)
            for name in ("saved_bytes", "saved_map_bytes")
        )
        largest = max(
            (layer for of_type in layers for layer in of_type),
            key=lambda layer: layer.workspace_bytes - layer.freed_bytes,
        )
        self.workspace, self.freed = largest.workspace_bytes, largest.freed_bytes
        self.workspace_maps = largest.workspace_map_bytes
        self.largest_saved, self.largest_maps = max(get_largest("saved_bytes")), max(get_largest("saved_map_bytes"))
        self.input_bytes = layers[0][0].input_bytes
        # Layers with the same window share their masks.
        shared = zip(types, get_largest("shared_bytes"), strict=True)
        self.shared_bytes = sum({layer.config.position.window: size for (layer, _), size in shared}.values())

    def estimate(self) -> MemoryEstimate:
        """Estimate all phases of a step."""
        states = _ModelStates(self.config, self.sizes, self.num_parameters, self.num_layers)
        is_recomputed, num_layers = self.config.model.checkpoint_activations is True, self.num_layers
        workspace, recomputed, freed, kept_per_layer = self.workspace, 0, self.freed, self.saved
        saved_maps, workspace_maps = num_layers * self.saved_maps, self.workspace_maps
        if is_recomputed:
            recomputed_layers = min(self.config.model.checkpoint_num_layers, num_layers)
            # Activations of the recomputed layers exist during their backward pass.
            recomputed = recomputed_layers * self.largest_saved - self.input_bytes
            workspace, freed = workspace + recomputed - freed, 0
            workspace_maps += recomputed_layers * self.largest_maps
            saved_maps = 0
            kept_per_layer = -(-num_layers // recomputed_layers) * self.input_bytes // num_layers
        layers = num_layers * kept_per_layer
        beside = 2 * self.hidden_bytes if self.is_last else 0  # the final norm
        beside += 0 if self.is_last else self.hidden_bytes  # the output sent to the next stage
        in_flight = (self.num_in_flight - 1) * (layers + beside)
        # A stage has one buffer per micro-batch in flight, the input of its first layer, and one for a gradient.
        received = 0 if self.is_first else self.hidden_bytes
        handed = self.num_in_flight * received + (0 if self.is_last else self.hidden_bytes)
        handed += self._count_offload_bytes() + self.num_in_flight * self.shared_bytes
        in_flight -= self.num_in_flight * received
        # A stage keeps its output until the backward pass of that micro-batch ends.
        output = self.hidden_bytes if not self.is_last else 0

        def build_phase(name: str, gradients: int = 0, buffers: int = 0, **parts: int) -> StepPhase:
            return StepPhase(name, gradients, handed + buffers, **parts)

        held = states.accumulated, states.held_bytes
        kept, logits = in_flight + layers + beside, self._count_logit_bytes()
        phases = [build_phase("the loss", *held, activations=kept, logits=logits)]
        graphs = phases[0].activations + phases[0].logits
        # Gradients grow layer by layer while activations shrink: extremes are at both ends, and when a bucket is full.
        head = self.local_vocab_size * self.config.model.hidden_size if self.is_last else 0
        for name, done in (("the top layer's backward pass", 0), ("the bottom layer's backward pass", num_layers - 1)):
            elements = min(head + done * self.layer_parameters, self.num_parameters)
            phases.append(
                build_phase(
                    name, states.count_gradient_bytes(elements), states.count_buffer_bytes(elements),
                    activations=in_flight + output + layers - done * kept_per_layer - freed, workspace=workspace,
                )
            )  # fmt: skip
            graphs = max(graphs, phases[-1].activations + workspace + self.bytes_per_element * elements)
        graphs = max(graphs, self.bytes_per_element * self.num_parameters)
        if states.reduces_early:
            done = min(max((states.bucket - head) // max(self.layer_parameters, 1), 0), num_layers - 1)
            phases.append(
                build_phase(
                    "a bucket's reduction", states.count_gradient_bytes(states.bucket), states.reduce_buffers,
                    activations=in_flight + output + layers - done * kept_per_layer,
                    workspace=recomputed,  # the layer that filled the bucket has finished
                )
            )  # fmt: skip
        reduced = states.reduce_gradients, states.reduce_buffers
        phases.append(build_phase("the reduction of gradients", *reduced, step=states.reduce_step))
        phases.append(build_phase("the optimizer's step", states.step_gradients, step=states.step))
        if activations.uses_compiled_regions(self.config) and self.config.training.eval_interval:
            held = held if states.zero_stage == 3 else (0, 0)
            logits = self._count_logit_bytes(validates=True)  # more than in training, whose loss is compiled
            phases.append(build_phase(VALIDATION, *held, activations=2 * self.hidden_bytes, logits=logits))
        return MemoryEstimate(
            self.stage, states.weights, states.optimizer, tuple(phases), saved_maps * self.num_in_flight,
            workspace_maps, graphs,
        )  # fmt: skip

    def _count_offload_bytes(self) -> int:
        """Return the bytes of the buffer for offloaded gradients of ZeRO 1 and 2, as large as the largest parameter."""
        zero, model = self.config.training.zero_optimization, self.config.model
        if zero.stage not in (1, 2) or zero.offload_optimizer.device != "cpu":
            return 0
        has_vocabulary = self.is_first or self.is_last
        embedding = self.local_vocab_size * model.hidden_size if has_vocabulary else 0
        return self.bytes_per_element * max(embedding, max(list_layer_matrices(model)) // self.sizes.tensor)

    def _count_logit_bytes(self, *, validates: bool = False) -> int:
        """Return the bytes of the logits that the loss processes together. Validation compiles nothing."""
        if not self.is_last:
            return 0
        b, model = self.bytes_per_element, self.config.model
        if activations.uses_compiled_regions(self.config) and not validates:
            per_logit = 2 * b  # the logits and their gradient; the compiled loss writes nothing else of this size
        else:
            # cross_entropy: log-probabilities, and in training the gradients of the loss and of the logits, else the
            # logits, in float32. With tensor parallelism it works in place: a float32 copy, and the logits or their
            # gradient in a half type.
            per_logit = (8 if validates else 12) if self.sizes.tensor == 1 else 4 + (b if b < 4 else 0)
            per_logit += 4 if model.final_logit_softcapping is not None else 0  # the hyperbolic tangents
            per_logit += 4 if self.config.training.z_loss and not validates else 0  # of the labels' logits
        scored = compute_loss_chunk_length(
            self.num_tokens // self.micro_batch_size, self.micro_batch_size, self.local_vocab_size
        )
        return scored * self.micro_batch_size * self.local_vocab_size * per_logit


class _ModelStates:
    """Weights, gradients and optimizer states as ZeRO shards them (see the tables above)."""

    def __init__(self, config: Config, sizes: ParallelSizes, num_parameters: int, num_layers: int) -> None:
        training = config.training
        zero, b = training.zero_optimization, BYTES_PER_ELEMENT[training.compute_dtype]
        num_shards, is_half = sizes.data * sizes.context, b < 4
        shard_size = -(-num_parameters // num_shards)
        has_pipeline = sizes.pipeline > 1
        accumulates = has_pipeline or training.gradient_accumulation_steps > 1
        self.zero_stage, self.bytes_per_element, self.num_parameters = zero.stage, b, num_parameters
        # requested by engine.build_deepspeed_config
        self.keeps_fp32 = training.compute_dtype == "bf16" and accumulates and zero.stage > 0
        self.bucket = min(zero.reduce_bucket_size, num_parameters)
        # training/zero_optimizer.py allocates a bucket when it is full; DeepSpeed holds it for the whole backward pass.
        self.is_flat = (
            zero.stage in (1, 2)
            and not zero.overlap_comm
            and zero.offload_optimizer.device != "cpu"
            and not (zero.stage == 1 and self.keeps_fp32)
        )
        is_offloaded = zero.offload_optimizer.device == "cpu"
        # DeepSpeed uses another optimizer in this case, which neither offloads nor holds a bucket.
        has_bf16_optimizer = zero.stage == 1 and self.keeps_fp32 and not is_offloaded
        self.reduces_early = zero.stage >= 2 and self.bucket < num_parameters
        bucket_type = 4 if zero.stage == 1 and self.keeps_fp32 and is_offloaded else b
        bucket_bytes = bucket_type * self.bucket * (2 if zero.overlap_comm else 1)
        holds_bucket = zero.stage > 0 and not self.is_flat and not has_bf16_optimizer
        self.bucket_bytes = bucket_bytes if num_shards > 1 or holds_bucket else 0
        self.held_bytes = 0
        """Buckets and gathered parameters while the loss is computed."""
        if zero.stage == 3:
            # Parameters that are reused soon stay gathered. The backward pass reaches one after passing everything that
            # followed it in the forward pass, twice.
            self.held_bytes = bucket_bytes + b * min(num_parameters, zero.stage3_max_reuse_distance // 2)
        elif zero.stage == 1 and holds_bucket and accumulates:
            self.held_bytes = bucket_bytes  # from the first to the last micro-batch of a step
        self.weights = b * (shard_size if zero.stage == 3 else num_parameters)
        stepped = shard_size if zero.stage else num_parameters
        algorithm, matrices = config.optimizer.optimizer.algorithm, list_layer_matrices(config.model)
        one_moment = {
            "AdamW": 0,
            "Lion": stepped,
            "Muon": stepped * num_layers * sum(matrices) // sizes.tensor // num_parameters,
        }[algorithm]
        self.optimizer = (12 if is_half or zero.stage else 8) * stepped - 4 * one_moment
        updates = 4 * one_moment
        if algorithm == "Muon":
            total, largest = num_layers * sum(matrices), max(matrices)
            together = min(max(MUON_MATRICES_AT_ONCE, largest), total)
            held, cut = together, 0
            if zero.stage and num_shards > 1:  # matrices it updates elements of; two are shared
                held = min(together, total // num_shards + 2 * largest)
                cut = min(together, (num_shards - 1) * largest) // sizes.tensor
            updates += (8 + 4 * b) * held + b * cut
        self.partition = 4 * shard_size
        is_whole = self.is_flat and not accumulates  # then the optimizer's float32 gradients directly
        self.summed = (4 if self.keeps_fp32 or is_whole else b) * shard_size  # for ZeRO 2 and 3
        if is_offloaded:
            # In host memory, unless ZeRO 2 sums in float32: that shard is copied to the host once per step.
            self.summed = 4 * shard_size if zero.stage == 2 and self.keeps_fp32 else 0
        self.gathered = 0
        self.step, self.step_gradients = self.partition, 0
        self.reduce_step, self.reduce_buffers = 0, self.bucket_bytes
        if zero.stage == 0:
            self.accumulated = b * num_parameters if accumulates else 0
            self.step_gradients = b * num_parameters
            self.step = 4 * num_parameters if is_half else 0
            self.bucket_bytes, self.reduce_gradients = 0, b * num_parameters
            self.reduce_buffers = b * min(ALLREDUCE_BUCKET_SIZE, num_parameters) if num_shards > 1 else 0
        elif has_bf16_optimizer:
            # Outside a pipeline DeepSpeed keeps the gradients of a micro-batch after adding them.
            self.accumulated = (4 if has_pipeline else 4 + b) * num_parameters
            self.step_gradients = self.reduce_gradients = self.accumulated
            sent = max(self.bucket, CAST_ELEMENTS) if num_shards > 1 else CAST_ELEMENTS
            self.reduce_buffers = b * min(sent, num_parameters)
            self.step = 0
        elif zero.stage == 1:
            type_bytes = 4 if self.keeps_fp32 else b
            self.accumulated = type_bytes * num_parameters if accumulates else 0
            self.reduce_gradients, self.reduce_step = type_bytes * num_parameters, self.partition
        else:
            # ZeRO 3 always keeps its shard of the gradients.
            self.accumulated = self.summed if accumulates or zero.stage == 3 else 0
            self.reduce_gradients, self.reduce_step = b * self.bucket, self.summed
            if self.is_flat and self.keeps_fp32 and num_shards == 1:
                self.reduce_buffers = 4 * min(CAST_ELEMENTS, self.bucket)
            self.step += self.summed if self.summed != self.partition else 0
        if zero.stage == 3:
            self.gathered = b * (
                min(num_parameters, zero.stage3_max_live_parameters)
                + min(num_parameters, zero.stage3_prefetch_bucket_size)
            )
            self.step = 4 * min(shard_size, zero.sub_group_size)
            self.reduce_buffers += self.gathered
        self.step += updates
        if is_offloaded:
            # Masters, moments and the step's gradients are in host memory.
            self.optimizer = self.step = self.reduce_step = 0
        if zero.offload_param.device == "cpu":
            self.weights = 0  # except those in use, counted as buffers

    def count_gradient_bytes(self, elements: int) -> int:
        """Return the bytes of gradients after the backward pass has computed this many elements."""
        b = self.bytes_per_element
        if self.zero_stage < 2:
            return self.accumulated or b * elements
        is_reduced = elements >= self.bucket
        held = self.accumulated or (self.summed if is_reduced else 0)
        return held + b * min(elements, self.bucket)

    def count_buffer_bytes(self, elements: int) -> int:
        """Return the bytes of buckets after the backward pass has computed this many elements of gradients."""
        return self.gathered + (0 if self.is_flat or not elements else self.bucket_bytes)

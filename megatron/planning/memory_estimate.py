"""The memory that training takes on one GPU, by part.

P parameters that a rank holds, N = data × context ranks (ZeRO divides over these), b bytes of the compute type. Per
parameter, as DeepSpeed's optimizers keep them (a test sums the tensors of real engines):

| ZeRO                            | weights | gradients                         | optimizer | in the step |
|---------------------------------|---------|-----------------------------------|-----------|-------------|
| 0, fp32                         | 4       | 4                                 | 8         |             |
| 0, half                         | b       | b                                 | 12        | 4           |
| 1                               | b       | b / N; b while they accumulate    | 12 / N    | 4 / N       |
| 1, bf16 that accumulates        | b       | 4, in float32; b more outside a pipeline | 12 / N |         |
| 2                               | b       | b / N; 4 / N if bf16 accumulates  | 12 / N    | 4 / N       |
| 3                               | b / N   | as in 2, at all times             | 12 / N    | 4 / N       |

The optimizer's 12 bytes are Adam's two moments and the float32 master of each weight. "Accumulates" means: more than
one micro-batch per step, or a pipeline.

What is offloaded to the CPU takes none.
Not in it: what CUDA, NCCL and the allocator take for themselves, which the tenth to spare in `fits` is for.
"""

from dataclasses import dataclass

from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes, pipeline_layer_range
from megatron.options.model import count_scored_at_once, padded_vocab_size
from megatron.planning import activations
from megatron.planning.activations import BYTES_PER_ELEMENT
from megatron.planning.model_costs import count_rank_parameters

RESERVED_FRACTION = 0.1
"""Of a GPU's memory, for what no formula here counts."""

ALLREDUCE_BUCKET_SIZE = 500_000_000
"""Elements of DeepSpeed's bucket without ZeRO."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank."""

    stage: int
    """The pipeline stage that it is for."""
    weights: int
    gradients: int
    optimizer: int
    """Moments and float32 masters."""
    activations: int
    """Kept for the backward pass, of all micro-batches that are in flight."""
    logits: int
    """Logits, their float32 copy, and the gradient: on the last stage, before the layers' backward pass begins."""
    working: int
    """The most that the backward pass of a layer has besides: its recomputed activations, gradients inside it, maps."""
    buffers: int
    """ZeRO's buckets and gathered parameters, and what pipeline stages hand each other."""
    step: int
    """What the optimizer's step has besides, when no activation is left."""
    kept_maps: int
    """Of the activations: score maps, and those of a score processor."""
    working_maps: int
    """Score maps and a processor's, with their gradients, at the worst moment of attention's own backward pass."""

    @property
    def total(self) -> int:
        """At the worst moment."""
        transient = max(self.activations + max(self.logits, self.working), self.step)
        return self.weights + self.gradients + self.optimizer + self.buffers + transient

    def fits(self, gpu_gib: float, reserved_fraction: float = RESERVED_FRACTION) -> bool:
        """Does it leave `reserved_fraction` of a GPU of so many GiB?"""
        return self.total <= (1 - reserved_fraction) * gpu_gib * 2**30


def estimate_memory(
    config: Config,
    sizes: ParallelSizes,
    vocab_size: int,
    *,
    backend: str | None = None,
    pipeline_stage: int | None = None,
) -> MemoryEstimate:
    """What a layout takes on one GPU.

    Args:
        config: settled by `megatron.training.resolve_run` (which decides the batch, and ZeRO's stage where it must).
        sizes: the mesh.
        vocab_size: of the tokenizer.
        backend: how attention is computed, instead of the configuration's attention_backend.
        pipeline_stage: of the pipeline; the one that needs most if absent.

    Raises:
        UserError: nothing is known of the position encoding or the score processor.
    """
    pipeline_stages = range(sizes.pipeline) if pipeline_stage is None else (pipeline_stage,)
    return max(
        (
            _estimate_stage_memory(config, sizes, vocab_size, backend, candidate_stage)
            for candidate_stage in pipeline_stages
        ),
        key=lambda m: m.total,
    )


def _estimate_stage_memory(
    config: Config, sizes: ParallelSizes, vocab_size: int, backend: str | None, pipeline_stage: int
) -> MemoryEstimate:
    states = _ModelStates(config, sizes, count_rank_parameters(config, sizes, vocab_size, pipeline_stage))
    num_tokens, bytes_per_element = _count_local_tokens(config, sizes), BYTES_PER_ELEMENT[config.training.compute_dtype]
    model = config.model
    is_first, is_last = pipeline_stage == 0, pipeline_stage == sizes.pipeline - 1
    num_micro_batches = config.training.gradient_accumulation_steps
    hidden_bytes = num_tokens * model.hidden_size * bytes_per_element

    context_ranks = {0, sizes.context - 1}  # the ranks of a sequence that differ most
    layers = [activations.estimate_layer_activations(config, sizes, backend, index) for index in context_ranks]
    saved, workspace, input_bytes = (
        max(layer.saved_bytes for layer in layers),
        max(layer.workspace_bytes for layer in layers),
        layers[0].input_bytes,
    )
    kept_maps, working_maps = (
        max(getattr(layer, name) for layer in layers) for name in ("saved_map_bytes", "workspace_map_bytes")
    )
    num_layers = len(pipeline_layer_range(model.num_layers, Axis(pipeline_stage, sizes.pipeline)))
    if model.checkpoint_activations:
        recomputed_layers = min(model.checkpoint_num_layers, num_layers)
        activation_bytes = -(-num_layers // recomputed_layers) * input_bytes
        workspace += (
            recomputed_layers * saved - input_bytes
        )  # its activations are there again while it is differentiated
        working_maps += recomputed_layers * kept_maps
        kept_maps = 0
    else:
        activation_bytes = num_layers * saved
    activation_bytes += 2 * hidden_bytes if is_last else 0  # the final norm
    activation_bytes += hidden_bytes if sizes.pipeline > 1 and not is_last else 0  # what was handed on
    # 1F1B: stage i has begun as many micro-batches as there are stages after it, and one more.
    num_in_flight = min(num_micro_batches, sizes.pipeline - pipeline_stage)
    activation_bytes *= num_in_flight

    logit_bytes = 0
    if is_last:
        # cross_entropy: log-probabilities, the loss's gradient and the logits', in float32. Divided over ranks it works
        # in place: the copy in float32, and beside it the logits or their gradient in a half type.
        per_logit = 12 if sizes.tensor == 1 else 4 + (bytes_per_element if bytes_per_element < 4 else 0)
        local_vocab_size, micro_batch_size = (
            padded_vocab_size(config.model, vocab_size) // sizes.tensor,
            config.training.train_micro_batch_size_per_gpu,
        )
        logit_bytes = (
            count_scored_at_once(num_tokens // micro_batch_size, micro_batch_size, local_vocab_size)
            * micro_batch_size
            * local_vocab_size
            * per_logit
        )
    # A stage receives each micro-batch, and each gradient, into a buffer of its own.
    receive_buffer_bytes = num_micro_batches * hidden_bytes * ((not is_first) + (not is_last))
    return MemoryEstimate(
        pipeline_stage, states.weights, states.gradients, states.optimizer, activation_bytes, logit_bytes, workspace,
        states.buffers + receive_buffer_bytes, states.step, num_layers * kept_maps * num_in_flight, working_maps,
    )  # fmt: skip


def _count_local_tokens(config: Config, sizes: ParallelSizes) -> int:
    """Tokens of a micro-batch on one rank."""
    return config.training.train_micro_batch_size_per_gpu * config.model.seq_length // sizes.context


class _ModelStates:
    """Weights, gradients and optimizer states as ZeRO divides them; the table above."""

    def __init__(self, config: Config, sizes: ParallelSizes, num_parameters: int) -> None:
        training = config.training
        zero, bytes_per_element = training.zero_optimization, BYTES_PER_ELEMENT[training.compute_dtype]
        num_shards, is_half = sizes.data * sizes.context, bytes_per_element < 4
        shard_size = -(-num_parameters // num_shards)
        has_pipeline = sizes.pipeline > 1
        accumulates = has_pipeline or training.gradient_accumulation_steps > 1
        accumulates_in_fp32 = training.compute_dtype == "bf16" and accumulates  # engine.deepspeed_config asks for it
        bucket_size = min(zero.reduce_bucket_size, num_parameters) * (2 if zero.overlap_comm else 1)
        self.weights = bytes_per_element * (shard_size if zero.stage == 3 else num_parameters)
        self.optimizer = (12 if is_half or zero.stage else 8) * (shard_size if zero.stage else num_parameters)
        self.step = 4 * shard_size
        self.buffers = bytes_per_element * bucket_size
        if zero.stage == 0:
            self.gradients = bytes_per_element * num_parameters
            self.step = 4 * num_parameters if is_half else 0
            self.buffers = bytes_per_element * min(ALLREDUCE_BUCKET_SIZE, num_parameters) if num_shards > 1 else 0
        elif zero.stage == 1 and accumulates_in_fp32:
            self.gradients = (4 if has_pipeline else 4 + bytes_per_element) * num_parameters
            self.step = self.buffers = 0
        elif zero.stage == 1:
            self.gradients = bytes_per_element * (num_parameters if accumulates else shard_size)
        else:
            self.gradients = (4 if accumulates_in_fp32 else bytes_per_element) * shard_size
        if zero.stage == 3:
            max_gathered = min(num_parameters, zero.stage3_max_live_parameters) + min(
                num_parameters, zero.stage3_prefetch_bucket_size
            )
            self.buffers += bytes_per_element * max_gathered
            self.step = 4 * min(shard_size, zero.sub_group_size)
        if zero.offload_optimizer.device == "cpu":
            self.optimizer = self.step = 0  # masters, moments and the step's gradients are in the host's memory
        if zero.offload_param.device == "cpu":
            self.weights = 0  # but for those in use, which the buffers have

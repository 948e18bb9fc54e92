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
from megatron.distributed.layers import layers_of
from megatron.distributed.mesh import Axis, Sizes
from megatron.options.model import count_scored_at_once, padded_vocab_size
from megatron.planning import activations
from megatron.planning.activations import BYTES
from megatron.planning.parameters import held

SPARE = 0.1
"""Of a GPU's memory, for what no formula here counts."""

ALLREDUCED_AT_ONCE = 500_000_000
"""Elements of DeepSpeed's bucket without ZeRO."""


@dataclass(frozen=True)
class Memory:
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
        moving = max(self.activations + max(self.logits, self.working), self.step)
        return self.weights + self.gradients + self.optimizer + self.buffers + moving

    def fits(self, gib: float, spare: float = SPARE) -> bool:
        """Does it leave `spare` of a GPU of so many GiB?"""
        return self.total <= (1 - spare) * gib * 2**30


def memory(
    config: Config, sizes: Sizes, vocabulary: int, *, backend: str | None = None, stage: int | None = None
) -> Memory:
    """What a layout takes on one GPU.

    Args:
        config: settled by `megatron.training.preflight` (which decides the batch, and ZeRO's stage where it must).
        sizes: the mesh.
        vocabulary: of the tokenizer.
        backend: how attention is computed, instead of the configuration's attention_backend.
        stage: of the pipeline; the one that needs most if absent.

    Raises:
        UserError: nothing is known of the position encoding or the score processor.
    """
    stages = range(sizes.pipeline) if stage is None else (stage,)
    return max((_of_stage(config, sizes, vocabulary, backend, each) for each in stages), key=lambda m: m.total)


def _of_stage(config: Config, sizes: Sizes, vocabulary: int, backend: str | None, stage: int) -> Memory:
    states = _States(config, sizes, held(config, sizes, vocabulary, stage))
    n, b = _tokens(config, sizes), BYTES[config.training.compute_type]
    model = config.model
    first, last = stage == 0, stage == sizes.pipeline - 1
    steps = config.training.gradient_accumulation_steps
    hidden = n * model.hidden_size * b

    at = {0, sizes.context - 1}  # the ranks of a sequence that differ most
    layers = [activations.layer(config, sizes, backend, index) for index in at]
    kept, working, entry = max(x.kept for x in layers), max(x.working for x in layers), layers[0].entry
    kept_maps, working_maps = (max(getattr(x, name) for x in layers) for name in ("kept_maps", "working_maps"))
    count = len(layers_of(model.num_layers, Axis(stage, sizes.pipeline)))
    if model.checkpoint_activations:
        block = min(model.checkpoint_num_layers, count)
        in_flight = -(-count // block) * entry
        working += block * kept - entry  # its activations are there again while it is differentiated
        working_maps += block * kept_maps
        kept_maps = 0
    else:
        in_flight = count * kept
    in_flight += 2 * hidden if last else 0  # the final norm
    in_flight += hidden if sizes.pipeline > 1 and not last else 0  # what was handed on
    # 1F1B: stage i has begun as many micro-batches as there are stages after it, and one more.
    begun = min(steps, sizes.pipeline - stage)
    in_flight *= begun

    logits = 0
    if last:
        # cross_entropy: log-probabilities, the loss's gradient and the logits', in float32. Divided over ranks it works
        # in place: the copy in float32, and beside it the logits or their gradient in a half type.
        per_logit = 12 if sizes.tensor == 1 else 4 + (b if b < 4 else 0)
        part, batch = (
            padded_vocab_size(config.model, vocabulary) // sizes.tensor,
            config.training.train_micro_batch_size_per_gpu,
        )
        logits = count_scored_at_once(n // batch, batch, part) * batch * part * per_logit
    # A stage receives each micro-batch, and each gradient, into a buffer of its own.
    received = steps * hidden * ((not first) + (not last))
    return Memory(
        stage, states.weights, states.gradients, states.optimizer, in_flight, logits, working,
        states.buffers + received, states.step, count * kept_maps * begun, working_maps,
    )  # fmt: skip


def _tokens(config: Config, sizes: Sizes) -> int:
    """Tokens of a micro-batch on one rank."""
    return config.training.train_micro_batch_size_per_gpu * config.model.seq_length // sizes.context


class _States:
    """Weights, gradients and optimizer states as ZeRO divides them; the table above."""

    def __init__(self, config: Config, sizes: Sizes, parameters: int) -> None:
        training = config.training
        zero, b = training.zero_optimization, BYTES[training.compute_type]
        ranks, half = sizes.data * sizes.context, b < 4
        part = -(-parameters // ranks)
        pipelined = sizes.pipeline > 1
        several = pipelined or training.gradient_accumulation_steps > 1
        in_float32 = training.compute_type == "bf16" and several  # engine.deepspeed_config asks for it
        bucket = min(zero.reduce_bucket_size, parameters) * (2 if zero.overlap_comm else 1)
        self.weights = b * (part if zero.stage == 3 else parameters)
        self.optimizer = (12 if half or zero.stage else 8) * (part if zero.stage else parameters)
        self.step = 4 * part
        self.buffers = b * bucket
        if zero.stage == 0:
            self.gradients = b * parameters
            self.step = 4 * parameters if half else 0
            self.buffers = b * min(ALLREDUCED_AT_ONCE, parameters) if ranks > 1 else 0
        elif zero.stage == 1 and in_float32:
            self.gradients = (4 if pipelined else 4 + b) * parameters
            self.step = self.buffers = 0
        elif zero.stage == 1:
            self.gradients = b * (parameters if several else part)
        else:
            self.gradients = (4 if in_float32 else b) * part
        if zero.stage == 3:
            live = min(parameters, zero.stage3_max_live_parameters) + min(parameters, zero.stage3_prefetch_bucket_size)
            self.buffers += b * live
            self.step = 4 * min(part, zero.sub_group_size)
        if zero.offload_optimizer.device == "cpu":
            self.optimizer = self.step = 0  # masters, moments and the step's gradients are in the host's memory
        if zero.offload_param.device == "cpu":
            self.weights = 0  # but for those in use, which the buffers have

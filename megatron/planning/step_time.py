"""How long an optimizer step takes, by arithmetic: computing, waiting and communicating, one after the other.

    computing       FLOPs of the slowest pipeline stage, its own share of them, with what it computes again
                    (`checkpoint_activations`: the layers' forward pass; attention in recomputed blocks of rows: its
                    scores once more; fused attention: half of them; the output layer's, where the loss takes some
                    tokens at a time), at `mfu` × the GPU's peak
    waiting         the pipeline's bubble: P - 1 micro-batches of the slowest stage more than the m of the step
    communicating   bytes of each collective over the link that it takes, nothing of it hidden behind computing

Bytes that a rank sends in a ring, p parameters that it holds, n tokens of a micro-batch, D hidden size, K width of keys
(D unless queries are grouped), b bytes of the compute type, N = data × context ranks, T and C tensor and context ranks,
m micro-batches of a step:

| what                       | bytes                                                                              |
|----------------------------|------------------------------------------------------------------------------------|
| ZeRO 0, 1: gradients       | 2 · p · b · (N - 1) / N, once per step                                             |
| ZeRO 2                     | p · b · (N - 1) / N per micro-batch, and once more for the weights                 |
| ZeRO 3                     | 3 · p · b · (N - 1) / N per micro-batch: weights twice, gradients once             |
| tensor: sums of activations| 2 · n · D · b · (T - 1) / T, four times per layer and micro-batch, six if recomputed|
| tensor: a score processor  | n · (D + K) · b · (T - 1) / T for queries and keys of all heads, as often as below |
| context: keys and values   | n · K · b · (C - 1) for each, twice per layer and micro-batch; recomputed: thrice  |
| pipeline: hidden states    | n · D · b to the next stage, and as much back                                      |

A group of ranks inside one node talks over the GPUs' link. A group that leaves the node shares the node's network with
all groups that leave it beside this one. Of both rates `REACHED` is what collectives get.

Not in it: the optimizer's step, reading data, starting kernels, offloading to the CPU, a GPU's own slowness at small
matrices. So small models, small micro-batches and long score maps take longer than this says, which is for comparing
layouts and for the order of magnitude. docs/planning.md compares it with published times.
"""

from dataclasses import dataclass

from megatron.config.schema import Config
from megatron.distributed.gpus import Gpu
from megatron.distributed.layers import layers_of
from megatron.distributed.mesh import Axis, Sizes
from megatron.options.model import MAX_LOGITS, kv_hidden_size, padded_vocab_size
from megatron.planning import activations
from megatron.planning.activations import BYTES
from megatron.planning.flops import TRAINING, flops
from megatron.planning.parameters import held
from megatron.planning.positions import processor

REACHED = 0.75
"""Of a link's rate by its data sheet; NCCL's tests show such shares for large messages."""


@dataclass(frozen=True)
class Cluster:
    """The machines of a plan."""

    gpu: Gpu
    gpus: int
    per_node: int = 8
    network: float = 25.0
    """GB/s between nodes, of one node in one direction: 25 for one 200 Gbit/s adapter, 200 for eight."""
    mfu: float = 0.45
    """The share of its peak that a GPU reaches while it computes, recomputation counted as work."""

    def rate(self, stride: int, size: int) -> float:
        """Bytes per second that each of `size` ranks, `stride` apart, can send in a ring."""
        if stride * size <= self.per_node:
            return REACHED * self.gpu.link * 1e9
        rings = min(stride, self.per_node)  # groups that leave a node side by side
        return REACHED * min(self.gpu.link, self.network / rings) * 1e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    computing: float
    waiting: float
    communicating: float
    mfu: float
    """The step's useful FLOPs over what all GPUs could do in this time: what a run reports as MFU."""

    @property
    def total(self) -> float:
        """Of the step."""
        return self.computing + self.waiting + self.communicating


def step_time(config: Config, sizes: Sizes, vocabulary: int, cluster: Cluster) -> StepTime:
    """The time of a step of a layout.

    Args:
        config: with its batch settled (`megatron.config.ranks.with_batch`).
        sizes: the mesh.
        vocabulary: of the tokenizer.
        cluster: where it runs.

    Raises:
        UserError: nothing is known of the position encoding or the score processor.
    """
    training = config.training
    steps, batch = training.gradient_accumulation_steps, training.train_batch_size or 0
    peak = config.logging.peak_tflops or cluster.gpu.peak(training.compute_type)
    stages = [_Stage(config, sizes, vocabulary, cluster, stage) for stage in range(sizes.pipeline)]
    speed = cluster.mfu * peak * 1e12
    computing, talking = max(
        ((stage.flops() / speed, stage.talking()) for stage in stages), key=lambda pair: pair[0] + pair[1]
    )
    waiting = (sizes.pipeline - 1) * (computing + talking)
    communicating = steps * talking + max(stage.reducing() for stage in stages)
    total = steps * computing + waiting + communicating
    useful = flops(config, vocabulary).per_token * batch * config.model.seq_length
    return StepTime(steps * computing, waiting, communicating, useful / (total * sizes.world * peak * 1e12))


class _Stage:
    def __init__(self, config: Config, sizes: Sizes, vocabulary: int, cluster: Cluster, stage: int) -> None:
        self.config, self.sizes, self.cluster, self.stage = config, sizes, cluster, stage
        self.flop = flops(config, vocabulary)
        self.layers = len(layers_of(config.model.num_layers, Axis(stage, sizes.pipeline)))
        self.n = config.training.train_micro_batch_size_per_gpu * config.model.seq_length // sizes.context
        self.b = BYTES[config.training.compute_type]
        self.keys = self.n * kv_hidden_size(config.model) * self.b
        self.again = 1 if config.model.checkpoint_activations else 0
        logits = self.n * padded_vocab_size(config.model, vocabulary) // sizes.tensor
        self.scored_again = 1 if logits > MAX_LOGITS else 0
        self.processor = processor(config.position)
        self.parameters = held(config, sizes, vocabulary, stage)

    def flops(self) -> float:
        """Of one rank for one micro-batch, with what is computed again."""
        tensor, one = self.sizes.tensor, self.flop
        # With a processor every rank has the scores of all heads, and half of a processor's work is for all of them.
        share = 1 / tensor if self.processor is None else (1 + 1 / tensor) / 2
        passes = TRAINING + self.again
        scores = passes + activations.layer(self.config, self.sizes).again
        layer = one.matrices * passes / tensor + (one.scores + one.processor) * scores * share
        last = self.stage == self.sizes.pipeline - 1
        return self.n * (self.layers * layer + last * (TRAINING + self.scored_again) * one.output / tensor)

    def talking(self) -> float:
        """Seconds in one micro-batch."""
        sizes, cluster = self.sizes, self.cluster
        hidden, seconds = self.n * self.config.model.hidden_size * self.b, 0.0
        passes = 2 + self.again
        if sizes.tensor > 1:
            sums = 2 * hidden * (2 * passes)
            heads = 0 if self.processor is None else (hidden + self.keys) * passes
            sent = (sums + heads) * (sizes.tensor - 1) / sizes.tensor
            seconds += self.layers * sent / cluster.rate(1, sizes.tensor)
        if sizes.context > 1:
            keys = self.keys if self.processor is not None else self.keys / sizes.tensor
            sent = (keys + self.keys / sizes.tensor) * (sizes.context - 1) * passes
            seconds += self.layers * sent / cluster.rate(sizes.tensor, sizes.context)
        if sizes.pipeline > 1:
            seconds += 2 * hidden / cluster.rate(sizes.world // sizes.pipeline, sizes.pipeline)
        return seconds

    def reducing(self) -> float:
        """Seconds of gradients, and of weights that ZeRO divides, in one step."""
        sizes, training = self.sizes, self.config.training
        ranks = sizes.data * sizes.context
        if ranks == 1:
            return 0.0
        micro, stage = training.gradient_accumulation_steps, training.zero_optimization.stage
        times = 2 if stage < 2 else micro + 1 if stage == 2 else 3 * micro
        sent = times * self.parameters * self.b * (ranks - 1) / ranks
        return sent / self.cluster.rate(sizes.tensor, ranks)

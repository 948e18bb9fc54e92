"""What the forward pass of a layer keeps for the backward pass, and what the backward pass needs besides.

Counted tensor by tensor, as autograd keeps them in our layer (a test counts them in the real one). B sequences of a
micro-batch, n = B·t tokens of a rank with t = T / C places, D hidden size, F feed-forward width, H heads, h = H / T_p
heads of a rank, d head dimension, W width of a processor, S scores (row, column) of a rank's blocks, b bytes of the
compute type:

| part                          | bytes                                                                              |
|-------------------------------|------------------------------------------------------------------------------------|
| a norm                        | 2·n·D·b: what it reads and what it gives (rmsnorm, composite in PyTorch: more)     |
| q, k, v                       | 3·n·(D/T_p)·b, one tensor; a rotated q and k are copies: 2·n·(D/T_p)·b more        |
| q, k, v of grouped queries    | 3·n·(D/T_p)·b: queries leave their groups, keys and values are repeated            |
| gathered k and v              | 2·B·T·(D/T_p)·b: of all places, where ranks share the sequence                     |
| attention's output            | n·(D/T_p)·b                                                                        |
| feed-forward layer            | 2·n·(F/T_p)·b: before and after the activation (gated: 5, relu: 1)                 |
| a score map that is kept      | B·h·S·(4 + b): probabilities in float32 and, in a half type, their copy            |
| a processor's maps, if kept   | B·(H + W)·S·b besides: its input and its hidden values, for all heads              |

Blocks of rows that are recomputed keep no map: only the block that is being differentiated has some.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, Sizes
from megatron.distributed.places import held
from megatron.model.backends.kept import MAX_KEYS_KEPT, MIN_ROWS_KEPT
from megatron.options.model import GATED, ffn_hidden_size, kv_hidden_size, num_kv_heads
from megatron.planning.positions import encoding, processor

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Block:
    """Query rows that are computed at once, and the columns that they see."""

    rows: int
    columns: int
    kept: bool
    """Its maps stay for the backward pass."""


@dataclass(frozen=True)
class Layer:
    """Of one layer and one micro-batch on one rank, in bytes."""

    kept: int
    """Between its forward and its backward pass, its input included."""
    working: int
    """The most that its backward pass has besides at one time. In the feed-forward layer that is the gradient of its
    inner values; in attention one block's maps and their gradients, when the feed-forward layer's own are gone, and
    the gradients of what goes in and out."""
    entry: int
    """Its input alone: what is kept where its activations are recomputed."""
    kept_maps: int
    """Of what is kept: score maps, a processor's among them."""
    working_maps: int
    """One block's maps and their gradients, at the worst moment of attention's backward pass."""
    again: float
    """The share of the forward pass's score products that the backward pass computes again for want of kept maps."""


def layer(config: Config, sizes: Sizes, backend: str | None = None, context_index: int = 0) -> Layer:
    """What a layer keeps. backend: instead of the configuration's; context_index: which rank of those that share a
    sequence (they differ by a block)."""
    one = _Layer(config, sizes, backend, context_index)
    kept = one.norms() + one.projections() + one.feed_forward() + one.dropped() + one.tables()
    maps = sum(one.maps(block) for block in one.blocks if block.kept)
    own = max(one.working(block) - (one.maps(block) if block.kept else 0) for block in one.blocks)
    working = max(own - one.gone() + one.gradients(), one.inner_gradient())
    return Layer(kept + maps, working, one.n * one.width * one.b, maps, own, one.again())


class _Layer:
    def __init__(self, config: Config, sizes: Sizes, backend: str | None, context_index: int) -> None:
        model = config.model
        self.model, self.sizes = model, sizes
        self.encoding, self.processor = encoding(config.position), processor(config.position)
        self.options, self.window = config.position.pos_emb_options, config.position.attention_window
        self.batch = config.training.train_micro_batch_size_per_gpu
        self.b = BYTES[config.training.compute_type]
        self.width, self.inner = model.hidden_size, ffn_hidden_size(model)
        self.part = self.width // sizes.tensor
        self.heads, self.own_heads = model.num_attention_heads, model.num_attention_heads // sizes.tensor
        self.length = model.seq_length
        self.n = self.batch * self.length // sizes.context
        self.spans = held(self.length, Axis(context_index, sizes.context))
        name = backend or model.attention_backend
        fused = self.encoding.fused and self.processor is None
        self.backend = ("sdpa" if fused else "auto") if name in ("auto", "triton", "native") else name
        self.blocks = list(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        rows = self.model.attention_chunk_rows
        for start, length in self.spans:
            stop = start + length
            kept, size = self.backend == "eager", length if self.backend in ("eager", "sdpa") else rows
            if self.backend == "auto" and stop <= MAX_KEYS_KEPT:
                kept, size = True, max(rows, MIN_ROWS_KEPT) if self.processor is None else rows
            for first in range(start, stop, size):
                end = min(first + size, stop)
                left = 0
                if self.window is not None and self.backend not in ("eager", "sdpa"):
                    reach = 0 if self.processor is None else self.processor.reach
                    left = max(0, first - self.window + 1 - reach)
                yield Block(end - first, end - left, kept)

    @property
    def recomputed(self) -> bool:
        return not all(block.kept for block in self.blocks) and self.backend != "sdpa"

    def again(self) -> float:
        """Fused attention computes its scores again, one of its two products."""
        if self.backend == "sdpa":
            return 0.5
        scores = [block.rows * block.columns for block in self.blocks]
        return sum(n for n, block in zip(scores, self.blocks, strict=True) if not block.kept) / sum(scores)

    def norms(self) -> int:
        model, size = self.model, self.n * self.width * self.b
        tied = model.gpt_j_residual and model.gpt_j_tied
        count = 1 if tied else 2
        inputs = 1 if model.gpt_j_residual else count  # parallel branches read the same
        if model.norm == "rmsnorm" and self.b == 2:
            # PyTorch computes it in float32: a copy of the input and the normalised values, two bytes' worth twice.
            return 5 * count * size
        extra = count if model.norm == "rmsnorm" else 0  # the normalised values, before the weight
        return (inputs + count + extra) * size

    def projections(self) -> int:
        """Queries, keys, values and the output, without any map."""
        n, b, part = self.n, self.b, self.part
        shared_heads = self.processor is not None and self.sizes.tensor > 1
        wide = self.width if shared_heads else part  # of the queries and keys that attention reads
        context = self.sizes.context > 1
        plain_query = self.recomputed or self.backend == "sdpa"  # else a scaled copy is kept
        # Not where ranks share a sequence: the rows of its two chunks are joined, which copies them.
        query_is_view = plain_query and not (self.encoding.rotates or shared_heads or context)
        grouped = num_kv_heads(self.model) < self.heads
        size = 0
        if not (context or grouped):
            size += 3 * n * part * b  # they lie in one tensor, which is kept whole for the values
        if grouped and query_is_view and num_kv_heads(self.model) == self.sizes.tensor:
            size += (
                n * (part + 2 * kv_hidden_size(self.model) // self.sizes.tensor) * b
            )  # of one group: in that tensor too
        elif grouped or not query_is_view:
            size += n * wide * b
        if context or grouped:
            size += self.sizes.context * n * (wide + part) * b  # of all places, repeated
        elif self.encoding.rotates or shared_heads:
            size += n * wide * b
        size += n * part * b  # the output, which the projection after it reads
        if self.backend == "sdpa":
            size += 4 * n * self.own_heads  # the logarithm of each row's sum
            if context:
                # With a mask in the compute type: PyTorch's plain causal attention is for whole sequences alone.
                masked = [(s, length) for s, length in self.spans if s]
                size += n * part * b + sum(length * (s + length) * b for s, length in masked)
        if self.encoding.rotates:
            size += 12 * (n // self.batch) * (self.width // self.heads)  # cosines and sines in float32
        return size

    def feed_forward(self) -> int:
        activation = self.model.activation
        maps = 5 if activation in GATED else 1 if activation == "relu" else 2
        return maps * self.n * self.inner // self.sizes.tensor * self.b

    def inner_gradient(self) -> int:
        """Of the feed-forward layer's values before and after the activation."""
        maps = 3 if self.model.activation in GATED else 1
        return maps * self.n * self.inner // self.sizes.tensor * self.b

    def gradients(self) -> int:
        """Of the residual stream, of attention's output, and of keys or values, which blocks add to."""
        return self.n * (self.width + 2 * self.part) * self.b

    def gone(self) -> int:
        """What attention's backward pass finds freed: the feed-forward layer and its norm, unless they stand beside."""
        return 0 if self.model.gpt_j_residual else self.feed_forward() + self.norms() // 2

    def dropped(self) -> int:
        """One byte per entry of each of the two residual branches."""
        return 2 * self.n * self.width if self.model.hidden_dropout else 0

    def tables(self) -> int:
        """What is kept per distance: linear in T whatever the batch, and small."""
        far = sum(start + length for start, length in self.spans)  # each of a rank's chunks has its own
        size = 4 * self.encoding.tables * self.heads * far
        if self.processor is not None and self.encoding.bias and self.window is None and self.backend != "eager":
            width, reach = self.processor.width, self.processor.reach
            size += far * (4 * width * (1 + reach) + 4 * self.heads * (1 + 2 * reach))
        return size

    def maps(self, block: Block) -> int:
        """What a block keeps per score, where it is kept."""
        b, half = self.b, self.b if self.b < 4 else 0
        per_sequence = self.own_heads * (4 + half + self.encoding.per_head + b * self.encoding.copies)
        once = self.encoding.per_score(self.options)
        heads = self.own_heads if self.processor is None else self.heads
        if self.encoding.weight:
            per_sequence += b * heads
            once += b * heads
        if self.model.attention_dropout:
            per_sequence += self.own_heads * (1 if half else 5)
        if self.processor is not None:
            per_sequence += b * (self.heads + self.processor.width)
            once += 2  # who sees what, as truth values, twice
            if self.encoding.bias and self.backend == "eager":
                once += b * self.heads + 1
        return block.rows * block.columns * (self.batch * per_sequence + once)

    def working(self, block: Block) -> int:
        """A block's maps and their gradients at the worst moment of the backward pass."""
        if self.backend == "sdpa":
            return 0  # fused: what it needs besides is in registers
        scores, b = block.rows * block.columns, self.b
        heads = self.own_heads if self.processor is None else self.heads
        bias = 8 * heads if self.encoding.bias else 0  # its gradient, and the same padded to be summed along diagonals
        # Probabilities, their gradient and the logits' in float32, when the copy in a half type has gone; or the
        # logits' gradient and the bias's.
        half, each = b if b < 4 else 0, self.batch * self.own_heads
        maps = self.maps(block) + scores * max((8 - half) * each, 4 * each + bias)
        if self.processor is None:
            return maps
        # Hidden values, their gradient through the activation and out of the second convolution. With a bias also the
        # hidden values before and after its own share joins them, that share in float32 and in the type of the scores;
        # and the share's gradient in both, and sheared to be summed along diagonals.
        width = self.processor.width
        moments = [self.batch * b * (3 * width + self.heads)]
        if self.encoding.bias:
            moments.append(self.batch * b * 2 * (width + self.heads) + (4 + half) * width)
            moments.append(4 * 2 * (width + self.heads) + half * width)
        return max(maps, scores * max(moments))

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

from megatron.attention.backends.backend import MAX_KEYS_KEPT, MIN_ROWS_KEPT
from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes, list_context_chunks
from megatron.options.model import GATED_ACTIVATIONS, ffn_hidden_size, kv_hidden_size, num_kv_heads
from megatron.planning.model_costs import plan_encoding, plan_processor

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class AttentionBlock:
    """Query rows that are computed at once, and the columns that they see."""

    num_rows: int
    num_columns: int
    is_saved: bool
    """Its maps stay for the backward pass."""


@dataclass(frozen=True)
class LayerActivations:
    """Of one layer and one micro-batch on one rank, in bytes."""

    saved_bytes: int
    """Between its forward and its backward pass, its input included."""
    workspace_bytes: int
    """The most that its backward pass has besides at one time. In the feed-forward layer that is the gradient of its
    inner values; in attention one block's maps and their gradients, when the feed-forward layer's own are gone, and
    the gradients of what goes in and out."""
    input_bytes: int
    """Its input alone: what is kept where its activations are recomputed."""
    saved_map_bytes: int
    """Of what is kept: score maps, a processor's among them."""
    workspace_map_bytes: int
    """One block's maps and their gradients, at the worst moment of attention's backward pass."""
    recomputed_fraction: float
    """The share of the forward pass's score products that the backward pass computes again for want of kept maps."""


def estimate_layer_activations(
    config: Config, sizes: ParallelSizes, backend: str | None = None, context_rank: int = 0
) -> LayerActivations:
    """What a layer keeps. backend: instead of the configuration's; context_index: which rank of those that share a
    sequence (they differ by a block)."""
    estimator = _LayerEstimator(config, sizes, backend, context_rank)
    saved = (
        estimator.norm_bytes()
        + estimator.projection_bytes()
        + estimator.mlp_bytes()
        + estimator.dropout_mask_bytes()
        + estimator.bias_table_bytes()
    )
    maps = sum(estimator.score_map_bytes(block) for block in estimator.blocks if block.is_saved)
    attention_workspace = max(
        estimator.score_workspace_bytes(block) - (estimator.score_map_bytes(block) if block.is_saved else 0)
        for block in estimator.blocks
    )
    workspace = max(
        attention_workspace - estimator.freed_bytes() + estimator.attention_gradient_bytes(),
        estimator.mlp_gradient_bytes(),
    )
    return LayerActivations(
        saved + maps,
        workspace,
        estimator.num_tokens * estimator.hidden_size * estimator.bytes_per_element,
        maps,
        attention_workspace,
        estimator.recomputed_fraction(),
    )


class _LayerEstimator:
    def __init__(self, config: Config, sizes: ParallelSizes, backend: str | None, context_rank: int) -> None:
        model = config.model
        self.model, self.sizes = model, sizes
        self.encoding, self.processor = plan_encoding(config.position), plan_processor(config.position)
        self.attention_window = config.position.attention_window
        self.micro_batch_size = config.training.train_micro_batch_size_per_gpu
        self.bytes_per_element = BYTES_PER_ELEMENT[config.training.compute_dtype]
        self.hidden_size, self.ffn_size = model.hidden_size, ffn_hidden_size(model)
        self.local_hidden_size = self.hidden_size // sizes.tensor
        self.num_heads, self.num_local_heads = model.num_attention_heads, model.num_attention_heads // sizes.tensor
        self.seq_length = model.seq_length
        self.num_tokens = self.micro_batch_size * self.seq_length // sizes.context
        self.chunks = list_context_chunks(self.seq_length, Axis(context_rank, sizes.context))
        name = backend or model.attention_backend
        supports_sdpa = self.encoding.supports_sdpa and self.processor is None
        self.backend = ("sdpa" if supports_sdpa else "auto") if name in ("auto", "triton", "native") else name
        self.blocks = list(self._iter_blocks())

    def _iter_blocks(self) -> Iterator[AttentionBlock]:
        chunk_rows = self.model.attention_chunk_rows
        for start, length in self.chunks:
            stop = start + length
            is_saved, block_rows = self.backend == "eager", length if self.backend in ("eager", "sdpa") else chunk_rows
            if self.backend == "auto" and stop <= MAX_KEYS_KEPT:
                is_saved, block_rows = True, max(chunk_rows, MIN_ROWS_KEPT) if self.processor is None else chunk_rows
            for block_start in range(start, stop, block_rows):
                block_stop = min(block_start + block_rows, stop)
                first_column = 0
                if self.attention_window is not None and self.backend not in ("eager", "sdpa"):
                    kernel_radius = 0 if self.processor is None else self.processor.kernel_radius
                    first_column = max(0, block_start - self.attention_window + 1 - kernel_radius)
                yield AttentionBlock(block_stop - block_start, block_stop - first_column, is_saved)

    @property
    def recomputes_blocks(self) -> bool:
        return not all(block.is_saved for block in self.blocks) and self.backend != "sdpa"

    def recomputed_fraction(self) -> float:
        """Fused attention computes its scores again, one of its two products."""
        if self.backend == "sdpa":
            return 0.5
        scores = [block.num_rows * block.num_columns for block in self.blocks]
        return sum(
            num_scores for num_scores, block in zip(scores, self.blocks, strict=True) if not block.is_saved
        ) / sum(scores)

    def norm_bytes(self) -> int:
        model, size = self.model, self.num_tokens * self.hidden_size * self.bytes_per_element
        shares_norm = model.gpt_j_residual and model.gpt_j_tied
        num_norms = 1 if shares_norm else 2
        num_inputs = 1 if model.gpt_j_residual else num_norms  # parallel branches read the same
        if model.norm == "rmsnorm" and self.bytes_per_element == 2:
            # PyTorch computes it in float32: a copy of the input and the normalised values, two bytes' worth twice.
            return 5 * num_norms * size
        num_normalized = num_norms if model.norm == "rmsnorm" else 0  # the normalised values, before the weight
        return (num_inputs + num_norms + num_normalized) * size

    def projection_bytes(self) -> int:
        """Queries, keys, values and the output, without any map."""
        n, b, part = self.num_tokens, self.bytes_per_element, self.local_hidden_size
        gathers_heads = self.processor is not None and self.sizes.tensor > 1
        qk_size = self.hidden_size if gathers_heads else part  # of the queries and keys that attention reads
        has_context_parallel = self.sizes.context > 1
        query_is_unscaled = self.recomputes_blocks or self.backend == "sdpa"  # else a scaled copy is kept
        # Not where ranks share a sequence: the rows of its two chunks are joined, which copies them.
        query_is_view = query_is_unscaled and not (
            self.encoding.facts.rotates_qk or gathers_heads or has_context_parallel
        )
        has_grouped_queries = num_kv_heads(self.model) < self.num_heads
        size = 0
        if not (has_context_parallel or has_grouped_queries):
            size += 3 * n * part * b  # they lie in one tensor, which is kept whole for the values
        if has_grouped_queries and query_is_view and num_kv_heads(self.model) == self.sizes.tensor:
            size += (
                n * (part + 2 * kv_hidden_size(self.model) // self.sizes.tensor) * b
            )  # of one group: in that tensor too
        elif has_grouped_queries or not query_is_view:
            size += n * qk_size * b
        if has_context_parallel or has_grouped_queries:
            size += self.sizes.context * n * (qk_size + part) * b  # of all places, repeated
        elif self.encoding.facts.rotates_qk or gathers_heads:
            size += n * qk_size * b
        size += n * part * b  # the output, which the projection after it reads
        if self.backend == "sdpa":
            size += 4 * n * self.num_local_heads  # the logarithm of each row's sum
            if has_context_parallel:
                # With a mask in the compute type: PyTorch's plain causal attention is for whole sequences alone.
                masked_chunks = [(start, length) for start, length in self.chunks if start]
                size += n * part * b + sum(length * (start + length) * b for start, length in masked_chunks)
        if self.encoding.facts.rotates_qk:
            size += (
                12 * (n // self.micro_batch_size) * (self.hidden_size // self.num_heads)
            )  # cosines and sines in float32
        return size

    def mlp_bytes(self) -> int:
        activation = self.model.activation
        num_saved = 4 if activation in GATED_ACTIVATIONS else 1 if activation == "relu" else 2
        return num_saved * self.num_tokens * self.ffn_size // self.sizes.tensor * self.bytes_per_element

    def mlp_gradient_bytes(self) -> int:
        """Of the feed-forward layer's values before and after the activation."""
        num_gradients = 3 if self.model.activation in GATED_ACTIVATIONS else 1
        return num_gradients * self.num_tokens * self.ffn_size // self.sizes.tensor * self.bytes_per_element

    def attention_gradient_bytes(self) -> int:
        """Of the residual stream, of attention's output, and of keys or values, which blocks add to."""
        return self.num_tokens * (self.hidden_size + 2 * self.local_hidden_size) * self.bytes_per_element

    def freed_bytes(self) -> int:
        """What attention's backward pass finds freed: the feed-forward layer and its norm, unless they stand beside."""
        return 0 if self.model.gpt_j_residual else self.mlp_bytes() + self.norm_bytes() // 2

    def dropout_mask_bytes(self) -> int:
        """One byte per entry of each of the two residual branches."""
        return 2 * self.num_tokens * self.hidden_size if self.model.hidden_dropout else 0

    def bias_table_bytes(self) -> int:
        """What is kept per distance: linear in T whatever the batch, and small."""
        num_distances = sum(start + length for start, length in self.chunks)  # each of a rank's chunks has its own
        size = 4 * self.encoding.cost.num_saved_tables * self.num_heads * num_distances
        if (
            self.processor is not None
            and self.encoding.facts.adds_bias
            and self.attention_window is None
            and self.backend != "eager"
        ):
            width, kernel_radius = self.processor.width, self.processor.kernel_radius
            size += num_distances * (4 * width * (1 + kernel_radius) + 4 * self.num_heads * (1 + 2 * kernel_radius))
        return size

    def score_map_bytes(self, block: AttentionBlock) -> int:
        """What a block keeps per score, where it is kept."""
        b, half_copy_bytes = self.bytes_per_element, self.bytes_per_element if self.bytes_per_element < 4 else 0
        per_sequence = self.num_local_heads * (
            4 + half_copy_bytes + self.encoding.cost.saved_bytes_per_head_score + b * self.encoding.cost.num_saved_maps
        )
        shared_bytes = self.encoding.cost.saved_bytes_per_score(self.encoding.options)
        heads = self.num_local_heads if self.processor is None else self.num_heads
        if self.encoding.facts.multiplies_scores:
            per_sequence += b * heads
            shared_bytes += b * heads
        if self.model.attention_dropout:
            per_sequence += self.num_local_heads * (1 if half_copy_bytes else 5)
        if self.processor is not None:
            per_sequence += b * (self.num_heads + self.processor.width)
            shared_bytes += 2  # who sees what, as truth values, twice
            if self.encoding.facts.adds_bias and self.backend == "eager":
                shared_bytes += b * self.num_heads + 1
        return block.num_rows * block.num_columns * (self.micro_batch_size * per_sequence + shared_bytes)

    def score_workspace_bytes(self, block: AttentionBlock) -> int:
        """A block's maps and their gradients at the worst moment of the backward pass."""
        if self.backend == "sdpa":
            return 0  # fused: what it needs besides is in registers
        scores, b = block.num_rows * block.num_columns, self.bytes_per_element
        heads = self.num_local_heads if self.processor is None else self.num_heads
        bias_bytes = (
            8 * heads if self.encoding.facts.adds_bias else 0
        )  # its gradient, and the same padded to be summed along diagonals
        # Probabilities, their gradient and the logits' in float32, when the copy in a half type has gone; or the
        # logits' gradient and the bias's.
        half_copy_bytes, num_maps = b if b < 4 else 0, self.micro_batch_size * self.num_local_heads
        maps = self.score_map_bytes(block) + scores * max((8 - half_copy_bytes) * num_maps, 4 * num_maps + bias_bytes)
        if self.processor is None:
            return maps
        # Hidden values, their gradient through the activation and out of the second convolution. With a bias also the
        # hidden values before and after its own share joins them, that share in float32 and in the type of the scores;
        # and the share's gradient in both, and sheared to be summed along diagonals.
        width = self.processor.width
        candidates = [self.micro_batch_size * b * (3 * width + self.num_heads)]
        if self.encoding.facts.adds_bias:
            candidates.append(self.micro_batch_size * b * 2 * (width + self.num_heads) + (4 + half_copy_bytes) * width)
            candidates.append(4 * 2 * (width + self.num_heads) + half_copy_bytes * width)
        return max(maps, scores * max(candidates))

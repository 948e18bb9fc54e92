"""Memory that a layer saves for the backward pass, and the workspace of its backward pass.

The formulas count each tensor that autograd saves in our layer; tests compare them with the real one. Compiled regions
(`model/layer_config.py`) save fewer than PyTorch's operations, because they recompute what is cheap. Symbols: B
sequences per micro-batch, n = B·t tokens of a rank with t = T / C positions, D hidden size, F feed-forward width, T_p
tensor ranks, b bytes of the compute type.

| component                     | bytes                                                                              |
|-------------------------------|------------------------------------------------------------------------------------|
| norm                          | 2·n·D·b: its input and output (rmsnorm in PyTorch's operations: more)              |
| q, k, v                       | 3·n·(D/T_p)·b; in PyTorch's operations they share one tensor, and a rotated q and  |
|                               | k are copies: 2·n·(D/T_p)·b more                                                   |
| q, k, v of grouped queries    | 3·n·(D/T_p)·b: queries are copied out of their groups, keys and values repeated    |
| gathered k and v              | 2·B·T·(D/T_p)·b: all positions if ranks share the sequence; all heads if tensor    |
|                               | ranks exchange heads for rows around a processor                                   |
| norms of q and k              | their output, unless it is rotated, gathered or repeated; rmsnorm also the         |
|                               | normalized values; with grouped queries also the tensor that contains q, k and v   |
| queries times a temperature   | n·(D/T_p)·b: the copy that attention reads; with learned factors also the unscaled |
|                               | queries and the factors, 4·t·H/T_p                                                 |
| attention output              | n·(D/T_p)·b; with gates twice that, and 4 bytes per gate                           |
| feed-forward layer            | 2·n·(F/T_p)·b: before and after the activation (gated: 4, or 3 compiled; relu: 1,  |
|                               | and compiled a mask of n·(F/T_p) bytes)                                            |

`attention_memory.py` counts what each attention backend saves in addition. With `checkpoint_activations: selective`,
attention is recomputed. Then only the output of its first linear layer, n·(D + 2·K)/T_p·b with K the width of keys, and
the input of its second, n·(D/T_p)·b, are saved. Attention's own backward pass recomputes the rest, after the backward
pass of the feed-forward layer.
"""

from dataclasses import dataclass

from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes, list_context_chunks
from megatron.options.model import (
    GATED_ACTIVATIONS,
    get_ffn_hidden_size,
    get_head_dim,
    get_kv_hidden_size,
    get_num_kv_heads,
    get_output_gate_size,
    get_q_hidden_size,
    get_qk_norm,
)
from megatron.planning.attention_memory import ATTENTION_MEMORY
from megatron.planning.model_costs import PlannedLayer
from megatron.planning.row_block_memory import AttentionShape

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}

DEFAULT_GPU_BYTES = 79 << 30
"""Device memory assumed for an unknown GPU. The kernels size their workspace by it."""


@dataclass(frozen=True)
class LayerActivations:
    """Activation memory of one layer and one micro-batch on one rank, in bytes."""

    saved_bytes: int
    """Tensors saved between the layer's forward and backward pass, including its input."""
    workspace_bytes: int
    """Memory allocated at the peak of the layer's backward pass, in addition to the saved tensors. In the feed-forward
    layer this is the gradient of its inner values. In attention it is the score matrices of one block with their
    gradients, and the gradients of the inputs and outputs."""
    freed_bytes: int
    """Saved tensors that are freed before that peak: those of the feed-forward layer if the peak is in attention."""
    input_bytes: int
    """Input of the layer: all that is saved if whole layers are recomputed."""
    saved_map_bytes: int
    """Score matrices among the saved tensors, including a processor's feature maps."""
    workspace_map_bytes: int
    """Part of `workspace_bytes`: score matrices of one block and their gradients."""
    shared_bytes: int
    """Tensors of a micro-batch that all layers share."""
    recomputed_fraction: float
    """Fraction of the forward pass's score products that the backward pass recomputes because they were not saved."""


def uses_compiled_regions(config: Config) -> bool:
    """Return True if training compiles regions, at least that of the loss: on a GPU unless `compile_regions` is off."""
    return config.model.compile_regions and config.launch.device != "cpu"


def estimate_layer_activations(
    layer: PlannedLayer,
    sizes: ParallelSizes,
    backend: str | None = None,
    context_rank: int = 0,
    gpu_bytes: int = DEFAULT_GPU_BYTES,
) -> LayerActivations:
    """Estimate the activation memory of one layer.

    Args:
        layer: layer of a resolved configuration.
        sizes: sizes of the mesh.
        backend: attention backend; overrides the configuration's.
        context_rank: index of the rank in its context-parallel group (ranks differ by one block).
        gpu_bytes: device memory.
    """
    estimator = _LayerEstimator(layer, sizes, backend, context_rank, gpu_bytes)
    attention = estimator.attention
    outside = estimator.estimate_norm_bytes() + estimator.estimate_mlp_bytes() + estimator.estimate_dropout_mask_bytes()
    inside = estimator.estimate_projection_bytes() + attention.saved_bytes + attention.saved_map_bytes
    saved_maps, workspace_maps, again = attention.saved_map_bytes, attention.workspace_map_bytes, 0
    if layer.config.model.checkpoint_activations == "selective":
        kept = estimator.estimate_linear_bytes()
        inside, again = kept, max(inside - kept, 0)
        saved_maps, workspace_maps = 0, workspace_maps + saved_maps
    workspace = attention.workspace_bytes + estimator.estimate_attention_gradient_bytes() + again
    freed = estimator.estimate_freed_bytes()
    if estimator.estimate_mlp_gradient_bytes() > workspace - freed:
        workspace, workspace_maps, freed = estimator.estimate_mlp_gradient_bytes(), 0, 0
    return LayerActivations(
        outside + inside,
        workspace,
        freed,
        estimator.num_tokens * estimator.hidden_size * estimator.bytes_per_element,
        saved_maps,
        workspace_maps,
        attention.shared_bytes,
        attention.recomputed_fraction,
    )


class _LayerEstimator:
    def __init__(
        self, layer: PlannedLayer, sizes: ParallelSizes, backend: str | None, context_rank: int, gpu_bytes: int
    ) -> None:
        config = layer.config
        model = config.model
        self.model, self.sizes = model, sizes
        self.encoding, self.processor = layer.encoding, layer.processor
        self.scales_queries = config.position.temperature != "none"
        self.learns_scale = layer.num_temperature_parameters > 0
        self.micro_batch_size = config.training.train_micro_batch_size_per_gpu
        self.bytes_per_element = BYTES_PER_ELEMENT[config.training.compute_dtype]
        self.hidden_size, self.ffn_size = model.hidden_size, get_ffn_hidden_size(model)
        self.head_dim, self.local_q_size = get_head_dim(model), get_q_hidden_size(model) // sizes.tensor
        self.num_heads = model.num_attention_heads
        self.num_tokens = self.micro_batch_size * model.seq_length // sizes.context
        self.is_compiled = (
            uses_compiled_regions(config)
            and not model.hidden_dropout
            and sizes.tensor == 1
            and config.training.zero_optimization.stage < 3
        )
        """True if regions are compiled (`can_compile` in `model/layer.py`)."""
        self.shares_rows = self.processor is not None and sizes.tensor > 1
        """True if tensor ranks exchange heads for rows."""
        segments = list_context_chunks(model.seq_length, Axis(context_rank, sizes.context))
        self.shape = AttentionShape(
            self.micro_batch_size,
            self._share_rows(segments) if self.shares_rows else segments,
            self.num_heads if self.shares_rows else self.num_heads // sizes.tensor,
            self.head_dim,
            self.bytes_per_element,
            self.encoding,
            self.processor,
            not config.position.pos_emb_per_layer,
            config.position.window,
            model.attention_chunk_rows,
            bool(model.attention_dropout),
            gpu_bytes,
            model.attn_logit_softcapping is not None,
            config.position.softmax,
            config.position.attention_mask == "document",
            self.is_compiled,
        )
        self.attention = ATTENTION_MEMORY[backend or model.attention_backend](self.shape)

    def _share_rows(self, segments: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Return the rows of the first tensor rank: one chunk from each end of the context rank's rows."""
        (first, length), (last, last_length) = segments[0], segments[-1]
        num_rows = sum(length for _, length in segments)
        size = num_rows // (2 * self.sizes.tensor)
        return (first, min(size, length)), (last + last_length - size, size)

    def estimate_norm_bytes(self) -> int:
        model, size = self.model, self.num_tokens * self.hidden_size * self.bytes_per_element
        shares_norm = model.gpt_j_residual and model.gpt_j_tied
        num_norms = 1 if shares_norm else 2
        num_inputs = 1 if model.gpt_j_residual else num_norms  # parallel branches read the same input
        # A second norm after each branch: its output is added to the residual stream and not saved.
        num_added = 2 if model.norm_placement == "sandwich" else 0
        if self.is_compiled:  # one of the two added norms is recomputed from tensors that are saved anyway
            return (num_inputs + num_norms + num_added // 2) * size
        if model.norm == "rmsnorm" and self.bytes_per_element == 2:
            # PyTorch computes it in float32: it saves a float32 copy of the input and the normalized values.
            return (5 * num_norms + 4 * num_added) * size
        num_normalized = num_norms if model.norm == "rmsnorm" else 0  # the normalized values, before the weight
        num_normalized += num_added if model.norm == "rmsnorm" else 0
        return (num_inputs + num_norms + num_normalized + num_added) * size

    def estimate_projection_bytes(self) -> int:
        """Return the bytes of queries, keys, values and the output, without score matrices."""
        n, b, part = self.num_tokens, self.bytes_per_element, self.local_q_size
        keys_part = (
            get_q_hidden_size(self.model) if self.shares_rows else part
        )  # of the keys and values that attention reads
        gathers = self.sizes.context > 1 or self.shares_rows
        has_grouped_queries = get_num_kv_heads(self.model) < self.num_heads
        rotates, numbers = self.encoding.facts.rotates_qk, self.encoding.count_qk_numbers()
        # Context-parallel ranks concatenate the rows of two chunks; a view would also retain the keys.
        query_is_view = not (self.attention.copies_query or rotates or gathers or self.scales_queries)
        # Queries, keys and values share one tensor, which stays allocated while a view of it is saved.
        in_region = self.shape.rotates_in_compiled_region  # which writes queries, keys and values
        keeps_mixed = not (gathers or has_grouped_queries or self.attention.copies_keys or in_region)
        size = 3 * n * part * b if keeps_mixed else 0
        if has_grouped_queries and query_is_view and get_num_kv_heads(self.model) == self.sizes.tensor:
            size += (
                n * (part + 2 * get_kv_hidden_size(self.model) // self.sizes.tensor) * b
            )  # with one group: in the shared tensor too
        elif has_grouped_queries or not query_is_view:
            size += n * part * b * numbers
        # Kernels pad values to the length of rotated keys.
        both = 2 * numbers if self.attention.pads_values else numbers + 1
        if self.attention.copies_keys:
            size += both * self.micro_batch_size * self.shape.num_distances * keys_part * b  # of each segment
        elif gathers or has_grouped_queries:
            size += both * self.sizes.context * n * keys_part * b  # of all positions, repeated
        elif rotates:
            pads_values = numbers > 1 and self.attention.pads_values
            size += n * part * b * (both if pads_values or in_region else numbers)
        size += self.estimate_qk_norm_bytes(
            keeps_mixed=keeps_mixed, is_read=not (rotates or gathers or has_grouped_queries)
        )
        size += n * part * b  # the output, which the output projection reads
        if gates := get_output_gate_size(self.model):
            size += n * part * b + 4 * n * gates // self.sizes.tensor  # output before gating, float32 gates
        if self.scales_queries:
            size += self.estimate_unscaled_query_bytes(keeps_mixed=keeps_mixed, gathers=gathers)
            size += 4 * (n // self.micro_batch_size) * (self.num_heads if self.learns_scale else 1)
        if rotates:
            num_positions, cost = n // self.micro_batch_size, self.encoding.cost
            size += 12 * num_positions * self.head_dim  # cosines and sines in float32
            size += 4 * cost.num_rotation_tables(self.encoding.options) * num_positions * part
            if cost.keeps_unrotated and not keeps_mixed:  # in the shared tensor, or copied out of their groups
                size += n * (part + 2 * get_kv_hidden_size(self.model) // self.sizes.tensor) * b
        return size

    def estimate_unscaled_query_bytes(self, *, keeps_mixed: bool, gathers: bool) -> int:
        """Return the bytes of the unscaled queries, and of the tensors that share their storage.

        Args:
            keeps_mixed: True if the tensor that contains queries, keys and values is saved anyway.
            gathers: True if keys and values are gathered from other ranks.
        """
        q_bytes = self.num_tokens * self.local_q_size * self.bytes_per_element
        k_bytes = self.num_tokens * get_kv_hidden_size(self.model) // self.sizes.tensor * self.bytes_per_element
        has_grouped_queries = get_num_kv_heads(self.model) < self.num_heads
        if self.shape.rotates_in_compiled_region:
            return q_bytes if self.learns_scale else 0
        if self.encoding.facts.rotates_qk:
            if not (gathers or has_grouped_queries or self.attention.copies_keys):
                return q_bytes  # rotated queries and keys share storage, and attention reads the keys
            return q_bytes + k_bytes if self.learns_scale else 0
        if not self.learns_scale or keeps_mixed:
            return 0
        return q_bytes if has_grouped_queries else q_bytes + 2 * k_bytes

    def estimate_linear_bytes(self) -> int:
        """Return the bytes of the first linear layer's output and the second one's input in attention."""
        width = (
            2 * self.local_q_size
            + (2 * get_kv_hidden_size(self.model) + get_output_gate_size(self.model)) // self.sizes.tensor
        )
        return self.num_tokens * width * self.bytes_per_element

    def estimate_qk_norm_bytes(self, *, keeps_mixed: bool, is_read: bool) -> int:
        """Return the bytes that the norms of queries and keys save.

        Args:
            keeps_mixed: True if the tensor that contains queries, keys and values is saved anyway.
            is_read: True if attention reads the norms' output itself, not a copy of it.
        """
        kind, model, per_token = get_qk_norm(self.model), self.model, self.num_tokens * self.bytes_per_element
        if kind is None:
            return 0
        q_bytes, k_bytes = (
            per_token * size // self.sizes.tensor for size in (get_q_hidden_size(model), get_kv_hidden_size(model))
        )
        is_composite = kind == "rmsnorm" and not self.is_compiled  # as in `estimate_norm_bytes`
        in_float32 = is_composite and self.bytes_per_element == 2
        size = (4 if in_float32 else 1) * (q_bytes + k_bytes) if is_composite else 0
        if model.qk_layernorm_over_heads and not in_float32:
            size += q_bytes + k_bytes  # their input, without the values
        elif not in_float32:
            size += 0 if keeps_mixed else q_bytes + 2 * k_bytes
            size += q_bytes if get_num_kv_heads(model) < self.num_heads else 0  # copied out of their groups
        if is_read:
            size += (0 if self.attention.copies_keys else k_bytes) + (0 if self.attention.copies_query else q_bytes)
        return size

    def estimate_mlp_bytes(self) -> int:
        activation = self.model.activation
        gated = 3 if self.is_compiled else 4
        num_saved = gated if activation in GATED_ACTIVATIONS else 1 if activation == "relu" else 2
        size = self.num_tokens * self.ffn_size // self.sizes.tensor
        mask_bytes = size if activation == "relu" and self.is_compiled else 0
        return num_saved * size * self.bytes_per_element + mask_bytes

    def estimate_mlp_gradient_bytes(self) -> int:
        """Return the bytes of the gradients before and after the activation of the feed-forward layer."""
        num_gradients = 3 if self.model.activation in GATED_ACTIVATIONS else 1
        return num_gradients * self.num_tokens * self.ffn_size // self.sizes.tensor * self.bytes_per_element

    def estimate_attention_gradient_bytes(self) -> int:
        """Return the bytes of the gradients of the residual stream, the attention output, and keys or values.

        Those of keys or values are accumulated over blocks.
        """
        return self.num_tokens * (self.hidden_size + 2 * self.local_q_size) * self.bytes_per_element

    def estimate_freed_bytes(self) -> int:
        """Return the bytes of the feed-forward layer and its norm, which are freed before attention's backward pass.

        With a parallel residual nothing is freed.
        """
        return 0 if self.model.gpt_j_residual else self.estimate_mlp_bytes() + self.estimate_norm_bytes() // 2

    def estimate_dropout_mask_bytes(self) -> int:
        """Return the bytes of the dropout masks: one byte per element of each of the two residual branches."""
        return 2 * self.num_tokens * self.hidden_size if self.model.hidden_dropout else 0

"""Exported model in plain PyTorch, for transformers 4.57 and 5.

Positions, scores and attention are computed by the same files that trained the model, which are copied next to this
one. Dimensions: B batch, T new tokens, D hidden size, H heads, g key and value heads, d head dimension, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import configuration_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput, logging

from megatron.attention.documents import find_document_starts, split_documents
from megatron.attention.inputs import AttentionInputs
from megatron.attention.query_rows import PrecedingRows, describe_query_rows, scale_queries
from megatron.attention.reference import compute_attention_in_blocks, sum_gates
from megatron.attention.segments import (
    SampleFunction,
    Segment,
    add_position_embeddings,
    attend_segments,
    build_segments,
    rotate_segments,
    skip_sampling,
)
from megatron.attention.softmax import build_softmax_sink
from megatron.conversion.bundled.configuration_farfield import FarfieldConfig
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.numerics import promote_to_float32, soft_cap
from megatron.position.processor import Processor
from megatron.position.registry import build_encoding, build_processor, build_temperature
from megatron.position.temperature import Temperature
from megatron.position.token_range import ALL_HEADS, SampledPositions, TokenRange, sample_positions

logger = logging.get_logger(__name__)

FIRST_MARK = 1_000_003
"""Mark of the first token among the bits stored after keys; later tokens count up. No rounded zero equals a mark."""
CACHE_FIELD = next(
    field.name
    for field in fields(BaseModelOutputWithPast)
    if field.name not in ("last_hidden_state", "hidden_states", "attentions")
)
"""Name of a model's cache in transformers: past_key_values until 5.23, cache from 5.24 on."""
UNSUPPORTED_ARGUMENTS = frozenset(
    (
        *("output_attentions", "head_mask", "cross_attn_head_mask", "token_type_ids"),
        *("encoder_hidden_states", "encoder_attention_mask", "block_table", "read_index", "write_index"),
        "cu_seqlens",
    )
)
"""Arguments that request results this model does not compute."""
IGNORED_ARGUMENTS = frozenset({"tokenizer", "assistant_tokenizer"})
"""Arguments that `generate` passes to every model but uses only itself."""
STATIC_CACHES = frozenset(
    getattr(configuration_utils, "ALL_STATIC_CACHE_IMPLEMENTATIONS", ("static", "offloaded_static"))
)
"""Names of static caches in `generate`."""
PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")
"""Arguments by which transformers' collators describe sequences packed into one row, in addition to position_ids."""

OutputT = TypeVar("OutputT", bound=ModelOutput)
Activation = Callable[[Tensor], Tensor]
GATED: dict[str, Activation] = {
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
}
PLAIN: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def build_norm_of_size(kind: str, size: int, epsilon: float, bias: bool) -> nn.Module:
    return nn.RMSNorm(size, eps=epsilon) if kind == "rmsnorm" else nn.LayerNorm(size, eps=epsilon, bias=bias)


def build_norm(config: FarfieldConfig) -> nn.Module:
    return build_norm_of_size(config.norm, config.hidden_size, config.norm_epsilon, config.norm_bias)


def build_norm_of_heads(config: FarfieldConfig, num_heads: int) -> nn.Module | None:
    """Build the norm of the queries or keys of `num_heads` heads, per head or over all heads."""
    if config.qk_norm == "none":
        return None
    size = config.head_dim * (num_heads if config.qk_norm_over_heads else 1)
    return build_norm_of_size(config.qk_norm, size, config.qk_norm_epsilon, config.norm_bias)


def normalize_heads(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Normalize queries or keys, [B, T, H, d]."""
    if norm is None:
        return x
    return norm(x.flatten(2)).view_as(x) if norm.weight.numel() > x.shape[-1] else norm(x)  # type: ignore[operator]


def build_attention_dims(config: FarfieldConfig) -> AttentionDims:
    return AttentionDims(
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        train_length=config.train_length,
        max_length=config.position_table,
    )


def get_layer_value(value: Any, layer_idx: int) -> Any:
    """Return the value of a layer: `value` itself, or the matching entry of a list that repeats over the layers."""
    return value[layer_idx % len(value)] if isinstance(value, list) else value


def get_layer_method(names: Any, options: dict[str, Any], layer_idx: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a layer's encoding or processor, and its options."""
    name = get_layer_value(names, layer_idx)
    return name, options.get(name, {}) if isinstance(names, list) else options


def pack_bits(parts: Sequence[Tensor], k: Tensor) -> Tensor:
    """Pack values of any type, bit for bit, into a tensor that extends keys.

    transformers' caches store keys and values, and copy, reorder and crop both in the same way.

    Args:
        parts: tensors [B, T, n].
        k: keys [B, g, T, d], which determine the type and groups of the result.

    Returns:
        Tensor [B, g, T, w] with the smallest sufficient width w.
    """
    bits = torch.cat([part.detach().contiguous().view(torch.uint8) for part in parts], dim=-1)  # [B, T, bytes]
    bits = F.pad(bits, (0, -bits.shape[-1] % (k.shape[1] * k.element_size())))
    return bits.unflatten(-1, (k.shape[1], -1)).transpose(1, 2).contiguous().view(k.dtype)


def unpack_bits(packed: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the values packed by `pack_bits`, for all tokens so far.

    Args:
        packed: [B, g, tokens so far, w].
        parts: values of the newest tokens, possibly none; they have the type and last dimension of the result.
    """
    bits = packed.detach().transpose(1, 2).contiguous().view(torch.uint8).flatten(2)
    sizes = [part.shape[-1] * part.element_size() for part in parts]
    split = bits[..., : sum(sizes)].split(sizes, dim=-1)
    return [
        own.clone(memory_format=torch.contiguous_format).view(part.dtype)
        for own, part in zip(split, parts, strict=True)
    ]


def read_document_ends(past_key_values: Cache | None, past_length: int, like: Tensor) -> Tensor:
    """Return from a cache which of the tokens so far end a document: int32 [B, past_length, 1] on the CPU.

    Args:
        past_length: number of tokens in the cache.
        like: any tensor of the forward pass, [B, …].

    Raises:
        ValueError: the cache contains other data in the keys of its first layer.
    """
    parts = [torch.zeros(len(like), 0, 1, dtype=torch.int32), mark_tokens(0, 0, like).cpu()]
    if past_key_values is None or past_length == 0:
        return parts[0]
    layers = getattr(past_key_values, "layers", ())
    stored = getattr(layers[0], "keys", None) if layers else None
    if not isinstance(stored, Tensor) or stored.dim() != 4 or len(stored) != len(like) or stored.shape[2] < past_length:
        raise ValueError(f"{type(past_key_values).__name__} does not contain the tokens so far; use a DynamicCache")
    size = sum(part.shape[-1] * part.element_size() for part in parts)
    width = -(-size // (stored.shape[1] * stored.element_size()))
    ends, marks = unpack_bits(stored[:, :, :past_length, -width:].cpu(), parts)
    check_marks(marks, past_key_values)
    return ends


def mark_tokens(past_length: int, length: int, like: Tensor) -> Tensor:
    """Return the marks of tokens past_length, past_length + 1, … for all sequences of a batch: int32 [B, length, 1]."""
    marks = torch.arange(past_length, past_length + length, dtype=torch.int32, device=like.device) + FIRST_MARK
    return marks[None, :, None].expand(len(like), -1, 1)


def check_marks(marks: Tensor, past_key_values: Cache) -> None:
    """Raise ValueError if a cache does not return the marks [B, tokens so far, 1] unchanged."""
    if not torch.equal(marks, mark_tokens(0, marks.shape[1], marks)):
        raise ValueError(
            f"{type(past_key_values).__name__} does not return exactly what was stored (it rounds keys, or something "
            "else filled it, such as peft's prefix tuning), but this model stores values that must be exact; use a "
            "DynamicCache that only this model fills"
        )


def build_encoding_for(config: FarfieldConfig, layer_idx: int, *, is_shared: bool) -> Encoding:
    name, options = get_layer_method(config.pos_emb, config.pos_emb_options, layer_idx)
    dims = replace(build_attention_dims(config), layer=0 if is_shared else layer_idx)
    return build_encoding(name, dims, options)


class FarfieldAttention(nn.Module):
    """Attention softmax(processor(weight·q·k/√d + contextual, bias))·v over causal keys; q·k/√d may be soft-capped."""

    def __init__(self, config: FarfieldConfig, layer_idx: int, shared: Encoding | None) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.num_kv_heads, self.queries_per_key = num_kv_heads, num_heads // num_kv_heads
        width = num_heads * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, width + 2 * num_kv_heads * self.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.output_gate: nn.Linear | None = None
        if config.attention_output_gate:
            num_gates = num_heads if config.attention_output_gate == "headwise" else width
            self.output_gate = nn.Linear(config.hidden_size, num_gates, bias=False)
        self.q_norm = build_norm_of_heads(config, num_heads)
        self.k_norm = build_norm_of_heads(config, num_kv_heads)
        # Wrapped in a tuple, the shared encoding is not a submodule here: the model registers its parameters once.
        self._shared: tuple[Encoding, ...] = () if shared is None else (shared,)
        self.encoding = build_encoding_for(config, layer_idx, is_shared=False) if shared is None else None
        self.window = get_layer_value(config.attention_window, layer_idx)
        self.processor: Processor | None = None
        name, options = get_layer_method(config.score_processor, config.score_processor_options, layer_idx)
        if name != "none":
            has_bias = (shared or self.encoding).adds_bias  # type: ignore[union-attr]
            dims = replace(build_attention_dims(config), layer=layer_idx)
            self.processor = build_processor(name, dims, options, has_bias=has_bias)
        self.temperature: Temperature | None = None
        name, options = get_layer_method(config.attention_temperature, config.attention_temperature_options, layer_idx)
        if name != "none":
            self.temperature = build_temperature(name, build_attention_dims(config), options)

        self.softmax_type = get_layer_value(config.softmax_type, layer_idx)
        self.sink = build_softmax_sink(self.softmax_type, num_heads)

    def forward(
        self,
        hidden_states: Tensor,
        segments: tuple[Segment, ...],
        past_key_values: Cache | None,
        document_ends: Tensor | None = None,
    ) -> Tensor:
        encoding = self._shared[0] if self.encoding is None else self.encoding
        # Each group: its queries, then its key, then its value.
        grouped_qkv = self.qkv(hidden_states).unflatten(
            -1, (self.num_kv_heads, self.queries_per_key + 2, self.head_dim)
        )
        q = normalize_heads(grouped_qkv[:, :, :, : self.queries_per_key].flatten(2, 3), self.q_norm)
        k, v = (grouped_qkv[:, :, :, index] for index in (-2, -1))
        q, k, v = (x.transpose(1, 2) for x in (q, normalize_heads(k, self.k_norm), v))
        if encoding.rotates_linearly:
            q = q * self.config.query_multiplier
        q, k = rotate_segments(q, k, encoding, segments)
        if not encoding.rotates_linearly:
            q = q * self.config.query_multiplier
        if self.temperature is not None:
            rows = describe_query_rows(segments, self.window, q.shape[0], q.shape[2], q.device)
            q = scale_queries(q, self.temperature, rows)
        gates = None
        if type(encoding).overrides_hook("gate"):
            gates = encoding.gate(hidden_states, ALL_HEADS)
        kept = self._cache_tokens(q, k, v, gates, past_key_values, document_ends)
        k, v, gates, above = kept.k, kept.v, kept.gates, kept.above
        k, v = (x.repeat_interleave(self.queries_per_key, dim=1) if self.queries_per_key > 1 else x for x in (k, v))

        sinks = None if self.sink is None else self.sink(q)

        def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, segment: Segment) -> Tensor:
            row_bias, key_bias = sum_gates(gates, segment.tokens.length)
            inputs = AttentionInputs(
                q=q,
                k=k,
                v=v,
                query=segment.tokens,
                key=TokenRange(0, segment.tokens.stop, segment.tokens.sampled),
                encoding=encoding,
                processor=self.processor,
                window=self.window,
                softcap=self.config.attn_logit_softcapping,
                sinks=sinks,
                uses_stick_breaking=self.softmax_type.startswith("stick-breaking"),
                adds_remainder=self.softmax_type == "stick-breaking-remainder",
                dropout=self.config.attention_dropout if self.training else 0.0,
                row_bias=row_bias,
                key_bias=key_bias,
            )
            if above is not None:
                inputs = above.add_to(inputs, segment)
            output = compute_attention_in_blocks(inputs, self.config.attention_rows)
            if above is not None and above.sums is not None:
                above.add_rows(inputs, segment)
            return output

        output = attend_segments(q, k, v, segments, attend, gates)
        if kept.store_sums is not None and above is not None:
            kept.store_sums(above.sums)
        output = output.transpose(1, 2)  # [B, T, H, d]
        if self.output_gate is not None:
            gate = promote_to_float32(self.output_gate(hidden_states))
            output = output * torch.sigmoid(gate.unflatten(-1, (self.config.num_attention_heads, -1)))
        return self.out(output.to(hidden_states.dtype).flatten(2))

    def _cache_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        past_key_values: Cache | None,
        document_ends: Tensor | None,
    ) -> "CachedTokens":
        """Add tokens to the cache, if there is one, and return its content for all tokens so far.

        After each token's key, the cache stores other data that later tokens need: queries, which a cache may round
        like keys, and bits that must be returned exactly. A mark among these bits detects whether they are.
        """
        processor, length = self.processor, k.shape[2]
        reads_above = processor is not None and processor.reads_preceding_rows
        has_sums = processor is not None and processor.overrides("row_terms")
        if past_key_values is None:
            return CachedTokens(k, v, gates, PrecedingRows(q, length, None) if reads_above else None)
        past_length = int(past_key_values.get_seq_length(self.layer_idx))
        keys = [k]
        if reads_above and not has_sums:
            keys.append(q.unflatten(1, (self.num_kv_heads, -1)).transpose(2, 3).flatten(3))
        marks, exact = mark_tokens(past_length, length, q), [] if gates is None else [gates.transpose(1, 2)]
        if processor is not None and has_sums:
            sums = q.new_zeros(len(q), length, 1, dtype=torch.float32)
            exact += [q[:, processor.summed_heads].transpose(1, 2).flatten(2), sums, sums.to(torch.int32)]
        if exact:
            exact.append(marks)
            keys.append(pack_bits(exact, k))
        number = len(keys) - 1
        if document_ends is not None:  # last, as `read_document_ends` expects
            keys.append(pack_bits([document_ends, marks], k))
        stored = torch.cat(keys, dim=-1) if len(keys) > 1 else k
        self._check_stored_width(past_key_values, stored.shape[-1])
        all_keys, v = past_key_values.update(stored, v, self.layer_idx)
        total = past_length + length
        if all_keys.shape[2] != total:
            raise ValueError(f"{type(past_key_values).__name__} does not contain the tokens so far; use a DynamicCache")
        parts = list(all_keys.split([part.shape[-1] for part in keys], dim=-1))
        k, above, store_sums = parts[0], None, None
        bits = unpack_bits(parts[number], exact) if exact else []
        if exact:
            check_marks(bits[-1], past_key_values)
        if document_ends is not None:
            check_marks(unpack_bits(parts[-1], [document_ends, marks])[-1], past_key_values)
        if gates is not None:
            # Use the new gates directly so that gradients flow through them.
            gates = torch.cat([bits[0][:, :past_length].transpose(1, 2), gates], dim=2)
        if processor is not None and has_sums:
            queries, sums, counts = bits[-4], bits[-3][..., 0], bits[-2][:, :past_length, 0]
            preceding_rows = q
            if not bool((counts == past_length).all()):
                # Tokens were removed since the sums were stored (or a cache kept a copy): recompute the sums of the
                # rows.
                preceding_rows = q.new_zeros(len(q), q.shape[1], total, q.shape[-1])
                preceding_rows[:, processor.summed_heads] = queries.unflatten(-1, (-1, q.shape[-1])).transpose(1, 2)
                preceding_rows[:, :, past_length:] = q
                sums = torch.zeros_like(sums)
            above = PrecedingRows(preceding_rows, total, sums)

            def store_sums(new_sums: Tensor) -> None:
                bits[-3:-1] = [new_sums[..., None], torch.full_like(bits[-2], total)]
                parts[number].data.copy_(pack_bits(bits, k))  # the cache's own memory; no gradient flows through it

        elif reads_above:
            above = PrecedingRows(parts[1].unflatten(3, (-1, q.shape[-1])).transpose(2, 3).flatten(1, 2), total, None)
        return CachedTokens(k, v, gates, above, store_sums)

    def _check_stored_width(self, past_key_values: Cache, width: int) -> None:
        """Reject a cache that was filled by something else, such as peft's prefix tuning."""
        layers = getattr(past_key_values, "layers", ())
        found = getattr(layers[self.layer_idx], "keys", None) if self.layer_idx < len(layers) else None
        if isinstance(found, Tensor) and found.dim() == 4 and found.shape[1::2] != (self.num_kv_heads, width):
            raise ValueError(
                f"the cache contains keys of {found.shape[1]} × {found.shape[3]} numbers, but this model stores "
                f"{self.num_kv_heads} × {width} per token; use a cache that only this model fills (peft's prefix "
                "tuning requires models that store only keys and values; use LoRA or prompt tuning)"
            )


@dataclass
class CachedTokens:
    """Keys, values and gates of all tokens so far."""

    k: Tensor
    v: Tensor
    gates: Tensor | None
    above: PrecedingRows | None
    """Earlier rows that the processor reads, or None."""
    store_sums: Callable[[Any], None] | None = None
    """Function that stores the sums for the next step, or None if there are none."""


class FarfieldMLP(nn.Module):
    """Feed-forward layer. With a gated activation, the first half of `up` is the gate."""

    def __init__(self, config: FarfieldConfig) -> None:
        super().__init__()
        self.activation = config.hidden_act
        up_size = config.intermediate_size * (2 if self.activation in GATED else 1)
        self.up = nn.Linear(config.hidden_size, up_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.up(hidden_states)
        if self.activation in GATED:
            gate, x = x.chunk(2, dim=-1)
            return self.down(GATED[self.activation](gate) * x)
        return self.down(PLAIN[self.activation](x))


class FarfieldLayer(GradientCheckpointingLayer):
    """Layer: x + attention(norm(x)), then x + mlp(norm(x)), or both from the same x; norms may follow branches."""

    def __init__(self, config: FarfieldConfig, layer_idx: int, shared: Encoding | None) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.dropout, self.multiplier = config.hidden_dropout, config.residual_multiplier
        is_first, is_last = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = build_norm(config) if is_first else nn.Identity()
        self.attention = FarfieldAttention(config, layer_idx, shared)
        self.attention_post_norm = build_norm(config) if is_last else nn.Identity()
        self.mlp_norm = None if config.tied_norm else build_norm(config) if is_first else nn.Identity()
        self.mlp = FarfieldMLP(config)
        self.mlp_post_norm = build_norm(config) if is_last else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        segments: tuple[Segment, ...],
        past_key_values: Cache | None = None,
        document_ends: Tensor | None = None,
    ) -> Tensor:
        normed = self.attention_norm(hidden_states)
        attended = self.attention_post_norm(self.attention(normed, segments, past_key_values, document_ends))
        residual = hidden_states + self._apply_dropout(attended)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(hidden_states if self.parallel else residual)
        return residual + self._apply_dropout(self.mlp_post_norm(self.mlp(normed)))

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.multiplier, self.dropout, self.training)


class FarfieldPreTrainedModel(PreTrainedModel):
    """Base class for loading, device placement and initialization in transformers."""

    config_class = FarfieldConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FarfieldLayer"]  # noqa: RUF012 (transformers' own form)
    _skip_keys_device_placement = ["past_key_values", CACHE_FIELD]  # noqa: RUF012

    def _to_requested_type(self, output: OutputT, return_dict: bool | None) -> OutputT | tuple[Any, ...]:
        """Return an output as it is or as a tuple, as `return_dict` or else the configuration requests."""
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize weights that are missing from a file; they would otherwise contain arbitrary memory."""
        if type(module) in (nn.Linear, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, self.config.initializer_range)  # type: ignore[arg-type]
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


class FarfieldModel(FarfieldPreTrainedModel):
    """Transformer decoder from tokens to hidden states [B, T, D]."""

    def __init__(self, config: FarfieldConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        names = [get_layer_value(config.pos_emb, layer_idx) for layer_idx in layers]
        # encodings shared by layers, by name
        shared = (
            {}
            if config.pos_emb_per_layer
            else {n: build_encoding_for(config, names.index(n), is_shared=True) for n in names}
        )
        self.position = next(iter(shared.values())) if len(shared) == 1 else None
        self.positions = nn.ModuleDict(shared if len(shared) > 1 else {})
        self.layers = nn.ModuleList(FarfieldLayer(config, index, shared.get(names[index])) for index in layers)
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.embed = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Compute hidden states.

        Sequences packed into one row do not interact: each yields the same result as by itself. They are described as
        by transformers' DataCollatorWithFlattening, with position_ids that restart at 0, with cu_seq_lens_q and
        cu_seq_lens_k, or with seq_idx. A model trained with document masking also ends a document at each
        document_end_token_id.

        Args:
            input_ids: int64 [B, T]; alternatively inputs_embeds, [B, T, D].
            attention_mask: [B, tokens so far], 0 for padding, on either side. A padded sequence yields the same result
                as by itself.
            position_ids: must equal the positions implied by the mask, the cache and the packing. The same applies to
                other arguments that this model would ignore (`cache_position`, passed by transformers 4, must continue
                the cache).
            past_key_values: cache of the preceding tokens, a DynamicCache, under any name that transformers passes. Not
                supported for packed sequences.

        Raises:
            ValueError: the arguments request something this model does not support.
        """
        past_key_values = _take_cache(past_key_values, kwargs)
        packing = {name: kwargs.pop(name, None) for name in PACKING_ARGUMENTS}
        cache_position = kwargs.pop("cache_position", None)
        if self.config.output_attentions:
            kwargs.setdefault("output_attentions", True)
        _check_no_extra_arguments(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if x.shape[1] == 0:
            raise ValueError("there are no tokens; start an empty text with the end of a previous one (eos_token)")
        past_length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        mask = _check_mask(attention_mask, x.shape[0], past_length + x.shape[1])
        sequence_ends = _find_sequence_ends(x, mask, position_ids, **packing)
        if sequence_ends is not None:
            if use_cache or past_key_values is not None:
                raise ValueError(
                    "sequences packed into one row (position_ids that restart, cu_seq_lens_q, seq_idx) "
                    "do not support a cache: use_cache must be False"
                )
            use_cache = False
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False  # layers are recomputed in the backward pass, and would be stored twice
            if past_length > 0:
                raise ValueError(
                    "gradient checkpointing does not support tokens from a cache (including prefix tuning)"
                )
            past_key_values = None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and self.config.randomized_positions is not None:
            raise ValueError(
                "randomized positions depend on the length of the whole sequence, which is unknown in a cached step: "
                "use_cache must be False"
            )
        document_ends = self._find_document_ends(input_ids)
        ends = sequence_ends
        if document_ends is not None:
            past_ends = read_document_ends(past_key_values, past_length, x)
            ends = torch.cat([past_ends, document_ends.cpu()], dim=1)[..., 0].bool()
            ends = ends if sequence_ends is None else ends | sequence_ends
        _check_positions(x, mask, past_length, position_ids, cache_position, sequence_ends)
        segments = self._build_segments(x.shape[1], mask, past_length, ends)
        x = F.dropout(x, self.config.hidden_dropout, self.training)
        x = x * (self.config.embedding_multiplier / self.config.position_embedding_multiplier)
        if self.position is not None:
            x = add_position_embeddings(x, self.position, segments)
        x = x * self.config.position_embedding_multiplier
        hidden_states = []
        for layer in self.layers:
            hidden_states.append(x)
            # The first layer's cache stores the document ends.
            x = layer(x, segments, past_key_values, None if len(hidden_states) > 1 else document_ends)
        x = self.norm(x)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            **{CACHE_FIELD: past_key_values},
        )
        return self._to_requested_type(output, return_dict)

    def _find_document_ends(self, input_ids: Tensor | None) -> Tensor | None:
        """Return which tokens end a document, int32 [B, T, 1], or None for a model without document masking."""
        if (end := self.config.document_end_token_id) is None:
            return None
        if input_ids is None:
            raise ValueError(
                f"this model masks documents by their end token (document_end_token_id {end}), which inputs_embeds do "
                "not contain; pass input_ids, or set config.document_end_token_id = None to treat a row as one document"
            )
        return (input_ids == end).to(torch.int32)[..., None]

    def _build_segments(
        self, length: int, mask: Tensor | None, past_length: int, ends: Tensor | None
    ) -> tuple[Segment, ...]:
        """Return the segments of the new tokens, with their positions.

        ends: bool [B, tokens so far] on the CPU, True for the last token of a document; None for one document per row.
        """
        sample: SampleFunction = skip_sampling
        if (max_positions := self.config.randomized_positions) is not None:
            continuous = self.config.continuous_positions

            def sample(tokens: int) -> SampledPositions:
                return sample_positions(tokens, max_positions, tokens, continuous=continuous)

        if ends is None or not bool((ends if mask is None else ends & mask.cpu())[:, :-1].any()):
            return build_segments(length, mask, past_length, sample)
        starts = find_document_starts(ends, True, None if mask is None else mask.cpu())
        return split_documents(starts, past_length, sample)


class FarfieldForCausalLM(FarfieldPreTrainedModel, GenerationMixin):
    """Language model with logits [B, T, V]."""

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: FarfieldConfig) -> None:
        super().__init__(config)
        self.model = FarfieldModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the number of tokens. Rows that were padding may then be generated, because they are now tokens."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        suppressed = self.generation_config.suppress_tokens
        if new_num_tokens is not None and suppressed:
            self.generation_config.suppress_tokens = [token for token in suppressed if token >= new_num_tokens] or None
        return embeddings

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Reject a static cache before transformers creates and keeps it."""
        if (name := generation_config.cache_implementation) in STATIC_CACHES:
            raise ValueError(
                f"cache_implementation is {name!r}: static caches use 2D attention masks, which this "
                "model does not support; omit it or use 'dynamic'"
            )
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute logits and, if labels are given (−100 is ignored; shifted here), the loss.

        Arguments as in `FarfieldModel.forward`. logits_to_keep: number of last positions to compute logits for, or a
        tensor of positions.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        logit_slice = (
            slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        )
        hidden = (
            outputs.last_hidden_state if isinstance(logit_slice, int) else outputs.last_hidden_state[:, logit_slice]
        )
        logits = soft_cap(self.lm_head(hidden * self.config.logits_multiplier), self.config.final_logit_softcapping)
        loss = None
        if labels is not None:
            loss_kwargs = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_FIELD: outputs.get(CACHE_FIELD)},
        )
        return self._to_requested_type(output, return_dict)


def _take_cache(past_key_values: Any, kwargs: dict[str, Any]) -> Cache | None:
    """Remove the cache from a call's arguments and return it. Caches are recognized by type, not by name."""
    names = [name for name, value in kwargs.items() if isinstance(value, Cache) or name == CACHE_FIELD]
    caches = [past_key_values, *(kwargs.pop(name) for name in names)]
    caches = [cache for cache in caches if cache is not None]
    if len(caches) > 1:
        raise ValueError(
            f"pass only one cache: {names[0]} is another name for past_key_values (peft's prefix tuning passes both "
            "until it supports transformers 5.24)"
        )
    if caches and not isinstance(caches[0], Cache):
        raise ValueError(f"{CACHE_FIELD} is a {type(caches[0]).__name__}; use a DynamicCache")
    if caches and getattr(caches[0], "is_compileable", False):
        raise ValueError(f"{CACHE_FIELD} is a {type(caches[0]).__name__}, whose size is fixed; use a DynamicCache")
    return caches[0] if caches else None


def _check_no_extra_arguments(kwargs: dict[str, Any]) -> None:
    """Reject arguments that request other results; warn about unknown ones, which later versions may pass."""
    for name in (name for name, value in kwargs.items() if value is not None and value is not False):
        if name in UNSUPPORTED_ARGUMENTS:
            raise ValueError(f"this model does not support {name}")
        if name not in IGNORED_ARGUMENTS:
            logger.warning_once(f"this model ignores the unknown argument {name}")


def _find_sequence_ends(
    x: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    seq_idx: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
) -> Tensor | None:
    """Return which tokens end a sequence that is followed by another in its row, or None for one sequence per row.

    Returns:
        bool [B, T] on the CPU.

    Raises:
        ValueError: the arguments contradict each other.
    """
    batch, length = x.shape[:2]
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != length):
        raise ValueError(f"position_ids must be [{batch}, {length}], not {list(position_ids.shape)}")
    begins: dict[str, Tensor] = {}
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        borders, others = (
            [] if each is None else torch.as_tensor(each).flatten().tolist() for each in (cu_seq_lens_q, cu_seq_lens_k)
        )
        is_valid = borders == sorted(borders) and borders[:1] == [0] and borders[-1:] == [length]
        if batch != 1 or not is_valid or others not in ([], borders):
            raise ValueError(
                f"cu_seq_lens_q must increase from 0 to the {length} tokens of one row, and cu_seq_lens_k must equal "
                f"it, not {borders} and {others} for {batch} rows"
            )
        begins["cu_seq_lens_q"] = torch.zeros(1, length, dtype=torch.bool)
        begins["cu_seq_lens_q"][0, [border for border in borders if border < length]] = True
    if seq_idx is not None:
        if seq_idx.shape != (batch, length):
            raise ValueError(f"seq_idx must be [{batch}, {length}], not {list(seq_idx.shape)}")
        changes = seq_idx.cpu().diff(dim=1) != 0
        begins["seq_idx"] = F.pad(changes, (1, 0), value=True)
    if not begins and position_ids is not None:
        is_first = position_ids.cpu() == 0
        if mask is not None:
            is_first = is_first & mask[:, -length:].cpu()
        # The first zero of a row may follow padding.
        begins["position_ids"] = is_first & (is_first.cumsum(1) > 1)
    if not begins:
        return None
    found = next(iter(begins.values()))
    if any(not torch.equal(found, other) for other in begins.values()):
        raise ValueError("cu_seq_lens_q and seq_idx must describe the same sequences")
    ends = F.pad(found[:, 1:], (0, 1), value=False).expand(batch, -1)
    return ends if ends.any() else None


def _check_positions(
    x: Tensor,
    mask: Tensor | None,
    past_length: int,
    position_ids: Tensor | None,
    cache_position: Tensor | None,
    sequence_ends: Tensor | None,
) -> None:
    """Reject positions other than those this model uses."""
    batch, length = x.shape[:2]
    cache_columns = torch.arange(past_length, past_length + length, device=x.device)
    if cache_position is not None and not torch.equal(cache_position.to(x.device), cache_columns):
        raise ValueError("cache_position must continue the tokens in the cache")
    if position_ids is None:
        return
    expected_positions = cache_columns.expand(batch, -1)
    is_token = torch.ones_like(expected_positions, dtype=torch.bool)
    if mask is not None:
        expected_positions, is_token = (mask.cumsum(1) - 1)[:, past_length:], mask[:, past_length:]
    if sequence_ends is not None:
        starts = find_document_starts(sequence_ends, True, None if mask is None else mask.cpu())
        expected_positions = cache_columns - starts.to(x.device)
    mismatch = (position_ids.to(x.device).expand(batch, -1) != expected_positions) & is_token
    if mismatch.any():
        raise ValueError(
            "position_ids must match attention_mask and the packing: from 0 in steps of 1 in each sequence of a row"
        )


def _check_mask(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != (batch, length):
        found = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must be [batch, tokens so far], here [{batch}, {length}], not {found}: 2D "
            "masks (static caches) are not supported; describe packed sequences by position_ids that restart"
        )
    if attention_mask.dtype != torch.bool and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError(
            "attention_mask must be 0 for padding and 1 for tokens; describe packed sequences by position_ids that "
            "restart"
        )
    mask = attention_mask.bool()
    num_segments = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    if (num_segments > 1).any():
        raise ValueError(
            "attention_mask may have padding only at the ends: pad on the left for generation (with peft's prefix and "
            "prompt tuning, whose tokens precede the padding, pad on the right for training, and generate from prompts "
            "of equal length)"
        )
    return mask

"""The exported model in plain PyTorch, for transformers 4.57 and 5.

The mathematics of positions, scores and attention is that of the training: the files beside this one are the ones that
trained the model. B batch, T tokens at hand, D hidden size, H heads, g heads of keys and values, d head dimension,
V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from megatron.attention.inputs import AttentionInputs
from megatron.attention.query_scale import describe_query_rows, scale_queries
from megatron.attention.reference import compute_attention_in_blocks, sum_gates
from megatron.attention.rows_above import RowsAbove
from megatron.attention.segments import (
    Segment,
    add_position_embeddings,
    attend_segments,
    build_segments,
    rotate_segments,
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
    """Of the queries or the keys of so many heads, each by itself or all together."""
    if config.qk_norm == "none":
        return None
    size = config.head_dim * (num_heads if config.qk_norm_over_heads else 1)
    return build_norm_of_size(config.qk_norm, size, config.qk_norm_epsilon, config.norm_bias)


def normalize_heads(x: Tensor, norm: nn.Module | None) -> Tensor:
    """[B, T, H, d] → the same."""
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
    """One value for all layers, or a list of them that repeats from the first layer to the last."""
    return value[layer_idx % len(value)] if isinstance(value, list) else value


def get_layer_method(names: Any, options: dict[str, Any], layer_idx: int) -> tuple[str, dict[str, Any]]:
    """The name of a layer's encoding or processor, and its options."""
    name = get_layer_value(names, layer_idx)
    return name, options.get(name, {}) if isinstance(names, list) else options


def pack_gates(k: Tensor, gates: Tensor) -> Tensor:
    """Keys [B, g, T, d] with the gates [B, H, T] of the heads that share each, bit for bit, as further numbers of any
    type: transformers' caches hold keys and values, and copy, reorder and cut them alike."""
    own = gates.unflatten(1, (k.shape[1], -1)).transpose(2, 3).contiguous()  # [B, g, T, H / g]
    return torch.cat([k, own.view(k.dtype)], dim=-1)


def unpack_gates(k: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `pack_gates` joined, of all tokens so far."""
    own = k[..., head_dim:].contiguous().view(dtype)
    return k[..., :head_dim], own.transpose(2, 3).flatten(1, 2)


def build_encoding_for(config: FarfieldConfig, layer_idx: int) -> Encoding:
    name, options = get_layer_method(config.pos_emb, config.pos_emb_options, layer_idx)
    return build_encoding(name, build_attention_dims(config), options)


class FarfieldAttention(nn.Module):
    """softmax(processor(weight·q·k/√d + contextual, bias))·v over causal keys; q·k/√d may be soft-capped."""

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
        # In a tuple the shared encoding is no submodule here: the model registers its parameters, once.
        self._shared: tuple[Encoding, ...] = () if shared is None else (shared,)
        self.encoding = build_encoding_for(config, layer_idx) if shared is None else None
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

    def forward(self, hidden_states: Tensor, segments: tuple[Segment, ...], past_key_values: Cache | None) -> Tensor:
        encoding = self._shared[0] if self.encoding is None else self.encoding
        # Of each group: its queries, then its key, then its value.
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
        above = place = None
        if self.processor is not None and self.processor.reads_rows_above:
            above, place, k, v, gates = self._update_rows(q, k, v, gates, past_key_values)
        elif past_key_values is not None:
            stored = k if gates is None else pack_gates(k, gates)
            k, v = past_key_values.update(stored, v, self.layer_idx)
            if gates is not None:
                k, gates = unpack_gates(k, self.head_dim, gates.dtype)
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
                breaks_sticks=self.softmax_type.startswith("stick-breaking"),
                adds_remainder=self.softmax_type == "stick-breaking-remainder",
                dropout=self.config.attention_dropout if self.training else 0.0,
                row_bias=row_bias,
                key_bias=key_bias,
            )
            if above is not None:
                inputs = above.join(inputs, segment)
            output = compute_attention_in_blocks(inputs, self.config.attention_rows)
            if above is not None and above.sums is not None:
                above.add_rows(inputs, segment)
            return output

        output = attend_segments(q, k, v, segments, attend, gates)
        if place is not None and above is not None and above.sums is not None:
            place.copy_(above.sums[..., None].contiguous().view(place.dtype))
        output = output.transpose(1, 2)  # [B, T, H, d]
        if self.output_gate is not None:
            gate = promote_to_float32(self.output_gate(hidden_states))
            output = output * torch.sigmoid(gate.unflatten(-1, (self.config.num_attention_heads, -1)))
        return self.out(output.to(hidden_states.dtype).flatten(2))

    def _update_rows(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, past_key_values: Cache | None
    ) -> tuple[RowsAbove, Tensor | None, Tensor, Tensor, Tensor | None]:
        """What the processor reads of rows above, where the cache keeps its sums, and keys, values and gates of all
        tokens so far.

        As gates, what is kept of each token stands behind its key: queries, or the number that sums up the rows.
        """
        assert self.processor is not None
        has_sums, num_groups = self.processor.overrides("row_terms"), self.num_kv_heads
        if past_key_values is None:
            return RowsAbove(q, k.shape[2], None), None, k, v, gates
        width, stored = k.shape[-1], k if gates is None else pack_gates(k, gates)
        if has_sums:
            sums_type = torch.promote_types(q.dtype, torch.float32)
            own = q.new_zeros(*k.shape[:3], sums_type.itemsize // q.dtype.itemsize)
        else:
            own = q.unflatten(1, (num_groups, -1)).transpose(2, 3).flatten(3)
        kept, v = past_key_values.update(torch.cat([stored, own], dim=-1), v, self.layer_idx)
        k, rows = kept.split([stored.shape[-1], own.shape[-1]], dim=-1)
        if gates is not None:
            k, gates = unpack_gates(k, width, gates.dtype)
        if not has_sums:
            queries = rows.unflatten(3, (-1, q.shape[-1])).transpose(2, 3).flatten(1, 2)
            return RowsAbove(queries, k.shape[2], None), None, k, v, gates
        place = rows.data[:, 0]  # the cache's own memory, of the first group; no gradient comes through it
        return RowsAbove(q, k.shape[2], place.contiguous().view(sums_type)[..., 0].clone()), place, k, v, gates


class FarfieldMLP(nn.Module):
    """The feed-forward layer; with a gate, the first half of `up` is the gate."""

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
    """x + attention(norm(x)), then x + mlp(norm(x)); or both from the same x; norms may stand after the branches."""

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
        self, hidden_states: Tensor, segments: tuple[Segment, ...], past_key_values: Cache | None = None
    ) -> Tensor:
        normed = self.attention_norm(hidden_states)
        attended = self.attention_post_norm(self.attention(normed, segments, past_key_values))
        residual = hidden_states + self._apply_dropout(attended)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(hidden_states if self.parallel else residual)
        return residual + self._apply_dropout(self.mlp_post_norm(self.mlp(normed)))

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.multiplier, self.dropout, self.training)


class FarfieldPreTrainedModel(PreTrainedModel):
    """How transformers loads, divides and initialises the model."""

    config_class = FarfieldConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FarfieldLayer"]  # noqa: RUF012 (transformers' own form)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Start values of a weight that a file lacks: it would be whatever was in memory."""
        if type(module) in (nn.Linear, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, self.config.initializer_range)  # type: ignore[arg-type]
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


class FarfieldModel(FarfieldPreTrainedModel):
    """From tokens to hidden states [B, T, D]."""

    def __init__(self, config: FarfieldConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        names = [get_layer_value(config.pos_emb, layer_idx) for layer_idx in layers]
        # The encodings that layers share, by their names.
        shared = {} if config.pos_emb_per_layer else {n: build_encoding_for(config, names.index(n)) for n in names}
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
    ) -> BaseModelOutputWithPast:
        """Hidden states.

        Args:
            input_ids: int64 [B, T]; or inputs_embeds, [B, T, D].
            attention_mask: [B, tokens so far], 0 for padding, on either side. A padded sequence gives what it gives
                alone.
            position_ids: those that the mask and the cache imply; others are refused, and so is whatever else this
                model would pass over (`cache_position`, which transformers 4 gives, must continue the cache).
            past_key_values: the tokens before these, a DynamicCache.

        Raises:
            ValueError: for what this model would compute wrongly.
        """
        cache_position = kwargs.pop("cache_position", None)
        _check_no_extra_arguments(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if x.shape[1] == 0:
            raise ValueError("there are no tokens; begin an empty text with the end of the one before (eos_token)")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False  # layers are computed again in the backward pass, and would be stored twice
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and self.config.randomized_positions is not None:
            raise ValueError(
                "randomized positions depend on the length of the whole sequence, which a cached step does not know: "
                "use_cache must be False"
            )
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        segments = self._build_segments(x, attention_mask, int(past_length), position_ids, cache_position)
        x = F.dropout(x, self.config.hidden_dropout, self.training)
        x = x * (self.config.embedding_multiplier / self.config.position_embedding_multiplier)
        if self.position is not None:
            x = add_position_embeddings(x, self.position, segments)
        x = x * self.config.position_embedding_multiplier
        hidden_states = []
        for layer in self.layers:
            hidden_states.append(x)
            x = layer(x, segments, past_key_values)
        if past_key_values is not None and past_key_values.get_seq_length() != past_length + x.shape[1]:
            raise ValueError(f"{type(past_key_values).__name__} does not hold the tokens so far; use a DynamicCache")
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
        )

    def _build_segments(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        past_length: int,
        position_ids: Tensor | None,
        cache_position: Tensor | None,
    ) -> tuple[Segment, ...]:
        batch, length = x.shape[:2]
        mask = _check_mask(attention_mask, batch, past_length + length)
        cache_columns = torch.arange(past_length, past_length + length, device=x.device)
        if cache_position is not None and not torch.equal(cache_position.to(x.device), cache_columns):
            raise ValueError("cache_position must continue the tokens that are in the cache")
        if position_ids is not None:
            expected_positions = cache_columns.expand(batch, -1)
            is_token = torch.ones_like(expected_positions, dtype=torch.bool)
            if mask is not None:
                expected_positions, is_token = (mask.cumsum(1) - 1)[:, past_length:], mask[:, past_length:]
            mismatch = (position_ids.to(x.device).expand(batch, -1) != expected_positions) & is_token
            if mismatch.any():
                raise ValueError("position_ids must be those that attention_mask implies: places from 0, in order")
        max_positions = self.config.randomized_positions
        if max_positions is None:
            return build_segments(length, mask, past_length)
        continuous = self.config.continuous_positions

        def sample(tokens: int) -> SampledPositions:
            return sample_positions(tokens, max_positions, tokens, continuous=continuous)

        return build_segments(length, mask, past_length, sample)


class FarfieldForCausalLM(FarfieldPreTrainedModel, GenerationMixin):
    """The language model: logits [B, T, V]."""

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
        """Logits, and with labels (−100 where nothing is scored; shifted here) the loss.

        Args as `FarfieldModel.forward`; logits_to_keep: only the last so many, or those at these places.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
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
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        return output if return_dict is None or return_dict else output.to_tuple()


def _check_no_extra_arguments(kwargs: dict[str, Any]) -> None:
    """An argument that is passed over would be a wrong answer."""
    names = [name for name, value in kwargs.items() if value is not None and value is not False]
    if names:
        raise ValueError(f"this model takes no {names[0]}")


def _check_mask(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask must be [batch, tokens so far], here [{batch}, {length}], not "
            f"{list(attention_mask.shape)}: masks "
            "of rows and columns (static caches, packed sequences) are not taken"
        )
    mask = attention_mask.bool()
    num_segments = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    if (num_segments > 1).any():
        raise ValueError("attention_mask must have padding at the ends only: pad on the left to generate")
    return mask

"""GPT model: megatron-core's GPTModel with our forward pass.

megatron-core provides embedding, layers, output layer and their tensor-parallel forms. Our forward pass adds absolute
positions to the embeddings and recomputes activations with torch's utility (megatron-core's needs CUDA). It can compute
the output layer for the last positions only. Shapes: B batch, T sequence, D hidden size, V padded vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.attention.segments import Segment, add_position_embeddings
from megatron.distributed.mesh import Axis, NumberT, get_pipeline_layer_range
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import count_all_elements, is_replica, mark_replica
from megatron.model.attention import AttentionContext, PositionedAttention
from megatron.model.backend_choice import BackendChoice
from megatron.model.core_modules import GPTModel
from megatron.model.cross_entropy import CrossEntropy, chunked_cross_entropy, gather_vocabulary
from megatron.model.kv_cache import KVCache
from megatron.model.layer import recompute_in_backward, run_layers
from megatron.model.mup import Multipliers, MupScaling
from megatron.model.pass_inputs import LayerGroups, SegmentBuilder, find_documents
from megatron.options.model import MAX_LOGITS
from megatron.position.encoding import Encoding
from megatron.position.numerics import has_parameters_sharded_by_zero3, is_sharded_by_zero3, soft_cap
from megatron.position.token_range import TokenRange
from megatron.utils.errors import UserError


class GPT(GPTModel):
    """Causal language model. Build it with `megatron.model.build.build_model`.

    Arguments not listed here are those of megatron-core's GPTModel.

    Args:
        groups: process groups that share the model.
        encoding_names: names of all layers' encodings, without repetition.
        positions: encodings that layers share, by name; empty if every layer has its own.
        randomized: number of positions from which a sequence's positions are sampled; None to use the token indices.
        continuous: True if sampled positions are real numbers.
        masks_documents: True if attention covers all documents of a row at once (`attention/documents.py`).
        mup: ratios of the sizes to those of the base model; None without muP.
        multipliers: multipliers applied in the forward pass.
        checkpoint_layers: layers per block whose activations are recomputed in backward; 0 keeps all activations.
        logit_softcap: bound of the logits (`numerics.soft_cap`), or None.
        backend_choice: attention backends, with the messages about their choice.
    """

    def __init__(
        self,
        *args: Any,
        groups: ProcessGroups,
        encoding_names: Sequence[str],
        positions: Mapping[str, Encoding],
        randomized: int | None = None,
        continuous: bool = False,
        masks_documents: bool = False,
        mup: MupScaling | None = None,
        multipliers: Multipliers,
        checkpoint_layers: int = 0,
        logit_softcap: float | None = None,
        backend_choice: BackendChoice,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.groups = groups
        self.position = next(iter(positions.values())) if len(positions) == 1 else None
        """Encoding shared by all layers, or None."""
        self.positions = nn.ModuleDict(positions if len(positions) > 1 else {})
        """Shared encodings by name, if there are several; none of them adds to the token embeddings."""
        self.encoding_names = tuple(encoding_names)
        self.randomized, self.continuous = randomized, continuous
        self.masks_documents = masks_documents
        self.end_of_document: int | None = None
        """End-of-document token at which `compute_hidden_states` separates documents, or None.

        Set when a model trained with document masking is loaded.
        """
        self.mup, self.multipliers = mup, multipliers
        self.checkpoint_layers = checkpoint_layers
        self.logit_softcap = logit_softcap
        self.max_logits = MAX_LOGITS
        self.backend_choice = backend_choice
        self.off_stage_prefixes: tuple[str, ...] = ()
        """Prefixes of the parameter names that only other pipeline stages hold."""
        stage = groups.mesh.pipeline
        self.is_first_stage, self.is_last_stage = stage.index == 0, stage.index == stage.size - 1
        """True if this pipeline stage reads the tokens; True if it computes logits and losses."""
        if stage.size > 1:
            self._drop_off_stage_modules(stage)
        attentions = [layer.self_attention.core_attention for layer in self.local_layers]
        used = {id(each.encoding) for each in attentions}
        self._unused_encodings = [name for name, each in self.positions.items() if id(each) not in used]
        """Names of shared encodings used only by the layers of other pipeline stages."""
        self._layer_groups = LayerGroups(attentions)

    def _drop_off_stage_modules(self, stage: Axis) -> None:
        """Delete the modules of other stages, and mark the parameters that an earlier stage also has."""
        local = get_pipeline_layer_range(self.config.num_layers, stage)
        prefixes = [f"decoder.layers.{layer}." for layer in range(self.config.num_layers) if layer not in local]
        tied = self.share_embeddings_and_output_weights
        if not self.is_first_stage and not (self.is_last_stage and tied):
            del self.embedding
            prefixes.append("embedding.")
        if not self.is_last_stage:
            del self.decoder.final_layernorm, self.output_layer
            prefixes += ["decoder.final_layernorm.", "output_layer."]
        if self.position is not None and not self.is_first_stage and type(self.position).only_adds_embeddings():
            self.position = None
            prefixes.append("position.")
        self.off_stage_prefixes = tuple(prefixes)
        if not self.is_first_stage:
            for _, parameter in self.list_replicated_parameters():
                mark_replica(parameter)

    def list_replicated_parameters(self) -> Iterator[tuple[Literal["ends", "pipeline"], nn.Parameter]]:
        """Yield the parameters of this stage that other stages also hold, and which stages: the first and last, or all.

        Their gradients must be summed after every backward pass.
        """
        if self.groups.mesh.pipeline.size == 1:
            return
        if self.share_embeddings_and_output_weights and (self.is_first_stage or self.is_last_stage):
            yield "ends", self.embedding.word_embeddings.weight
        if self.position is not None and not type(self.position).only_adds_embeddings():
            for parameter in self.position.parameters():
                yield "pipeline", parameter
        for parameter in self.positions.parameters():
            yield "pipeline", parameter

    @property
    def row_blocks_reason(self) -> str | None:
        """Reason why attention is computed in row blocks without a check, or None."""
        return self.backend_choice.row_blocks_reason

    @property
    def max_length(self) -> int | None:
        """Length of the longest sequence that the model has positions for, or None for any length."""
        if self.randomized is not None:
            return self.randomized
        shared: list[Any] = [*([] if self.position is None else [self.position]), *self.positions.values()]
        return min((each.max_length for each in shared if each.max_length is not None), default=None)

    def create_kv_cache(self, length: int) -> KVCache:
        """Return an empty cache with room for `length` tokens.

        Raises:
            UserError: if the model has fewer positions.
        """
        if length < 1:
            raise UserError(f"a cache needs room for at least 1 token, not {length}")
        if self.max_length is not None and length > self.max_length:
            raise UserError(f"the model has {self.max_length} positions, but the requested sequence length is {length}")
        attentions = [layer.self_attention.core_attention for layer in self.local_layers]
        kept = {each.layer_index: each.num_cached_keys for each in attentions}
        return KVCache(length, kept, self._get_segment_builder().sample_positions(length, None))

    def _get_segment_builder(self) -> SegmentBuilder:
        return SegmentBuilder(
            self.groups, self.local_layers, self.randomized, self.continuous, self.masks_documents, self.max_length
        )

    def _embed(self, tokens: Tensor, segments: tuple[Segment, ...], restarted: TokenRange | None) -> Tensor:
        """Embed tokens and add the encoding's embeddings: [B, T] → [T, B, D]."""
        hidden = self.embedding(input_ids=tokens, position_ids=None)
        ours = self.multipliers.position_embedding
        if (factor := self.multipliers.embedding / ours) != 1.0:
            hidden = hidden * factor
        if self.position is None:
            return hidden
        try:
            embedded = add_position_embeddings(hidden.transpose(0, 1), self.position, segments, restarted)
            return (embedded if ours == 1.0 else embedded * ours).transpose(0, 1)
        except ValueError as error:
            raise UserError(str(error)) from error

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        num_logits: int | None = None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_seed: int | None = None,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        with_log_z: bool = False,
    ) -> Tensor:
        """Compute logits, or the loss of each token.

        With context parallelism each rank passes the tokens that it holds (`distributed/mesh.py`) and receives their
        logits or losses; T is then the number of these tokens. Pipeline stages after the first take the hidden states
        [T, B, D] of the previous stage, and stages before the last return hidden states.

        Args:
            tokens: int64 [B, T].
            labels: int64 [B, T], the token that follows each position.
            num_logits: number of last positions to score, or None for all.
            attention_mask: bool [B, T], False for padding; with a cache [B, all tokens so far]. A sequence padded on
                the left gives the same results as alone. Outputs of padding tokens are meaningless.
            kv_cache: cache of earlier tokens, see `create_kv_cache`; the new tokens are added to it.
            position_seed: seed of randomized positions; None uses fixed positions for each sequence length.
            document_starts: int64 [B, all tokens of a row so far] on the CPU, the column at which each token's document
                begins. Documents are masked, so that each gives the same results as alone. None for one document per
                row, or for documents separated by `end_of_document`, if that is set.
            position_ids: int64 [B, T] on the CPU, positions passed to the encoding instead of token indices, in any
                order and with repetitions. Causality still follows the indices. Supported by encodings that define only
                `embed` or `rotate`: distances may be negative, for which no bias is defined.
            with_log_z: True to return log Z of each token besides the losses, where Z is the denominator of the
                softmax over the vocabulary. Requires labels.

        Returns:
            Without labels, logits [B, T or num_logits, V]. With labels, the cross entropy in nats, float32
            [B, T or num_logits], or the cross entropy and log Z, [2, B, T or num_logits].

        Raises:
            UserError: if the sequence is longer than the position encoding supports.
        """
        if self.groups.mesh.context.size > 1 and not (
            num_logits is None and kv_cache is None and attention_mask is None and position_ids is None
        ):
            raise RuntimeError("context parallelism needs whole sequences without padding, cache or position ids")
        if num_logits is not None and num_logits < 1:
            raise UserError(f"num_logits is {num_logits}; it must be at least 1")
        hidden = self.compute_hidden_states(
            tokens, num_logits, attention_mask, kv_cache, position_seed, document_starts, position_ids
        )
        if not self.is_last_stage:
            return hidden
        scored = labels if labels is None or num_logits is None else labels[:, -num_logits:]
        return self._score(hidden, scored, with_log_z=with_log_z)

    def compute_hidden_states(
        self,
        tokens: Tensor,
        num_logits: int | None = None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_seed: int | None = None,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden states after the layers, [T or num_logits, B, D]. Arguments are those of `forward`."""
        if document_starts is None and self.end_of_document is not None:
            document_starts, attention_mask = find_documents(tokens, self.end_of_document, attention_mask, kv_cache)
        length, batch = (tokens.shape[i] for i in ((1, 0) if self.is_first_stage else (0, 1)))
        segments, restarted = self._get_segment_builder().build_segments(
            batch,
            length,
            tokens.device,
            mask=attention_mask,
            kv_cache=kv_cache,
            seed=position_seed,
            document_starts=document_starts,
            position_ids=position_ids,
        )
        hidden = self._embed(tokens, segments, restarted) if self.is_first_stage else tokens  # [T, B, D]
        if self._unused_encodings and torch.is_grad_enabled():
            hidden = self._add_zero_gradients(hidden)
        context = self._layer_groups.build_context(
            [layer.self_attention.core_attention for layer in self.local_layers],
            segments,
            hidden,
            kv_cache=kv_cache,
            num_logits=num_logits,
            restarted=restarted,
            document_starts=document_starts,
        )
        hidden = self._run_layers(hidden, context)
        if kv_cache is not None:
            kv_cache.length += length
        return hidden

    def _add_zero_gradients(self, hidden: Tensor) -> Tensor:
        """Return the hidden states unchanged, with zero gradients for parameters that no layer of this stage reads.

        Pipeline stages sum these gradients, so their order and data type match those of other gradients.
        """
        unused = [p for name in self._unused_encodings for p in self.positions[name].parameters()]
        return hidden + sum((0.0 * parameter.sum() for parameter in unused), hidden.new_zeros(())).to(hidden.dtype)

    def _score(self, hidden: Tensor, labels: Tensor | None, *, with_log_z: bool) -> Tensor:
        """Compute the result of `forward` from the hidden states after the last layer."""
        if self.decoder.final_layernorm is not None:
            hidden = self.decoder.final_layernorm(hidden)
        if self.multipliers.logits != 1.0:
            hidden = hidden * self.multipliers.logits
        if labels is None:
            logits = soft_cap(self._compute_logits(hidden), self.logit_softcap)
            return rearrange(gather_vocabulary(logits, self.groups), "t b v -> b t v")
        vocabulary = self.vocab_size // self.groups.mesh.tensor.size
        entropy = CrossEntropy(self._compute_logits, self.config, self.groups, self.logit_softcap)
        compute_losses = entropy.compute_losses_and_log_z if with_log_z else entropy.compute_losses
        return chunked_cross_entropy(compute_losses, hidden, labels, vocabulary, self.max_logits)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of this rank's vocabulary shard, [T, B, V], before the soft cap."""
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = self.output_layer.weight if tied is None else tied
        if self.groups.mesh.tensor.size == 1 and not is_sharded_by_zero3(weight):
            return F.linear(hidden, weight)
        logits: Tensor = self.output_layer(hidden, weight=tied)[0]
        return logits

    def _run_layers(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        # Only the output layer reads the top layer, so that layer computes only the scored positions.
        full_context = replace(context, num_logits=None)
        layers = [(layer, full_context) for layer in self.local_layers]
        if self.is_last_stage:
            layers[-1] = (layers[-1][0], context)
        if not (self.checkpoint_layers and self.training and torch.is_grad_enabled()):
            return run_layers(layers, hidden)

        def run(hidden: Tensor, start: int) -> Tensor:
            return run_layers(layers[start : start + self.checkpoint_layers], hidden)

        draws = self.config.hidden_dropout > 0 or self.config.attention_dropout > 0
        for start in range(0, len(layers), self.checkpoint_layers):
            hidden = recompute_in_backward(run, hidden, start, draws=draws)
        return hidden

    @property
    def is_sharded_by_zero3(self) -> bool:
        """True if ZeRO 3 shards the weights of this stage's layers."""
        return has_parameters_sharded_by_zero3(self.local_layers[0])

    def has_attention_parameters(self) -> bool:
        """Return True if attention itself has trainable parameters, in an encoding or a processor."""
        attentions: list[PositionedAttention] = [layer.self_attention.core_attention for layer in self.local_layers]
        encodings = (each.encoding for each in attentions if not type(each.encoding).only_adds_embeddings())
        modules = (*encodings, *(each.processor for each in attentions))
        return any(module is not None and any(True for _ in module.parameters()) for module in modules)

    @property
    def local_layers(self) -> list[Any]:
        return [
            self.decoder.layers[i] for i in get_pipeline_layer_range(self.config.num_layers, self.groups.mesh.pipeline)
        ]

    def num_parameters(self) -> int:
        """Count trainable parameters, including position parameters and vocabulary padding. All ranks must call it."""
        num_local = sum(count_all_elements(p, self.groups.mesh) for p in self.parameters() if not is_replica(p))
        return self._sum_over_stages(num_local)

    def _sum_over_stages(self, local: NumberT) -> NumberT:
        """Return the sum of a value over pipeline stages."""
        mesh = self.groups.mesh
        if mesh.pipeline.size == 1:
            return local
        return self.groups.all_reduce_sum(local if mesh.tensor.index == mesh.dp_cp.index == 0 else type(local)(0))[0]

    def count_flops_per_token(self, length: int) -> float:
        """Return forward and backward FLOPs per token at a sequence length, counting only unmasked scores.

        A matrix product costs 2 FLOPs per multiply-add, and the backward pass costs twice the forward pass: 6 FLOPs per
        weight. Each score (b, h, i, j ≤ i) adds 4·d for q·k and p·v (more if rotated queries are longer than d), plus
        the FLOPs that the encoding's contextual terms and the score processor report. All ranks must call this.
        """
        forward = 2.0 * sum(count_all_elements(p, self.groups.mesh) for p in self._list_matrices())
        for layer in self.local_layers:
            attention: PositionedAttention = layer.self_attention.core_attention
            seen = min(attention.window or length, length)
            scores = seen - seen * (seen - 1) / 2 / length  # mean of min(i + 1, window)
            sizes = attention.encoding.qk_head_dim + self.config.kv_channels
            per_score = 2.0 * sizes * self.config.num_attention_heads
            if attention.processor is not None:
                per_score += attention.processor.flops_per_score()
            forward += per_score * scores + attention.encoding.product_flops(scores)
        return 3.0 * self._sum_over_stages(forward)

    def _list_matrices(self) -> list[torch.nn.Parameter]:
        """Return the weights that multiply every token.

        These are linear layers and the output layer, but not the embedding table.
        """
        matrices = []
        for layer in self.local_layers:
            attention, mlp = layer.self_attention, layer.mlp
            matrices += [attention.linear_qkv.weight, attention.linear_proj.weight]
            matrices += [] if attention.linear_gate is None else [attention.linear_gate.weight]
            matrices += [mlp.linear_fc1.weight, mlp.linear_fc2.weight]
        if self.is_last_stage:
            tied = self.share_embeddings_and_output_weights
            output: Any = self.embedding.word_embeddings if tied else self.output_layer
            matrices.append(output.weight)
        return matrices

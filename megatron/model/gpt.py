"""The GPT: megatron-core's GPTModel with our forward pass.

megatron-core provides embedding, layers, output layer and their tensor-parallel forms; the forward pass here adds
absolute positions to the embeddings, recomputes activations with torch's own utility (megatron-core's needs CUDA), and
can compute the output layer for the last positions only. B batch, T sequence, D hidden size, V padded vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron.distributed.layers import layers_of
from megatron.distributed.mesh import Axis, Number
from megatron.distributed.parameters import is_copy, mark_copy, whole_size
from megatron.distributed.places import held
from megatron.distributed.processes import Processes
from megatron.errors import UserError
from megatron.model.attention import PositionedAttention, Reading
from megatron.model.cache import Cache
from megatron.model.loss import token_losses
from megatron.model.megatron_core import GPTModel, vocab_parallel_cross_entropy
from megatron.model.shared_attention import gather_vocabulary
from megatron.options.model import MOST_LOGITS
from megatron.position.encoding import Encoding
from megatron.position.randomized import draw_positions
from megatron.position.shape import DrawnPositions, Span
from megatron.position.stretches import Draw, Stretch, embedded, nothing_drawn, one_after_another, stretches


class GPT(GPTModel):
    """A causal language model. Build it with `megatron.model.build.build_model`.

    Args:
        processes: those that share the model.
        position: the encoding shared by all layers, or None if every layer has its own.
        randomized: positions that a sequence's own are drawn from; None for the places themselves.
        checkpoint_layers: layers per block whose activations are recomputed in backward; 0 keeps all activations.
        why_row_blocks: why attention is computed in row blocks, for the console; None if it is not.
        Others are megatron-core's.
    """

    def __init__(
        self,
        *args: Any,
        processes: Processes,
        position: Encoding | None,
        randomized: int | None = None,
        checkpoint_layers: int = 0,
        why_row_blocks: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.processes = processes
        self.position = position
        self.randomized = randomized
        self.checkpoint_layers = checkpoint_layers
        self.most_logits = MOST_LOGITS
        self.why_row_blocks = why_row_blocks
        self.elsewhere: tuple[str, ...] = ()
        """How the names of parameters begin that only other pipeline stages hold."""
        stage = processes.mesh.pipeline
        self.first, self.last = stage.index == 0, stage.index == stage.size - 1
        """Is this the pipeline stage that reads tokens, and the one that scores them?"""
        if stage.size > 1:
            self._keep_own(stage)

    def _keep_own(self, stage: Axis) -> None:
        """Drop what other stages use, and mark what an earlier one holds too."""
        own = layers_of(self.config.num_layers, stage)
        foreign = [f"decoder.layers.{layer}." for layer in range(self.config.num_layers) if layer not in own]
        tied = self.share_embeddings_and_output_weights
        if not self.first and not (self.last and tied):
            del self.embedding
            foreign.append("embedding.")
        if not self.last:
            del self.decoder.final_layernorm, self.output_layer
            foreign += ["decoder.final_layernorm.", "output_layer."]
        if self.position is not None and not self.first and type(self.position).only_embeds():
            self.position = None
            foreign.append("position.")
        self.elsewhere = tuple(foreign)
        if not self.first:
            for _, parameter in self.of_several_stages():
                mark_copy(parameter)

    def of_several_stages(self) -> Iterator[tuple[Literal["ends", "pipeline"], nn.Parameter]]:
        """The parameters of this stage that others hold too, and which ones do: the first and the last, or all. Their
        gradients are to be summed after every backward pass."""
        if self.processes.mesh.pipeline.size == 1:
            return
        if self.share_embeddings_and_output_weights and (self.first or self.last):
            yield "ends", self.embedding.word_embeddings.weight
        if self.position is not None and not type(self.position).only_embeds():
            for parameter in self.position.parameters():
                yield "pipeline", parameter

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the model has positions for, or None for any length."""
        return self.randomized or (None if self.position is None else self.position.max_length)

    def new_cache(self, length: int) -> Cache:
        """An empty cache with room for `length` tokens.

        Raises:
            UserError: the model has no positions for so many.
        """
        if length < 1:
            raise UserError(f"a cache needs room for at least 1 token, not {length}")
        if self.max_length is not None and length > self.max_length:
            raise UserError(
                f"the model has {self.max_length} positions, but a sequence of length {length} was asked for"
            )
        return Cache(self.config.num_layers, length, self._draw(length, None))

    def _draw(self, length: int, seed: int | None) -> DrawnPositions | None:
        if self.randomized is None:
            return None
        try:
            return draw_positions(length, self.randomized, length if seed is None else seed)
        except ValueError as error:
            raise UserError(str(error)) from error

    def _stretches(
        self, length: int, mask: Tensor | None, cache: Cache | None, seed: int | None
    ) -> tuple[Stretch, ...]:
        """Where `length` tokens of this rank stand in their sequences."""
        if cache is not None:
            cache.check(length)
            return stretches(
                length, mask, cache.length, nothing_drawn if cache.drawn is None else lambda _: cache.drawn
            )
        context = self.processes.mesh.context
        if context.size == 1:
            draw: Draw = nothing_drawn if self.randomized is None else lambda tokens: self._draw(tokens, seed)
            return stretches(length, mask, draw=draw)
        whole = length * context.size
        drawn = self._draw(whole, seed)
        return one_after_another([Span(start, size, drawn) for start, size in held(whole, context)])

    def _embedded(self, tokens: Tensor, parts: tuple[Stretch, ...]) -> Tensor:
        """The token embeddings, and what the encoding adds to them: [B, T] → [T, B, D]."""
        hidden = self.embedding(input_ids=tokens, position_ids=None)
        if self.position is None:
            return hidden
        try:
            return embedded(hidden.transpose(0, 1), self.position, parts).transpose(0, 1)
        except ValueError as error:
            raise UserError(str(error)) from error

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        last: int | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        draw: int | None = None,
    ) -> Tensor:
        """Logits, or the loss of each token.

        Where ranks share a sequence (context parallelism), each gives the tokens of the places that it holds
        (`distributed/places.py`) and gets their logits or losses; T is then their number. A pipeline stage after the
        first takes the hidden states [T, B, D] of the one before it, and one before the last returns them.

        Args:
            tokens: int64 [B, T].
            labels: int64 [B, T], the token that follows each position.
            last: only the last n positions are scored.
            attention_mask: bool [B, T], False for padding; with a cache [B, all tokens so far]. A sequence padded on
                the left gives what it gives alone. What a padding token gives means nothing.
            cache: the tokens that came before, see `new_cache`; these are added to it.
            draw: seed of randomized positions; None takes those that belong to a sequence of this length for good.

        Returns:
            Without labels logits [B, T or last, V]; with labels the cross entropy in nats, float32 [B, T or last].

        Raises:
            UserError: the sequence is longer than the position encoding knows.
        """
        if self.processes.mesh.context.size > 1 and not (last is None and cache is None and attention_mask is None):
            raise RuntimeError("ranks that share a sequence score all of it, from its start and without padding")
        if last is not None and last < 1:
            raise UserError(f"last is {last}; it must be at least 1")
        hidden = self.states(tokens, last, attention_mask, cache, draw)
        if not self.last:
            return hidden
        return self._scored(hidden, labels if labels is None or last is None else labels[:, -last:])

    def states(
        self,
        tokens: Tensor,
        last: int | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        draw: int | None = None,
    ) -> Tensor:
        """Hidden states after the layers [T or last, B, D]; arguments as in `forward`."""
        length = tokens.shape[1 if self.first else 0]
        parts = self._stretches(length, attention_mask, cache, draw)
        hidden = self._embedded(tokens, parts) if self.first else tokens  # [T, B, D]
        hidden = self._layers(hidden, Reading(parts, cache, last))
        if cache is not None:
            cache.length += length
        return hidden

    def _scored(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        """What `forward` returns, from the hidden states after the last layer."""
        if self.decoder.final_layernorm is not None:
            hidden = self.decoder.final_layernorm(hidden)
        if labels is None:
            return rearrange(gather_vocabulary(self._logits(hidden), self.processes), "t b v -> b t v")
        vocabulary = self.vocab_size // self.processes.mesh.tensor.size
        return token_losses(self._losses, hidden, labels, vocabulary, self.most_logits)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of this rank's part of the vocabulary, [T, B, V]."""
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(hidden, weight=tied)[0]
        return logits

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Of each token, float32 [B, T], from hidden states [T, B, D]."""
        logits = self._logits(hidden).float()
        if self.processes.mesh.tensor.size > 1:
            return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()
        flat = rearrange(logits, "t b v -> (t b) v")
        losses = F.cross_entropy(flat, rearrange(labels, "b t -> (t b)"), reduction="none")
        return rearrange(losses, "(t b) -> b t", b=labels.shape[0])

    def _layers(self, hidden: Tensor, reading: Reading) -> Tensor:
        # Only the output layer reads the top layer, and what it scores is all it reads; the others are read whole.
        whole = replace(reading, last=None)
        layers = [(layer, whole) for layer in self.own_layers]
        if self.last:
            layers[-1] = (layers[-1][0], reading)
        if not (self.checkpoint_layers and self.training and torch.is_grad_enabled()):
            for layer, what in layers:
                hidden = layer(hidden, what)
            return hidden

        def run(hidden: Tensor, start: int) -> Tensor:
            for layer, what in layers[start : start + self.checkpoint_layers]:
                hidden = layer(hidden, what)
            return hidden

        for start in range(0, len(layers), self.checkpoint_layers):
            hidden = checkpoint(run, hidden, start, use_reentrant=False)
        return hidden

    @property
    def own_layers(self) -> list[Any]:
        """The layers of this pipeline stage."""
        return [self.decoder.layers[i] for i in layers_of(self.config.num_layers, self.processes.mesh.pipeline)]

    def num_parameters(self) -> int:
        """Trainable parameters, position parameters and the padding of the vocabulary included; all ranks call it."""
        own = sum(whole_size(p, self.processes.mesh) for p in self.parameters() if not is_copy(p))
        return self._over_stages(own)

    def _over_stages(self, own: Number) -> Number:
        """The sum over pipeline stages of what each has."""
        mesh = self.processes.mesh
        if mesh.pipeline.size == 1:
            return own
        return self.processes.sum(own if mesh.tensor.index == mesh.batch.index == 0 else type(own)(0))[0]

    def flops_per_token(self, length: int) -> float:
        """Forward and backward FLOPs per token at a sequence length, counting the scores that are seen only.

        Matrix products count 2 FLOPs per multiply-add and the backward pass twice the forward: 6 per weight, plus per
        score (b, h, i, j ≤ i) 4·d for q·k and p·v, and what the encoding's contextual terms and the score processor
        say of themselves. All ranks must call it.
        """
        forward = 2.0 * sum(whole_size(p, self.processes.mesh) for p in self._matrices())
        for layer in self.own_layers:
            attention: PositionedAttention = layer.self_attention.core_attention
            seen = min(attention.window or length, length)
            scores = seen - seen * (seen - 1) / 2 / length  # the mean of min(i + 1, window)
            per_score = 4.0 * self.config.kv_channels * self.config.num_attention_heads
            if attention.processor is not None:
                per_score += attention.processor.flops_per_score()
            forward += per_score * scores + attention.encoding.contextual_flops(scores)
        return 3.0 * self._over_stages(forward)

    def _matrices(self) -> list[torch.nn.Parameter]:
        """Weights that multiply every token: linear layers and the output layer, not the embedding look-up."""
        matrices = []
        for layer in self.own_layers:
            attention, mlp = layer.self_attention, layer.mlp
            matrices += [attention.linear_qkv.weight, attention.linear_proj.weight]
            matrices += [mlp.linear_fc1.weight, mlp.linear_fc2.weight]
        if self.last:
            tied = self.share_embeddings_and_output_weights
            output: Any = self.embedding.word_embeddings if tied else self.output_layer
            matrices.append(output.weight)
        return matrices

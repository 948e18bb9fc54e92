"""The GPT: megatron-core's GPTModel with our forward pass.

megatron-core provides embedding, layers, output layer and their tensor-parallel forms; the forward pass here adds
absolute positions to the embeddings, recomputes activations with torch's own utility (megatron-core's needs CUDA), and
can compute the output layer for the last positions only. B batch, T sequence, D hidden size, V padded vocabulary.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron.errors import UserError
from megatron.model.attention import PositionedAttention
from megatron.position.encoding import Encoding
from megatron.position.shape import Span


class GPT(GPTModel):
    """A causal language model. Build it with `megatron.model.build.build_model`.

    Args:
        position: the encoding shared by all layers, or None if every layer has its own.
        checkpoint_layers: layers per block whose activations are recomputed in backward; 0 keeps all activations.
        Others are megatron-core's.
    """

    def __init__(self, *args: Any, position: Encoding | None, checkpoint_layers: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = position
        self.checkpoint_layers = checkpoint_layers

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the position encoding knows, or None for any length."""
        return None if self.position is None else self.position.max_length

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        last: int | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the loss of each token.

        Args:
            tokens: int64 [B, T].
            labels: int64 [B, T], the token that follows each position.
            last: only the last n positions are scored.
            attention_mask: bool [B, T], False for padding that must not be seen.

        Returns:
            Without labels logits [B, T or last, V]; with labels the cross entropy in nats, float32 [B, T or last].

        Raises:
            UserError: the sequence is longer than the position encoding knows.
        """
        hidden = self.embedding(input_ids=tokens, position_ids=None)  # [T, B, D]
        if self.position is not None:
            try:
                vectors = self.position.embed(Span(0, tokens.shape[1]), hidden)
            except ValueError as error:
                raise UserError(str(error)) from error
            if vectors is not None:
                hidden = hidden + vectors[:, None]
        hidden = self._layers(hidden, attention_mask)
        if last is not None:
            hidden = hidden[-last:]
            labels = labels[:, -last:] if labels is not None else None
        if self.decoder.final_layernorm is not None:
            hidden = self.decoder.final_layernorm(hidden)
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=tied)  # [T, B, V]
        if labels is None:
            return logits.transpose(0, 1)
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.t().flatten(), reduction="none")
        return losses.view(labels.shape[::-1]).t()

    def _layers(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        layers = list(self.decoder.layers)
        if not (self.checkpoint_layers and self.training and torch.is_grad_enabled()):
            for layer in layers:
                hidden = layer(hidden, attention_mask)
            return hidden

        def run(hidden: Tensor, start: int) -> Tensor:
            for layer in layers[start : start + self.checkpoint_layers]:
                hidden = layer(hidden, attention_mask)
            return hidden

        for start in range(0, len(layers), self.checkpoint_layers):
            hidden = checkpoint(run, hidden, start, use_reentrant=False)
        return hidden

    def num_parameters(self) -> int:
        """Trainable parameters, position parameters and the padding of the vocabulary included."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Forward and backward FLOPs per token at a sequence length, counting causal scores only.

        Matrix products count 2 FLOPs per multiply-add and the backward pass twice the forward: 6 per weight, plus per
        score (b, h, i, j ≤ i) 4·d for q·k and p·v, and what the score processor says of itself.
        """
        weights = sum(getattr(p, "ds_numel", p.numel()) for p in self._matrices())
        scores = (length + 1) / 2  # causal scores per token and head
        per_score = 0.0
        for layer in self.decoder.layers:
            attention: PositionedAttention = layer.self_attention.core_attention
            per_score += 4.0 * self.config.kv_channels * self.config.num_attention_heads
            if attention.processor is not None:
                per_score += attention.processor.flops_per_score()
        return 3.0 * (2.0 * weights + per_score * scores)

    def _matrices(self) -> list[torch.nn.Parameter]:
        """Weights that multiply every token: linear layers and the output layer, not the embedding look-up."""
        matrices = []
        for layer in self.decoder.layers:
            attention, mlp = layer.self_attention, layer.mlp
            matrices += [attention.linear_qkv.weight, attention.linear_proj.weight]
            matrices += [mlp.linear_fc1.weight, mlp.linear_fc2.weight]
        tied = self.share_embeddings_and_output_weights
        matrices.append(self.embedding.word_embeddings.weight if tied else self.output_layer.weight)
        return matrices

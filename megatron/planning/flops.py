"""How many floating-point operations a step has, by what they are for.

A product of matrices counts 2 per multiply-add, the backward pass twice the forward pass, and scores only where a token
may see another: the same count that a run reports as TFLOP/s and MFU (`GPT.flops_per_token`; a test compares the two).
What is computed again in the backward pass is no part of it, because it brings a run no further.
"""

from dataclasses import dataclass

from megatron.config.schema import Config
from megatron.options.model import GATED, ffn_hidden_size, kv_hidden_size, padded_vocab_size
from megatron.planning.positions import encoding, processor

TRAINING = 3
"""Forward and backward pass, in forward passes."""


@dataclass(frozen=True)
class Flops:
    """Of the forward pass, per token."""

    matrices: float
    """The linear layers of one layer."""
    scores: float
    """One layer's products of queries and keys, and of probabilities and values, with the encoding's own."""
    processor: float
    """One layer's convolutions along the keys."""
    output: float
    """The output layer, once."""
    layers: int

    @property
    def per_token(self) -> float:
        """Forward and backward."""
        return TRAINING * (self.layers * (self.matrices + self.scores + self.processor) + self.output)


def flops(config: Config, vocabulary: int) -> Flops:
    """The FLOPs of a configuration's forward pass at its training length."""
    model, position = config.model, config.position
    width, inner, length = model.hidden_size, ffn_hidden_size(model), model.seq_length
    wide = inner * (2 if model.activation in GATED else 1)
    seen = min(position.attention_window or length, length)
    scores = seen - seen * (seen - 1) / 2 / length  # keys that a token sees: the mean of min(i + 1, window)
    own = processor(position)
    return Flops(
        matrices=2.0 * width * (2 * width + 2 * kv_hidden_size(model) + wide + inner),
        scores=width * (4.0 * scores + 2.0 * encoding(position).products(position.pos_emb_options, scores)),
        processor=0.0 if own is None else own.flops(model.num_attention_heads) * scores,
        output=2.0 * padded_vocab_size(model, vocabulary) * width,
        layers=model.num_layers,
    )

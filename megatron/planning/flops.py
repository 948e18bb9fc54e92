"""How many floating-point operations a step has, by what they are for.

A product of matrices counts 2 per multiply-add, the backward pass twice the forward pass, and scores only where a token
may see another: the same count that a run reports as TFLOP/s and MFU (`GPT.flops_per_token`; a test compares the two).
What is computed again in the backward pass is no part of it, because it brings a run no further.
"""

from dataclasses import dataclass

from megatron.config.schema import Config
from megatron.options.model import GATED, ffn_hidden_size, kv_hidden_size, padded_vocab_size
from megatron.planning.position_costs import plan_encoding, plan_processor

TRAINING_TO_FORWARD_RATIO = 3
"""Forward and backward pass, in forward passes."""


@dataclass(frozen=True)
class ForwardFlops:
    """Of the forward pass, per token."""

    linear: float
    """The linear layers of one layer."""
    attention: float
    """One layer's products of queries and keys, and of probabilities and values, with the encoding's own."""
    processor: float
    """One layer's convolutions along the keys."""
    output: float
    """The output layer, once."""
    num_layers: int

    @property
    def training_flops_per_token(self) -> float:
        """Forward and backward."""
        return TRAINING_TO_FORWARD_RATIO * (
            self.num_layers * (self.linear + self.attention + self.processor) + self.output
        )


def estimate_forward_flops(config: Config, vocab_size: int) -> ForwardFlops:
    """The FLOPs of a configuration's forward pass at its training length."""
    model, position = config.model, config.position
    hidden_size, ffn_size, seq_length = model.hidden_size, ffn_hidden_size(model), model.seq_length
    fc1_size = ffn_size * (2 if model.activation in GATED else 1)
    max_keys = min(position.attention_window or seq_length, seq_length)
    keys_per_token = (
        max_keys - max_keys * (max_keys - 1) / 2 / seq_length
    )  # keys that a token sees: the mean of min(i + 1, window)
    encoding, processor_cost = plan_encoding(position), plan_processor(position)
    return ForwardFlops(
        linear=2.0 * hidden_size * (2 * hidden_size + 2 * kv_hidden_size(model) + fc1_size + ffn_size),
        attention=hidden_size
        * (4.0 * keys_per_token + 2.0 * encoding.cost.num_products(encoding.options, keys_per_token)),
        processor=0.0
        if processor_cost is None
        else processor_cost.flops_per_score(model.num_attention_heads) * keys_per_token,
        output=2.0 * padded_vocab_size(model, vocab_size) * hidden_size,
        num_layers=model.num_layers,
    )

"""The sizes that encodings and processors are built for; without torch, for whoever only plans a run."""

from megatron.options.model import ModelOptions
from megatron.position.facts import AttentionDims


def build_attention_dims(model: ModelOptions) -> AttentionDims:
    """What encodings and processors are told about the model."""
    return AttentionDims(
        num_heads=model.num_attention_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        hidden_size=model.hidden_size,
        train_length=model.seq_length,
        max_length=model.max_position_embeddings or model.seq_length,
    )

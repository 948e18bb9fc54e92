"""How many parameters a model has, and how many of them each rank holds.

D hidden size, K width of keys, F width of the feed-forward layer, V padded vocabulary, T tensor-parallel ranks.
"""

from megatron.config.schema import Config
from megatron.distributed.layers import layers_of
from megatron.distributed.mesh import Axis, Sizes
from megatron.options.model import GATED, ffn_hidden_size, has_qkv_bias, kv_hidden_size, padded_vocab_size
from megatron.planning.positions import encoding, encoding_parameters, processor_parameters


def _layer(config: Config, tensor: int) -> int:
    """Parameters of one layer on one rank: matrices are divided, and what is added after their sum is not."""
    model, position = config.model, config.position
    width, inner = model.hidden_size, ffn_hidden_size(model)
    wide = inner * (2 if model.activation in GATED else 1)
    norm = width * (2 if model.norm == "layernorm" else 1)
    norms = norm * (1 if model.gpt_j_residual and model.gpt_j_tied else 2)
    qkv = width + 2 * kv_hidden_size(model)
    matrices = (qkv + width + wide + inner) * width
    biases = (qkv if has_qkv_bias(model) else 0) + (wide if model.use_bias_in_mlp else 0)
    whole = (width if model.use_bias_in_attn_linear else 0) + (width if model.use_bias_in_mlp else 0)
    own = encoding_parameters(model, position) if position.pos_emb_per_layer else 0
    return (matrices + biases) // tensor + whole + norms + own + processor_parameters(model, position)


def held(config: Config, sizes: Sizes, vocabulary: int, stage: int = 0) -> int:
    """Parameters that a rank of a pipeline stage holds, before ZeRO divides them further.

    A tied embedding is held by the first stage and the last, and an encoding that all layers share by all stages,
    unless it only adds to the embeddings.
    """
    model, position = config.model, config.position
    first, last = stage == 0, stage == sizes.pipeline - 1
    ends = padded_vocab_size(model, vocabulary) * model.hidden_size // sizes.tensor
    count = len(layers_of(model.num_layers, Axis(stage, sizes.pipeline))) * _layer(config, sizes.tensor)
    if not position.pos_emb_per_layer and (first or not encoding(position).embeds):
        count += encoding_parameters(model, position)
    if last:
        count += model.hidden_size * (2 if model.norm == "layernorm" else 1)
    tied = not model.no_weight_tying
    return count + ends * ((first or (last and tied)) + (last and not tied))


def whole(config: Config, vocabulary: int) -> int:
    """Parameters of the model, each counted once."""
    return held(config, Sizes(), vocabulary)

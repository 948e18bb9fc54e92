"""How many parameters a model has, and how many of them each rank holds.

D hidden size, K width of keys, F width of the feed-forward layer, V padded vocabulary, T tensor-parallel ranks.
"""

from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes, pipeline_layer_range
from megatron.options.model import GATED, ffn_hidden_size, has_qkv_bias, kv_hidden_size, padded_vocab_size
from megatron.planning.position_costs import count_encoding_parameters, count_processor_parameters, plan_encoding


def _count_layer_parameters(config: Config, tensor_parallel_size: int) -> int:
    """Parameters of one layer on one rank: matrices are divided, and what is added after their sum is not."""
    model, position = config.model, config.position
    hidden_size, ffn_size = model.hidden_size, ffn_hidden_size(model)
    fc1_size = ffn_size * (2 if model.activation in GATED else 1)
    norm_parameters = hidden_size * (2 if model.norm == "layernorm" else 1)
    total_norm_parameters = norm_parameters * (1 if model.gpt_j_residual and model.gpt_j_tied else 2)
    qkv_size = hidden_size + 2 * kv_hidden_size(model)
    matrices = (qkv_size + hidden_size + fc1_size + ffn_size) * hidden_size
    sharded_biases = (qkv_size if has_qkv_bias(model) else 0) + (fc1_size if model.use_bias_in_mlp else 0)
    replicated_biases = (hidden_size if model.use_bias_in_attn_linear else 0) + (
        hidden_size if model.use_bias_in_mlp else 0
    )
    own_encoding_parameters = count_encoding_parameters(model, position) if position.pos_emb_per_layer else 0
    return (
        (matrices + sharded_biases) // tensor_parallel_size
        + replicated_biases
        + total_norm_parameters
        + own_encoding_parameters
        + count_processor_parameters(model, position)
    )


def count_rank_parameters(config: Config, sizes: ParallelSizes, vocab_size: int, pipeline_stage: int = 0) -> int:
    """Parameters that a rank of a pipeline stage holds, before ZeRO divides them further.

    A tied embedding is held by the first stage and the last, and an encoding that all layers share by all stages,
    unless it only adds to the embeddings.
    """
    model, position = config.model, config.position
    is_first, is_last = pipeline_stage == 0, pipeline_stage == sizes.pipeline - 1
    embedding_parameters = padded_vocab_size(model, vocab_size) * model.hidden_size // sizes.tensor
    count = len(pipeline_layer_range(model.num_layers, Axis(pipeline_stage, sizes.pipeline))) * _count_layer_parameters(
        config, sizes.tensor
    )
    if not position.pos_emb_per_layer and (is_first or not plan_encoding(position).facts.only_adds_embeddings):
        count += count_encoding_parameters(model, position)
    if is_last:
        count += model.hidden_size * (2 if model.norm == "layernorm" else 1)
    is_tied = not model.no_weight_tying
    return count + embedding_parameters * ((is_first or (is_last and is_tied)) + (is_last and not is_tied))


def count_parameters(config: Config, vocab_size: int) -> int:
    """Parameters of the model, each counted once."""
    return count_rank_parameters(config, ParallelSizes(), vocab_size)

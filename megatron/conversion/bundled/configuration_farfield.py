"""Configuration of an exported model, stored in config.json."""

from typing import Any

from transformers import PretrainedConfig


class FarfieldConfig(PretrainedConfig):
    """Configuration of a Farfield model.

    Keys have transformers' names where available.

    Args:
        vocab_size: rows of the embedding, including padding.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: as in other models.
        num_key_value_heads: number of key and value heads, each shared by several query heads.
        head_dim: dimension of a head; hidden_size / num_attention_heads by default.
        hidden_act: gelu, gelu_tanh, relu, silu, geglu, geglu_tanh or swiglu.
        norm: layernorm or rmsnorm.
        norm_epsilon: added to the variance.
        norm_bias: True if layernorm has a bias.
        norm_placement: pre, x + f(norm(x)); post, x + norm(f(x)); sandwich, x + norm(f(norm(x))).
        qk_norm, qk_norm_epsilon: type of the norm applied to queries and keys before rotation, or none.
        qk_norm_over_heads: True to normalize all heads of a token together rather than each head separately.
        attn_logit_softcapping: c in c·tanh(q·k/(c√d)), applied to scores first.
        final_logit_softcapping: c in c·tanh(logit/c).
        parallel_residual: x + attention(norm(x)) + mlp(norm(x)) instead of sequential residuals.
        tied_norm: one norm for both branches, with parallel_residual.
        qkv_bias, attention_bias, mlp_bias: biases of the query, key and value projections, of the attention output
            projection, and of the feed-forward layers.
        tie_word_embeddings: True if the output matrix is the embedding.
        train_length: length of training sequences, in tokens. Longer inputs are accepted but were not seen in training.
        position_table: rows of a table of absolute positions, for encodings that have one.
        max_position_embeddings: longest input that the model can compute, or None if it has no limit. transformers
            warns about longer inputs.
        pos_emb, pos_emb_options: position encoding. This and score_processor, attention_temperature and
            attention_window may be lists, which repeat over the layers; options are then given by method name.
        pos_emb_per_layer: True if every layer has its own encoding.
        score_processor, score_processor_options: method that computes logits from scores and bias, or none.
        attention_temperature, attention_temperature_options: method that scales each query, or none.
        attention_window: number of most recent tokens that each token attends to, including itself.
        softmax_type: vanilla, off-by-one, learnable, stick-breaking or stick-breaking-remainder, or a list.
        attention_output_gate: True gates every attention output element by σ(W·x); headwise gates every head.
        document_end_token_id: end-of-document token. A token attends only to its own document, whose positions start
            at 0, as in this model's training; None treats a row as one document.
        randomized_positions: size of the range from which positions of a sequence are drawn; disables the cache.
        continuous_positions: True if drawn positions are real numbers.
        hidden_dropout, attention_dropout: dropout in training.
        attention_rows: number of query rows computed at a time to limit memory; does not affect the result.
        initializer_range: standard deviation of initial weights.
        embedding_multiplier, position_embedding_multiplier, query_multiplier, residual_multiplier, logits_multiplier:
            factors on token embeddings, position embeddings, queries, layer outputs, and logits.
        mup, query_pre_attn_scalar: training keys from which the multipliers were computed.
    """

    model_type = "farfield"

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "gelu",
        norm: str = "layernorm",
        norm_epsilon: float = 1e-5,
        norm_bias: bool = True,
        norm_placement: str = "pre",
        qk_norm: str = "none",
        qk_norm_epsilon: float = 1e-5,
        qk_norm_over_heads: bool = False,
        attn_logit_softcapping: float | None = None,
        final_logit_softcapping: float | None = None,
        parallel_residual: bool = False,
        tied_norm: bool = False,
        qkv_bias: bool = True,
        attention_bias: bool = True,
        mlp_bias: bool = True,
        tie_word_embeddings: bool = True,
        train_length: int = 512,
        position_table: int | None = None,
        max_position_embeddings: int | None = None,
        pos_emb: str | list[str] = "none",
        pos_emb_options: dict[str, Any] | None = None,
        pos_emb_per_layer: bool = False,
        score_processor: str | list[str] = "none",
        score_processor_options: dict[str, Any] | None = None,
        attention_temperature: str | list[str] = "none",
        attention_temperature_options: dict[str, Any] | None = None,
        attention_window: int | list[int | None] | None = None,
        softmax_type: str | list[str] = "vanilla",
        attention_output_gate: bool | str = False,
        document_end_token_id: int | None = None,
        randomized_positions: int | None = None,
        continuous_positions: bool = False,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        attention_rows: int = 128,
        initializer_range: float = 0.02,
        embedding_multiplier: float = 1.0,
        position_embedding_multiplier: float = 1.0,
        query_multiplier: float = 1.0,
        residual_multiplier: float = 1.0,
        logits_multiplier: float = 1.0,
        mup: dict[str, Any] | None = None,
        query_pre_attn_scalar: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.hidden_act = hidden_act
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        self.norm_bias = norm_bias
        self.norm_placement = norm_placement
        self.qk_norm = qk_norm
        self.qk_norm_epsilon = qk_norm_epsilon
        self.qk_norm_over_heads = qk_norm_over_heads
        self.attn_logit_softcapping = attn_logit_softcapping
        self.final_logit_softcapping = final_logit_softcapping
        self.parallel_residual = parallel_residual
        self.tied_norm = tied_norm
        self.qkv_bias = qkv_bias
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.train_length = train_length
        self.position_table = position_table or train_length
        self.pos_emb = pos_emb
        self.pos_emb_options = dict(pos_emb_options or {})
        self.pos_emb_per_layer = pos_emb_per_layer
        self.score_processor = score_processor
        self.score_processor_options = dict(score_processor_options or {})
        self.attention_temperature = attention_temperature
        self.attention_temperature_options = dict(attention_temperature_options or {})
        self.attention_window = attention_window
        self.softmax_type = softmax_type
        self.attention_output_gate = attention_output_gate
        self.document_end_token_id = document_end_token_id
        self.randomized_positions = randomized_positions
        self.continuous_positions = continuous_positions
        self.hidden_dropout = hidden_dropout
        self.attention_dropout = attention_dropout
        self.attention_rows = attention_rows
        self.initializer_range = initializer_range
        self.embedding_multiplier = embedding_multiplier
        self.position_embedding_multiplier = position_embedding_multiplier
        self.query_multiplier = query_multiplier
        self.residual_multiplier = residual_multiplier
        self.logits_multiplier = logits_multiplier
        self.mup = mup
        self.query_pre_attn_scalar = query_pre_attn_scalar
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = kwargs.pop("use_cache", randomized_positions is None)
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)

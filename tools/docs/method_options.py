"""What the options of the position methods mean, for the entries of docs/positions.md; a test finds what is missing."""

_RESIDUAL = (
    "add the bias to the result as well (equation 5 of DAPE V2); false leaves it to the network alone (equation 2)"
)
_ZERO = "start as S + B exactly, so that a trained model can be given a processor and keep its loss (`finetune: true`)"
_MIXES_BIAS = "what is mixed or convolved is S + B; false leaves B as it is and adds it afterwards"


def _describe_uniform_starts(*names: str) -> dict[str, str]:
    return {f"{name}_below": f"{name} of each head starts uniformly between 0 and this" for name in names}


def _describe_normal_start(what: str) -> str:
    return f"standard deviation of the normal distribution of {what} at the start"


OPTIONS: dict[str, dict[str, str]] = {
    # encodings
    "bam": {"exponent_init": "where β starts; at 1 the bias falls linearly, as ALiBi's does"},
    "cope": {"positions": "rows of the table e, to which gates can count; tokens further back share the last"},
    "fire": {
        "width": "hidden units of the network f",
        "activation": "of these units: `relu`, which kernels fuse, or `leaky_relu`",
        "c_start": "where c starts: how fast the logarithm compresses distances",
        "multiplier_start": "where the multiplier starts: rows before multiplier·T_train/2 share one normaliser",
    },
    "fope": {
        "base": "frequencies are base^(−2m/d) of the pairs m; the larger, the slower the slowest pair turns",
        "original_length": "L; pairs that turn less than once within it stay as they are; the training length if null",
        "gain": "size of the random weights of the other frequencies",
        "seed": "of these weights, which are drawn once and not trained",
    },
    "fox": {
        "std": _describe_normal_start("w"),
        "bias_init": "where b starts; at 0 a gate lets half through",
        "decay_time_min_init": "with the next one, in the place of bias_init: tokens after which the first head has "
        "forgotten all but 1/e",
        "decay_time_max_init": "the same of the last head; the others lie evenly between on a logarithmic scale",
    },
    "gaussian_bias2": _describe_uniform_starts("r1", "r2"),
    "gaussian_bias3": _describe_uniform_starts("r1", "r2", "r3"),
    "gaussian_weight1": _describe_uniform_starts("r1"),
    "gaussian_weight2": _describe_uniform_starts("r1", "r2"),
    "grape_a": {
        "gates": "what the rate of the penalty is read from: `key`, or `query_key` for both",
        "normalize": "u and v have length 1",
        "omega_init": "where ω starts, as a multiple of ALiBi's slope of the head",
    },
    "kerple_bias_weight": _describe_uniform_starts("r1", "r2", "r3", "r4"),
    "kerple_log": _describe_uniform_starts("r1", "r2"),
    "kerple_log3": {**_describe_uniform_starts("r1", "r2"), "r3_start": "where r3 starts; at 1 it is kerple_log"},
    "kerple_power": _describe_uniform_starts("r1", "r2"),
    "learned": {"std": _describe_normal_start("the table")},
    "pope": {
        "base": "frequencies are base^(−c/d) of the d numbers c; the larger, the slower the slowest turns",
        "learned_delta": "learn a phase δ for each head and number; false has none",
        "delta_init": "where δ starts: `zero`, or `uniform` between −2π and 0",
    },
    "rotary": {
        "fraction": "share of each head's dimensions that are turned (GPT-NeoX's `rotary_pct`)",
        "base": "frequencies are base^(−2m/r) of the pairs m; the larger, the slower the slowest pair turns",
        "scaling": "how frequencies or far positions are changed: `none`, `p_rope`, `hope`, `linear`, `ntk`, "
        "`dynamic`, `llama3`, `yarn`, `longrope`, `selfextend` or `rerope` "
        "([rotary frequencies](#rotary-frequencies)); those below but for xpos belong to some of these",
        "factor": "s, how many times the original length is to be read (linear, ntk, dynamic, llama3, yarn, longrope)",
        "original_length": "L, the tokens of the original training (hope, dynamic, llama3, yarn, longrope)",
        "low_freq_factor": "pairs that turn less often than this within L are stretched in full (llama3; 1 if null)",
        "high_freq_factor": "pairs that turn more often than this within L stay (llama3; 4 if null)",
        "beta_fast": "pairs that turn more often than this within L stay (yarn; 32 if null)",
        "beta_slow": "pairs that turn less often than this within L are stretched in full (yarn; 1 if null)",
        "attention_factor": "what cosines and sines are multiplied by (yarn, longrope); as published if null",
        "share": "of the pairs that turn, the fastest ones (p_rope)",
        "short_factor": "what each pair's frequency is divided by up to L (longrope)",
        "long_factor": "the same beyond L (longrope)",
        "group": "G, how many far tokens share one position (selfextend)",
        "neighbors": "w; tokens nearer than this keep their positions (selfextend, rerope)",
        "xpos": "let scores decay with the distance, those of fast pairs fastest",
        "xpos_scale_base": "S, the tokens within which the fastest pair decays by ζ = 0.29 (xpos)",
    },
    "sandwich": {
        "dimension": "m, the numbers of the sinusoidal vectors whose products are the bias; even",
        "base": "frequencies are base^(−2j/m); the larger, the slower the slowest wave",
    },
    "sinusoidal": {"base": "frequencies are base^(−2m/D); the larger, the slower the slowest wave"},
    "t5": {
        "num_buckets": "distances are sorted into so many, each with a bias of its own; even",
        "max_distance": "from this distance on all share the last bucket",
        "std": _describe_normal_start("the table of biases"),
    },
    "transformer_xl": {
        "base": "frequencies are base^(−2m/D) of the vectors R_n",
        "std": _describe_normal_start("u, v and W_R"),
    },
    # processors
    "cdape": {
        "width": "hidden channels W (DAPE's D_DAPE)",
        "kernel_size": "keys under the convolutions' kernels, odd; 1 is `dape`",
        "residual_bias": _RESIDUAL,
        "zero_init": _ZERO,
    },
    "dape": {"width": "hidden units W (DAPE's D_DAPE)", "residual_bias": _RESIDUAL, "zero_init": _ZERO},
    "mta": {
        "query_kernel_size": "rows c_q under the kernels, the row's own and those above it",
        "key_kernel_size": "keys c_k under the kernels, odd",
        "head_kernel_size": "heads c_h of a group that are mixed after the softmax; all heads if null, none of them "
        "at 1",
        "weights_query_kernel_size": "rows under the kernels of a second convolution, of the weights after the "
        "softmax; 0 for none",
        "weights_key_kernel_size": "keys under these, odd; 0 for none",
        "mixes_scores": "mix all heads before the softmax as well, after the convolution",
        "mixes_bias": _MIXES_BIAS,
        "group_norm": "an RMS norm of each head's output, with a scale for each dimension that heads share",
        "depth_scale": "multiply that by 0.2 + 0.6·exp(−0.3·layer), as Differential Transformer does",
        "gate": "multiply that by a number between 0 and 1 for each head and token, made of it",
    },
    "talking_heads": {
        "before_softmax": "mix the logits",
        "after_softmax": "mix the weights",
        "mixes_bias": _MIXES_BIAS,
    },
    # temperatures
    "llama4": {
        "floor_scale": "tokens after which the factor takes its next step; up to the first it is 1",
        "attn_scale": "how much the logarithm of the steps adds",
    },
    "logn": {"length": "T, the keys up to which the factor is 1; the training length if null"},
    "ssmax": {"s": "where s starts, or what it is without `learned`", "learned": "learn s for each head"},
}
"""Method → option → meaning."""

"""Cases of the parity table: methods, layouts, the run of each, and the allowed differences."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.config.schema import Config
from megatron.distributed.mesh import ParallelSizes
from tools.tolerances import compute_tolerance, count_gpt_sums

STEPS = 5
LENGTH, WIDTH, LAYERS, HEADS, VOCABULARY = 32, 32, 4, 4, 61
BATCH = 4
"""Sequences per step: by default four micro-batches of one, divided over the data-parallel ranks."""

# Clipping exposes a wrong norm in the next step's loss. A large epsilon keeps Adam from amplifying the rounding of a
# nearly zero gradient to a whole step.
OPTIMIZER_PARAMS = {"lr": 1e-2, "eps": 1e-2}
GROUPED = {
    "num_kv_heads": 2,
    "activation": "gelu_tanh",
    "use_bias_in_attn_linear": False,
    "use_bias_in_qkv": True,
}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"pos_emb": "none"},
    "rotary": {"pos_emb": "rotary"},
    "learned": {"pos_emb": "learned"},
    "t5": {"pos_emb": "t5"},
    "kerple_log per layer": {"pos_emb": "kerple_log", "pos_emb_per_layer": True},
    "fire": {"pos_emb": "fire"},
    "cope": {"pos_emb": "cope"},
    "transformer_xl": {"pos_emb": "transformer_xl"},
    "cdape(kerple_log), window 20": {"pos_emb": "kerple_log", "score_processor": "cdape", "attention_window": 20},
    "rotary, randomized": {"pos_emb": "rotary", "randomized_positions": 80},
    "kerple_log, untied": {"pos_emb": "kerple_log", "no_weight_tying": True, "activation": "swiglu"},
    "cdape(rotary), grouped": {"pos_emb": "rotary", "score_processor": "cdape", **GROUPED},
    "rotary, normalized, capped, z-loss": {
        "pos_emb": "rotary",
        "use_qk_layernorm": True,
        "qk_norm": "rmsnorm",
        "norm_placement": "sandwich",
        "num_kv_heads": 2,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "z_loss": 0.01,
        "checkpoint_activations": "selective",
    },
    "cdape(fox) per layer, documents": {
        "pos_emb": "fox", "pos_emb_per_layer": True, "score_processor": "cdape", "attention_mask": "document",
        "checkpoint_activations": "selective",
    },
    "fox, grouped": {"pos_emb": "fox", **GROUPED},
    # Rotated queries and keys longer than values, and separate rotations of queries and keys.
    "pope, grouped": {"pos_emb": "pope", "pos_emb_options": {"delta_init": "uniform"}, "num_kv_heads": 2},
    "xpos | fope, documents": {
        "pos_emb": ["rotary", "fope"], "pos_emb_options": {"xpos": True, "gain": 1.0}, "attention_mask": "document"
    },
    "cdape(selfextend)": {
        "pos_emb": "rotary", "pos_emb_options": {"scaling": "selfextend", "group": 3, "neighbors": 9},
        "score_processor": "cdape",
    },
    "kerple_log, continuous": {
        "pos_emb": "kerple_log", "randomized_positions": 80, "continuous_positions": True
    },
    # Documents together, and one by one.
    "cdape(kerple_log), documents": {
        "pos_emb": "kerple_log", "score_processor": "cdape", "attention_mask": "document",
        "attention_backend": "chunked",
    },
    "cdape(fire), documents": {
        "pos_emb": "fire", "score_processor": "cdape", "attention_mask": "document", "checkpoint_activations": True
    },
    "rotary, documents": {"pos_emb": "rotary", "attention_mask": "document"},
    "ssmax, cdape(kerple_log), window 20": {
        "pos_emb": "kerple_log", "score_processor": "cdape", "attention_window": 20, "attention_temperature": "ssmax"
    },
    "llama4, rotary, documents": {
        "pos_emb": "rotary", "attention_mask": "document", "attention_temperature": "llama4",
        "attention_temperature_options": {"floor_scale": 3, "attn_scale": 0.6},
    },
    "cdape(kerple_log), sinks, headwise gates": {
        "pos_emb": "kerple_log", "score_processor": "cdape", "softmax_type": "learnable",
        "attention_output_gate": "headwise",
    },
    "rotary, sinks in windows, gates": {
        "pos_emb": "rotary", "attention_window": [9, None], "softmax_type": ["learnable", "off-by-one"], **GROUPED,
        "attention_output_gate": True, "checkpoint_activations": "selective",
    },
    "stick-breaking, documents": {
        "pos_emb": "none", "softmax_type": "stick-breaking", "attention_mask": "document",
    },
    # Rows that depend on earlier rows, which other ranks store.
    "mta(fox), window 20": {
        "pos_emb": "fox", "score_processor": "mta", "attention_window": 20,
        "score_processor_options": {"query_kernel_size": 3, "key_kernel_size": 5},
    },
    "selective(rotary), documents": {
        "pos_emb": "rotary", "score_processor": "selective", "attention_mask": "document"
    },
    "talking_heads(alibi), grouped": {"pos_emb": "alibi", "score_processor": "talking_heads", **GROUPED},
    # Different layers: over two stages with different patterns, and over four, some without a shared encoding.
    "rotary, window 9 | cdape(kerple_log)": {
        "pos_emb": ["rotary", "rotary", "rotary", "kerple_log"], "attention_window": [9, 9, 9, None],
        "score_processor": ["none", "none", "none", "cdape"],
    },
    "dape(alibi), recomputed": {"pos_emb": "alibi", "score_processor": "dape", "checkpoint_activations": True},
    "Muon, cdape(kerple_log), grouped": {
        "pos_emb": "kerple_log", "score_processor": "cdape", **GROUPED, "activation": "swiglu", "no_weight_tying": True,
        "optimizer": {"type": "Muon", "params": OPTIMIZER_PARAMS},
    },
    "muP, cdape(kerple_log)": {
        "pos_emb": "kerple_log", "score_processor": "cdape", "use_mup": True, "mup_base_hidden_size": 8,
        "mup_base_num_layers": 2,
    },
    # A small step, because Lion uses the sign, which rounding may flip for a nearly zero gradient.
    "Lion, dape(kerple_log)": {
        "pos_emb": "kerple_log", "score_processor": "dape", "optimizer": {"type": "Lion", "params": {"lr": 1e-6}},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Division of the work between ranks."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    stage: int = 0

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(self.tensor, self.context, self.data, self.pipeline)

    def __str__(self) -> str:
        letters = {"TP": self.tensor, "CP": self.context, "PP": self.pipeline, "DP": self.data}
        return (
            " × ".join([f"{name} {size}" for name, size in letters.items() if size > 1] or ["1"])
            + f", ZeRO {self.stage}"
        )


def list_layouts(world_size: int) -> Iterator[Layout]:
    """Yield every layout of this many ranks, with every ZeRO stage that it supports."""
    for tensor in _list_divisors(world_size, HEADS):
        for context in _list_divisors(world_size // tensor, LENGTH // 2):
            for pipeline in _list_divisors(world_size // tensor // context, LAYERS):
                data = world_size // tensor // context // pipeline
                for stage in (0, 1) if pipeline > 1 else (0, 1, 2, 3):
                    if BATCH // data >= pipeline:
                        yield Layout(tensor, context, data, pipeline, stage)


def _list_divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0 and most % size == 0]


@dataclass(frozen=True)
class ParityCase:
    """Training run of a few steps."""

    method: str
    layout: Layout
    precision: str = "fp32"
    steps: int = STEPS
    layers: int = LAYERS
    micro_batch: int = 1
    """Number of sequences."""

    def build_config(self) -> Config:
        """Build the configuration of the case; the caller provides the data."""
        layout = self.layout
        return Config.from_flat(
            {
                "num_layers": self.layers,
                "hidden_size": WIDTH,
                "num_attention_heads": HEADS,
                "seq_length": LENGTH,
                "init_method_std": 0.1,
                "make_vocab_size_divisible_by": 64,
                "attention_chunk_rows": 12,
                "optimizer": {"params": OPTIMIZER_PARAMS},
                **METHODS[self.method],
                "train_iters": self.steps,
                "train_micro_batch_size_per_gpu": self.micro_batch,
                "gradient_accumulation_steps": BATCH // layout.data // self.micro_batch,
                "train_batch_size": BATCH,
                "precision": self.precision,
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
                "model_parallel_size": layout.tensor,
                "context_parallel_size": layout.context,
                "pipe_parallel_size": layout.pipeline,
                "num_gpus": layout.sizes.world_size,
                "device": "cpu",
                "distributed_backend": "gloo",
            }
        )

    def to_single_process(self) -> "ParityCase":
        """Return the same case in one process, one sequence at a time."""
        return replace(self, layout=Layout(), micro_batch=1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "ParityCase":
        return ParityCase(**{**values, "layout": Layout(**values["layout"])})


def is_supported_case(case: ParityCase) -> bool:
    """Return True if the case is supported.

    Half precision without ZeRO cannot shard a model, because a run then uses stage 1. Tensor ranks divide the key-value
    heads. Muon needs whole matrices, and ZeRO 3 needs the same number of module calls on all ranks.
    """
    layout = case.layout
    method = METHODS[case.method]
    if method.get("num_kv_heads", HEADS) % layout.tensor:
        return False
    if layout.stage == 3 and method.get("optimizer", {}).get("type") == "Muon":
        return False
    if layout.stage == 3 and (method["pos_emb"], method.get("attention_mask")) == ("fire", "document"):
        return False
    return case.precision == "fp32" or layout.stage > 0 or layout.tensor * layout.pipeline == 1


def compute_layout_tolerance(precision: str) -> tuple[float, float]:
    """Return the allowed relative differences of losses and gradient norms between two layouts.

    In float32, errors accumulate over consecutive sums in the forward pass, and over as many in the backward pass. In
    bfloat16, sums are float32 and each result is rounded once. A loss is the mean over at least 64 tokens, and a norm
    is the root of a sum over many more gradients, all with independent errors. Five steps of this optimizer move a
    weight by 5 · lr/eps = 5 times a gradient clipped to a norm of 0.5, so an error in it returns at most 2.5 times as
    large.
    """
    terms, sums = count_gpt_sums(WIDTH, LAYERS)
    if precision == "fp32":
        return compute_tolerance(terms, sums), 3.5 * compute_tolerance(terms, 2 * sums)
    import torch

    return compute_tolerance(1, sums, torch.bfloat16) / 8, 3.5 * compute_tolerance(1, 2 * sums, torch.bfloat16) / 8

"""Cases of the export matrix: models, their runs, and the logits that this project computes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint import manifest
from megatron.checkpoint.layout import CHECKPOINTS, WEIGHTS, format_checkpoint_name
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import list_persistent_buffers
from megatron.config.schema import CONFIG_FILE, Config
from megatron.config.yaml_files import dump_yaml
from megatron.data.load_tokenizer import save_tokenizer
from megatron.data.tokenizers import ByteTokenizer, Tokenizer
from megatron.distributed.process_groups import build_single_process_groups
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.position.registry import list_encodings, list_processors, list_temperatures
from tools.tolerances import compute_tolerance, count_gpt_sums

LENGTH, FAR = 16, 64
"""Training length in tokens, and four times this length."""
WIDTH, LAYERS = 24, 2
PROCESSED = ("none", "rotary", "kerple_log", "fire", "cope", "fox")
END = ByteTokenizer().eod
"""End-of-document token."""
LENGTHS = (FAR, 41, LENGTH)
"""Lengths of the sequences of a padded batch."""


@dataclass(frozen=True, eq=False)
class ExportCase:
    """Model to export."""

    title: str
    keys: dict[str, Any] = field(default_factory=dict)

    def build_config(self) -> Config:
        return Config.from_flat(
            {
                "num_layers": LAYERS,
                "hidden_size": WIDTH,
                "num_attention_heads": 3,
                "seq_length": LENGTH,
                "max_position_embeddings": FAR,
                "attention_chunk_rows": 24,
                "init_method_std": 0.2,  # large enough for attention to matter
                "make_vocab_size_divisible_by": 64,
                "train_iters": 1,
                **self.keys,
            }
        )


def list_method_cases() -> Iterator[ExportCase]:
    """Yield every encoding without a processor and with CDAPE, and every processor on each kind of encoding."""
    for encoding, processor in product(list_encodings(), ("none", *list_processors())):
        if processor not in ("none", "cdape") and encoding not in PROCESSED:
            continue
        yield ExportCase(f"{encoding}, {processor}", {"pos_emb": encoding, "score_processor": processor})


def list_position_cases() -> Iterator[ExportCase]:
    """Yield windows, randomized positions and per-layer parameters."""
    for encoding, processor in product(list_encodings(), ("none", "cdape")):
        keys = {"pos_emb": encoding, "score_processor": processor, "attention_window": 11}
        yield ExportCase(f"{encoding}, {processor}, window 11", keys)
    for encoding in ("rotary", "kerple_log", "fire"):
        randomized = {"pos_emb": encoding, "randomized_positions": 90}
        yield ExportCase(f"{encoding}, randomized", randomized)
        yield ExportCase(f"{encoding}, per layer", {"pos_emb": encoding, "pos_emb_per_layer": True})


def list_temperature_cases() -> Iterator[ExportCase]:
    """Yield every temperature, with options that affect short sequences."""
    options = {"logn": {"length": 4}, "llama4": {"floor_scale": 3, "attn_scale": 0.6}}
    for name, place in zip(
        list_temperatures(),
        cycle(({"pos_emb": "kerple_log", "score_processor": "cdape", "attention_window": 11}, {"pos_emb": "rotary"})),
        strict=False,
    ):
        temperature = {"attention_temperature": name, "attention_temperature_options": options.get(name, {})}
        yield ExportCase(f"{name}, {place['pos_emb']}", {**place, **temperature})


def list_softmax_cases() -> Iterator[ExportCase]:
    """Yield every softmax, and gates on the attention output."""
    for name, place in (
        ("off-by-one", {"pos_emb": "rotary"}),
        ("learnable", {"pos_emb": "kerple_log", "score_processor": "cdape", "attention_window": 11}),
        ("stick-breaking", {"pos_emb": "none"}),
    ):
        yield ExportCase(f"softmax {name}, {place['pos_emb']}", {**place, "softmax_type": name})
    layers = {"attention_window": [9, None], "softmax_type": ["learnable", "vanilla"], "pos_emb": "rotary"}
    yield ExportCase("sinks in layers with a window", layers)
    yield ExportCase("a gate for each number", {"attention_output_gate": True, "pos_emb": "alibi"})
    gated = {"attention_output_gate": "headwise", "num_kv_heads": 1, "head_dim": 12, "pos_emb": "rotary"}
    yield ExportCase("a gate for each head", gated)


def list_document_cases() -> Iterator[ExportCase]:
    """Yield runs trained with document masking."""
    layers: dict[str, Any] = {"pos_emb": ["rotary", "none"], "attention_window": [9, None]}
    temperature = {"attention_temperature": "ssmax", "attention_window": 7}
    for title, keys in {
        "rotary": {"pos_emb": "rotary", "num_kv_heads": 1},
        "learned": {"pos_emb": "learned"},
        "randomized rotary": {"pos_emb": "rotary", "randomized_positions": 90},
        "kerple_log under cdape in a window": {
            "pos_emb": "kerple_log", "score_processor": "cdape", "attention_window": 11
        },
        "fire under dape": {"pos_emb": "fire", "score_processor": "dape"},
        "cope under mta": {"pos_emb": "cope", "score_processor": "mta"},
        "fox under selective": {"pos_emb": "fox", "score_processor": "selective"},
        "rotary with ssmax": {"pos_emb": "rotary", **temperature},
        "a pattern of layers": layers,
        "stick-breaking": {"pos_emb": "none", "softmax_type": "stick-breaking-remainder"},
    }.items():  # fmt: skip
        yield ExportCase(f"documents, {title}", {**keys, "attention_mask": "document"})


def list_architecture_cases() -> Iterator[ExportCase]:
    """Yield further variants of layers."""
    with_cdape = {"pos_emb": "kerple_log", "score_processor": "cdape", "score_processor_options": {"kernel_size": 5}}
    without_bias = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    yield ExportCase("parallel residual", {**with_cdape, "gpt_j_residual": True})
    yield ExportCase("parallel residual, one norm", {**with_cdape, "gpt_j_residual": True, "gpt_j_tied": True})
    yield ExportCase("grouped queries", {**with_cdape, "num_kv_heads": 1})
    yield ExportCase("hope", {"pos_emb": "rotary", "pos_emb_options": {"scaling": "hope", "original_length": 20}})
    p_rope = {"scaling": "p_rope", "share": 0.5, "fraction": 0.5}
    yield ExportCase("p_rope of half a head", {"pos_emb": "rotary", "pos_emb_options": p_rope})
    layers: dict[str, Any] = {
        "attention_temperature": ["none", "ssmax"],
        "pos_emb": ["rotary", "kerple_log"], "attention_window": [9, None], "score_processor": ["none", "cdape"],
        "pos_emb_options": {"base": 5000},
        "score_processor_options": {"kernel_size": 5},
    }  # fmt: skip
    yield ExportCase("a pattern of layers", layers)
    yield ExportCase("a pattern of layers, each its own", {**layers, "pos_emb_per_layer": True})
    drawn = {"pos_emb": "fope", "pos_emb_per_layer": True, "pos_emb_options": {"released": True, "gain": 1.0}}
    yield ExportCase("an encoding that draws its own weights in each layer", drawn)
    llama = {"pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "no_weight_tying": True, **without_bias}
    yield ExportCase("as Llama", {**llama, "num_kv_heads": 1})
    yield ExportCase("as Qwen2", {**llama, "use_bias_in_qkv": True})
    normalized = {"use_qk_layernorm": True, "num_kv_heads": 1, "head_dim": 12}
    yield ExportCase("queries and keys normalized", {**with_cdape, **normalized, "attn_logit_softcapping": 1.5})
    over_heads = {"use_qk_layernorm": True, "qk_norm": "rmsnorm", "qk_layernorm_over_heads": True}
    yield ExportCase(
        "normalized over heads, norms after", {"pos_emb": "rotary", **over_heads, "norm_placement": "post"}
    )
    gemma = {
        **llama, "norm_placement": "sandwich", "activation": "geglu_tanh", "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 11.0, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    }  # fmt: skip
    yield ExportCase("as Gemma 2", gemma)
    mup = {
        "use_mup": True, "mup_base_hidden_size": 8, "mup_base_num_attention_heads": 2, "mup_base_num_layers": 1,
        "mup_depth_alpha": 0.75, "mup_embedding_mult": 3.0, "mup_attn_temp": 0.5, "mup_output_temp": 0.25,
    }  # fmt: skip
    yield ExportCase("muP", {**with_cdape, **mup})
    yield ExportCase("muP, position embeddings", {"pos_emb": "learned", **mup, "mup_rp_embedding_mult": 0.5})
    for activation in ("gelu_tanh", "relu", "silu", "geglu"):
        yield ExportCase(activation, {"pos_emb": "alibi", "activation": activation})


def build_gpt(case: ExportCase, vocabulary: int) -> GPT:
    """Build the case's model with random weights, including norms and biases."""
    config = case.build_config()
    gpt = build_model(config.model, config.position, vocabulary, groups=build_single_process_groups(), seed=11).eval()
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter_name, parameter in gpt.named_parameters():
            is_identity = ".processor." in parameter_name and not parameter.any()
            if "norm" in parameter_name or parameter_name.endswith("linear.bias") or is_identity:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    if config.position.attention_mask == "document":
        gpt.end_of_document = END
    return gpt


def write_run(folder: Path, config: Config, gpt: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write a run folder with one checkpoint, complete enough for other readers."""
    tokenizer = tokenizer or ByteTokenizer()
    checkpoint = folder / CHECKPOINTS / format_checkpoint_name(1)
    checkpoint.mkdir(parents=True)
    tensors = {**dict(gpt.named_parameters()), **dict(list_persistent_buffers(gpt))}
    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, checkpoint / WEIGHTS)
    # Write only keys that were set, as in an imported run. Parsing all keys would dominate the run time.
    keys = {**config.model.model_dump(exclude_unset=True), **config.position.model_dump(exclude_unset=True)}
    (checkpoint / CONFIG_FILE).write_text(dump_yaml(keys), encoding="utf-8")
    vocabulary = {"size": tokenizer.vocab_size, "name": tokenizer.name}
    if config.position.attention_mask == "document":
        vocabulary["eod"] = tokenizer.eod
    TrainerState(step=1, vocabulary=vocabulary).write(checkpoint)
    manifest.write_manifest(
        checkpoint, manifest.compute_checksums(checkpoint, [checkpoint / file for file in manifest.MODEL_FILES])
    )
    save_tokenizer(tokenizer, folder)
    return folder


def draw_sequences(seed: int = 13) -> list[Tensor]:
    """Return the sequences of a padded batch, int64 [1, length] each, in which some documents end."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(256, (1, length), generator=generator) for length in LENGTHS]
    for sequence in sequences:
        sequence[:, [3, 4, *range(12, sequence.shape[1], 19)]] = END
    return sequences


@torch.inference_mode()
def compute_expected_logits(gpt: GPT) -> dict[str, Tensor]:
    """Return the logits of each sequence alone, float32 [1, length, V], by its length."""
    return {str(sequence.shape[1]): gpt(sequence).clone() for sequence in draw_sequences()}


def write_case(case: ExportCase, folder: Path) -> Path:
    """Write the case's run, and the expected results for `reader.py` next to it. Return the run."""
    tokenizer = ByteTokenizer()
    gpt = build_gpt(case, tokenizer.vocab_size)
    run = write_run(folder / "run", case.build_config(), gpt, tokenizer)
    save_file(compute_expected_logits(gpt), folder / "expected.safetensors")
    facts = {
        "title": case.title,
        "lengths": LENGTHS,
        "cached": case.build_config().position.randomized_positions is None,
        "tokens": [sequence[0].tolist() for sequence in draw_sequences()],
    }
    (folder / "case.json").write_text(json.dumps(facts), encoding="utf-8")
    return run


def compute_export_tolerance() -> float:
    """Return the allowed difference of logits, relative to the largest logit."""
    return compute_tolerance(*count_gpt_sums(WIDTH, LAYERS))

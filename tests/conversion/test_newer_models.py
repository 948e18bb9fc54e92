"""Random options of newer families: windows, two rotations, multipliers, and texts beyond the original length."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published import (
    FULL,
    IS_4,
    LLAMA3,
    LOCAL,
    LONGROPE,
    OF_LLAMA,
    ROWS,
    WIDTH,
    YARN,
    build_random_model,
    logits_of,
    write_tokenizer,
    written,
)
from torch.nn.functional import cross_entropy

from megatron.checkpoint.load_model import load_model
from megatron.conversion.export_model import export_model
from megatron.conversion.hf_checkpoint import HF_FAMILIES
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.import_model import import_model
from tools.export.cases import write_run
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

LAYERS, LENGTH = 3, 96
ANGLES = 2 * LAYERS * 16
"""Errors of transformers' float32 angles at twice the training length, as in test_hugging_face.py."""
TERMS, SUMS = count_gpt_sums(WIDTH, LAYERS)
STEP_SUMS = SUMS + 2 * SUMS + SUMS
"""Consecutive sums of logits after a step: a forward pass, the gradients of inputs and weights, which have as many sums
each, and a forward pass with the new weights. The errors of the angles are the same in all passes and count once.
"""
TYPES: list[Any] = [None, [LOCAL, LOCAL, FULL], [FULL, LOCAL, FULL], [FULL] * LAYERS]
COMMON: dict[str, list[Any]] = {
    "num_key_value_heads": [1, 2, 4],
    "tie_word_embeddings": [True, False],
    "pad_token_id": [None],  # transformers does not train the row of a padding token
}
WINDOW = {"sliding_window": [1, 7, 200]}
BIASES = {"attention_bias": [True, False]}
ROPE = [{"rope_type": "default", "rope_theta": 300.0}, LLAMA3, YARN]
LAYER_ROPE: list[Any] = [
    {FULL: full, LOCAL: {"rope_type": "default", "rope_theta": base}} for full in ROPE for base in (300.0, 1e4)
]
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "Mistral": {**COMMON, "sliding_window": [None, 1, 7], "head_dim": [None, 12], "rope_parameters": ROPE},
    "Qwen2": {
        **COMMON, **WINDOW, "use_sliding_window": [True], "max_window_layers": [0, 1, 3], "rope_parameters": ROPE
    },
    "Qwen3": {
        **COMMON, **WINDOW, **BIASES, "use_sliding_window": [True], "layer_types": TYPES[1:], "head_dim": [12, 8]
    },
    "Gemma3Text": {
        **COMMON, **WINDOW, **BIASES, "head_dim": [8, 12], "query_pre_attn_scalar": [5, 8], "layer_types": TYPES,
        "final_logit_softcapping": [None, 4.0], "rope_parameters": [None, *LAYER_ROPE], "rms_norm_eps": [1e-6, 0.1],
    },
    "Olmo3": {
        **COMMON, **WINDOW, **BIASES, "layer_types": TYPES, "rope_parameters": [None, *LAYER_ROPE],
        "rms_norm_eps": [1e-5, 0.1],
    },
    "Granite": {
        **COMMON, **BIASES, "mlp_bias": [True, False], "embedding_multiplier": [1.0, 12], "logits_scaling": [0.25, 3],
        "residual_multiplier": [0.22, 2.0], "attention_multiplier": [0.3, 1.0], "rope_parameters": ROPE,
    },
    "Phi3": {
        **COMMON, "sliding_window": [None, 7], "hidden_act": ["silu", "gelu"],
        "original_max_position_embeddings": [24, 48, 100],
        "rope_parameters": [None, {"partial_rotary_factor": 0.5}, LONGROPE, {**LONGROPE, "attention_factor": 1.3}],
    },
}  # fmt: skip
"""Options of each family that change its results, with values to choose from."""


def draw_options(family: str, seed: int) -> dict[str, Any]:
    """Return random options of a family, the same for the same seed."""
    generator = random.Random(f"{family} {seed}")
    return {name: generator.choice(values) for name, values in OPTIONS[family].items()}


def import_random_model(family: str, seed: int, folder: Path) -> tuple[transformers.PreTrainedModel, Path]:
    """Write a random model of a family, and import it."""
    options = {**OF_LLAMA, "num_hidden_layers": LAYERS, **draw_options(family, seed)}
    theirs = build_random_model(family, options, seed)
    theirs.save_pretrained(folder / "source")
    write_tokenizer(folder / "source")
    return theirs, import_model(folder / "source", folder / "run")[0].run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", OPTIONS)
def test_random_options_beyond_the_original_length(family: str, seed: int, tmp_path: Path) -> None:
    theirs, run = import_random_model(family, seed, tmp_path)
    model = load_model(run).model
    tokens = torch.randint(ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        cache = model.create_kv_cache(LENGTH)
        steps = torch.cat([model(part, kv_cache=cache) for part in tokens.split([20, 1, 1, LENGTH - 22], 1)], 1)
        for length in (20, LENGTH):
            reference = logits_of(theirs, tokens[:, :length])
            assert_close_in_rounding(model(tokens[:, :length]), reference, TERMS, SUMS + ANGLES)
    assert_close_in_rounding(steps, reference, TERMS, SUMS + ANGLES)


@pytest.mark.parametrize("family", OPTIONS)
def test_a_training_step_of_an_import_is_exported(family: str, tmp_path: Path) -> None:
    """Import, one step of gradient descent, and a native export equal the same step in transformers."""
    theirs, run = import_random_model(family, 1, tmp_path)
    tokens = torch.randint(ROWS, (4, 24), generator=torch.Generator().manual_seed(3))
    loaded = load_model(run)
    model = loaded.model.train()
    logits = theirs.train()(input_ids=tokens).logits[:, :-1]
    before = logits.detach()
    cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    model(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *model.parameters()):
            parameter -= 0.05 * parameter.grad
    stepped = write_run(tmp_path / "stepped", loaded.run.config, model)
    target = export_model(stepped, tmp_path / "native", native=True, log=lambda line: None)
    again = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    expected = logits_of(theirs.eval(), tokens)
    assert (expected[:, :-1] - before).abs().max() > 0.1
    assert_close_in_rounding(logits_of(again, tokens), expected, TERMS, STEP_SUMS + ANGLES)


@pytest.mark.parametrize("model_type", sorted(HF_FAMILIES.keys() - {"gpt_neox", "gpt2", "opt"}))
def test_missing_keys_have_the_defaults_of_transformers(model_type: str) -> None:
    """Published files may omit keys that have the default value of their family."""
    if IS_4 and model_type in ("cohere", "olmo3"):
        pytest.skip("transformers 5 raised this family's default base from 10,000 to 500,000")
    family = HF_FAMILIES[model_type]
    complete = transformers.CONFIG_MAPPING[model_type]().to_dict()
    keys, defaults = (
        family.from_hf_config(HFConfigReader(values, model_type)) for values in (complete, {"model_type": model_type})
    )
    assert defaults == keys


def test_longrope_within_the_original_length(tmp_path: Path) -> None:
    """A text within the original length has the short factors, also with a cache that ends there."""
    theirs = written("phi3, longrope", tmp_path / "source")
    model = load_model(import_model(tmp_path / "source", tmp_path / "run")[0].run).model
    tokens = torch.randint(ROWS, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = model.create_kv_cache(24)
        steps = torch.cat([model(part, kv_cache=cache) for part in tokens.split([20, 1, 3], 1)], 1)
    assert_close_in_rounding(steps, logits_of(theirs, tokens), TERMS, SUMS + ANGLES)

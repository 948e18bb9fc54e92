"""One table defines import and export; a round trip loses nothing."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from published import MODELS, ROWS, model_of

from megatron.config.schema import Config
from megatron.conversion.families.opt import POSITION_OFFSET
from megatron.conversion.hf_checkpoint import HF_FAMILIES, find_exact_family, get_family
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.model_family import AddOne, ModelFamily
from megatron.model.mup import get_multipliers
from megatron.utils.errors import UserError


def read(name: str) -> tuple[ModelFamily, Config, dict[str, torch.Tensor]]:
    """Return a model's family, its configuration in our format, and its tensors by name."""
    model = model_of(name)
    values = json.loads(model.config.to_json_string(use_diff=False))
    family = get_family(values["model_type"], name)
    stored = dict(model.state_dict())
    if values["tie_word_embeddings"]:
        stored.pop("lm_head.weight", None), stored.pop("embed_out.weight", None)
    renamed = {theirs: ours for ours, theirs in family.tensor_aliases.items()}
    stored = {renamed.get(key, key): value for key, value in stored.items()}
    return family, Config.from_flat(family.from_hf_config(HFConfigReader(values, name))), stored


def test_a_mup_model_exports_its_own_scale_of_scores() -> None:
    """Granite's multiplier of scores includes muP's, which no key of a configuration states."""
    keys = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16, "activation": "swiglu"}
    keys |= {"pos_emb": "rotary", "norm": "rmsnorm", "use_mup": True, "mup_base_hidden_size": 32}
    config = Config.from_flat({**keys, "mup_attn_temp": 2.0})
    written = HF_FAMILIES["granite"].to_hf_keys(config)["attention_multiplier"]
    assert written == pytest.approx(get_multipliers(config.model).query * 16**-0.5)
    assert written != pytest.approx(16**-0.5)


@pytest.mark.parametrize(
    ("auto_map", "is_accepted"),
    [
        (
            {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
            True,
        ),
        ({"AutoTokenizer": "hub/name", "AutoModelForCausalLM": "hub/name--modeling_phi3.Phi3ForCausalLM"}, True),
        ({"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}, False),
        ({"AutoConfig": "configuration_mine.MineConfig"}, False),
        ({"AutoModelForCausalLM": ["modeling_phi3.Phi3ForCausalLM"]}, False),
    ],
)
def test_included_code_of_a_class_that_transformers_has_is_not_needed(
    auto_map: dict[str, Any], is_accepted: bool
) -> None:
    with nullcontext() if is_accepted else pytest.raises(UserError, match="needs custom code, which is not run"):
        HFConfigReader({"auto_map": auto_map}, "config.json", architecture="Phi3ForCausalLM")


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_bit_for_bit(name: str) -> None:
    family, config, stored = read(name)
    for weight in family.weight_mappings(config):
        theirs = [stored.pop(each) for each in weight.hf_names]
        ours = weight.transform.to_megatron(theirs)
        back = weight.transform.to_hf(ours)
        assert torch.equal(weight.transform.to_megatron(back), ours)
        for before, after in zip(theirs, back, strict=True):
            assert after.is_contiguous()
            skipped = POSITION_OFFSET if "embed_positions" in weight.hf_names[0] else 0
            rounding = 2**-24 if isinstance(weight.transform, AddOne) else 0.0  # rounding of sums with 1
            assert (before[skipped:] - after[skipped:]).abs().max() <= rounding
    assert stored == {}


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_there_and_back(name: str) -> None:
    family, config, _ = read(name)
    assert family.describe_unsupported(config) is None
    found, reasons = find_exact_family(config)
    assert found is not None
    assert (found is family) or family.model_type in ("opt", "qwen2") or name == "mistral, yarn, tied, no window"
    assert set(reasons) == {
        other for other, each in HF_FAMILIES.items() if each.describe_unsupported(config) is not None
    }
    values = json.loads(json.dumps(family.to_hf_config(config, ROWS, eos_token_id=0)))
    reader = HFConfigReader(values, name)
    again = Config.from_flat(family.from_hf_config(reader))
    assert {**again.model.model_dump(), **again.position.model_dump()} == {
        **config.model.model_dump(), **config.position.model_dump()
    }  # fmt: skip
    reader.get("vocab_size")  # read with the weights
    assert reader.unread_keys() == []


@pytest.mark.parametrize(
    "name",
    [
        "pythia",
        "gpt2",
        "opt, no bias",
        "llama, yarn, biases",
        "llama3, tied",
        "qwen2",
        "qwen3",
        "olmo2",
        "gemma",
        "gemma2",
        "gemma2, windows, no caps",
        "gemma2, as published",
        "smollm3",
        "smollm3, windows, biases",
        "cohere",
        "cohere2",
        "mistral",
        "qwen2, windows from a layer on",
        "qwen3, windows",
        "gemma3",
        "olmo3",
        "granite",
        "phi3",
        "phi3, longrope",
    ],
)
def test_transformers_loads_exports(name: str, tmp_path: Path) -> None:
    """transformers reads the written configuration with its own class and builds the same model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, config, stored = read(name)
    (tmp_path / "config.json").write_text(json.dumps(family.to_hf_config(config, ROWS)))
    wanted = model_of(name)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), attn_implementation=wanted.config._attn_implementation
    )
    model.load_state_dict(wanted.state_dict())
    tokens = torch.randint(ROWS, (2, 20))
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, wanted(tokens).logits)
    assert stored


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("pythia", {"score_processor": "cdape"}, "score_processor is cdape; GPTNeoXForCausalLM supports none"),
        ("pythia", {"attention_window": 5}, "attention_window is 5"),
        ("pythia", {"pos_emb": "kerple_log", "pos_emb_options": {}}, "pos_emb is kerple_log; .* supports rotary"),
        ("pythia", {"num_kv_heads": 2}, "num_kv_heads is 2"),
        ("pythia", {"gpt_j_tied": True}, "gpt_j_tied is true; GPTNeoXForCausalLM supports false"),
        ("pythia", {"use_bias_in_attn_linear": False, "use_bias_in_qkv": True}, "use_bias_in_qkv is true without"),
        ("gpt2", {"gpt_j_residual": True}, "gpt_j_residual is true; GPT2LMHeadModel supports false"),
        ("gpt2", {"use_bias_in_mlp": False}, "use_bias_in_mlp is false"),
        ("opt", {"layernorm_epsilon": 1e-6}, "layernorm_epsilon is 1e-06; OPTForCausalLM supports 1e-05"),
        ("llama", {"pos_emb_options": {"fraction": 0.5}}, "this family rotates whole heads"),
        ("llama", {"norm": "layernorm"}, "norm is layernorm; LlamaForCausalLM supports rmsnorm"),
        (
            "smollm3",
            {"pos_emb": ["rotary", "alibi"]},
            "pos_emb is .rotary, alibi.; SmolLM3ForCausalLM supports rotary or none",
        ),
        ("smollm3", {"attention_window": [3, 5]}, "attention_window is 3, 5; this family supports one size"),
        (
            "cohere2",
            {"attention_window": [9, 5]},
            "layers must have pos_emb rotary with a window, or pos_emb none without",
        ),
        ("cohere", {"layernorm_bias": True}, "layernorm_bias is true; CohereForCausalLM supports false"),
        ("llama", {"logit_scale": 0.5}, r"multiplies by 0.5 \(logits\); not supported by LlamaForCausalLM"),
        ("qwen2", {"use_bias_in_mlp": True}, "Qwen2ForCausalLM has biases only in queries, keys and values"),
        ("mistral", {"attention_window": [9, None]}, "attention_window is a pattern of layers; Mistral has the same"),
        ("phi3", {"attention_window": [9, None]}, "attention_window is a pattern of layers; Phi-3 has the same"),
        ("phi3, longrope", {"seq_length": 96}, "Phi-3 derives them from the ratio of seq_length and .*, 4"),
        ("gemma3", {"attention_window": [None, 9]}, "layers must have pos_emb rotary_local with a window, or pos_emb"),
        ("gemma3", {"pos_emb": ["alibi", "rotary"]}, "Gemma3ForCausalLM supports rotary or rotary_local"),
        ("llama", {"residual_multiplier": 0.5}, r"multiplies by 0.5 \(residual\); not supported by LlamaForCausalLM"),
    ],
)
def test_unsupported_features_of_a_family_are_reported(name: str, keys: dict[str, object], reason: str) -> None:
    family, config, _ = read(name)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(family.describe_unsupported(config.replace(**keys)))

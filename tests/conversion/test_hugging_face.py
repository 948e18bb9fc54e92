"""Imported transformers models give the same results as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk
from published import (
    IS_4,
    LAYERS,
    LENGTH,
    MODELS,
    ROWS,
    TOKENS,
    WIDTH,
    RunsCode,
    logits_of,
    model_of,
    write_tokenizer,
    written,
)
from safetensors.torch import load_file, save_file

from megatron.checkpoint.load_model import load_model
from megatron.config.load import read_config
from megatron.conversion.import_model import import_model
from megatron.utils.errors import RunError, UserError
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

TERMS, SUMS = count_gpt_sums(WIDTH, LAYERS)
ANGLES = 2 * LAYERS * 8
"""transformers computes float32 angles; at the last position each has an error of up to LENGTH units, or its square
root in a sum."""


def imported(folder: Path, **options: Any) -> Path:
    made, _ = import_model(folder, folder.parent / "run", **options)
    return made.run


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(name: str, tmp_path: Path) -> None:
    theirs = written(name, tmp_path / "source")
    loaded = load_model(imported(tmp_path / "source"))
    assert loaded.verified
    assert loaded.run.config.model.seq_length == LENGTH
    assert loaded.run.trainer_state.vocabulary["size"] == TOKENS
    tokens = torch.randint(ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = loaded.model(tokens)
        cache = loaded.model.create_kv_cache(LENGTH)
        steps = torch.cat([loaded.model(part, kv_cache=cache) for part in tokens.split([30, 1, 17], 1)], 1)
    reference = logits_of(theirs, tokens)
    assert reference.abs().max() > 1
    assert_close_in_rounding(ours, reference, TERMS, SUMS + ANGLES)
    assert_close_in_rounding(steps, reference, TERMS, SUMS + ANGLES)


@pytest.mark.parametrize(("rope", "parameters"), [
    ("pi:4", {"rope_type": "linear", "factor": 4.0}),
    ("dynamic", {"rope_type": "dynamic", "factor": 1.0}),
    ("dynamic:2", {"rope_type": "dynamic", "factor": 2.0}),
    ("yarn:4", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}),
])  # fmt: skip
def test_rope_of_the_evaluation_is_the_scaling_that_transformers_has(
    rope: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    theirs = written("llama", tmp_path / "source")
    if IS_4:
        theirs.config.rope_scaling = parameters
    else:
        theirs.config.rope_parameters = {"rope_theta": 1e4, **parameters}
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    run = imported(tmp_path / "source")
    plain, ours = load_model(run).model, load_model(run, rope=rope).model
    tokens = torch.randint(ROWS, (2, 3 * LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for length in (LENGTH // 2, 3 * LENGTH):
            reference = logits_of(theirs, tokens[:, :length])
            # Errors of float32 angles grow with the position.
            assert_close_in_rounding(ours(tokens[:, :length]), reference, TERMS, SUMS + 3 * ANGLES)
        with pytest.raises(AssertionError, match=r"^difference "):
            assert_close_in_rounding(plain(tokens), reference, TERMS, SUMS + 3 * ANGLES)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Exact gelu instead of the approximation, or a lost norm bias, exceeds the tolerance by far."""
    theirs = written("gpt2", tmp_path / "source")
    tokens = torch.randint(ROWS, (2, LENGTH))
    config = json.loads((tmp_path / "source/config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps({**config, "activation_function": "gelu"}))
    exact = load_model(imported(tmp_path / "source")).model
    with torch.no_grad():
        one = exact(tokens)
        exact.decoder.layers[0].input_layernorm.bias.zero_()
        two = exact(tokens)
    for wrong in (one, two):
        with pytest.raises(AssertionError, match=r"^difference "):
            assert_close_in_rounding(wrong, logits_of(theirs, tokens), TERMS, SUMS + ANGLES)


@pytest.mark.parametrize("how", ["shards", "torch", "torch shards", "base model", "half"])
def test_every_weight_format_is_read(how: str, tmp_path: Path) -> None:
    name = "neox, serial, tied" if how == "base model" else "pythia"
    source, plain = tmp_path / how / "source", tmp_path / "plain"
    model = written(name, plain / "source")
    model = model.bfloat16() if how == "half" else model
    model.save_pretrained(source, max_shard_size="20KB" if "shards" in how else "1GB")
    write_tokenizer(source)
    files = sorted(source.glob("*.safetensors"))
    assert (len(files) > 1) == ("shards" in how)
    if "torch" in how:
        for number, path in enumerate(files, 1):
            shard = f"pytorch_model-{number:05d}-of-{len(files):05d}.bin" if len(files) > 1 else "pytorch_model.bin"
            torch.save(load_file(path), source / shard)
            path.unlink()
        if len(files) > 1:
            index = json.loads((source / "model.safetensors.index.json").read_text())
            renamed = {
                key: f"pytorch_model-{file.split('-')[1]}-of-{len(files):05d}.bin"
                for key, file in index["weight_map"].items()
            }
            (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": renamed}))
            (source / "model.safetensors.index.json").unlink()
    if how == "base model":
        weights = {key.removeprefix("gpt_neox."): value for key, value in load_file(files[0]).items()}
        weights["lm_head.weight"] = weights["embed_in.weight"].clone()
        weights["layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(weights, files[0])
    a, b = (load_file(imported(each) / "checkpoints/step_0000000/model.safetensors") for each in
            (source, plain / "source"))  # fmt: skip
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key].bfloat16().float() if how == "half" else b[key]) for key in a)


def test_a_run_folder_like_any_other(tmp_path: Path) -> None:
    written("llama", tmp_path / "source")
    made, notes = import_model(tmp_path / "source", tmp_path / "runs" / "llama")
    assert notes == ()
    assert {path.name for path in made.run.iterdir()} == {"config.yml", "tokenizer", "checkpoints"}
    again = read_config(made.run / "config.yml")
    assert (again.model, again.position) == (made.config.model, made.config.position)
    text = (made.run / "config.yml").read_text()
    assert "num_kv_heads: 2" in text
    assert f"make_vocab_size_divisible_by: {ROWS}" in text
    assert "train_iters:" not in text
    assert (made.run / "tokenizer/tokenizer.json").read_bytes() == (tmp_path / "source/tokenizer.json").read_bytes()
    assert made.num_parameters == sum(p.numel() for p in model_of("llama").parameters())
    with pytest.raises(UserError, match="exists and is not empty"):
        import_model(tmp_path / "source", made.run)


REFUSED = {
    "llama": [
        ({"model_type": "gemini"}, "unknown model_type 'gemini'"),
        ({"model_type": "gemma3"}, "'gemma3' cannot be imported: it has image input; save its text model"),
        ({"model_type": "mixtral"}, "'mixtral' cannot be imported: mixtures of experts are not supported"),
        ({"model_type": "ministral3"}, "'ministral3' cannot be imported: its attention temperature"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu': it must be silu, gelu"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu': unknown activation"),
        ({"head_dim": 16}, "has shape"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_kv_heads 3"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling dynamic is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "warp": 1}}, "unknown parameter warp"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate must be true"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta cannot be '1e4'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "option factor of rotary is 0.5; it must be at least 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates whole heads"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "needs custom code, which is not run"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True: it must be an integer"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
        ({"num_hidden_layers": 1}, "contains model.layers.1.*would be dropped"),
        ({"num_hidden_layers": 3}, "contains no model.layers.2"),
        ({"intermediate_size": 81}, "has shape"),
        ({"vocab_size": 305}, "has 304 rows, but config.json specifies 305"),
        ({"mlp_bias": True}, "contains no model.layers.0.mlp.gate_proj.bias"),
        ({"num_hidden_layers": 10**7}, "num_layers is 10000000; it must be at most"),
    ],
    "opt": [
        ({"do_layer_norm_before": False}, "do_layer_norm_before is False: norms must precede"),
        ({"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16: embeddings must have the width"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
        ({"max_position_embeddings": 50}, r"contains.*|has shape \[48, 32\]"),
    ],
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"n_head": 5}, "hidden_size 32 is not divisible by num_attention_heads 5"),
    ],
    "gemma": [({"hidden_activation": "silu"}, "hidden_activation is 'silu': it must be gelu_pytorch_tanh"),
              ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True: only causal attention")],
    "gemma2": [({"layer_types": ["sliding_attention", "chunked_attention"]}, "must be one of sliding_attention, full"),
               ({"layer_types": ["full_attention"]}, "layer_types is .*: it must be one of sliding_attention")],
    "smollm3, windows, biases": [({"no_rope_layers": [1]}, "no_rope_layers is .*: it must be 1 for each layer"),
                                 ({"sliding_window": 0}, "sliding_window is 0: it must be an integer")],
    "qwen3": [({"layer_types": ["sliding_attention"] * 2}, "sliding_attention needs use_sliding_window: true"),
              ({"head_dim": None}, "has shape")],
    "qwen2": [({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1: it must be an integer"),
              ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": "9"}, "sliding_window is '9'")],
    "mistral": [({"layer_types": ["full_attention"] * 2}, "layer_types is .*: Mistral has the same window in all"),
                ({"sliding_window": 0}, "sliding_window is 0: it must be an integer")],
    "gemma3": [({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: transformers does not apply it"),
               ({"sliding_window": None}, "sliding_window is None: layer_types has sliding_attention"),
               ({"rope_parameters": {"rope_type": "default"}}, "must have parameters for sliding_attention and full"),
               ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
                "scaling linear in layers of type sliding_attention is not supported"),
               ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True: only causal attention")],
    "olmo3": [({"rope_parameters": None, "rope_theta": 1e4}, "rope_theta is 10000.0: give rope_parameters of both"),
              ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling dynamic is not supported")],
    "granite": [({"residual_multiplier": 0}, "residual_multiplier is 0: it must be a positive number")],
    "phi3, longrope": [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rotary scaling linear is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 4}}, "short_factor is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
         "short_factor of rotary has 1 number; expected 4"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in REFUSED:
        written(name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_unsupported_parameters_are_rejected_by_name(
    name: str, change: dict[str, Any], message: str, sources: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in (sources / name).iterdir():
        (source / path.name).symlink_to(path)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").unlink()
    if "rope_parameters" in change:
        values.pop("rope_scaling", None)  # of transformers 4; takes precedence
    (source / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises((UserError, RunError), match=message) as caught:
        imported(source)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_ignored_keys_are_reported(sources: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in (sources / "opt").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "wonder": 3, "nothing": None}))
    _, notes = import_model(source, tmp_path / "run")
    assert len(notes) == 1
    assert "wonder: ignored; unknown keys for model_type opt" in notes[0]


DAMAGED = {
    "cut short": "cannot be read",
    "code": r"contains more than tensors, numbers and text: builtins\.exec|exec",
    "no weights": "contains no weights; looked for model.safetensors",
    "a shard is missing": "not found, but listed in model.safetensors.index.json",
    "an index that leads away": "not an index of shards",
    "not finite": "is not finite",
    "integers": "has type int8; quantized weights are not supported",
    "no JSON": "cannot be read as JSON",
    "no tokenizer": "contains no tokenizer",
    "a larger tokenizer": "the tokenizer has 290 tokens, but the embedding has",
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_wrong_file_is_one_line_and_leaves_nothing(what: str, sources: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in (sources / "opt").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    weights, index = source / "model.safetensors", source / "model.safetensors.index.json"
    stored = load_file(weights)
    norm = "model.decoder.final_layer_norm.weight"
    if what == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif what in ("code", "no weights", "a shard is missing", "an index that leads away"):
        weights.unlink()
    if what == "code":
        torch.save({"x": RunsCode()}, source / "pytorch_model.bin")
    elif what == "a shard is missing":
        index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    elif what == "an index that leads away":
        index.write_text('{"weight_map": {"a": "../../other.safetensors"}}')
    elif what == "not finite":
        save_file({**stored, norm: stored[norm] / 0}, weights)
    elif what == "integers":
        save_file({**stored, norm: stored[norm].to(torch.int8)}, weights)
    elif what == "no JSON":
        (source / "config.json").write_text("{")
    elif what == "no tokenizer":
        (source / "tokenizer.json").unlink()
    elif what == "a larger tokenizer":
        embedding = "model.decoder.embed_tokens.weight"
        save_file({**stored, embedding: stored[embedding][:200].clone()}, weights)
        values = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**values, "vocab_size": 200}))
    with pytest.raises((UserError, RunError), match=DAMAGED[what]) as caught:
        imported(source)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_another_tokenizer_by_name(sources: Path, tmp_path: Path) -> None:
    made, _ = import_model(sources / "gpt2", tmp_path / "run", tokenizer="bytes")
    assert made.tokenizer == "bytes"
    with pytest.raises(UserError, match="specify its tokenizer type"):
        import_model(sources / "gpt2", tmp_path / "other", vocab_file=sources / "gpt2/tokenizer.json")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    written("gpt2", tmp_path / "source")
    with full_disk(10_000), pytest.raises(RunError, match=r"run: .*: the disk is full; nothing was saved"):
        imported(tmp_path / "source")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_more_layers_than_the_files_can_hold_are_rejected_before_they_are_built(sources: Path, tmp_path: Path) -> None:
    """A configuration with a million layers is rejected before building, which would take minutes."""
    source = tmp_path / "source"
    source.mkdir()
    for path in (sources / "opt").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 1_000_000}))
    with pytest.raises(UserError, match=r"the configuration describes over [\d,]+ parameters, but the weight files"):
        import_model(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()

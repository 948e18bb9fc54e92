"""Stock configurations of other projects load with their original meaning, and ineffective keys are reported."""

import ast
import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron.config import method_names, neox_deferred_rules, neox_keys, neox_rules
from megatron.config.load import LoadedConfig, load_config
from megatron.config.schema import list_config_keys
from megatron.distributed.hardware import LocalHardware
from megatron.model.build import check_position_options
from megatron.options.model import get_ffn_hidden_size
from megatron.options.optimizer import OptimizerChoice
from megatron.position import catalog, registry
from megatron.position.facts import AttentionDims
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import UserError

_spec = importlib.util.spec_from_file_location("neox_files", Path(__file__).with_name("neox_files.py"))
stock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stock)

SMALL = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "seq_length": 17, "train_iters": 5}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Load mappings as JSON-like files with Python booleans and trailing commas, merged from left to right."""
    monkeypatch.chdir(tmp_path)

    def _read(*files: dict[str, Any], overrides: list[str] = ()) -> LoadedConfig:
        paths = []
        for number, values in enumerate(files):
            text = json.dumps(values, indent=2).replace("true", "True").replace("false", "False").replace("\n}", ",\n}")
            (tmp_path / f"{number}.yml").write_text(f"# stock\n{text}\n")
            paths.append(f"{number}.yml")
        return load_config(paths, overrides)

    return _read


def test_gpt_neox_125m_with_its_local_setup(read):
    loaded = read(stock.NEOX_125M, stock.NEOX_LOCAL_SETUP)
    flat, notes = loaded.config.to_flat(), "\n".join(loaded.notes)
    for key in (
        "num_layers",
        "hidden_size",
        "pos_emb",
        "no_weight_tying",
        "init_method",
        "min_lr",
        "checkpoint_factor",
    ):
        assert flat[key] == stock.NEOX_125M[key]
    assert flat["precision"] == "fp16"
    assert flat["optimizer"]["type"] == "Adam"
    assert flat["optimizer"]["params"].items() >= {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1e-8}.items()
    assert flat["zero_optimization"].items() >= stock.ZERO.items()
    assert flat["tokenizer_type"] == "GPT2BPETokenizer"
    assert flat["use_wandb"] is True
    assert flat["save"] == flat["load"] == "checkpoints"
    silent = {"partition_activations", "steps_per_print", "bias_gelu_fusion", "log_dir"}
    assert all(key in notes for key in silent)


def test_every_stock_key_is_supported_or_reported_as_ineffective(read):
    """Every key of a stock file is either supported or mentioned in a note."""
    for files in (
        (stock.NEOX_125M, stock.NEOX_LOCAL_SETUP, stock.NEOX_BF16),
        (stock.KERPLE_TRAIN, stock.KERPLE_LOCAL_SETUP, stock.KERPLE_EXPERIMENT),
        (stock.DAPE["125M_kerple_capev2"],),
    ):
        notes = "\n".join(read(*files).notes)
        for name in (name.replace("-", "_") for values in files for name in values):
            rule = neox_keys.RULES.get(name)
            harmless = isinstance(rule, neox_rules.Unsupported)  # a value that disables the feature
            assert (name,) in list_config_keys() or harmless or name in notes, name


@pytest.mark.parametrize("files", [("NEOX_125M", "NEOX_LOCAL_SETUP"), ("KERPLE_TRAIN", "KERPLE_LOCAL_SETUP"), ()])
def test_stock_files_resolve_without_a_gpu(read, files):
    """Stock files resolve without a GPU: they train in float16 on any number of GPUs."""
    values = [getattr(stock, name) for name in files] or [stock.DAPE["125M_kerple_c"]]
    settled = resolve_run(
        read(*values, {"precision": "fp16", "data_path": "x"}).config, LocalHardware(0, 2), dry_run=True
    )
    assert (settled.config.launch.device, settled.config.launch.num_gpus) == ("cuda", None)
    assert sum("not checked" in note for note in settled.notes) == 1


def test_bfloat16_overlay(read):
    loaded = read(stock.NEOX_125M, stock.NEOX_BF16)
    assert loaded.config.training.precision == "bf16"
    replacements = loaded.layers.replacements
    assert any(line.startswith("precision fp16") and "replaced by bf16" in line for line in replacements)


def test_kerple_training(read):
    config = read(stock.KERPLE_TRAIN, stock.KERPLE_LOCAL_SETUP, stock.KERPLE_EXPERIMENT).config
    assert config.training.precision == "bf16"  # written as fp16: {type: bfloat16}
    assert (config.position.pos_emb, config.position.pos_emb_per_layer) == ("kerple_power", False)
    assert (config.checkpoint.checkpoint_factor, config.training.seed) == (10000, 1235)
    assert config.data.split == "949,50,1"
    assert read(stock.KERPLE_TRAIN).config.position.pos_emb == "learned"


@pytest.mark.parametrize("name", stock.DAPE)
def test_dape_125m(read, name):
    values = stock.DAPE[name]
    alias = neox_keys.POSITION_ALIASES.get(values["pos-emb"], neox_rules.PositionAlias(values["pos-emb"]))
    encoding, processor, per_layer, options, _ = dataclasses.astuple(alias)
    if encoding not in catalog.list_encodings():
        with pytest.raises(UserError, match=f"pos_emb {encoding} is not available"):
            read(values)
        return
    loaded = read(values)
    position = loaded.config.position
    assert (position.pos_emb, position.score_processor) == (encoding, processor or "none")
    # noise_seq_length alone distinguishes a FIRE file of DAPE from ours.
    assert position.pos_emb_per_layer == (bool(per_layer) or encoding == "fire")
    assert loaded.config.optimizer.decay_positions == (alias.decays or encoding == "fire")
    width = {"width": 32} if processor else {}
    kernel = {"kernel_size": 3} if "capev2_kernel" in values else {}
    if encoding == "fire":  # its network has the processor's width; noise_seq_length gives its threshold
        options = {**options, "width": 32, "multiplier_start": values["noise_seq_length"] / values["seq-length"]}
    assert position.pos_emb_options == options
    assert position.score_processor_options == {**width, **kernel}
    if not processor and encoding != "fire":
        assert any("mlp_width has no effect: score_processor is none" in note for note in loaded.notes)


def test_a_key_of_dapes_fire_implies_separate_layers_by_default(read) -> None:
    own = read(stock.DAPE["125M_fire"], {"pos_emb_per_layer": False}).config
    assert (own.position.pos_emb_per_layer, own.optimizer.decay_positions) == (False, True)
    kerple = read({**stock.DAPE["125M_fire"], "pos-emb": "kerple_log"}).config
    assert (kerple.position.pos_emb_per_layer, kerple.optimizer.decay_positions) == (False, False)


def test_options_apply_to_the_final_method(read):
    base = {**SMALL, "pos-emb": "rotary", "rotary_pct": 0.25, "rotary_emb_base": 500, "rpe_num_buckets": 16}
    assert read(base).config.position.pos_emb_options == {"fraction": 0.25, "base": 500}
    t5 = read(base, {"pos_emb": "rpe"})
    assert t5.config.position.pos_emb == "t5"
    assert t5.config.position.pos_emb_options == {
        "num_buckets": 16,
        "root_scale": True,
        "xavier_init": True,
    }
    assert any("rotary_pct has no effect: pos_emb is t5" in note for note in t5.notes)


def test_the_later_of_our_name_and_a_foreign_one_wins(read):
    theirs, ours = {**SMALL, "pos_emb": "rotary", "rotary_pct": 0.5}, {"pos_emb_options": {"fraction": 0.25}}
    assert read(theirs, ours).config.position.pos_emb_options == {"fraction": 0.25}
    later = read({**SMALL, "pos_emb": "rotary", **ours}, {"rotary_pct": 0.5})
    assert later.config.position.pos_emb_options == {"fraction": 0.5}
    replacements = later.layers.replacements
    assert any("fraction 0.25 (0.yml" in line and "replaced by 0.5 (1.yml:3)" in line for line in replacements)


def optimizer(name, **params):
    return OptimizerChoice.model_validate({"type": name, "params": params}).model_dump()


@pytest.mark.parametrize(
    ("theirs", "key", "value"),
    [
        ({"lr": 1e-3}, "optimizer", optimizer("Adam", lr=1e-3)),
        ({"optimizer_type": "lion"}, "optimizer", optimizer("Lion", betas=[0.9, 0.99])),
        ({"optimizer": {"type": "muon", "params": {"lr": 1e-3}}}, "optimizer", optimizer("Muon", lr=1e-3)),
        ({"save_interval": 7}, "checkpoint_factor", 7),
        ({"batch_size": 7}, "train_micro_batch_size_per_gpu", 7),
        ({"clip_grad": 0.5}, "gradient_clipping", 0.5),
        ({"expansion_factor": 2}, "intermediate_size", 48),
        ({"lr_decay_fraction": 0.4}, "lr_decay_iters", 2),
        ({"data_impl": "infer"}, "data_impl", "mmap"),
        ({"activation": "swish"}, "activation", "silu"),
        ({"bias_gelu_fusion": True}, "activation", "gelu_tanh"),
        ({"bias_gelu_fusion": True, "activation": "gelu"}, "activation", "gelu_tanh"),
        ({"bias_gelu_fusion": True, "activation": "geglu"}, "activation", "geglu"),
        ({"bias_gelu_fusion": False}, "activation", "gelu"),
        ({"num_kv_heads": 1}, "num_kv_heads", 1),
        ({"norm": "te_rmsnorm"}, "norm", "rmsnorm"),
        ({"optimizer": {"params": {"weight_decay": 0.3}}}, "weight_decay", 0.3),
        ({"precision": "bfloat16"}, "precision", "bf16"),
        ({"recompute_granularity": "selective"}, "checkpoint_activations", "selective"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "checkpoint_activations", True),
        ({"recompute_activations": True, "recompute_modules": ["core_attn"]}, "checkpoint_activations", "selective"),
        ({"checkpoint_activations": True, "recompute_num_layers": 2}, "checkpoint_num_layers", 2),
        ({"peak_theoretical_tflops": 312.0}, "peak_tflops", 312.0),
    ],
)
def test_other_names(read, theirs, key, value):
    assert read({**SMALL, **theirs}).config.to_flat()[key] == value


def test_schedules_by_names_of_megatron_and_pull_requests(read):
    """Schedules use the names of Megatron-LM (--lr-decay-style etc.) and of GPT-NeoX's pull requests.

    #1375 decays by a cosine, and #1194 cools down by one.
    """

    def optimizer(**keys):
        return read({**SMALL, **keys}).config.optimizer

    wsd = optimizer(lr_decay_style="WSD", lr_wsd_decay_style="1-sqrt", lr_warmup_iters=3)
    assert wsd == optimizer(lr_decay_style="wsd", lr_wsd_decay_style="minus_sqrt", lr_warmup_iters=3)
    ratio = optimizer(lr_decay_style="wsd", wsd_decay_ratio=0.2)
    assert ratio == optimizer(lr_decay_style="wsd", lr_wsd_decay_fraction=0.2, lr_wsd_decay_style="cosine")
    infinite = optimizer(lr_decay_style="infinite_cosine", constant_lr=1e-4, lr_warmup_fraction=0.1)
    assert infinite == optimizer(lr_decay_style="infinite", constant_lr=1e-4, warmup=0.1)
    assert optimizer(lr_decay_style="inverse-square-root").lr_decay_style == "inverse_sqrt"


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"zero_optimization": {"stage": 1, "cpu_offload": 1}}, "cpu_offload is 1; it must be true or false"),
        ({"zero_optimization": {"cpu_offload": True}}, "device cpu: only sharded states can be offloaded"),
        ({"zero_optimization": {"stage": 2, "cpu_offload_params": True}}, "offload_param.device cpu: stage 2 keeps"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme is not supported; use cpu"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "mix up the float32 masters"),
        ({"zero_optimization": {"stage": 1, "allgather_bucket_size": 999}}, "is 999; it must be even"),
        ({"attention_config": [[["local", "global"], 6]]}, "attention local is not supported"),
        ({"attention_config": "local"}, "attention local is not supported: sparse attention"),
        (
            {"attention_config": [[["mamba"], 12]]},
            "attention mamba is not supported: a recurrent layer has no attention",
        ),
        ({"attention_config": [[["rwkv"], 12]]}, "attention rwkv is not supported: a recurrent layer"),
        (
            {"attention_config": [[["ringX1"], 12]]},
            "attention ringX1 is not supported: context_parallel_size divides a",
        ),
        (
            {"attention_config": [[["ring"], 12]]},
            "attention ring is not supported: context_parallel_size divides a sequence",
        ),
        ({"attention_config": [[["gmlp"], 12]]}, "attention gmlp is not supported: a gated MLP"),
        ({"attention_config": [[["globel"], 12]]}, "attention globel is not supported: GPT-NeoX has no such attention"),
        ({"sparsity_config": {"block": 16}}, "sparse attention"),
        ({"use_mup": True}, "needs mup_base_hidden_size"),
        ({"mup_output_temp": 2.0}, "has no effect without use_mup: true"),
        (
            {"compile": {"enable": True, "components": ["model"]}},
            "training on a GPU compiles all but attention unless compile_regions is false",
        ),
        ({"torch_compile": True}, "training on a GPU compiles all but attention unless compile_regions is false"),
        ({"recompute_method": "block"}, "recomputes all layers, checkpoint_num_layers at a time"),
        ({"recompute_modules": ["core_attn", "mlp"]}, "selective recomputes attention"),
        ({"recompute_activations": True, "checkpoint_activations": True}, "contradicts selective"),
        ({"coord_check": True}, "tools/mup/coordinate_check.py"),
        ({"moe_num_experts": 4}, "mixture-of-experts"),
        ({"optimizer": {"type": "OneBitAdam"}}, "use Adam, AdamW, Muon or Lion"),
        ({"scheduler": {"type": "WarmupLR"}}, "use lr_decay_style"),
        ({"checkpoint_scale": "log"}, "extra_save_iters"),
        ({"serve_model_weights": True}, "weights are read from checkpoints"),
        ({"norm": "scalenorm"}, "norm: scalenorm is not supported; use layernorm or rmsnorm"),
        ({"activation": "reglu"}, "activation: reglu is not supported; use geglu or swiglu"),
        ({"init_method": "orthogonal"}, "init_method: orthogonal is not supported; use normal or scaled_normal"),
        ({"num_nodes": 2}, "not supported: use nodes"),
        ({"include": "node1"}, "set a hostfile"),
        ({"wandb_host": "https://example.org"}, "WANDB_BASE_URL"),
        ({"tokenizer_type": "HFGPT2Tokenizer"}, "GPT2BPETokenizer"),
        ({"lr_decay_style": "exponential"}, "cosine, linear, constant or inverse_sqrt"),
        ({"expansion_factor": 2, "intermediate_size": 50}, "contradicts intermediate_size"),
        ({"expansion_factor": -2}, "positive number"),
    ],
)
def test_rejected_keys_name_the_replacement(read, theirs, message):
    with pytest.raises(UserError) as caught:
        read({**SMALL, **theirs})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("0.yml:")
    assert message in line


@pytest.mark.parametrize(
    "theirs",
    [
        {"attention_config": [[["global"], 12]]},
        {"attention_config": [[["flash"], 12]]},
        {"attention_config": None},
        {"zero_optimization": {"cpu_offload": False, "offload_param": {"device": "none"}}},
        {"zero_optimization": {"load_from_fp32_weights": False, "round_robin_gradients": False}},
        {"use_mup": False, "moe_num_experts": 1, "sparsity_config": {}},
        {"num_nodes": -1, "checkpoint_scale": "linear"},
        {"flops_profiler": {"enabled": False}},
        {"bf16": {"bf16": True}, "fp16": {"fp16": True}},
        {"compile": {"enable": False}, "torch_compile": False},
        {"recompute_granularity": None, "recompute_num_layers": None, "recompute_modules": None},
    ],
)
def test_values_that_disable_a_feature_are_accepted(read, theirs):
    assert read({**SMALL, **theirs}).config == read(SMALL).config


def test_offloading_to_the_cpu_by_all_its_names(read):
    zero = read({**SMALL, "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}).config
    own = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": True}}
    assert zero == read({**SMALL, "zero_optimization": {"stage": 3, **own}}).config
    with pytest.raises(UserError, match="device cpu contradicts none"):
        read({**SMALL, "zero_optimization": {"stage": 3, "cpu_offload": False, **own}})


def test_all_spellings_of_document_masking(read):
    def mask_of(theirs):
        return read({**SMALL, **theirs}).config.position.attention_mask

    for key in ("inter_document_attention_masking", "inter_document_masking", "dataloader_inter_document_masking"):
        assert (mask_of({key: True}), mask_of({key: False})) == ("document", "causal")
    both = {"reset_attention_mask": True, "reset_position_ids": True}
    assert mask_of(both) == mask_of({**both, "attention_mask": "document"}) == "document"
    assert mask_of(dict.fromkeys(both, False)) == mask_of({"reset_position_ids": False}) == "causal"
    with pytest.raises(UserError, match=r"reset_position_ids: true needs reset_attention_mask: true"):
        read({**SMALL, "reset_position_ids": True})
    with pytest.raises(UserError, match=r"reset_attention_mask is 'often'; it must be true or false"):
        read({**SMALL, "reset_attention_mask": "often"})
    with pytest.raises(UserError, match=r"reset_attention_mask and reset_position_ids true contradict attention_mask"):
        read({**SMALL, **both, "attention_mask": "causal"})


def test_profile_switches_become_steps(read):
    """GPT-NeoX's profiler starts after step profile_step_start."""
    steps = {"profile_step_start": 4, "profile_step_stop": 6}
    logging = read({**SMALL, "profile": True, "memory_profiling": True, **steps}).config.logging
    assert logging.profile.steps == range(5, 7)
    assert logging.memory_snapshot == 6
    assert read({**SMALL, "profile": True}).config.logging.profile.steps == range(11, 13)
    loaded = read({**SMALL, "profile": False, **steps})
    assert not loaded.config.logging.profile.steps
    assert "profile_step_start has no effect" in "\n".join(loaded.notes)
    own = read({**SMALL, "profile": {"from": 2, "to": 3, "ranks": [0, 1]}, "log_param_norm": True}).config.logging
    assert (own.profile.steps, own.profile.ranks, own.log_param_norm) == (range(2, 4), [0, 1], True)
    for wrong, why in (
        ({"profile": {"from": 3}}, "profile.from needs profile.to"),
        ({"profile": {"from": 3, "to": 2}}, "profile.to 2 is before profile.from 3"),
        ({"profile": 3}, "must be true or false"),
    ):
        with pytest.raises(UserError, match=why):
            read({**SMALL, **wrong})
    with pytest.raises(UserError, match=r"profile contradicts profile\.from"):
        read({**SMALL, "profile": True, "profile.from": 2, "profile.to": 3})
    later = read({**SMALL, "profile": {"from": 2, "to": 3}}, {**SMALL, "profile": True}).config.logging
    assert later.profile.steps == range(11, 13)


@pytest.mark.parametrize(
    ("overrides", "encodings", "windows"),
    [
        (["no_rope_freq=4"], ["rotary"] * 3 + ["none"], None),
        ([f"no_rope_freq={[1, 0, 0] * 4}"], ["none", "rotary", "rotary"], None),
        (["window_size=[127,0]"], "rotary", 128),
        (["window_size=[-1,0]"], "rotary", None),
        (["window_size=[127,0]", "window_attn_skip_freq=4"], "rotary", [128, 128, 128, None]),
        (["attention_window=9", f"window_attn_skip_freq={[0, 1] * 6}"], "rotary", [None, 9]),
        (["attention_window=9", "window_attn_skip_freq=5"], "rotary", ([9] * 4 + [None]) * 2 + [9, 9]),
        (["window_attn_skip_freq=4"], "rotary", None),
    ],
)
def test_layer_patterns_match_megatron(overrides, encodings, windows) -> None:
    position = load_config(["125M", "rotary"], overrides).config.position
    assert (position.pos_emb, position.attention_window) == (encodings, windows)
    settings = {name: ast.literal_eval(value) for name, _, value in (text.partition("=") for text in overrides)}
    if (frequency := settings.get("no_rope_freq")) is not None:
        theirs = TransformerConfig(num_layers=12, hidden_size=12, num_attention_heads=2, no_rope_freq=frequency)
        assert [int(position.get_layer_options(layer).encoding == "none") for layer in range(12)] == theirs.no_rope_freq
    if (frequency := settings.get("window_attn_skip_freq")) is not None:
        size = settings.get("window_size") or ("attention_window" in settings and (8, 0)) or None
        theirs = [is_layer_window_attention(size, frequency, number) for number in range(1, 13)]
        assert [position.get_layer_options(layer).window is not None for layer in range(12)] == theirs


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["no_rope_freq=5"], "no_rope_freq 5 does not divide num_layers 12"),
        (["no_rope_freq=[0,1]"], "no_rope_freq has 2 entries; num_layers is 12"),
        (["no_rope_freq=true"], "no_rope_freq is true; it must be a whole number of layers"),
        ([f"no_rope_freq={[2] * 12}"], "a list must contain 0 or 1 for each layer"),
        (["pos_emb=alibi", "no_rope_freq=4"], "no_rope_freq applies to pos_emb rotary, but it is alibi"),
        (["pos_emb=[rotary,none]", "no_rope_freq=4"], "no_rope_freq contradicts pos_emb"),
        (["window_size=[4,4]"], "window_size is [4, 4]; it must be [keys before a token, 0]"),
        (["window_size=[4,0]", "attention_window=5"], "window_size contradicts attention_window"),
    ],
)
def test_invalid_layer_patterns_are_rejected(overrides, problem) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        load_config(["125M", "rotary"], overrides)


def test_every_argument_of_gpt_neox_is_known():
    lines = Path(__file__).with_name("neox_argument_names.txt").read_text().splitlines()[1:]
    names = " ".join(lines).split()
    own = {".".join(path) for path in list_config_keys()}
    assert len(names) == 318
    assert [name for name in names if name not in own and name not in neox_keys.RULES] == []


def test_tables_are_consistent():
    for name, rule in neox_keys.RULES.items():
        own = list_config_keys().get(tuple(name.split(".")))
        is_switch = isinstance(rule, neox_deferred_rules.EventSwitch)  # a value instead of our keys
        assert own is None or (is_switch and own.opens), f"{name} is a key of ours"
        if isinstance(rule, neox_rules.Alias | neox_deferred_rules.FractionOf):
            assert tuple(rule.farfield_key.split(".")) in list_config_keys(), name
    for key in (*neox_keys.VALUE_ALIASES, *neox_keys.UNSUPPORTED_VALUES):
        assert tuple(key.split(".")) in list_config_keys(), key
    for key, values in neox_keys.VALUE_ALIASES.items():
        choices = list_config_keys()[tuple(key.split("."))].choices
        assert set(values.values()) <= set(choices), key
        assert not set(values) & set(choices), key
    counted = sum(
        len(rules)
        for rules in (
            neox_keys.ALIASES,
            neox_keys.METHOD_OPTION_ALIASES,
            neox_keys.FRACTIONS,
            neox_keys.VALUE_SWITCHES,
            neox_keys.LAYER_PATTERNS,
            neox_keys.EVENT_SWITCHES,
            neox_keys.VALIDATED_NOOPS,
        )
    )
    of_many_keys = (neox_keys.AGREEING_SWITCHES, neox_keys.IGNORED, neox_keys.UNSUPPORTED)
    counted += sum(len(rule.keys) for rules in of_many_keys for rule in rules)
    assert counted == len(neox_keys.RULES), "a key has two rules"
    for option in (option for rule in neox_keys.METHOD_OPTION_ALIASES for option in rule.options):
        find = (
            method_names.list_encoding_options
            if option.method_key == "pos_emb"
            else method_names.list_processor_options
        )
        for method in option.methods:
            assert option.option in find(method)


@pytest.mark.parametrize("alias", neox_keys.POSITION_ALIASES)
def test_every_other_name_of_a_position_method_is_understood_and_logged(alias: str) -> None:
    encoding, processor, per_layer, options, decays = dataclasses.astuple(neox_keys.POSITION_ALIASES[alias])
    loaded = load_config(["125M"], [f"pos_emb={alias}"])
    position = loaded.config.position
    assert (position.pos_emb, position.score_processor) == (encoding, processor or "none")
    assert position.pos_emb_per_layer == bool(per_layer)
    assert loaded.config.optimizer.decay_positions == decays
    assert any(f"pos_emb {alias} is {encoding}" in note for note in loaded.notes)
    assert position.pos_emb_options == options
    built = registry.build_encoding(encoding, AttentionDims(4, 8, 32, 16, 16), options)
    if processor is not None:
        registry.build_processor(processor, built.dims, has_bias=built.adds_bias)


def test_fire_with_a_dape_processor_uses_its_activation() -> None:
    """FIRE in DAPE's FIRE_C and FIRE_DAPEV2 uses LeakyReLU in its own network; in DAPE's FIRE it uses ReLU."""
    for alias in ("fire_c", "fire_dapev2", "fire_capev2"):
        assert load_config(["125M"], [f"pos_emb={alias}"]).config.position.pos_emb_options == {
            "activation": "leaky_relu"
        }
    assert load_config(["125M"], ["pos_emb=fire"]).config.position.pos_emb_options == {}
    rotary = load_config(["125M"], ["pos_emb=fire_c", "pos_emb=rotary"])
    assert rotary.config.position.pos_emb_options == {}


@pytest.mark.parametrize("method", ["alibi", "rpe", "kerple_log", "fire", "transformer_xl", "rope_dapev1", "nope_c"])
def test_scaling_by_layer_is_rejected_with_a_bias(read, method: str) -> None:
    """Scaling by layer is rejected if a term is added to the scores: layer n of GPT-NeoX then has n times the bias.

    Its fraction of the logits is 0.25 with alibi and 0.60 with rpe.
    """
    scaled = {**SMALL, "pos_emb": method, "apply_query_key_layer_scaling": True}
    with pytest.raises(
        UserError, match=r"apply_query_key_layer_scaling: true is not supported with (pos_emb|score_proc)"
    ):
        read(scaled)
    assert read({**scaled, "apply_query_key_layer_scaling": False}).config.model.num_layers == 2


@pytest.mark.parametrize("method", ["rotary", "learned", "sinusoidal", "none"])
def test_scaling_by_layer_has_no_effect_without_a_bias(read, method: str) -> None:
    loaded = read({**SMALL, "pos_emb": method, "apply_query_key_layer_scaling": True})
    assert any("apply_query_key_layer_scaling has no effect: the softmax" in note for note in loaded.notes)
    with pytest.raises(UserError, match=r"apply_query_key_layer_scaling: is 'often'; it must be true or false"):
        read({**SMALL, "pos_emb": method, "apply_query_key_layer_scaling": "often"})


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"intermediate_size": 32768, "mlp_multiple_of": 256}, 11008),  # GPT-NeoX's llama/7B.yml: Llama's own width
        ({"intermediate_size": 40960, "mlp_multiple_of": 256}, 13824),  # llama/13B.yml
        ({"intermediate_size": 53248, "mlp_multiple_of": 256}, 17920),  # llama/30B.yml
        ({"intermediate_size": 100}, 33),
        ({"expansion_factor": 3}, 24),
        ({}, 32),  # 4 × 24 / 3
    ],
)
def test_a_gated_layer_has_the_width_of_gpt_neox(read, keys: dict[str, int], width: int) -> None:
    loaded = read({**SMALL, **keys, "activation": "swiglu"})
    assert get_ffn_hidden_size(loaded.config.model) == width
    assert any(f"gives a feed-forward width of {width} (a third), as in GPT-NeoX" in note for note in loaded.notes)
    theirs = loaded.config.model.intermediate_size or 4 * 24
    rows, multiple = int(theirs * 2 / 3), keys.get("mlp_multiple_of", 1)
    inner = multiple * ((rows // 2 + multiple - 1) // multiple)  # as in ParallelMLP
    assert inner == width
    plain = read({**SMALL, "activation": "gelu"}).config.model
    assert get_ffn_hidden_size(plain) == 96


def test_a_gated_layer_without_a_width_is_rejected(read) -> None:
    with pytest.raises(UserError, match=r"intermediate_size 2 leaves no width with activation geglu.*at least 3"):
        read({**SMALL, "activation": "geglu", "intermediate_size": 2})
    with pytest.raises(UserError, match="a third of intermediate_size, 3 is not divisible by model_parallel_size 2"):
        read({**SMALL, "hidden_size": 32, "num_attention_heads": 2, "activation": "geglu", "intermediate_size": 9,
              "model_parallel_size": 2, "num_gpus": 2})  # fmt: skip


def test_embedding_rows_are_padded_to_a_multiple_of_the_ranks(read) -> None:
    """GPT-NeoX's llama/13B.yml sets make_vocab_size_divisible_by 1 for two ranks and multiplies it by the number of
    ranks.
    """
    loaded = read({**SMALL, "hidden_size": 32, "num_attention_heads": 4, "make_vocab_size_divisible_by": 3,
                   "model_parallel_size": 2, "num_gpus": 2})  # fmt: skip
    assert loaded.config.model.make_vocab_size_divisible_by == 6
    assert any(
        "make_vocab_size_divisible_by 3 becomes 6, a multiple of model_parallel_size 2" in note for note in loaded.notes
    )


def test_foreign_windows_exclude_the_token_itself(read) -> None:
    assert read({**SMALL, "sliding_window_width": 5}).config.position.attention_window == 6


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"comms_logger": {"enabled": True}}, None),
        ({"flops_profiler": {"enabled": False}}, None),
        (
            {"flops_profiler": {"enabled": True}},
            "deepspeed_extra_args: flops_profiler is not supported: DeepSpeed's section",
        ),
        ({"wonder": 1}, "deepspeed_extra_args: wonder is not supported"),
        (3, "deepspeed_extra_args: is 3; it must be a mapping"),
    ],
)
def test_deepspeed_sections_without_effect_are_accepted(read, value: Any, problem: str | None) -> None:
    keys = {**SMALL, "deepspeed_extra_args": value}
    if problem is None:
        assert any("deepspeed_extra_args has no effect" in note for note in read(keys).notes)
        return
    with pytest.raises(UserError, match=problem):
        read(keys)


def load_null(folder: Path, values: dict[str, Any]) -> str | None:
    """Load a file with these values and build its methods; return the error message."""
    path = folder / "null.yml"
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))
    try:
        loaded = load_config([path])
        with loaded.layers.locate_errors():
            check_position_options(loaded.config.model, loaded.config.position)
    except UserError as error:
        return str(error)
    return None


def test_invalid_null_keys_are_reported_with_their_line(tmp_path: Path) -> None:
    """Every key set to null either has a meaning or gives a one-line error with its line number."""
    refused = 0
    for path in list_config_keys():
        values: dict[str, Any] = {**SMALL, "train_data_paths": ["x"]}
        *outer, last = path
        inner = values
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = None
        if (problem := load_null(tmp_path, values)) is not None:
            refused += 1
            name = re.escape(".".join(path))
            fault = r"is null; it must be .*|is empty \(null\); give it keys, or remove it"
            assert re.fullmatch(rf".*null\.yml:\d+: {name} ({fault})", problem), problem
    assert refused > 10


@pytest.mark.parametrize("key", ["pos_emb", "score_processor", "attention_temperature"])
def test_invalid_null_options_are_reported_with_their_line(tmp_path: Path, key: str) -> None:
    list_methods, read_facts = {
        "pos_emb": (catalog.list_encodings, catalog.read_encoding_facts),
        "score_processor": (catalog.list_processors, catalog.read_processor_facts),
        "attention_temperature": (catalog.list_temperatures, catalog.read_temperature_facts),
    }[key]
    refused = 0
    for method in list_methods():
        for option in read_facts(method).option_types:
            values = {**SMALL, "train_data_paths": ["x"], key: method, f"{key}_options": {option: None}}
            if (problem := load_null(tmp_path, values)) is not None:
                refused += 1
                assert re.search(rf"null\.yml:\d+: .*\b{option}\b", problem), problem
                assert "None" not in problem, problem
    assert refused > 0

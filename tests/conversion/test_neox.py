"""Checkpoints of GPT-NeoX, KERPLE and DAPE give the results of their tensor-parallel ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from neox_layout import HEADS, INNER, LAYERS, LENGTH, ROWS, WIDTH, Layout
from published import RunsCode

from megatron.checkpoint.load_model import load_model
from megatron.config.load import load_config
from megatron.config.yaml_files import dump_yaml, read_yaml
from megatron.conversion.import_model import import_model
from megatron.utils.errors import RunError, UserError
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

TERMS, SUMS = count_gpt_sums(WIDTH, LAYERS)
SHAPE = {
    "num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "seq_length": LENGTH,
    "max_position_embeddings": LENGTH, "intermediate_size": INNER,
    # Training keys that have no meaning here or are not supported.
    "train_iters": 100, "vocab_file": "gone.json", "model_parallel_size": 2, "optimizer": {"type": "sm3"},
    "extra_save_iters": [3], "use_bias_in_norms": True, "hidden_dropout": 0.1, "make_vocab_size_divisible_by": 128,
    "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4,
}  # fmt: skip
UNTIED, PARALLEL = {"no_weight_tying": True}, {"gpt_j_residual": True}
SWIGLU = {
    "activation": "swiglu", "intermediate_size": 3 * INNER, "norm": "rmsnorm", "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}  # fmt: skip
NEW = ("linear1", "linear2")


def layout(keys: dict[str, Any], **others: Any) -> Layout:
    return Layout({**SHAPE, **keys}, **others)


CASES = {
    "20B-like": layout(
        {"pos_emb": "rotary", "rotary_pct": 0.25, "bias_gelu_fusion": True, **UNTIED, **PARALLEL}, ranks=2
    ),
    "serial, whole files": layout({"pos_emb": "rotary", "bias_gelu_fusion": False}, ranks=2, whole_files=True),
    "tied norms": layout({"pos_emb": "none", "gpt_j_tied": True, **PARALLEL}, ranks=4),
    "learned": layout({"pos_emb": "learned"}, ranks=2),
    "t5": layout({"pos_emb": "rpe"}, ranks=2),
    "kerple_log": layout({"pos_emb": "kerple_log", **UNTIED}, ranks=2),
    "kerple_power": layout({"pos_emb": "kerple_power", **UNTIED}, ranks=4),
    "kerple, both": layout({"pos_emb": "kerple_power_ap_ap"}, ranks=2),
    "kerple, weight": layout({"pos_emb": "kerple_power__ap"}),
    "alibi": layout({"pos_emb": "alibi"}),
    "window": layout({"pos_emb": "rotary", "sliding_window_width": 5, "use_bias_in_norms": False}),
    "swiglu, grouped": layout({"pos_emb": "rotary", "num_kv_heads": 2, **SWIGLU, **UNTIED}, ranks=2, mlp=NEW),
    "grouped, one rank": layout({"pos_emb": "none", "num_kv_heads": 1, **UNTIED}, mlp=NEW),
    "geglu, parallel": layout({"pos_emb": "none", "activation": "geglu", **PARALLEL}, ranks=2),
    "cdape": layout(
        {"pos_emb": "kerple_dapev2", "mlp_width": 6, "dapev2_kernel": 3}, module="kerple_dapev2", per_layer=True
    ),
    "dape": layout({"pos_emb": "kerple_c", "mlp_width": 6}, module="kerple_c", per_layer=True),
    "dape, no bias": layout({"pos_emb": "nope_c", "mlp_width": 6}, module="nope_c", per_layer=True),
    "fire": layout({"pos_emb": "fire", "pos_emb_per_layer": True}, module="fire", per_layer=True),
    "cope": layout(
        {"pos_emb": "cope", "pos_emb_per_layer": True, "pos_emb_options": {"positions": 6}}, module="cope",
        per_layer=True,
    ),
    "transformer_xl": layout({"pos_emb": "xl_bias"}, module="xl_bias", per_layer=True),
    "fire, dape": layout({"pos_emb": "fire_c", "mlp_width": 32}, module="fire_c", per_layer=True),
    "fire, cdape": layout(
        {"pos_emb": "fire_dapev2", "mlp_width": 6, "dapev2_kernel": 3}, module="fire_dapev2", per_layer=True
    ),
}  # fmt: skip


def imported(source: Path, **options: Any) -> Path:
    run = source.parent / "run"
    import_model(source, run, tokenizer="HFTokenizer", vocab_file=tokenizer_of(source.parent), **options)
    return run


def tokenizer_of(folder: Path) -> Path:
    """Return a tokenizer with fewer tokens than rows of the embedding."""
    import tokenizers as hf

    words = {"</s>": 0, **{chr(97 + i): i + 1 for i in range(26)}}
    path = folder / "tokenizer.json"
    hf.Tokenizer(hf.models.WordLevel(words)).save(str(path))
    return path


@pytest.mark.parametrize("name", CASES)
def test_the_same_logits(name: str, tmp_path: Path) -> None:
    theirs = CASES[name].fill()
    if name == "alibi":  # slopes are a buffer, and the bias is irrelevant to this check
        theirs.states[0]["2.attention.alibi_embed.slopes"] = torch.ones(HEADS)
    loaded = load_model(imported(theirs.write(tmp_path / "source")))
    tokens = torch.randint(ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = loaded.model(tokens)
    if name == "alibi":
        slopes = torch.tensor([2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)])[:, None, None]
        n = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(min=0)
        theirs._positioned = lambda scores, rank, layer: scores - slopes * n  # type: ignore[method-assign]
    reference = theirs.logits(tokens)
    assert reference.abs().max() > 1
    # Its code sees the right edge of its matrix, which is where a sequence ends.
    if name in ("cdape", "fire, cdape"):
        ours, reference = ours[:, :-1], reference[:, :-1]
    # The reference uses float32 angles; a kernel's powers and logarithms have errors of a few units.
    assert_close_in_rounding(ours, reference, TERMS, SUMS + 2 * LAYERS * 8)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-5])
@pytest.mark.parametrize("fused", [{}, {"rmsnorm_fusion": True}, {"norm": "te_rmsnorm"}], ids=str)
def test_rmsnorm_adds_epsilon_as_in_gpt_neox(fused: dict[str, Any], epsilon: float, tmp_path: Path) -> None:
    """GPT-NeoX's own code adds it to the root mean square, and its kernels to the mean square."""
    keys = {"pos_emb": "none", **SWIGLU, **UNTIED, **fused, "rms_norm_epsilon": epsilon}
    theirs = layout({**keys, "norm": "rmsnorm"}).fill()
    source = theirs.write(tmp_path / "source")
    (config,) = source.glob("*/configs/*.yml")
    config.write_text(dump_yaml({**read_yaml(config).values, **fused}))
    found = load_config([str(imported(source) / "config.yml")]).config.model.rms_norm_epsilon
    if fused:
        assert found == epsilon
        return
    for rms in (0.02, 0.5, 3.0):  # 0.02 is that of embeddings at the start of training
        assert math.isclose(math.sqrt(rms**2 + found), rms + epsilon, rel_tol=epsilon / rms)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Names of the other kernel, a gate before its values, and unsummed biases all exceed the tolerance by far."""
    tokens = torch.randint(ROWS, (2, LENGTH))
    theirs = layout({"pos_emb": "rotary", "activation": "geglu", **PARALLEL}, ranks=2).fill()
    run = imported(theirs.write(tmp_path / "source"))
    gpt = load_model(run).model
    with torch.no_grad():
        gpt.decoder.layers[0].self_attention.linear_proj.bias.mul_(0.5)
        wrong = gpt(tokens)
    with pytest.raises(AssertionError, match=r"^difference "):
        assert_close_in_rounding(wrong, theirs.logits(tokens), TERMS, SUMS + 2 * LAYERS * 8)


def test_an_encoding_with_an_unknown_layout_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pos_emb kerple_log3 cannot be imported.*fire, .*kerple_log, .*t5"):
        imported(layout({"pos_emb": "kerple_log3"}).fill().write(tmp_path / "source"))


def test_a_checkpoint_and_its_run_mean_the_same_and_a_configuration_can_be_named(tmp_path: Path) -> None:
    source = CASES["kerple_log"].fill().write(tmp_path / "source")
    checkpoint = source / "global_step10"
    (checkpoint / "configs/model.yml").rename(tmp_path / "model.yml")
    with pytest.raises(UserError, match=r"contains no configs/\*.yml; specify the model's configuration with --config"):
        imported(checkpoint)
    made, _ = import_model(
        checkpoint, tmp_path / "named", configs=[tmp_path / "model.yml"], tokenizer="HFTokenizer",
        vocab_file=tokenizer_of(tmp_path),
    )  # fmt: skip
    assert made.config.position.pos_emb == "kerple_log"
    assert made.config.model.make_vocab_size_divisible_by == ROWS
    assert made.config.model.hidden_dropout == 0
    assert made.config.training.train_iters == 0


BAD = {
    "a rank is missing": "contains shards of the ranks|a file is missing",
    "a layer is missing": "a file is missing|contains no 3",
    "cut short": "is damaged|cannot be read",
    "code": r"contains more than tensors, numbers and text: builtins\.exec",
    "a tensor too many": "contains 2.attention.wonder.weight.*would be dropped",
    "another width": "do not match|has shape",
    "layers differ": "differs from that of layer 2, but its configuration has pos_emb_per_layer: false",
    "sparse": "sparse_attention",
    "normed queries": "use_qk_layernorm",
    "no module": "contains no GPT-NeoX `module`",
}


@pytest.mark.parametrize("what", BAD)
def test_errors_are_one_line_and_leave_no_files(what: str, tmp_path: Path) -> None:
    theirs = layout({"pos_emb": "kerple_log"}, ranks=2, whole_files=what == "no module").fill()
    if what == "a tensor too many":
        theirs.states[0]["2.attention.wonder.weight"] = theirs.states[1]["2.attention.wonder.weight"] = torch.ones(2)
    if what == "layers differ":
        for state in theirs.states:
            state["3.attention.rpe.bias_p"] = state["3.attention.rpe.bias_p"] + 1
    if what == "sparse":
        theirs.keys["sparse_attention"] = {"mode": "fixed"}
    if what == "normed queries":
        theirs.keys["use_qk_layernorm"] = True
    source = theirs.write(tmp_path / "source")
    checkpoint = source / "global_step10"
    first = checkpoint / "layer_03-model_01-model_states.pt"
    if what == "a rank is missing":
        first.unlink()
    elif what == "a layer is missing":
        for path in checkpoint.glob("layer_03*"):
            path.unlink()
    elif what == "cut short":
        first.write_bytes(first.read_bytes()[:-600])
    elif what == "code":
        torch.save({"args": RunsCode()}, first)
    elif what == "another width":
        (checkpoint / "configs/model.yml").write_text(dump_yaml({**theirs.keys, "intermediate_size": 48}))
    elif what == "no module":
        torch.save({"step": 3}, checkpoint / "mp_rank_00_model_states.pt")
    with pytest.raises((UserError, RunError), match=BAD[what]) as caught:
        imported(source)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()

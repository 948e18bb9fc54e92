"""muP and CompleteP: no effect at the base shape, rules of the papers' tables, and equal coordinate changes at all
sizes.

Coordinate changes are not equal under the standard parametrization.
"""

import math
from typing import Any

import pytest
import torch
from models import VOCABULARY, build_model
from torch import nn

from megatron.model.mup import MupScaling
from megatron.model.parameter_groups import build_parameter_groups
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions, find_model_conflicts
from megatron.position.processors.cdape import Cdape
from megatron.utils.errors import UserError
from tools.mup import coordinate_check
from tools.mup.coordinate_check import compute_exponent, measure_over_sizes

WIDE: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_num_layers": 2}
CDAPE = PositionOptions(pos_emb="kerple_log", score_processor="cdape")
TOKENS = torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(2))


def options(**keys: Any) -> ModelOptions:
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 12}
    return ModelOptions(**{**shape, "make_vocab_size_divisible_by": 8, **keys})


def test_at_the_base_models_shapes_nothing_changes() -> None:
    plain, mup = (build_model(options(**keys), CDAPE, VOCABULARY, seed=1) for keys in ({}, WIDE))
    assert torch.equal(plain(TOKENS), mup(TOKENS))
    one, other = (build_parameter_groups(model, 0.1) for model in (plain, mup))
    assert [{**group, "params": None} for group in one] == [{**group, "params": None} for group in other]


def test_rules_match_the_papers() -> None:
    """Four times as wide, three times as deep, α = 3/4; the number of heads grows with the width, or by two in the
    second model.
    """
    keys = {**WIDE, "mup_depth_alpha": 0.75, "no_weight_tying": True, "init_method_std": 0.5, "mup_init_scale": 2.0}
    model = options(**keys, num_layers=6, hidden_size=64, num_attention_heads=8, output_layer_init_method="normal")
    gpt = build_model(model, CDAPE, VOCABULARY, seed=1)
    layer = gpt.decoder.layers[0]
    processor = layer.self_attention.core_attention.processor
    depth = 3**-0.25
    expected: dict[nn.Parameter, tuple[float, float, float, float | None]] = {
        gpt.embedding.word_embeddings.weight: (1, 0.1, 1 / 4, 2 * 0.5),
        gpt.output_layer.weight: (1, 0.1, 1 / 4, 2 * 0.5),
        gpt.decoder.final_layernorm.weight: (1, 0, 1 / 4, None),
        layer.self_attention.linear_qkv.weight: (depth / 4, 0.4, 1 / (4 * 3**0.75), 2 * 0.5 / 2),
        layer.mlp.linear_fc2.weight: (depth / 4, 0.4, 1 / (4 * 3**0.75), 2 * 0.5 / 2),
        layer.mlp.linear_fc1.bias: (depth, 0, 1 / (4 * 3**0.75), None),
        layer.input_layernorm.weight: (depth, 0, 1 / (4 * 3**0.75), None),
        gpt.position.r1.value: (depth, 0, 1 / (4 * 3**0.75), None),
        # torch initializes from U(−1/√fan_in, 1/√fan_in), with standard deviation 1/√(3·fan_in)
        processor.hidden.weight: (depth / 4, 0.4, 1 / (4 * 3**0.75), 1 / math.sqrt(3 * 2 * 8 * 3) / 2),
        processor.output.weight: (depth, 0.1, 1 / (4 * 3**0.75), 1 / math.sqrt(3 * 32 * 3)),
    }
    found = {p: group for group in build_parameter_groups(gpt, 0.1) for p in group["params"]}
    for parameter, (lr, decay, eps, deviation) in expected.items():
        group = found[parameter]
        assert (group["lr_scale"], group["weight_decay"], group["eps_scale"]) == pytest.approx((lr, decay, eps))
        if deviation is not None:
            assert float(parameter.std()) == pytest.approx(deviation, rel=0.1)
    muon = {p: group for group in build_parameter_groups(gpt, 0.1, "Muon") for p in group["params"]}
    group = muon[layer.mlp.linear_fc1.weight]
    assert (group["lr_scale"], group["weight_decay"]) == pytest.approx((depth / 2, 0.2))
    assert muon[processor.hidden.weight]["lr_scale"] == pytest.approx(depth / 4)

    half = MupScaling.from_options(options(**keys, num_layers=6, hidden_size=64, num_attention_heads=4))
    assert half is not None
    assert (half.width, half.heads, half.depth) == (4, 4, 3)  # the base has one head of this size
    fixed = MupScaling.from_options(
        options(**keys, num_layers=6, hidden_size=64, num_attention_heads=2, mup_base_num_attention_heads=2)
    )
    assert fixed is not None
    assert fixed.multipliers.query == pytest.approx(
        math.sqrt(8) / math.sqrt(32)
    )  # √8/32 on q·k, of which 1/√32 is the usual scale
    assert fixed.get_step_scales("heads").lr == pytest.approx(depth)


def test_multipliers_are_applied_at_the_right_modules() -> None:
    """Each multiplier equals scaling the corresponding weights of a model without it."""
    position, tokens = PositionOptions(pos_emb="learned"), TOKENS[:, :12]
    base = {"use_mup": True, "mup_base_hidden_size": 16}
    plain = build_model(options(no_weight_tying=True), position, VOCABULARY, seed=1)
    weights = plain.state_dict()

    def logits(factors: dict[str, float], **keys: Any) -> torch.Tensor:
        model = build_model(options(no_weight_tying=True, **keys), position, VOCABULARY, seed=1)
        scaled = {name: value.clone() for name, value in weights.items() if torch.is_tensor(value)}
        for part, factor in factors.items():
            for name in (name for name in scaled if part in name):
                scaled[name] = scaled[name] * factor
        model.load_state_dict(scaled, strict=False)
        with torch.no_grad():
            return model(tokens)

    torch.testing.assert_close(logits({}, **base, mup_output_temp=4.0), logits({"output_layer": 0.25}))
    torch.testing.assert_close(
        logits({}, **base, mup_embedding_mult=3.0, mup_rp_embedding_mult=0.5),
        logits({"word_embeddings": 3.0, "position.vectors": 0.5}),
    )
    branches = {"linear_proj": 0.5, "linear_fc2": 0.5}
    torch.testing.assert_close(logits({}, **base, mup_base_num_layers=1), logits(branches))
    keys_alone = logits({}, **base, mup_attn_temp=2.0)
    model = build_model(options(no_weight_tying=True), position, VOCABULARY, seed=1)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        for name in ("weight", "bias"):
            tensor = getattr(attention.linear_qkv, name).data.unflatten(0, (2, -1))
            tensor[:, : attention.group_sizes[0]] *= 0.5
    with torch.no_grad():
        torch.testing.assert_close(keys_alone, model(tokens))


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        ({"mup_base_hidden_size": 8}, "mup_base_hidden_size", "has no effect without use_mup"),
        ({"use_mup": True}, "use_mup", "needs mup_base_hidden_size"),
        ({**WIDE, "mup_base_hidden_size": 12}, "mup_base_hidden_size", "not divisible by this model's head size, 8"),
        ({**WIDE, "mup_base_num_attention_heads": 3}, "mup_base_num_attention_heads", "not divisible"),
        ({**WIDE, "init_method": "xavier_normal"}, "init_method", "follows from the matrix's shape"),
    ],
)
def test_invalid_configurations_are_rejected(keys: dict[str, Any], key: str, text: str) -> None:
    ((found, problem),) = find_model_conflicts(options(**keys), CDAPE)
    assert found == key
    assert text in problem


@pytest.mark.parametrize("choice", [{}, {"linear_init": True}])
def test_a_projection_starts_as_a_layers_matrix_however_it_is_drawn(choice: dict[str, bool]) -> None:
    """Transformer-XL's projection is base's / √m, also if its own draw depends on the width."""
    position = PositionOptions(pos_emb="transformer_xl", pos_emb_options=choice)
    sizes = []
    for width, heads in ((16, 2), (256, 32)):
        gpt = build_model(options(**WIDE, hidden_size=width, num_attention_heads=heads), position, VOCABULARY, seed=1)
        sizes.append(gpt.position.project.weight.square().mean().sqrt().item())
    assert sizes[1] / sizes[0] == pytest.approx(1 / 4, rel=5 / math.sqrt(2 * 16**2))  # five deviations of 256 draws


def test_methods_without_a_rule_are_rejected() -> None:
    heads = {**WIDE, "mup_base_num_attention_heads": 4}
    with pytest.raises(UserError, match="no muP rule for a head size other than the base model's"):
        build_model(options(**heads), PositionOptions(pos_emb="transformer_xl"), VOCABULARY)
    with pytest.raises(UserError, match="kerple_log adds nothing to the token embeddings"):
        build_model(options(**WIDE, mup_rp_embedding_mult=2.0), CDAPE, VOCABULARY)


COHERENT = ("queries·keys", "attention", "feed-forward", "hidden")


def exponents(over: str, parametrization: str, **choices: Any) -> dict[str, float]:
    """Return the exponents from the smallest and the largest size; the middle one would not affect the slope."""
    sizes = {"width": (64, 256), "layers": (2, 8)}[over]
    keys = {"steps": 3, "lr": 1e-2, "seeds": 2, **choices}
    changes = measure_over_sizes(keys.pop("method", "cdape"), over, sizes, parametrization, **keys)
    return {name: compute_exponent(sizes, values) for name, values in changes.items()}


@pytest.mark.parametrize("choices", [{"method": "fox"}, {}, {"optimizer": "Muon"}], ids=str)
def test_coordinates_move_equally_far_at_every_width(choices: dict[str, str]) -> None:
    found = exponents("width", "muP", **choices)
    for name in (*COHERENT, "gate" if "method" in choices else "processor channels"):
        assert abs(found[name]) < 0.25, found
    assert max(found.values()) < 0.35, found  # the contribution of the initial values decreases


def test_under_the_standard_parametrisation_they_do_not() -> None:
    found = exponents("width", "standard", seeds=1)
    assert min(found[name] for name in ("queries·keys", "attention", "feed-forward", "processor channels")) > 0.7, found
    assert found["logits"] > 0.4


def test_a_processor_needs_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cdape, "list_growing_fan_ins", lambda self: [])
    assert exponents("width", "muP", seeds=1)["processor channels"] > 0.6


def test_the_residual_stream_moves_equally_far_at_every_depth() -> None:
    assert abs(exponents("layers", "muP")["residual stream"]) < 0.25
    assert exponents("layers", "standard", seeds=1)["residual stream"] > 0.6


def test_the_check_is_drawn_and_written(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(coordinate_check, "SIZES", {"width": (16, 32)})
    monkeypatch.setattr(coordinate_check, "BASE_WIDTH", 16)
    arguments = ["--steps", "1", "--seeds", "1", "--json", str(tmp_path / "c.json"), "--png", str(tmp_path / "c.png")]
    monkeypatch.setattr("sys.argv", [coordinate_check.__file__, *arguments])
    assert coordinate_check.main() == 0
    assert "| queries·keys |" in (tmp_path / "c.md").read_text()
    assert (tmp_path / "c.png").stat().st_size > 10_000

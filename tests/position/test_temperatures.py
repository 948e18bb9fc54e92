"""Attention temperatures: formulas in float64, laws, and errors for invalid options."""

import math

import pytest
import torch

from megatron.position import registry
from megatron.position.catalog import MethodFileError, read_temperature_facts
from megatron.position.facts import AttentionDims, OptionError
from megatron.position.temperature import Temperature

DIMS = AttentionDims(num_heads=3, head_dim=8, hidden_size=24, train_length=16, max_length=16)
NAMES = registry.list_temperatures()
# Separate positions and key counts: of a window, of documents, of randomized positions.
ROWS = [(0, 1), (1, 2), (14, 15), (15, 16), (16, 17), (63, 64), (8190, 8191), (8191, 8192), (70_000, 512), (10**6, 7)]


def build(name: str, **options: object) -> Temperature:
    temperature = registry.build_temperature(name, DIMS, options)
    with torch.no_grad():
        for number, parameter in enumerate(temperature.parameters()):
            parameter.copy_(torch.tensor([0.43, 1.0, 2.5]) + number)
    return temperature


def rows(kind: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and key counts."""
    return torch.tensor(ROWS, dtype=kind).T.unbind()


def ssmax(i: int, n: int, head: int) -> float:
    return (0.43, 1.0, 2.5)[head] * math.log(n)


def fixed_ssmax(i: int, n: int, head: int) -> float:
    return 0.43 * math.log(n)


def logn(i: int, n: int, head: int) -> float:
    return max(1.0, math.log(n, 16))


def logn_of_512(i: int, n: int, head: int) -> float:
    return math.log(n) / math.log(512) if n > 512 else 1.0


def llama4(i: int, n: int, head: int) -> float:
    return math.log((i + 1) // 8192 + 1) * 0.1 + 1


def llama4_of_short_texts(i: int, n: int, head: int) -> float:
    return math.log((i + 1) // 8 + 1) * 0.5 + 1


@pytest.mark.parametrize(
    ("formula", "name", "options"),
    [
        (ssmax, "ssmax", {}),
        (fixed_ssmax, "ssmax", {"s": 0.43, "learned": False}),
        (logn, "logn", {}),
        (logn_of_512, "logn", {"length": 512}),
        (llama4, "llama4", {}),
        (llama4_of_short_texts, "llama4", {"floor_scale": 8, "attn_scale": 0.5}),
    ],
)
def test_factors_are_the_formulas(formula, name: str, options: dict) -> None:
    expected = torch.tensor([[formula(i, n, head) for i, n in ROWS] for head in range(3)], dtype=torch.float64)
    found = build(name, **options)(*rows())
    assert found.dtype == torch.float32
    assert found.shape[0] in (1, 3)
    torch.testing.assert_close(found.expand(3, -1).double(), expected, rtol=4 * 2**-24, atol=0)
    torch.testing.assert_close(build(name, **options).double()(*rows(torch.float64)).expand(3, -1), expected, rtol=1e-6,
                               atol=1e-9)  # fmt: skip


def test_every_temperature_has_a_formula_here() -> None:
    assert NAMES == ["llama4", "logn", "ssmax"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_independent_and_of_any_shape(name: str) -> None:
    temperature, arguments = build(name), rows()
    whole = temperature(*arguments)
    block = temperature(*(part.view(2, 5) for part in arguments))
    assert torch.equal(block.flatten(1), whole)
    for index in range(len(ROWS)):
        assert torch.equal(temperature(*(part[index : index + 1] for part in arguments)), whole[:, index : index + 1])


@pytest.mark.parametrize("name", NAMES)
def test_a_half_precision_model_has_float32_factors(name: str) -> None:
    for kind in (torch.bfloat16, torch.float16):
        half = build(name).to(kind)
        full = build(name)
        full.load_state_dict(half.state_dict())
        far = torch.tensor([0.0, 2.0**24]), torch.tensor([1.0, 2.0**24 + 1])
        assert half(*far).dtype == torch.float32
        assert torch.equal(half(*far), full(*far))
        assert half(*far).isfinite().all()


def test_gradients_of_the_first_row_are_finite() -> None:
    temperature = build("ssmax")
    temperature(torch.zeros(1), torch.ones(1)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros(3)) for p in temperature.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_its_file_declares_its_number_of_parameters(name: str) -> None:
    facts, temperature = read_temperature_facts(name), build(name)
    assert facts.cost.num_parameters(DIMS, facts.fill_options({})) == sum(p.numel() for p in temperature.parameters())
    assert facts.defaults == {key: option.default for key, option in type(temperature).options().items()}
    assert facts.has_parameters({}, **vars(DIMS)) == (name == "ssmax")
    assert not facts.has_parameters({"learned": False}, **vars(DIMS))


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("ssmax", {"s": 0.0}, "option s of ssmax is 0.0; it must be greater than 0"),
        ("ssmax", {"s": -math.inf}, "option s of ssmax"),
        ("logn", {"length": 1}, "option length of logn is 1; it must be at least 2"),
        ("llama4", {"floor_scale": 0}, "option floor_scale of llama4 is 0; it must be at least 1"),
        ("llama4", {"attn_scale": -0.1}, "option attn_scale of llama4 is -0.1; it must not be negative"),
        ("logn", {"lenght": 1}, "did you mean length?"),
    ],
)
def test_bad_options_are_rejected(name: str, options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("?", r"\?")) as refusal:
        registry.build_temperature(name, DIMS, options)
    assert isinstance(refusal.value, OptionError) or "lenght" in options


class WithARowTooMuch(Temperature):
    def forward(self, positions: torch.Tensor, num_keys: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, positions.shape[0] + 1)


def test_files_without_factors_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load_temperature_class", lambda name: WithARowTooMuch)
    with pytest.raises(MethodFileError, match=r"returns \[1, 3\] for two rows; it must be \[3, 2\] or \[1, 2\]"):
        registry.build_temperature("ssmax", DIMS)

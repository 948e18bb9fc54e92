"""Analyses of a bias alone, compared with loops over the papers' formulas and with known values."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.evaluation.analysis.bias_series import (
    PLOTTED_EPSILONS,
    ReceptiveField,
    compute_bias_by_distance,
    compute_finite_field,
    compute_terms,
    compute_theoretical_field,
    mask_window,
    sum_bias_series,
    to_float64,
)
from megatron.evaluation.analysis.from_bias.effective_length import (
    MAX_PLOTTED_DISTANCE,
    compute_effective_lengths,
    count_heads_within,
)
from megatron.position import catalog, registry, series_tails
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims

EPSILONS = (0.5, 0.1, 0.01, 0.001)


def encoding_of(name: str, heads: int = 1, options: dict[str, Any] | None = None, **parameters: float) -> Encoding:
    encoding = registry.build_encoding(name, AttentionDims(heads, 8, 8 * heads, 16, 16), options)
    with torch.no_grad():
        for parameter, value in parameters.items():
            getattr(encoding, parameter).value.fill_(value)
    return encoding


def fields_of(encoding: Encoding, head: int = 0, **choices: Any) -> list[ReceptiveField]:
    series = sum_bias_series(encoding, **choices)[head]
    return compute_theoretical_field(series.bias, series.tail, EPSILONS)


KNOWN = [
    ("slope 1", encoding_of("kerple_power", r1=1.0, r2=1.0), 0, [1, 3, 5, 7]),
    ("slope 1/256", encoding_of("alibi", heads=8), 7, [178, 590, 1179, 1769]),
    ("type1", encoding_of("type1"), 0, [1, 6, 61, 608]),
    ("type2", encoding_of("type2"), 0, [2, 4, 9, 15]),
    ("kerple_log as type1", encoding_of("kerple_log", r1=2.0, r2=1.0), 0, [1, 6, 61, 608]),
    ("slow kerple_log", encoding_of("kerple_log", r1=1.5, r2=0.5), 0, [5, 153, 15_385, 1_538_606]),
    ("kerple_power", encoding_of("kerple_power", r1=0.1, r2=0.5), 0, [281, 1511, 4404, 8521]),
]
"""Known values: least integers above −ln ε for slope 1, closed forms, and high-precision sums."""


@pytest.mark.parametrize(("encoding", "head", "expected"), [case[1:] for case in KNOWN], ids=[c[0] for c in KNOWN])
def test_theoretical_receptive_fields(encoding: Encoding, head: int, expected: list[int]) -> None:
    assert fields_of(encoding, head) == [ReceptiveField(keys, keys) for keys in expected]


@pytest.mark.parametrize("name", ["type1", "kerple_log", "kerple_power", "type2", "alibi"])
def test_few_terms_with_a_bound_match_many_terms(name: str) -> None:
    """The tail's bounds carry the result: 64 explicit terms give the same as 65,536."""
    parameters = {"kerple_log": {"r1": 1.7, "r2": 0.4}, "kerple_power": {"r1": 0.2, "r2": 0.6}}.get(name, {})
    encoding = encoding_of(name, **parameters)
    for few, many in zip(fields_of(encoding, num_terms=64), fields_of(encoding), strict=True):
        assert few.low <= many.low <= many.high <= few.high
        assert few.high - few.low <= 1


def brute(b: list[float], share: float) -> int:
    """Evaluate equation 22 literally."""
    total, sum_ = math.fsum(b), 0.0
    for j in range(1, len(b) + 1):
        sum_ = math.fsum([sum_, b[j - 1]])
        if sum_ > (1 - share) * total:
            return j
    raise AssertionError


def brute_finite(a: list[float], count: int = 50) -> list[int]:
    """Evaluate the paper's algorithm literally: ≥, and m at ε = 0."""
    total, found = math.fsum(a), []
    for i in range(count):
        share = 1 - i / (count - 1)
        found.append(next((j for j in range(len(a)) if math.fsum(a[:j]) >= (1 - share) * total), len(a)))
    return [*found[:-1], len(a)]


@pytest.mark.parametrize("seed", range(5))
def test_both_definitions_against_loops(seed: int) -> None:
    torch.manual_seed(seed)
    bias = torch.randn(97, dtype=torch.float64) - torch.arange(97) * 0.05
    b = [math.exp(x) for x in bias.tolist()]
    shares = [0.9, 0.5, 0.2, 0.05, 0.003]
    assert compute_theoretical_field(bias, series_tails.windowed_tail(97), shares) == [
        ReceptiveField(j, j) for j in (brute(b, share) for share in shares)
    ]
    assert compute_finite_field(bias.exp()) == brute_finite(b)
    assert pytest.approx([1 - i / 49 for i in range(50)]) == PLOTTED_EPSILONS


def test_the_two_definitions_treat_ties_differently() -> None:
    """b_t = 2^−t leaves exactly one half after one term. Equation 22 requires more; the algorithm accepts it."""
    bias = -torch.arange(60, dtype=torch.float64) * math.log(2)
    assert compute_theoretical_field(bias, series_tails.exponential_tail(math.log(2)), [0.5]) == [ReceptiveField(2, 2)]
    assert compute_finite_field(bias.exp(), [0.5]) == [1]


def test_a_series_that_diverges_has_no_end() -> None:
    for name in ("inverse", "none", "inverse_nlogn"):
        assert {str(field) for field in fields_of(encoding_of(name), num_terms=64)} == {"∞"}


def test_a_window_ends_every_series() -> None:
    """A window ends every series: without a bias, w keys count equally."""
    fields = fields_of(encoding_of("none"), window=10)
    assert [field.low for field in fields] == [6, 10, 10, 10]  # more than 5, 9, 9.9, 9.99
    assert sum_bias_series(encoding_of("inverse"), 10)[0].total == pytest.approx(
        (sum(1 / n for n in range(1, 11)),) * 2
    )


def test_large_distances_are_bounded() -> None:
    fields = fields_of(encoding_of("kerple_log", r1=1.01, r2=0.5))
    assert str(fields[0]) == "over 2^53"
    assert str(ReceptiveField(3, 5)) == "3 to 5"
    assert str(ReceptiveField(1, math.inf)) == "not known"


def test_biases_are_the_encodings_own() -> None:
    encoding = encoding_of("kerple_log", heads=3)
    r1, r2 = encoding.r1().tolist(), encoding.r2().tolist()
    expected = [[-a * math.log1p(b * n) for n in range(40)] for a, b in zip(r1, r2, strict=True)]
    found = compute_bias_by_distance(encoding, 40)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-15)
    assert encoding.r1().dtype == torch.float32  # the analysis uses a copy
    torch.testing.assert_close(found.float(), encoding.table(torch.arange(40.0)).bias.detach())


@pytest.mark.parametrize(
    "name", [n for n in registry.list_encodings() if registry.load_encoding_class(n).overrides_hook("table")]
)
def test_tables_compute_in_float64_on_request(name: str) -> None:
    """Tables are computed in float64 on request, not in float32 and then converted."""
    encoding = encoding_of(name, heads=3)
    coarse = encoding.table(torch.arange(50.0))
    fine = compute_terms(to_float64(encoding), torch.arange(50, dtype=torch.float64))
    for low, high in zip(coarse, fine, strict=True):
        assert (low is None) == (high is None)
        if low is not None:
            assert high.dtype == torch.float64
            torch.testing.assert_close(high.float(), low.detach(), rtol=2e-5, atol=1e-5)
            exact = name in ("t5", "alibi")  # float32 values, looked up or multiplied by integers
            assert exact or not torch.equal(high, high.float().double())


def test_fires_bias_is_that_of_one_query() -> None:
    encoding = encoding_of("fire", heads=2)
    far, near = compute_bias_by_distance(encoding, 100), compute_bias_by_distance(encoding, 50)
    assert far.shape == (2, 100)
    assert not torch.allclose(far[:, :50], near)
    with pytest.raises(ValueError, match="a row is required"):
        compute_terms(to_float64(encoding), torch.arange(3, dtype=torch.float64))


def test_a_window_masks_keys_outside_of_it() -> None:
    assert mask_window(torch.zeros(1, 5), 3).tolist() == [[0, 0, 0, -math.inf, -math.inf]]
    assert torch.equal(mask_window(torch.zeros(1, 5), 8), torch.zeros(1, 5))


def test_effective_lengths() -> None:
    assert compute_effective_lengths(encoding_of("kerple_log", r1=1.0, r2=0.1)) == [64]
    slopes = [2 ** (-8 * h / 12) for h in (1, 6, 12)]
    with torch.no_grad():
        encoding = encoding_of("kerple_power", heads=3, r2=1.0)
        encoding.r1.value.copy_(torch.tensor(slopes))
        encoding.r1.low = 0.0
    assert compute_effective_lengths(encoding) == [4, 33, 513]
    assert compute_effective_lengths(encoding, window=100) == [4, 33, 100]


@pytest.mark.parametrize(("r1", "r2"), [(0.7, 0.3), (0.3, 0.02), (1.9, 0.9), (0.26, 0.9)])
def test_effective_lengths_against_a_loop(r1: float, r2: float) -> None:
    encoding = encoding_of("kerple_log", r1=r1, r2=r2)
    r1, r2 = encoding.r1().item(), encoding.r2().item()
    expected = next(n for n in range(10**6) if -r1 * math.log1p(r2 * n) < -2)
    assert compute_effective_lengths(encoding) == [expected]


def test_missing_effective_lengths() -> None:
    assert compute_effective_lengths(encoding_of("fire", heads=2)) == [None, None]
    assert compute_effective_lengths(encoding_of("sandwich")) == [None]  # not monotonic
    assert compute_effective_lengths(encoding_of("none")) == [math.inf]
    assert compute_effective_lengths(encoding_of("kerple_log", r1=0.02, r2=0.02)) == [math.inf]  # at n = 10^45


def test_heads_are_counted_up_to_each_distance() -> None:
    lengths, distances = [700, 3, 30_000, math.inf, 3], [0, 2, 3, 699, 700, MAX_PLOTTED_DISTANCE]
    assert count_heads_within(lengths, distances) == [0, 0, 2, 2, 3, 3]
    assert count_heads_within([math.inf], distances) == [0] * 6


PAGE = Path(__file__).parents[3] / "docs" / "analysis.md"


def test_documented_verdicts_match() -> None:
    """The table in docs/analysis.md has one row for each encoding, with the verdict on its initial parameters."""
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| (converges|diverges|per head|does not apply) \|", page, re.MULTILINE)
    documented = [(name, verdict) for names, verdict in rows for name in names.split(", ")]
    assert sorted(name for name, _ in documented if name.isidentifier()) == catalog.list_encodings()
    for name, verdict in documented:
        if verdict in ("converges", "diverges") and name.isidentifier():
            assert {series.verdict for series in sum_bias_series(encoding_of(name, heads=4))} == {verdict}, name


def test_documented_values_of_sandwich_match() -> None:
    """The table in docs/analysis.md contains Sandwich's bias at 10⁴, 10⁵ and 10⁶ keys for the first, sixth and last of
    12 heads.
    """
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^ *\| ([\d.]+) \(\w+\) \| (−[\d.]+), (−[\d.]+), (−[\d.]+) \|", page, re.MULTILINE)
    far = torch.tensor([10**4, 10**5, 10**6], dtype=torch.float64)
    bias = to_float64(encoding_of("sandwich", heads=12)).table(far).bias
    assert [float(row[0]) for row in rows] == [12 / (8 * head) for head in (1, 6, 12)]
    for row, head in zip(rows, (0, 5, 11), strict=True):
        assert [float(value.replace("−", "-")) for value in row[1:]] == [
            round(value, 1) for value in bias[head].tolist()
        ]

"""Each formula against numbers computed here, in float64, from the paper's equation."""

import math

import numpy as np
import pytest
import torch

from megatron.position import registry
from megatron.position.encodings.alibi import slopes
from megatron.position.scores import distances
from megatron.position.shape import Shape, Span

N = 300
n = np.arange(N, dtype=np.float64)


def _build(name: str, heads: int = 5, **options):
    return registry.build_encoding(name, Shape(heads, 8, 8 * heads, 16, 16), options)


def _close(ours: torch.Tensor, exact: np.ndarray, ulps: float = 8) -> None:
    """Equal to float32's rounding of the numbers that went in, a few units in the last place."""
    np.testing.assert_allclose(ours.detach().numpy(), exact, rtol=ulps * 2**-24, atol=ulps * 2**-24)


def test_kerple_log() -> None:
    encoding = _build("kerple_log")
    r1, r2 = (p.value.detach().double().numpy()[:, None] for p in (encoding.r1, encoding.r2))
    _close(encoding.table(distances(N)).bias, -r1 * np.log(1 + r2 * n))


def test_kerple_power() -> None:
    encoding = _build("kerple_power")
    r1, r2 = (p.value.detach().double().numpy()[:, None] for p in (encoding.r1, encoding.r2))
    # pow's exponent r2·log(n) carries a relative error of 2⁻²⁴·r2·log(n) ≤ 12 ulps here
    _close(encoding.table(distances(N)).bias, -r1 * n**r2, ulps=24)


@pytest.mark.parametrize("start", [("kerple_log", "r1", 2.0), ("kerple_log", "r2", 1.0), ("kerple_power", "r2", 2.0)])
def test_kerple_start_values_fill_their_interval(start: tuple[str, str, float]) -> None:
    name, parameter, high = start
    values = getattr(_build(name, heads=4000), parameter).value
    assert values.min() >= 1e-2
    assert values.max() <= high
    assert abs(values.mean() - high / 2) < high * 0.03


def test_alibi_power_of_two() -> None:
    bias = _build("alibi", heads=8).table(distances(N)).bias
    _close(bias, np.stack([-(2.0 ** (-h)) * n for h in range(1, 9)]))


def test_alibi_other_head_counts_follow_the_released_rule() -> None:
    # 12 heads: those of 8, then every other of 16's, from the first
    assert slopes(12) == [2.0**-h for h in range(1, 9)] + [2.0 ** (-h / 2) for h in (1, 3, 5, 7)]
    for heads in range(1, 70):
        assert len(slopes(heads)) == heads


def _t5_bucket(distance: int, buckets: int, longest: int) -> int:
    """T5's causal bucket in exact integer logic: the largest b with distance ≥ e·(longest/e)^((b−e)/e)."""
    exact = buckets // 2
    if distance < exact:
        return distance
    bucket = exact
    while bucket < buckets - 1 and distance**exact * exact ** (bucket + 1 - exact) >= (
        exact**exact * longest ** (bucket + 1 - exact)
    ):
        bucket += 1
    return bucket


@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 200), (8, 64)])
def test_t5_buckets(buckets: int, longest: int) -> None:
    encoding = _build("t5", num_buckets=buckets, max_distance=longest)
    ours = encoding.buckets(distances(4 * longest)).tolist()
    assert ours == [_t5_bucket(d, buckets, longest) for d in range(4 * longest)]
    bias = encoding.table(distances(10)).bias
    assert torch.equal(bias, encoding.bias.value.t()[:, ours[:10]])


def test_t5_knows_the_published_edges() -> None:
    ours = _build("t5").buckets(distances(1000))
    assert ours[:17].tolist() == list(range(17))
    assert ours[127] == ours[128] == ours[999] == 31
    assert ours[112] == 30


@pytest.mark.parametrize("fraction", [1.0, 0.25])
@pytest.mark.parametrize("position", [0, 7, 65_536])
def test_rotary_is_the_rotation_matrix(fraction: float, position: int) -> None:
    encoding = registry.build_encoding("rotary", Shape(1, 16, 16, 16, 16), {"fraction": fraction})
    r = int(16 * fraction)
    x = torch.randn(1, 1, 1, 16)
    matrix = np.eye(16)
    for m in range(r // 2):
        angle = position * 10000.0 ** (-2 * m / r)
        a, b = m, m + r // 2
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
    exact = matrix @ x[0, 0, 0].double().numpy()
    _close(encoding.rotate(x, Span(position, 1))[0, 0, 0], exact)


def test_sinusoidal() -> None:
    encoding = registry.build_encoding("sinusoidal", Shape(2, 6, 12, 16, 16))
    ours = encoding.embed(Span(65_530, 5), torch.zeros(1))
    for row, position in enumerate(range(65_530, 65_535)):
        angle = position / 10000.0 ** (np.arange(6) / 6)
        _close(ours[row], np.concatenate([np.sin(angle), np.cos(angle)]))


def test_learned_is_its_table_and_ends_with_it() -> None:
    encoding = _build("learned")
    assert torch.equal(encoding.embed(Span(3, 5), torch.zeros(1)), encoding.vectors.weight[3:8])
    with pytest.raises(ValueError, match=r"end at 16 .* length 17"):
        encoding.embed(Span(0, 17), torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("rotary", {"fraction": 1.5}, "fraction of rotary is 1.5"),
        ("rotary", {"fracton": 0.5}, "did you mean fraction"),
        ("rotary", {"base": "big"}, "must be of type float"),
        ("t5", {"num_buckets": 7}, "must be even"),
        ("t5", {"max_distance": 16}, "must exceed"),
        ("t5", {"max_distance": True}, "must be of type int"),
        ("kerple", {}, "did you mean kerple_log"),
        ("alibi", {"slope": 1}, "it has none"),
    ],
)
def test_bad_names_and_options_are_refused_by_name(name: str, options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _build(name, **options)


def test_every_method_describes_itself() -> None:
    for record in registry.describe():
        assert record["formula"]
        assert record["source"]
        assert record["parameters"]

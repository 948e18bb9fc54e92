"""Each formula, compared with float64 values of the paper's equation."""

import math

import numpy as np
import pytest
import torch

from megatron.attention.reference import build_distances
from megatron.position import registry
from megatron.position.encodings.alibi import compute_slopes
from megatron.position.facts import AttentionDims
from megatron.position.token_range import ALL_HEADS, TokenRange
from tools.tolerances import assert_close_in_rounding

N = 300
n = np.arange(N, dtype=np.float64)


def _build(name: str, heads: int = 5, **options):
    return registry.build_encoding(name, AttentionDims(heads, 8, 8 * heads, 16, 16), options)


def _close(ours: torch.Tensor, exact: np.ndarray, ulps: float = 8) -> None:
    """Assert equality up to float32 rounding: 4 units for a function such as log, 1 for each operation around it."""
    np.testing.assert_allclose(ours.detach().numpy(), exact, rtol=ulps * 2**-24, atol=ulps * 2**-24)


def test_kerple_log() -> None:
    encoding = _build("kerple_log")
    r1, r2 = (p.value.detach().double().numpy()[:, None] for p in (encoding.r1, encoding.r2))
    _close(encoding.table(build_distances(N)).bias, -r1 * np.log(1 + r2 * n))


def test_kerple_power() -> None:
    encoding = _build("kerple_power")
    r1, r2 = (p.value.detach().double().numpy()[:, None] for p in (encoding.r1, encoding.r2))
    # pow's exponent r2·log(n) carries a relative error of 2⁻²⁴·r2·log(n) ≤ 12 ulps here
    _close(encoding.table(build_distances(N)).bias, -r1 * n**r2, ulps=24)


@pytest.mark.parametrize("start", [("kerple_log", "r1", 2.0), ("kerple_log", "r2", 1.0), ("kerple_power", "r2", 2.0)])
def test_kerple_start_values_fill_their_interval(start: tuple[str, str, float]) -> None:
    name, parameter, high = start
    values = getattr(_build(name, heads=4000), parameter).value
    assert values.min() >= 1e-2
    assert values.max() <= high
    assert abs(values.mean() - high / 2) < high * 0.03


def test_alibi_power_of_two() -> None:
    bias = _build("alibi", heads=8).table(build_distances(N)).bias
    _close(bias, np.stack([-(2.0 ** (-h)) * n for h in range(1, 9)]))


def test_alibi_other_head_counts_follow_the_released_rule() -> None:
    # 12 heads: the slopes of 8 heads, then every other slope of 16 heads, starting with the first
    assert compute_slopes(12) == [2.0**-h for h in range(1, 9)] + [2.0 ** (-h / 2) for h in (1, 3, 5, 7)]
    for heads in range(1, 70):
        assert len(compute_slopes(heads)) == heads


def _t5_bucket(distance: int, buckets: int, longest: int) -> int:
    """Return T5's causal bucket in exact integer logic: the largest b with distance ≥ e·(longest/e)^((b−e)/e)."""
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
    ours = encoding.compute_buckets(build_distances(4 * longest)).tolist()
    assert ours == [_t5_bucket(d, buckets, longest) for d in range(4 * longest)]
    bias = encoding.table(build_distances(10)).bias
    assert torch.equal(bias, encoding.bias.value.t()[:, ours[:10]])


def test_t5_bucket_edges_match_published_ones() -> None:
    ours = _build("t5").compute_buckets(build_distances(1000))
    assert ours[:17].tolist() == list(range(17))
    assert ours[127] == ours[128] == ours[999] == 31
    assert ours[112] == 30


@pytest.mark.parametrize("fraction", [1.0, 0.25])
@pytest.mark.parametrize("position", [0, 7, 65_536])
def test_rotary_is_the_rotation_matrix(fraction: float, position: int) -> None:
    encoding = registry.build_encoding("rotary", AttentionDims(1, 16, 16, 16, 16), {"fraction": fraction})
    r = int(16 * fraction)
    x = torch.randn(1, 1, 1, 16)
    matrix = np.eye(16)
    for m in range(r // 2):
        angle = position * 10000.0 ** (-2 * m / r)
        a, b = m, m + r // 2
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
    exact = matrix @ x[0, 0, 0].double().numpy()
    _close(encoding.rotate(x, TokenRange(position, 1))[0, 0, 0], exact)


def test_sinusoidal() -> None:
    encoding = registry.build_encoding("sinusoidal", AttentionDims(2, 6, 12, 16, 16))
    ours = encoding.embed(TokenRange(65_530, 5), torch.zeros(1))
    for row, position in enumerate(range(65_530, 65_535)):
        angle = position / 10000.0 ** (np.arange(6) / 6)
        _close(ours[row], np.concatenate([np.sin(angle), np.cos(angle)]))


def test_learned_is_its_table_and_ends_with_it() -> None:
    encoding = _build("learned")
    assert torch.equal(encoding.embed(TokenRange(3, 5), torch.zeros(1)), encoding.vectors.weight[3:8])
    with pytest.raises(ValueError, match=r"end at 16 .* length 17"):
        encoding.embed(TokenRange(0, 17), torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("rotary", {"fraction": 1.5}, "fraction of rotary is 1.5"),
        ("rotary", {"fracton": 0.5}, "did you mean fraction"),
        ("rotary", {"base": "big"}, "must be of type float"),
        ("t5", {"num_buckets": 7}, "must be even"),
        ("bam", {"exponent_init": -3.5}, "exponent_init of bam is -3.5; it must be in .−3, 3."),
        ("kerple_log", {"r1_below": 0.0}, "r1_below of kerple_log is 0.0; it must be greater than 0.01$"),
        ("kerple_power", {"r2_below": 3.0}, "r2_below of kerple_power is 3.0; it must be in .0.01, 2.$"),
        ("t5", {"max_distance": 16}, "must exceed"),
        ("t5", {"max_distance": True}, "must be of type int"),
        ("kerple", {}, "did you mean kerple_log"),
        ("alibi", {"slope": 1}, "it has none"),
        ("fire", {"activation": "gelu"}, "activation of fire is .gelu.; choose from relu, leaky_relu"),
    ],
)
def test_bad_names_and_options_are_rejected_by_name(name: str, options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _build(name, **options)


def test_every_method_describes_itself() -> None:
    for record in registry.describe_methods(
        [*registry.list_encodings(), *registry.list_processors(), *registry.list_temperatures()]
    )[0]:
        assert record["formula"]
        assert record["source"]
        assert record["parameters"]


def _values(encoding, *names: str) -> list[np.ndarray]:
    """Return learned parameters as float64 columns [H, 1]."""
    return [getattr(encoding, name).value.detach().double().numpy()[:, None] for name in names]


BIASES = {
    "bam": (("log_scale", "exponent"), lambda s, beta: -np.exp(s) * (n + 1e-5) ** beta),
    "kerple_log3": (("r1", "r2", "r3"), lambda r1, r2, r3: -r1 * np.log(1 + r2 * n**r3)),
    "kerple_bias_weight": (("r1", "r2", "r3", "r4"), lambda r1, r2, r3, r4: -r1 * n**r2),
    "gaussian_bias2": (("r1", "r2"), lambda r1, r2: r1 * np.exp(-r2 * n**2)),
    "gaussian_bias3": (("r1", "r2", "r3"), lambda r1, r2, r3: r1 * np.exp(-r2 * n**r3)),
    "type1": ((), lambda: np.tile(-2 * np.log(n + 1), (5, 1))),
    "type2": ((), lambda: np.tile(-(np.log(n + 1) ** 2), (5, 1))),
    "inverse": ((), lambda: np.tile(-np.log(n + 1), (5, 1))),
    "inverse_nlogn": ((), lambda: np.tile(-np.log((n + 2) * np.log(n + 2)), (5, 1))),
}
WEIGHTS = {
    "kerple_bias_weight": (("r3", "r4"), lambda r3, r4: np.exp(-r3 * n**r4)),
    "gaussian_weight1": (("r1",), lambda r1: np.exp(-r1 * n**2)),
    "gaussian_weight2": (("r1", "r2"), lambda r1, r2: np.exp(-r1 * n**r2)),
}


@pytest.mark.parametrize("exponent", [-1.5, 0.0, 0.7, 2.0])
def test_bam_has_exponents_of_either_sign(exponent: float) -> None:
    """BAM accepts exponents of either sign, and starts as ALiBi except for its offset."""
    encoding = _build("bam", heads=8, exponent_init=exponent)
    ours = encoding.table(build_distances(N)).bias
    slope = np.array([2.0**-h for h in range(1, 9)])[:, None]
    offset = n + np.float64(np.float32(1e-5))
    # Rounding n + 1e-5 gives an error that the power multiplies by its exponent; with ln n < 12 the exponent's rounding
    # acts alike.
    _close(ours, -slope * offset**exponent, ulps=32)
    assert np.isfinite(ours.detach().numpy()).all()
    ours.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoding.parameters())


@pytest.mark.parametrize("name", BIASES)
def test_biases(name: str) -> None:
    encoding = _build(name)
    names, formula = BIASES[name]
    # At most a function of a function: 4 units each, and 2 for a product between them. type2 squares, which doubles it.
    _close(encoding.table(build_distances(N)).bias, formula(*_values(encoding, *names)), ulps=32)


RELEASED = {
    "type1": lambda y: -np.log(1 + y**2),
    "type2": lambda y: -(np.log(3 + y) ** 2),
    "inverse": lambda y: -np.log(1 + y),
    "inverse_nlogn": lambda y: -np.log((3 + y) * np.log(3 + y)),
}


@pytest.mark.parametrize("name", RELEASED)
def test_series_as_their_authors_train_them(name: str) -> None:
    """Series as their authors train them.

    OpenNLPLab/fairseq-evo, transformer_rpe.py: rpe types 4, 11, 7 and 13 of ALiBi's slopes times the distance.
    """
    slopes = np.array([2.0**-h for h in range(1, 9)])[:, None]
    encoding = _build(name, heads=8, released=True)
    _close(encoding.table(build_distances(N)).bias, RELEASED[name](slopes * n), ulps=32)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str) -> None:
    encoding = _build(name)
    names, formula = WEIGHTS[name]
    # exp(−x) inherits x's rounding: a relative error of x·2⁻²⁴, while exp(−x) itself is at most 1/x.
    _close(encoding.table(build_distances(N)).weight, formula(*_values(encoding, *names)), ulps=32)


@pytest.mark.parametrize(
    ("name", "parameter", "low", "high"),
    [
        ("kerple_log3", "r1", 0.01, 2), ("kerple_log3", "r2", 0.01, 1), ("kerple_log3", "r3", 1, 1),
        ("kerple_bias_weight", "r1", 0.01, 1), ("kerple_bias_weight", "r2", 0.01, 2),
        ("kerple_bias_weight", "r3", 0.01, 1), ("kerple_bias_weight", "r4", 0.01, 2),
        ("gaussian_bias3", "r1", 0.01, 1), ("gaussian_bias3", "r2", 0.01, 1), ("gaussian_bias3", "r3", 0.01, 2),
        ("gaussian_weight1", "r1", 0.01, 1), ("gaussian_weight2", "r2", 0.01, 2),
    ],
)  # fmt: skip
def test_start_values_fill_their_interval(name: str, parameter: str, low: float, high: float) -> None:
    values = getattr(_build(name, heads=4000), parameter).value
    assert low <= values.min()
    assert values.max() <= high
    assert abs(values.mean() - (low if low == high else high / 2)) < high * 0.03


@pytest.mark.parametrize("from_zero", [False, True])
def test_sandwich(from_zero: bool) -> None:
    """k_h (Σ_j cos(n/10000^(2j/128)) − 64), k_h = H/(8h), with j from 1, or from 0 as in products of sinusoids."""
    bias = _build("sandwich", from_zero=from_zero).table(build_distances(N)).bias
    total = sum(np.cos(n / 10000.0 ** (2 * j / 128)) for j in range(1 - from_zero, 65 - from_zero)) - 64
    _close(bias, np.stack([5 / (8 * h) * total for h in range(1, 6)]))
    if from_zero:  # its paper's appendix: products of sinusoidal vectors over 8h/H, minus the value at distance 0
        angles = np.arange(12)[:, None] / 10000.0 ** (2 * np.arange(64) / 128)
        vectors = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
        products = vectors[11] @ vectors[::-1].T
        exact = np.stack([(products - products[0]) / (8 * h / 5) for h in range(1, 6)])
        np.testing.assert_allclose(bias[:, :12].numpy(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "slope"), [("relu", 0.0), ("leaky_relu", 0.01)])
def test_fire_against_a_loop(activation: str, slope: float) -> None:
    encoding = _build("fire", heads=3, width=7, activation=activation)
    p = {name: value.detach().double() for name, value in encoding.named_parameters()}
    half = 16 / 2
    for query, key in ((TokenRange(0, 12), TokenRange(0, 12)), (TokenRange(40, 3), TokenRange(0, 43))):
        bias = encoding.dense(query, key, torch.zeros(1), ALL_HEADS).bias
        for r, i in enumerate(range(query.start, query.stop)):
            for j in range(min(i + 1, key.stop)):
                x = math.log(1 + p["c.value"] * (i - j)) / (math.log(1 + p["c.value"] * max(half, i)) + 1e-6)
                inner = p["weight1.value"][:, 0] * x + p["bias1.value"]
                hidden = torch.where(inner > 0, inner, slope * inner)
                exact = p["weight2.value"] @ hidden + p["bias2.value"]
                assert_close_in_rounding(
                    bias[:, r, j], exact, terms=7, sums=4
                )  # two logarithms, their ratio, two layers


@pytest.mark.parametrize("scaled", [False, True])
def test_cope_against_a_loop(scaled: bool) -> None:
    """q·e is added to q·k/√d as published; before checkpoint format 6 it was divided by √d = 2, too."""
    shape = AttentionDims(2, 4, 8, 16, 16)
    encoding = registry.build_encoding("cope", shape, {"positions": 5, "scaled": scaled})
    with torch.no_grad():
        encoding.vectors.value.normal_()
    q, k = torch.randn(2, 1, 2, 11, 4)
    scores = q @ k.transpose(-1, -2) / 2
    ours = encoding.contextual(q, k, scores, TokenRange(0, 11), TokenRange(0, 11), ALL_HEADS)
    e = encoding.vectors.value.double()
    for h in range(2):
        for i in range(11):
            for j in range(i + 1):
                p = sum(1 / (1 + math.exp(-scores[0, h, i, t].item())) for t in range(j, i + 1))
                p = min(p, 4.0)
                low = min(math.floor(p), 3)
                vector = e[low] * (1 - (p - low)) + e[low + 1] * (p - low)
                exact = float(q[0, h, i].double() @ vector) / (2 if scaled else 1)
                assert_close_in_rounding(
                    ours[0, h, i, j], torch.tensor(exact), terms=11, sums=4
                )  # q·k, gates, q·e, share


def test_t5_as_gpt_neox_computes_and_starts_it() -> None:
    """T5's table is multiplied by √d and initialized from Xavier's normal distribution over [buckets, heads], as in
    GPT-NeoX.
    """
    dims = AttentionDims(12, 64, 768, 128, 128)
    encoding = registry.build_encoding("t5", dims, {"root_scale": True, "xavier_init": True})
    table, distances = encoding.bias.value.detach().double(), torch.arange(16.0)
    assert 0.9 < float(table.std()) / math.sqrt(2 / (32 + 12)) < 1.1
    torch.testing.assert_close(encoding.table(distances).bias.double(), 8 * table[:16].t(), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="std"):
        registry.build_encoding("t5", dims, {"std": 0.1, "xavier_init": True})


def test_bam_with_a_location_against_its_formula() -> None:
    encoding = _build("bam", heads=3, location=True)
    n = torch.arange(40.0)
    plain = _build("bam", heads=3).table(n).bias
    assert torch.equal(encoding.table(n).bias, plain)  # the location starts at 0
    with torch.no_grad():
        encoding.location.value.copy_(torch.tensor([-1.0, 0.3, 2.0]))
        encoding.exponent.value.copy_(torch.tensor([0.7, -0.4, 1.3]))
    mu, beta, s = (
        p.value.detach().double()[:, None] for p in (encoding.location, encoding.exponent, encoding.log_scale)
    )
    # Released code: b = j − i − (e^μ − e^−μ), −(|b| + 1e-5)^β·e^α.
    b = -n.double() - (mu.exp() - (-mu).exp())
    exact = -((b.abs() + 1e-5) ** beta) * s.exp()
    torch.testing.assert_close(encoding.table(n).bias.double(), exact, rtol=1e-5, atol=1e-6)


def test_cope_starts_without_effect() -> None:
    q, k = torch.randn(2, 1, 5, 6, 8)
    assert (
        _build("cope")
        .contextual(q, k, q @ k.transpose(-1, -2), TokenRange(0, 6), TokenRange(0, 6), ALL_HEADS)
        .abs()
        .max()
        == 0
    )


def test_transformer_xl_starts_as_the_published_modules() -> None:
    """W_R is initialized from N(0, 0.02²) as in the original code, or from torch.nn.Linear's ±1/√D as in DAPE's
    module.
    """
    dims = AttentionDims(4, 64, 256, 16, 16)
    own, linear = (
        registry.build_encoding("transformer_xl", dims, options).project.weight
        for options in ({}, {"linear_init": True})
    )
    assert float(own.std()) == pytest.approx(0.02, rel=0.02)
    assert 0.999 / 16 < float(linear.abs().max()) <= 1 / 16
    assert float(linear.std()) == pytest.approx(1 / 16 / math.sqrt(3), rel=0.02)
    u = registry.build_encoding("transformer_xl", dims, {"linear_init": True}).u.value
    assert float(u.std()) == pytest.approx(0.02, rel=0.2)


def test_transformer_xl_against_a_loop() -> None:
    shape = AttentionDims(2, 4, 8, 16, 16)
    encoding = registry.build_encoding("transformer_xl", shape)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    q, k = torch.randn(2, 1, 2, 7, 4)
    ours = encoding.contextual(q, k, q @ k.transpose(-1, -2) / 2, TokenRange(0, 7), TokenRange(0, 7), ALL_HEADS)
    u, v = encoding.u.value.double(), encoding.v.value.double()
    w = encoding.project.weight.double().view(2, 4, 8)
    for h in range(2):
        for i in range(7):
            for j in range(i + 1):
                angle = (i - j) / 10000.0 ** (np.arange(4) / 4)
                r = torch.tensor(np.concatenate([np.sin(angle), np.cos(angle)]))
                qi, kj = q[0, h, i].double(), k[0, h, j].double()
                size = (u[h].abs() @ kj.abs() + (qi.abs() + v[h].abs()) @ (w[h].abs() @ r.abs())).item() / 2
                exact = (u[h] @ kj + (qi + v[h]) @ (w[h] @ r)) / 2
                assert_close_in_rounding(ours[0, h, i, j], exact, terms=8, sums=3, size=size)


def _scaled_frequency(scaling: str, m: int, half: int, base: float, options: dict[str, float], reached: int) -> float:
    """Return one frequency as defined in the papers: by wavelengths, by bases, or by the pair with a given number of
    turns.
    """
    plain, factor, length = base ** (-m / half), options.get("factor", 1.0), options.get("original_length", 16)
    if scaling == "linear":
        return plain / factor
    if scaling == "p_rope":
        return plain if m + 1 <= options["share"] * half else 0.0
    if scaling == "hope":
        return plain if 2 * math.pi / plain <= length else 0.0
    if scaling in ("ntk", "dynamic"):
        stretch = factor if scaling == "ntk" else factor * max(reached, length) / length - (factor - 1)
        return 1 / (base * stretch ** (2 * half / (2 * half - 2))) ** (2 * m / (2 * half))
    if scaling == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < length / options.get("high_freq_factor", 4.0):
            return plain
        if wavelength > length / options.get("low_freq_factor", 1.0):
            return plain / factor
        low, high = options.get("low_freq_factor", 1.0), options.get("high_freq_factor", 4.0)
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * plain / factor + smooth * plain
    pairs = [
        2 * half * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (options.get("beta_fast", 32), options.get("beta_slow", 1))
    ]
    low, high = max(math.floor(pairs[0]), 0), min(math.ceil(pairs[1]), 2 * half - 1)
    ramp = min(max((m - low) / (high - low), 0), 1)
    return plain / factor * ramp + plain * (1 - ramp)


SCALED = [
    ("p_rope", {"share": 0.75}),
    ("p_rope", {"share": 0.4}),
    ("hope", {}),
    ("hope", {"original_length": 512}),
    ("linear", {"factor": 4.0}),
    ("ntk", {"factor": 8.0}),
    ("dynamic", {"factor": 1.0, "original_length": 64}),
    ("dynamic", {"factor": 2.0, "original_length": 400}),
    ("dynamic", {"factor": 2.0, "original_length": 2000}),
    ("llama3", {"factor": 8.0, "original_length": 256}),
    ("llama3", {"factor": 32.0, "original_length": 512, "low_freq_factor": 2.0, "high_freq_factor": 6.0}),
    ("yarn", {"factor": 4.0, "original_length": 256}),
    ("yarn", {"factor": 16.0, "original_length": 4096, "beta_fast": 64.0, "beta_slow": 2.0, "attention_factor": 1.3}),
]


@pytest.mark.parametrize(("scaling", "options"), SCALED)
def test_rotary_scaling(scaling: str, options: dict[str, float]) -> None:
    half, base, place = 16, 5000.0, 1000
    encoding = registry.build_encoding(
        "rotary", AttentionDims(2, 32, 64, 16, 16), {"base": base, "scaling": scaling, **options}
    )
    exact = [_scaled_frequency(scaling, m, half, base, options, place + 5) for m in range(half)]
    np.testing.assert_allclose(encoding.compute_frequencies(length=place + 5).numpy(), exact, rtol=1e-14)
    is_one = scaling == "linear" or options.get("original_length") == 2000
    assert len({round(f * base ** (m / half), 6) for m, f in enumerate(exact)}) > (0 if is_one else 1)
    amplitude = options.get("attention_factor", 0.1 * math.log(options["factor"]) + 1) if scaling == "yarn" else 1.0
    x = torch.randn(1, 2, 5, 32)
    turned = encoding.rotate(x, TokenRange(place, 5)).double()
    angle = (place + np.arange(5))[:, None] * np.array(exact)
    a, b = x[..., :half].double().numpy(), x[..., half:].double().numpy()
    wanted = amplitude * np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )
    # A cosine, rounded once, times a number of the size of x, twice, and their sum.
    np.testing.assert_allclose(turned.numpy(), wanted, atol=8 * 2**-24 * float(x.abs().max()) * amplitude)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "xpos"}, "choose from none, p_rope, hope, linear, ntk, dynamic, llama3, yarn"),
        ({"scaling": "p_rope"}, "option share of rotary is missing"),
        ({"scaling": "p_rope", "share": 1.2}, "option share of rotary is 1.2; it must be at most 1"),
        ({"scaling": "p_rope", "share": 0.2}, "option share of rotary is 0.2; none of 4 pairs would rotate"),
        ({"scaling": "hope", "original_length": 6}, "original_length of rotary is 6; none of 4 pairs would rotate"),
        ({"scaling": "hope", "factor": 2.0}, "factor of rotary is 2.0, but scaling hope takes original_length"),
        ({"scaling": "ntk", "factor": 2.0, "fraction": 0.25}, "scaling ntk needs at least two"),
        ({"factor": 2.0}, "option factor of rotary is 2.0, but scaling none takes no options"),
        ({"scaling": "linear"}, "option factor of rotary is missing"),
        ({"scaling": "linear", "factor": 0.5}, "must be at least 1"),
        ({"scaling": "linear", "factor": "2"}, "option factor of rotary is '2'; it must be of type float"),
        ({"scaling": "yarn", "factor": 2, "original_length": 0}, "must be a positive number"),
        ({"scaling": "llama3", "factor": 2.0}, "option original_length of rotary is missing"),
        ({"scaling": "yarn", "factor": 2.0, "original_length": 64, "beta_fast": 1.0}, "must be less than beta_fast 1"),
        (
            {"scaling": "llama3", "factor": 2.0, "original_length": 64, "beta_fast": 9.0},
            "takes factor, original_length, low_freq_factor",
        ),
    ],
)
def test_rotary_scaling_that_makes_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _build("rotary", **options)

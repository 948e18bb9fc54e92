"""Analyses of models that read text, compared with loops over materialized scores that share no code with the
analyses.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from models import VOCABULARY, small_gpt
from torch import Tensor

from megatron.attention.backends.pytorch import EagerBackend
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_weights, precompute_terms
from megatron.evaluation import forward_passes
from megatron.evaluation.analysis.bias_series import compute_finite_field
from megatron.evaluation.analysis.from_text import score_maps
from megatron.evaluation.analysis.from_text.attention_entropy import measure_attention_entropy, measure_weights
from megatron.evaluation.analysis.from_text.empirical_receptive_field import AttentionMass, measure_attention_mass
from megatron.evaluation.analysis.from_text.processor_taps import measure_processor_jacobian
from megatron.evaluation.analysis.from_text.score_maps import compute_layer_maps
from megatron.evaluation.forward_passes import capture_attention, list_attention_layers, run_forward
from megatron.model.gpt import GPT
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS

LENGTH = 23
HEADS = 3


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several row blocks."""
    monkeypatch.setattr(forward_passes, "MAX_BLOCK_ELEMENTS", 5 * HEADS * LENGTH)


def windows(count: int = 2, length: int = LENGTH) -> list[np.ndarray]:
    return list(np.random.default_rng(1).integers(0, VOCABULARY, (count, length)))


def captured(model: GPT, window: np.ndarray) -> list[tuple[Tensor, Tensor]]:
    """Return queries and keys of each layer, as computed by its linear layer, [H, T, d] float64."""
    found = []

    def hook(module: object, inputs: tuple[Tensor, ...], kwargs: object = None) -> None:
        q, k = (x[:, 0].permute(1, 0, 2).double() for x in inputs[:2])
        found.append((q, k))

    handles = [attention.register_forward_pre_hook(hook) for attention in list_attention_layers(model)]
    with torch.no_grad():
        model(torch.from_numpy(window)[None])
    for handle in handles:
        handle.remove()
    return found


def pieces(model: GPT, layer: int, q: Tensor, k: Tensor, window: int | None = None) -> Iterator[dict[str, list]]:
    """Yield score, bias, processor output and attention of each row, [H][i + 1] each, from the papers' formulas."""
    attention = list_attention_layers(model)[layer]
    r1, r2 = (r().double().tolist() for r in (attention.encoding.r1, attention.encoding.r2))
    heads, length, dim = q.shape
    for i in range(length):
        first = 0 if window is None else max(0, i - window + 1)
        score = [[float(q[h, i] @ k[h, j]) / math.sqrt(dim) for j in range(i + 1)] for h in range(heads)]
        bias = [[-r1[h] * math.log1p(r2[h] * (i - j)) for j in range(i + 1)] for h in range(heads)]
        added = [[0.0] * (i + 1) for _ in range(heads)]
        if attention.processor is not None:
            seen = [[x if j >= first else 0.0 for j, x in enumerate(line)] for line in (*score, *bias)]
            added = convolved(attention.processor, seen, i + 1)
        rows = []
        for h in range(heads):
            exps = [math.exp(score[h][j] + bias[h][j] + added[h][j]) if j >= first else 0.0 for j in range(i + 1)]
            rows.append([e / math.fsum(exps) for e in exps])
        yield {"score": score, "bias": bias, "processor": added, "attention": rows}


def convolved(processor: Processor, channels: list[list[float]], columns: int) -> list[list[float]]:
    """Compute Conv2(LeakyReLU(Conv1(channels))) along the keys element by element, with zero padding."""
    weights = [p.detach().double() for p in processor.parameters()]
    (w1, b1, w2, b2), p = weights, processor.left_context

    def at(line: list[float], j: int) -> float:
        return line[j] if 0 <= j < len(line) else 0.0

    hidden = []
    for c in range(len(w1)):
        line = []
        for j in range(columns + p):
            x = float(b1[c]) + math.fsum(
                float(w1[c, g, 0, t]) * at(channel, j + t - p)
                for g, channel in enumerate(channels)
                for t in range(2 * p + 1)
            )
            line.append(x if x > 0 else 0.01 * x)
        hidden.append(line)
    return [
        [
            float(b2[h])
            + math.fsum(
                float(w2[h, c, 0, t]) * at(line, j + t - p) for c, line in enumerate(hidden) for t in range(2 * p + 1)
            )
            for j in range(columns)
        ]
        for h in range(len(w2))
    ]


CASES = [
    ("none", {}, None),
    ("cdape", {"score_processor_options": {"width": 4}}, None),
    ("none", {}, 7),
    ("cdape", {"score_processor_options": {"width": 4}}, 7),
]


def model_of(processor: str, place: dict, window: int | None) -> GPT:
    return small_gpt(LENGTH, "kerple_log", processor, attention_window=window, **place)


@pytest.mark.parametrize(("processor", "place", "window"), CASES)
def test_entropy_and_largest_weight_by_position(processor: str, place: dict, window: int | None) -> None:
    model, train_length = model_of(processor, place, window), 6
    reported: list[float] = []
    found = measure_attention_entropy(model, windows(), train_length, reported.append)
    assert reported == [0.25, 0.5, 0.75, 1.0]
    assert found.ends == (1, 3, 6, 12, LENGTH)
    starts = (0, *found.ends[:-1])
    sums = {name: np.zeros((2, HEADS, len(found.ends))) for name in ("entropy", "normalized", "largest")}
    for tokens in windows():
        for layer, (q, k) in enumerate(captured(model, tokens)):
            rows = list(pieces(model, layer, q, k, window))
            for number, (first, end) in enumerate(zip(starts, found.ends, strict=True)):
                for h in range(HEADS):
                    heads_rows = [row["attention"][h] for row in rows[first:end]]
                    entropies = [-math.fsum(a * math.log(a) for a in row if a > 0) for row in heads_rows]
                    keys = [len(row) if window is None else min(len(row), window) for row in heads_rows]
                    shares = [entropy / math.log(n) for entropy, n in zip(entropies, keys, strict=True) if n > 1]
                    sums["entropy"][layer, h, number] += np.mean(entropies) / 2
                    sums["largest"][layer, h, number] += np.mean([max(row) for row in heads_rows]) / 2
                    sums["normalized"][layer, h, number] += np.mean(shares) / 2 if shares else math.nan
                    assert found.keys[number] == pytest.approx(np.mean(keys))
    for name, expected in sums.items():
        np.testing.assert_allclose(found.values[name].numpy(), expected, atol=5e-6)
    assert found.values["unspent"].abs().max() < 1e-6
    assert (found.stderr[..., 1:] > 0).all()


@pytest.mark.parametrize(
    "place",
    [
        {"score_processor": "talking_heads"},
        {"score_processor": "mta"},
        {"score_processor": "selective"},
        {"softmax_type": "off-by-one"},
        {"pos_emb": "fox"},
    ],
    ids=lambda place: "-".join(place.values()),
)
def test_blocks_of_rows_have_the_entropy_of_the_whole(place: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy from row blocks equals entropy from the weights of all rows at once, with the inputs of the model's
    backend.
    """
    place = {"pos_emb": "rotary", "score_processor": "none", **place}
    model = small_gpt(LENGTH, place.pop("pos_emb"), place.pop("score_processor"), **place)
    found = measure_attention_entropy(model, windows(1), 6)
    monkeypatch.setattr(forward_passes, "MAX_BLOCK_ELEMENTS", 1 << 20)
    weights: dict[int, Tensor] = {}

    def keep(layer: int, inputs: AttentionInputs) -> None:
        weights[layer] = compute_weights(precompute_terms(inputs))[0].double()

    run_forward(model, windows(1)[0], keep)
    for layer, of_layer in weights.items():
        sizes = of_layer.abs()
        shares = sizes / sizes.sum(-1, keepdim=True)
        entropy = -(shares * shares.clamp(min=1e-300).log()).sum(-1)
        for number, (first, end) in enumerate(zip((0, *found.ends), found.ends, strict=False)):
            for name, expected in (
                ("entropy", entropy),
                ("largest", sizes.amax(-1)),
                ("unspent", 1 - of_layer.sum(-1)),
            ):
                of_bin = expected[:, first:end].mean(-1)
                torch.testing.assert_close(found.values[name][layer, :, number], of_bin, atol=1e-5, rtol=1e-5)


def test_entropy_includes_temperatures_and_sinks() -> None:
    """log-n scaling sharpens only rows beyond the training length; weights of sinks are normalized by their own sum."""
    sharper = {"attention_temperature": "logn", "attention_temperature_options": {"length": 6}}
    plain, sharp = (small_gpt(LENGTH, "none", "none", **place) for place in ({}, sharper))
    plain_values, sharp_values = (
        measure_attention_entropy(model, windows(), 6).values["normalized"][0] for model in (plain, sharp)
    )
    torch.testing.assert_close(plain_values[:, 1:3], sharp_values[:, 1:3])
    assert (sharp_values[:, 3:] < plain_values[:, 3:]).all()
    weights = torch.tensor([[[0.25, 0.25, 0.0], [0.1, 0.2, 0.3]]])
    found = measure_weights(weights, torch.tensor([2.0, 3.0], dtype=torch.float64))
    thirds = [1 / 6, 1 / 3, 1 / 2]
    entropy = -sum(p * math.log(p) for p in thirds)
    np.testing.assert_allclose(found["entropy"], [[math.log(2), entropy]], atol=1e-6)
    np.testing.assert_allclose(found["normalized"], [[1.0, entropy / math.log(3)]], atol=1e-6)
    np.testing.assert_allclose(found["unspent"], [[0.5, 0.4]], atol=1e-6)


@pytest.mark.parametrize(("processor", "place", "window"), CASES)
def test_mean_attention_by_distance(processor: str, place: dict, window: int | None) -> None:
    model = model_of(processor, place, window)
    near = LENGTH // 2
    reported: list[float] = []
    found = measure_attention_mass(model, windows(), reported.append)
    assert reported == sorted(reported)
    assert {0.25, 0.5, 0.75, 1.0} < set(reported)  # two layers with two windows, each in several row blocks
    expected = np.zeros((2, HEADS, near))
    for tokens in windows():
        for layer, (q, k) in enumerate(captured(model, tokens)):
            for i, row in enumerate(pieces(model, layer, q, k, window)):
                if i + 1 >= near:
                    for h in range(HEADS):
                        for t in range(near):
                            expected[layer, h, t] += row["attention"][h][i - t]
    queries = 2 * (LENGTH - near + 1)
    assert found.num_queries == queries
    # Scores and softmax are float32 and of order one.
    np.testing.assert_allclose(found.by_distance.numpy(), expected / queries, atol=2e-6)
    np.testing.assert_allclose(found.mass_beyond.numpy(), 1 - expected.sum(-1) / queries, atol=2e-6)


@pytest.mark.parametrize(("processor", "place", "window"), CASES)
def test_maps_are_means_over_visible_tokens(
    processor: str, place: dict, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, heads = 6, [2, 0]
    monkeypatch.setattr(score_maps, "MAP_SIZE", side)
    model, tokens = model_of(processor, place, window), windows()[0]
    (found,) = compute_layer_maps(model, tokens, [1], heads)
    q, k = captured(model, tokens)[1]
    rows = list(pieces(model, 1, q, k, window))
    assert found.layer == 1
    assert set(found.cells) == {"score", "bias", "attention"} | ({"processor"} if processor != "none" else set())
    for kind, cells in found.cells.items():
        for place_, head in enumerate(heads):
            for a in range(side):
                for b in range(side):
                    inside = [
                        rows[i][kind][head][j]
                        for i in range(LENGTH)
                        for j in range(max(0, i - (window or LENGTH) + 1), i + 1)
                        if i * side // LENGTH == a and j * side // LENGTH == b
                    ]
                    value = cells[place_, a, b].item()
                    if inside:
                        assert value == pytest.approx(math.fsum(inside) / len(inside), abs=5e-6)
                    else:
                        assert math.isnan(value)


def test_capturing_attention_changes_nothing() -> None:
    model, tokens = model_of("cdape", {}, None), torch.from_numpy(windows()[0])[None]
    with torch.no_grad():
        before = model(tokens)
        seen: list[tuple[int, int]] = []
        with capture_attention(model, lambda layer, rows: seen.append((layer, rows.query.length))):
            watched = model(tokens)
        assert torch.equal(before, watched)
    assert seen == [(0, LENGTH), (1, LENGTH)]
    kept = [attention.backend for attention in list_attention_layers(model)]
    with pytest.raises(ZeroDivisionError):
        run_forward(model, windows()[0], lambda layer, rows: 1 // 0)
    assert [attention.backend for attention in list_attention_layers(model)] == kept


@pytest.mark.parametrize(
    "encoding", ["rotary", "cope", "fire", "fox", "learned", "kerple_bias_weight", "transformer_xl"]
)
@pytest.mark.parametrize("processor", ["none", "dape"])
def test_every_kind_of_method_is_measured(encoding: str, processor: str) -> None:
    """Every attention weight is counted, within m or beyond it, and rows of attention maps sum to 1."""
    model = small_gpt(LENGTH, encoding, processor)
    mass = measure_attention_mass(model, windows())
    assert ((mass.by_distance.sum(-1) <= 1 + 1e-5) & (mass.by_distance >= 0).all(-1)).all()
    (found,) = compute_layer_maps(model, windows()[0], [0], [0])
    side = found.cells["attention"].shape[-1]
    assert side == LENGTH  # no pooling
    rows = found.cells["attention"][0].nan_to_num(0).sum(-1)
    torch.testing.assert_close(rows, torch.ones(side, dtype=torch.float64), atol=1e-5, rtol=0)
    has_bias = encoding in ("fire", "fox", "kerple_bias_weight")
    kinds = {"bias": has_bias, "processor": processor != "none"}
    assert set(found.cells) == {"score", "attention", *(kind for kind, there in kinds.items() if there)}


def test_fields_of_a_known_distribution() -> None:
    mass = AttentionMass(torch.tensor([[[0.5, 0.25, 0.125, 0.0625]]], dtype=torch.float64), num_queries=1)
    assert mass.mass_beyond.item() == 0.0625
    assert [mass.compute_receptive_field(0, 0, share) for share in (0.6, 0.5, 0.2, 0.07, 0.0625, 0.01)] == [
        1,
        2,
        3,
        4,
        None,
        None,
    ]
    # Cumulative attention of the four keys: 8, 12, 14 and 15 fifteenths.
    assert compute_finite_field(mass.by_distance[0, 0], [1.0, 0.5, 0.2, 0.05, 0.0]) == [0, 1, 2, 4, 4]


class Mixing(Processor):
    """Processor that returns 2·S of the head, half of the next head's score one key to the left, and three times the
    bias.
    """

    left_context = 1

    def forward(self, scores, bias, visible, heads=ALL_HEADS, bias_contribution=None):
        seen = scores.masked_fill(~visible, 0)
        left = torch.nn.functional.pad(seen, (1, 0))[..., :-1].roll(-1, 1)
        return 2 * seen + 0.5 * left + 3 * bias


def test_taps_of_a_linear_processor_are_its_weights() -> None:
    model = small_gpt(80, "kerple_log", "dape")
    for attention in list_attention_layers(model):
        shape = attention.processor.dims
        attention.processor, attention.backend = Mixing(shape, has_bias=True), EagerBackend()
    found = measure_processor_jacobian(model, windows(2, 80))
    assert [(jacobian.layer, jacobian.source) for jacobian in found] == [
        (0, "score"),
        (0, "bias"),
        (1, "score"),
        (1, "bias"),
    ]
    of_score, of_bias = found[:2]
    assert (of_score.max_offset, of_bias.max_offset) == (1, 0)
    expected = torch.zeros(HEADS, HEADS, 3, dtype=torch.float64)
    for h in range(HEADS):
        expected[h, h, 1] = 2 - 1
        expected[h, (h + 1) % HEADS, 0] = 0.5
    torch.testing.assert_close(of_score.mean, expected)
    torch.testing.assert_close(of_score.rms, expected.abs())
    torch.testing.assert_close(of_bias.mean[..., 0], 2 * torch.eye(HEADS, dtype=torch.float64))
    assert of_score.far_share == of_bias.far_share == 0


@pytest.mark.parametrize("encoding", ["kerple_log", "fox"])
def test_taps_of_cdape_where_it_is_linear(encoding: str) -> None:
    """If all hidden values are positive, the two convolutions equal one with the product of the kernels."""
    model = small_gpt(80, encoding, "cdape", score_processor_options={"width": 4, "kernel_size": 3})
    processor = list_attention_layers(model)[0].processor
    with torch.no_grad():
        processor.hidden.bias.fill_(100.0)
    w1, w2 = (w.detach().double()[:, :, 0] for w in (processor.hidden.weight, processor.output.weight))
    expected = torch.zeros(HEADS, 2 * HEADS, 5, dtype=torch.float64)
    for h in range(HEADS):
        for g in range(2 * HEADS):
            for a in range(3):
                for b in range(3):
                    expected[h, g, a + b] += sum(w2[h, c, a] * w1[c, g, b] for c in range(4))
    of_score, of_bias = measure_processor_jacobian(model, windows(1, 80))[:2]
    torch.testing.assert_close(of_score.mean, expected[:, :HEADS], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(of_bias.mean, expected[:, HEADS:], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(of_score.rms, expected[:, :HEADS].abs(), atol=1e-6, rtol=1e-5)


def test_taps_differ_where_cdape_is_nonlinear() -> None:
    model = small_gpt(80, "kerple_log", "cdape")
    found = measure_processor_jacobian(model, windows(2, 80))
    assert any((jacobian.rms > jacobian.mean.abs() + 1e-6).any() for jacobian in found)
    again = measure_processor_jacobian(model, windows(2, 80))
    assert all(torch.equal(a.mean, b.mean) for a, b in zip(found, again, strict=True))


def test_no_processor_has_no_taps() -> None:
    assert measure_processor_jacobian(small_gpt(80, "rotary", "none"), windows(1, 80)) == []

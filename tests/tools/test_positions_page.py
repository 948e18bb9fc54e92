"""docs/positions.md is current and complete, and its pictures agree with the formulas."""

import ast
import base64
import io
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread

from megatron.position import registry
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.encodings.fire import ACTIVATIONS
from megatron.position.processor import Processor
from megatron.position.rotary_scaling import SCALINGS
from tools.docs import make_docs, position_plots, positions_page
from tools.docs import position_panels as panels
from tools.docs.position_panels import CurvePanel

ROOT = Path(__file__).resolve().parents[2]
METHODS = (*registry.list_encodings(), *registry.list_processors(), *registry.list_temperatures())
FLOAT32 = 2.0**-23


@pytest.fixture(scope="module")
def page() -> str:
    state = torch.random.get_rng_state()
    made = positions_page.render_page()
    assert torch.equal(torch.random.get_rng_state(), state)
    return made


def test_page_is_current(page: str) -> None:
    assert (ROOT / positions_page.PAGE).read_text(encoding="utf-8") == page, "run: make docs"


def described(kind: str) -> dict[str, dict[str, str]]:
    """Return each method's descriptions in `megatron/position/`, from syntax trees without registry or import."""
    found = {}
    for path in (ROOT / "megatron" / "position" / kind).glob("[a-z]*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        said = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in ("formula", "source", "advice")
        }
        starts = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        options = [
            argument.arg for start in starts if "dims" in ast.unparse(start.args) for argument in start.args.kwonlyargs
        ]
        found[path.stem] = said | {f"option {name}": f"`{name}`" for name in options if name != "has_bias"}
    return found


def section_of(page: str, name: str) -> str:
    """Return a method's section of the page, with each fact on one line."""
    return page.split(f"\n### {name}\n")[1].split("\n### ")[0].replace("\n  ", " ")


def test_page_matches_the_files(page: str) -> None:
    methods = described("encodings") | described("processors") | described("temperatures")
    assert len(methods) == 37  # counted by hand: 28 encodings, 6 processors, 3 temperatures
    assert methods["rotary"]["option base"] == "`base`"
    assert methods["cdape"]["option kernel_size"] == "`kernel_size`"
    for name, said in methods.items():
        assert {"formula", "source", "advice"} <= set(said), name
        section = section_of(page, name)
        for what, text in said.items():
            assert text.strip(), (name, what)
            assert text in section, (name, what)


def test_advice_names_its_source() -> None:
    for record in registry.describe_methods([*registry.list_encodings(), *registry.list_processors()])[0]:
        papers = ("DAPE V2", "KERPLE", "Exploring Transformer Extrapolation", "arXiv:", "the paper")
        if not any(paper in record["advice"] for paper in papers):
            pytest.fail(record["name"])


def test_options_and_descriptions_match() -> None:
    methods = [
        *map(registry.load_encoding_class, registry.list_encodings()),
        *(registry.load_processor_class(name) for name in registry.list_processors() if name != "none"),
        *(registry.load_temperature_class(name) for name in registry.list_temperatures() if name != "none"),
    ]
    for method in methods:
        assert list(positions_page.read_option_meanings(method)) == list(method.options()), method


def test_option_choices_are_listed(page: str) -> None:
    for name in SCALINGS:
        meanings = section_of(page, "rotary").partition("`scaling` = none (string): ")[2]
        assert f"`{name}`" in meanings.partition("`factor`")[0]
    for choice in ACTIVATIONS:
        assert f"`{choice}`" in section_of(page, "fire")


def test_every_method_has_pictures_and_every_picture_a_method(page: str) -> None:
    shown = re.findall(r"^!\[(\w+): [^\]]+\]\((images/positions/\w+\.svg)\)$", page, flags=re.MULTILINE)
    assert {name for name, _ in shown} == set(METHODS)
    there = {path.relative_to(ROOT) for path in (ROOT / position_plots.FOLDER).iterdir()}
    assert there == {positions_page.PAGE.parent / path for _, path in shown}
    assert len(there) == len(shown)
    assert sum((ROOT / path).stat().st_size for path in there) < 25e3 * len(there)
    for path in there:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert "prefers-color-scheme:dark" in text
        assert "#0a0b" not in text, "a color of no scheme"
        assert "<image" in text or 'id="line2d_' in text


@pytest.mark.parametrize("name", ["alibi", "rotary"])
def test_pictures_are_current(name: str) -> None:
    """Pictures of two methods are current, with any matplotlibrc; drawing all takes twenty seconds."""
    with matplotlib.rc_context({"font.family": "serif", "lines.linewidth": 9.0, "axes.titlesize": 30}):
        for number, panel in enumerate(panels.build_encoding_panels(panels.build_encoding(name))[0], start=1):
            picture = (ROOT / position_plots.get_picture_path(name, number)).read_bytes()
            assert make_docs._look_equal(picture, position_plots.draw_panel(panel)), "run: make docs"
            assert b"font-family: " not in picture


def test_same_pictures_every_time() -> None:
    """Pictures are reproducible; test_page_is_current does the same for the page."""
    state = torch.random.get_rng_state()
    first, second = (
        [position_plots.draw_panel(panel) for panel in panels.build_processor_panels("cdape")[0]] for _ in range(2)
    )
    assert first == second
    assert all(map(make_docs._look_equal, first, second))
    assert not make_docs._look_equal(first[1], first[2])
    doubled = CurvePanel("t", {"a": torch.tensor([0.0, 0.04])}), CurvePanel("t", {"a": torch.tensor([0.0, 0.08])})
    assert not make_docs._look_equal(*map(position_plots.draw_panel, doubled)), "the scale is another"
    encoded = make_docs.EMBEDDED_MAP.findall(first[1].decode())[0]
    assert imread(io.BytesIO(base64.b64decode(encoded)), format="png").shape[:2] == (64, 64)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kerple_log", "24 for all layers, 288 with a set per layer"),
        ("t5", f"{32 * 12} for all layers, {12 * 32 * 12:,} with a set per layer"),
        ("learned", f"{512 * 768:,}\n"),
        ("alibi", "**Parameters:** none"),
        # Conv1 2H·W·k + W, Conv2 W·H·k + H, with H = 12, W = 32, k = 3
        ("cdape", f"{24 * 32 * 3 + 32 + 32 * 12 * 3 + 12:,} in each layer ("),
        ("cdape", f"; with an encoding that has no bias, {12 * 32 * 3 + 32 + 32 * 12 * 3 + 12:,} ("),
        ("cdape", "keys up to 2 apart"),  # two kernels of 3
        ("dape", "mixes heads, each key separately"),
        ("ssmax_prior", "mixes neither heads nor keys"),  # a factor for each head
        ("kerple_bias_weight", "gives a bias and a weight"),
        ("fire", "not relative"),
        ("rotary", "**Also called:** `rope`, `roformer`"),
        (
            "rotary",
            f"{2 * 12 * (64 + 64):,} FLOPs forward per query, key and layer for the products with k and v, as with",
        ),
        ("pope", f"{2 * 12 * (2 * 64 + 64):,} FLOPs forward per query, key and layer"),
        # Two FLOPs per multiply-add, 12 heads: u·k of 512 keys, and d of W_R R for each
        ("transformer_xl", f"; {2 * 12 * 64 * 512:,} more per query and layer if it sees 512 keys"),
        ("llama4", f"{12 * 64} FLOPs forward per query and layer"),
        ("kerple_bias_weight", "r\\*_below"),
    ],
)
def test_counts_and_traits(name: str, text: str, page: str) -> None:
    assert text in section_of(page, name)


def _lines(name: str, panel: int = 0) -> dict[str, np.ndarray]:
    found = panels.build_encoding_panels(panels.build_encoding(name))[0][panel]
    return {label: values.double().numpy() for label, values in found.lines.items()}


N = np.arange(panels.MAX_DISTANCE, dtype=np.float64)


def test_bias_curves_are_the_bias() -> None:
    found = _lines("alibi")
    # 12 heads: 2^-1 … 2^-8, then heads 1, 3, 5 and 7 of 16.
    for head, slope in ((1, 2.0**-1), (4, 2.0**-4), (8, 2.0**-8), (12, 2.0**-3.5)):
        np.testing.assert_allclose(found[f"head {head}"], -slope * N, rtol=2 * FLOAT32)
    np.testing.assert_allclose(_lines("type1")["every head"], -2 * np.log(N + 1), rtol=4 * FLOAT32)


def test_different_heads_have_separate_curves() -> None:
    """Heads with differences have separate curves: each head of FoPE has its own coefficients; rotary's are equal."""
    curves = _lines("fope")
    assert list(curves) == ["head 1", "head 8"]
    assert abs(curves["head 1"] - curves["head 8"]).max() > 0.01
    shown = panels.build_encoding_panels(panels.build_encoding("fope"))[0]
    assert [panel.title.rpartition(", ")[2] for panel in shown[1:]] == ["head 1", "head 8"]
    assert list(_lines("rotary")) == ["every head"]


def test_rotary_curve_is_the_mean_of_cosines() -> None:
    frequencies = 10000.0 ** (-np.arange(32) / 32)
    expected = np.cos(N[:, None] * frequencies).mean(1)
    # 64 products of float32 numbers of size 1/64 or less, each rounded at most four times
    np.testing.assert_allclose(_lines("rotary")["every head"], expected, atol=8 * FLOAT32)


def test_sinusoidal_curve_is_the_mean_of_cosines() -> None:
    frequencies = 10000.0 ** (-np.arange(384) / 384)
    expected = np.cos(N[:, None] * frequencies).mean(1)
    np.testing.assert_allclose(_lines("sinusoidal")["from i = 2,047"], expected, atol=16 * FLOAT32)


def test_without_hooks_every_visible_key_gets_the_same() -> None:
    curves, square = panels.build_encoding_panels(panels.build_encoding("none"))[0]
    np.testing.assert_allclose(curves.lines["i = 511"], np.full(512, 1 / 512), rtol=4 * FLOAT32)
    row = square.values[9]
    np.testing.assert_allclose(row[:10], np.full(10, 0.1), rtol=4 * FLOAT32)
    assert row[10:].isnan().all()


def test_maps_are_the_curves_along_diagonals() -> None:
    curves, first, _ = panels.build_encoding_panels(panels.build_encoding("kerple_log"))[0]
    bias = curves.lines["head 1"].double().numpy()
    i, j = np.tril_indices(panels.MAP_SIZE)
    np.testing.assert_allclose(first.values.numpy()[i, j], np.exp(bias[i - j]), rtol=16 * FLOAT32)


def test_temperature_curves_are_the_factors() -> None:
    (curve,) = panels.build_temperature_panels(registry.build_temperature("llama4", panels.SHAPE))
    (line,) = curve.lines.values()
    rows = np.arange(panels.MAX_ROW)
    expected = 1 + 0.1 * np.log(1 + np.floor((rows + 1) / 8192))
    np.testing.assert_allclose(line.double().numpy(), expected, rtol=4 * FLOAT32)


def test_a_zero_initialized_term_is_perturbed_and_reported() -> None:
    encoding = panels.build_encoding("cope")
    shown, note = panels.build_encoding_panels(encoding)
    assert "zero at the start" in note
    line = shown[0].lines["head 1"]
    # Gates of about 1/2 each reach the 63rd position near n = 126 and remain there.
    assert line[:100].unique().numel() == 100
    assert line[300:].unique().numel() == 1
    assert panels.build_encoding_panels(panels.build_encoding("transformer_xl"))[1] == ""


@pytest.mark.parametrize(("options", "reach"), [({"kernel_size": 1}, 0), ({}, 2), ({"kernel_size": 7}, 6)])
def test_reach_is_that_of_two_kernels(options: dict, reach: int) -> None:
    processor = panels.build_seeded(lambda: registry.build_processor("cdape", panels.SHAPE, options, has_bias=False))
    assert panels.measure_context(processor) == (reach, True)


class Everything(Encoding):
    """Encoding that implements every hook."""

    adds_bias = multiplies_scores = True

    formula = "a | b"
    source = "nobody 2000"
    advice = "Never (KERPLE)."

    def embed(self, tokens, like):
        return tokens.positions().to(like.dtype)[:, None].expand(-1, self.dims.hidden_size) + 1

    def rotate(self, x, tokens):
        return -x

    def dense(self, query, key, like, heads):
        n = (query.positions()[:, None] - key.positions()[None, :]).clamp(min=0).float()
        every = torch.arange(1.0, self.dims.num_heads + 1)[heads, None, None] * n
        return ScoreTerms(bias=-every, weight=1 / (1 + every))

    def contextual(self, q, k, scores, query, key, heads):
        return 2 * scores


class Doubled(Processor):
    """Processor that adds its input once more."""

    formula = "2·(S + B)"
    parameters_summary = "none"
    source = "nobody 2000"
    advice = "Never (KERPLE)."

    def forward(self, scores, bias, visible, heads=slice(None), bias_contribution=None, first_columns=None):
        return 2 * (scores if bias is None else scores + bias)[:, heads]

    def flops_per_score(self):
        return 1.0


def test_a_new_file_has_its_section_and_picture_without_an_edit_here(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"everything": Everything, "doubled": Doubled}
    for kind in ("encoding", "processor"):
        find, known = (
            getattr(registry, f"load_{kind}_class"),
            {"encoding": ["alibi", "kerple_log"], "processor": ["cdape"]}[kind],
        )
        monkeypatch.setattr(registry, f"load_{kind}_class", lambda name, find=find: classes.get(name) or find(name))
        new = "everything" if kind == "encoding" else "doubled"
        monkeypatch.setattr(registry, f"list_{kind}s", lambda names=(*known, new): list(names))
    page = positions_page.render_page()
    section = page.split("\n### everything\n")[1].split("\n### ")[0]
    assert "`embed`, adds to the embeddings; `rotate`, rotates queries and keys; `dense`" in section
    assert "images/positions/everything_1.svg" in section
    assert "| [`everything`](#everything) | `a \\| b` |" in page
    assert "mixes neither heads nor keys" in page.split("\n### doubled\n")[1]
    shown, note = panels.build_encoding_panels(panels.build_encoding("everything"))
    assert [panel.title.split(",")[0] for panel in shown if isinstance(panel, panels.CurvePanel)] == [
        "cosine of p(i) and p(i − n)",
        "q·k/|q||k| of equal vectors",
        "bias over distance",
        "weight over distance",
        "contextual term",
    ]
    assert note == ""
    np.testing.assert_array_equal(shown[4].lines["head 8, i = 511"], -8 * N[:512])
    assert all(position_plots.draw_panel(panel).startswith(b"<?xml") for panel in shown[:2])

"""SVG pictures of docs/positions.md, one for each panel of a method: `make docs`.

Each panel is a separate file, so that a page can arrange them according to its width. Colors follow the HTML pages and
the reader's light or dark scheme. The files contain no dates or versions, so that equal numbers give equal files.
"""

import base64
import io
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from megatron.position import registry
from megatron.reports.html_page import TEMPLATES_FOLDER
from megatron.reports.plots import DASHES
from tools.docs import position_panels as panels
from tools.docs.position_panels import CurvePanel, MapPanel, Panel

FOLDER = Path("docs/images/positions")
MIN_BIAS = -20.0
"""Lower limit of a displayed bias: exp(−20) is a factor of 2·10⁻⁹."""
MIN_FACTOR = 1e-4
MAX_PIXELS = 256
"""Largest side of a drawn matrix in pixels; larger matrices are subsampled."""
SIZE = (3.3, 2.8)
"""Size of a panel in inches: 317 pixels wide, which fits a phone."""
SIGNED_ENDS = ("#2f7fc8", "#d9532c")
"""Colors of the smallest and the largest value; zero has the color of the background."""
SCHEME_COLORS = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--(\w+): light-dark\((#\w+), (#\w+)\)", (TEMPLATES_FOLDER / "style.css").read_text(encoding="utf-8")
    )
}
"""Colors of our HTML pages by name: (light scheme, dark scheme)."""
LINE_COLORS = ("c0", "c1", "c2", "c3", "c4", "c5")
_PLACEHOLDERS = {name: f"#0a0b{index:02x}" for index, name in enumerate(SCHEME_COLORS)}
"""Placeholder of each scheme color while matplotlib draws."""


def get_picture_path(name: str, number: int) -> Path:
    """Return the path of a method's panel; the first has number 1."""
    return FOLDER / f"{name}_{number}.svg"


def draw_panel(panel: Panel) -> bytes:
    """Draw a panel as SVG."""
    text, soft, strong = (_PLACEHOLDERS[name] for name in ("text", "soft", "strong"))
    settings = {
        "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "positions", "axes.unicode_minus": True,
        "text.color": text, "axes.labelcolor": soft, "axes.edgecolor": strong, "xtick.color": strong,
        "ytick.color": strong, "xtick.labelcolor": soft, "ytick.labelcolor": soft, "axes.facecolor": "none",
        "figure.facecolor": _PLACEHOLDERS["ground"],
    }  # fmt: skip
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **settings}):  # independent of a user's matplotlibrc
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        (_draw_curves if isinstance(panel, CurvePanel) else _draw_map)(figure, axes, panel)
        axes.set_title(panel.title, loc="left", x=0 if isinstance(panel, CurvePanel) else -0.1, fontsize=9.5, pad=14)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return _follow_scheme(content.getvalue()).encode()


def _draw_curves(figure: Figure, axes: Axes, panel: CurvePanel) -> None:
    for index, (label, values) in enumerate(panel.lines.items()):
        color, dash = _PLACEHOLDERS[LINE_COLORS[index % len(LINE_COLORS)]], DASHES[index % len(DASHES)]
        style = {"color": color, "linestyle": dash, "label": label, "linewidth": 1.4}
        axes.plot(np.arange(len(values)), values.double().numpy(), **style)
    if panel.logarithmic:
        axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
        axes.xaxis.set_major_locator(FixedLocator([0, 1, 4, 16, 64, 256, 1024, 4096, 16384]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}"))
        trained = panels.SHAPE.train_length
        axes.axvline(trained, color=_PLACEHOLDERS["strong"], linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            "training length", (trained, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=7.5, color=_PLACEHOLDERS["soft"],
        )  # fmt: skip
    lowest = min(float(values.min()) for values in panel.lines.values())
    highest = max(float(values.max()) for values in panel.lines.values())
    if panel.clips_low_values and lowest < MIN_BIAS:
        axes.set_ylim(MIN_BIAS, highest + 0.05 * (highest - MIN_BIAS))
    axes.set_xlim(left=0, right=panel.max_x)
    axes.set_xlabel(panel.x_label)
    axes.grid(axis="y", color=_PLACEHOLDERS["line"], linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_map(figure: Figure, axes: Axes, panel: MapPanel) -> None:
    step = -(-max(panel.values.shape) // MAX_PIXELS)
    values = panel.values[::step, ::step].double().numpy()
    top = max(float(np.nanmax(np.abs(values))), 1e-12)
    if panel.scale == "decades":
        faintest = float(np.nanmin(values))
        # Within a decade, a logarithmic scale would show a single color.
        near = 0.1 * top < faintest < top
        norm = Normalize(faintest, top) if near else LogNorm(MIN_FACTOR, max(1.0, top), clip=True)
        colors: Colormap = matplotlib.colormaps["viridis"].resampled(65)  # few colors keep files small
    else:
        norm, colors = Normalize(-top, top), _build_signed_colors()
    row, column = panel.first
    height, width = panel.values.shape
    extent = (column - 0.5, column + width - 0.5, row + height - 0.5, row - 0.5)
    shown = axes.imshow(values, cmap=colors, norm=norm, extent=extent, aspect="auto", interpolation="none")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    trained = panels.SHAPE.train_length
    if height > trained:
        for line in (axes.axhline, axes.axvline):
            line(trained, color=_PLACEHOLDERS["strong"], linewidth=0.8, linestyle=(0, (4, 3)))
        axes.xaxis.set_major_locator(FixedLocator([0, trained, 2 * trained]))
        axes.yaxis.set_major_locator(FixedLocator([0, trained, 2 * trained]))
    bar = figure.colorbar(shown, ax=axes, fraction=0.05, pad=0.02)
    bar.ax.tick_params(labelsize=7.5)


def _build_signed_colors() -> ListedColormap:
    """Build a color map from one color over transparent to the other.

    An odd number of entries makes zero transparent.
    """
    shares = np.linspace(-1, 1, 65)
    low, high = map(matplotlib.colors.to_rgb, SIGNED_ENDS)
    return ListedColormap([(*(low if share < 0 else high), abs(share)) for share in shares])


def _follow_scheme(svg: str) -> str:
    """Post-process matplotlib's SVG: both color schemes, the system's font, shorter numbers and smaller maps."""
    for name, placeholder in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    used = [name for name in SCHEME_COLORS if f"var(--{name})" in svg]
    light, dark = ("".join(f"--{name}:{SCHEME_COLORS[name][index]};" for name in used) for index in (0, 1))
    style = f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}text{{font-family:sans-serif}}"
    svg = re.sub(r" *<metadata>.*?</metadata>\n", "", svg, flags=re.DOTALL).replace("</style>", f"{style}</style>", 1)
    svg = re.sub(r" *font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(?<= d=\")[^\"]+", lambda found: re.sub(r"-?\d+\.\d+", _shorten_number, found[0]), svg)
    return re.sub(r"(?<=data:image/png;base64,)[^\"]+", lambda found: _pack_map(found[0]), svg)


def _shorten_number(found: re.Match[str]) -> str:
    """Round a number to a hundredth of a point."""
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _pack_map(encoded: str) -> str:
    """Convert a base64 PNG to palette colors, which takes a fraction of the size of RGBA."""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA"))
    palette, indices = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    image = Image.fromarray(indices.reshape(pixels.shape[:2]).astype(np.uint8), mode="P")
    image.putpalette(palette.tobytes(), "RGBA")
    packed = io.BytesIO()
    image.save(packed, format="png", optimize=True, compress_level=9)
    return base64.b64encode(packed.getvalue()).decode("ascii")


def draw_pictures() -> dict[Path, bytes]:
    """Draw all pictures; return their contents by path in the repository."""
    shown = {name: panels.build_encoding_panels(panels.build_encoding(name))[0] for name in registry.list_encodings()}
    shown |= {name: panels.build_processor_panels(name)[0] for name in registry.list_processors()}
    shown |= {
        name: panels.build_temperature_panels(registry.build_temperature(name, panels.SHAPE))
        for name in registry.list_temperatures()
    }
    return {
        get_picture_path(name, number): draw_panel(panel)
        for name, own in shown.items()
        for number, panel in enumerate(own, start=1)
    }

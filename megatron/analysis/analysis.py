"""The interface of an analysis, and how they are found: one file each, as encodings are.

An analysis measures each model by itself, and shows all of them side by side. Measures are numbers that know nothing of
drawing; pictures are drawn from them when the page is made. What needs the bias alone is in `from_bias/`, and what lets
a trained model read a text, or the task that it learned, in `from_text/`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron.options.commands import AnalysisOptions
from megatron.reports.charts import Chart
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megatron.config.schema import Config
    from megatron.model.gpt import GPT
    from megatron.position.encoding import Encoding


class NotApplicable(Exception):
    """An analysis has nothing to measure of a model; the message says why, as a sentence for the page."""


@dataclass(frozen=True)
class LayerEncoding:
    """An encoding with a window, and the layers that it belongs to."""

    encoding: Encoding
    layers: tuple[int, ...] | None
    """None where all layers share it."""
    window: int | None
    """Every token sees the last so many keys only."""

    @property
    def name(self) -> str:
        if self.layers is None:
            return "all layers"
        return f"layer{'s' if len(self.layers) > 1 else ''} {', '.join(map(str, self.layers))}"

    @property
    def has_bias(self) -> bool:
        """Does anything depend on the distance? A window is a bias of −∞ outside it."""
        hooks = ("table", "dense")  # what a layer's input decides is no function of the distance
        is_of_positions = any(type(self.encoding).overrides_hook(hook) for hook in hooks)
        return (self.encoding.adds_bias and is_of_positions) or self.window is not None


@dataclass(frozen=True)
class AnalysisContext:
    """A model that is analyzed, and the windows that it reads."""

    name: str
    """Of its row, curve or picture."""
    config: Config
    encodings: Sequence[LayerEncoding]
    """One if all layers share it, else one for each layer, or for each kind of layers that share it."""
    options: AnalysisOptions
    lengths: Sequence[int]
    """Of windows, in tokens, ascending."""
    model: GPT | None = None
    """In evaluation mode; None for a configuration that was not trained."""
    windows: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)
    """Length in tokens → the windows; those of a text end at the same positions at all lengths."""
    progress: Callable[[float], None] = lambda fraction: None
    """Called with the fraction of a long analysis that is done."""

    @property
    def trained_model(self) -> GPT:
        """The model. Raises NotApplicable if there is none."""
        if self.model is None:
            raise NotApplicable("It is a configuration that was not trained.")
        return self.model

    @property
    def distance_encodings(self) -> Sequence[LayerEncoding]:
        """Its encodings, where distances alone decide the bias. Raises NotApplicable if what a layer reads does."""
        if any(type(layer.encoding).overrides_hook("gate") for layer in self.encodings):
            raise NotApplicable("What a layer reads decides its bias, which is no function of the distance.")
        return self.encodings

    @property
    def finite_encodings(self) -> Sequence[LayerEncoding]:
        """Those, if no parameter is infinite or no number: sums of it say nothing. Raises NotApplicable."""
        for layer in self.distance_encodings:
            for name, parameter in layer.encoding.named_parameters():
                if not bool(parameter.isfinite().all()):
                    raise NotApplicable(f"Its encoding's {name}, of {layer.name}, is not finite.")
        return self.encodings

    @property
    def biased_encodings(self) -> Sequence[LayerEncoding]:
        """Those with a bias or a window. Raises NotApplicable if there is none."""
        found = [layer for layer in self.distance_encodings if layer.has_bias]
        if not found:
            raise NotApplicable("It adds no bias.")
        return found

    @property
    def readable_windows(self) -> Mapping[int, Sequence[np.ndarray]]:
        """The windows that it has positions for. Raises NotApplicable if there are none."""
        max_length = self.trained_model.max_length
        if max_length is None:
            return self.windows
        readable = {length: windows for length, windows in self.windows.items() if length <= max_length}
        if not readable:
            raise NotApplicable(f"Its positions end at {max_length:,}, before the shortest length.")
        return readable

    @property
    def drawn_layers(self) -> list[int]:
        """Layers whose maps are drawn."""
        count = self.config.model.num_layers
        if self.options.layers is not None:
            return [layer for layer in self.options.layers if layer < count]
        return sorted({0, count // 2, count - 1})

    @property
    def drawn_heads(self) -> list[int]:
        """Heads whose maps are drawn."""
        count = self.config.model.num_attention_heads
        if self.options.heads is not None:
            return [head for head in self.options.heads if head < count]
        return sorted({0, count - 1})


@dataclass(frozen=True)
class Figure:
    """A PNG in two widths."""

    alt: str
    draw: Callable[[bool], bytes]
    """Draws it; True for telephones."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    """The first names the rows."""
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False
    """Shown when it is clicked on, under its caption."""


Block = str | Figure | Chart | Table
"""A part of the page; a string is a paragraph. Charts that follow each other stand side by side."""

MAX_UNFOLDED_ROWS = 12
"""Tables of heads with more rows are folded."""

HeadRow = tuple[str, str, int, Sequence[str]]
"""A model, a layer, a head, and the cells of its row."""


def build_head_table(columns: Sequence[str], heads: Iterable[HeadRow], caption: str) -> Table:
    """A table in which neighbouring heads of a model's layer share a row if they have the same cells.

    Args:
        columns: names of the cells.
        heads: in the order of the table.
        caption: under it.
    """
    rows = []
    for (model, layer, cells), group in groupby(heads, key=lambda head: (head[0], head[1], tuple(head[3]))):
        indices = [head for _, _, head, _ in group]
        label = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        rows.append([model, layer, label, *cells])
    return Table(["method", "layer", "heads", *columns], rows, caption, folded=len(rows) > MAX_UNFOLDED_ROWS)


def format_triangle(values: Tensor, digits: int) -> list[list[float | None]]:
    """A map [queries, keys] up to its diagonal, so many digits of each number; None where no key is seen."""
    return [
        [float(f"{x:.{digits}g}") if x == x else None for x in row[: i + 1]] for i, row in enumerate(values.tolist())
    ]


class Analysis:
    """Base of all analyses. A subclass measures one thing and describes itself."""

    order: ClassVar[int]
    """Its place on the page."""
    title: ClassVar[str]
    description: ClassVar[str]
    """What is measured, in one to four sentences, with the source."""
    data_format: ClassVar[Literal["csv", "json"]] = "csv"
    """Of its file; JSON where a row has lists."""

    def measure(self, context: AnalysisContext) -> Any:
        """The result of one model. Raises NotApplicable."""
        raise NotImplementedError

    def render_blocks(self, results: Mapping[str, Any], names: Sequence[str]) -> list[Block]:
        """The page's part.

        Args:
            results: of each model by name; there is at least one.
            names: of all models on the page, so that each has one colour in all pictures.
        """
        raise NotImplementedError

    def list_rows(self, result: Any) -> Iterable[Mapping[str, object]]:
        """The result of one model as rows of the analysis' file."""
        raise NotImplementedError


ANALYSIS_FOLDERS = ("from_bias", "from_text")


def list_analysis_names(*folders: str) -> list[str]:
    """Names of the analyses in some of the folders, or all, without importing any."""
    root = Path(__file__).parent
    paths = [path for folder in folders or ANALYSIS_FOLDERS for path in (root / folder).glob("*.py")]
    return sorted(path.stem for path in paths if path.stem != "__init__")


def is_data_file(path: Path) -> bool:
    """Is a file one that `AnalysisResults` wrote: rows that begin with the method's name?"""
    return path.is_file() and path.read_bytes()[:16].startswith((b"method,", b'[\n{"method":', b"[\n]\n"))


def needs_text(name: str) -> bool:
    """Does this analysis let trained models read something?"""
    return name in list_analysis_names("from_text")


@cache
def load_analyses() -> dict[str, Analysis]:
    """All analyses by name, in the order of the page."""
    analyses: dict[str, Analysis] = {}
    for folder in ANALYSIS_FOLDERS:
        for name in list_analysis_names(folder):
            module = importlib.import_module(f"megatron.analysis.{folder}.{name}")
            classes = [
                value
                for value in vars(module).values()
                if isinstance(value, type) and issubclass(value, Analysis) and value.__module__ == module.__name__
            ]
            assert len(classes) == 1, f"{module.__name__} must define one Analysis, it defines {len(classes)}"
            analyses[name] = classes[0]()
    return dict(sorted(analyses.items(), key=lambda item: item[1].order))


def check_analysis_names(only: Sequence[str] | None) -> None:
    """Raises UserError for a name that no analysis has."""
    for name in only or ():
        if name not in list_analysis_names():
            raise UserError(f"--only: there is no analysis {name!r}; {format_choices(name, list_analysis_names())}")

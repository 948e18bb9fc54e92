"""Interface and discovery of analyses. Each analysis has its own file, as encodings do.

An analysis measures each model separately, and shows all models side by side. Measuring does not depend on drawing:
figures are drawn from the measured numbers when the page is made. Analyses in `from_bias/` need only the bias. Analyses
in `from_text/` run a trained model on a text or on the task that it was trained on.
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
from megatron.utils.formatting import format_choices

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megatron.config.schema import Config
    from megatron.model.gpt import GPT
    from megatron.position.encoding import Encoding


class NotApplicable(Exception):
    """Raised if an analysis does not apply to a model. The message is a sentence for the page."""


@dataclass(frozen=True)
class LayerEncoding:
    """Encoding with a window, and the layers that use it."""

    encoding: Encoding
    layers: tuple[int, ...] | None
    """Layer indices, or None if all layers share the encoding."""
    window: int | None
    """Number of most recent keys that each token attends to, or None if unlimited."""

    @property
    def name(self) -> str:
        if self.layers is None:
            return "all layers"
        return f"layer{'s' if len(self.layers) > 1 else ''} {', '.join(map(str, self.layers))}"

    @property
    def has_bias(self) -> bool:
        """True if the bias depends on the distance. A window counts as a bias of −∞ outside it."""
        hooks = ("table", "dense")  # a bias computed from a layer's input is not a function of the distance
        is_of_positions = any(type(self.encoding).overrides_hook(hook) for hook in hooks)
        return (self.encoding.adds_bias and is_of_positions) or self.window is not None


@dataclass(frozen=True)
class AnalysisContext:
    """Model to analyze, with the windows that it reads."""

    name: str
    """Name of its row, curve, or figure."""
    config: Config
    encodings: Sequence[LayerEncoding]
    """Encodings: one if all layers share it, else one for each layer, or for each group of layers that share one."""
    options: AnalysisOptions
    lengths: Sequence[int]
    """Window lengths in tokens, ascending."""
    model: GPT | None = None
    """Model in evaluation mode, or None for an untrained configuration."""
    windows: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)
    """Length in tokens → windows. Windows of a text end at the same positions at all lengths."""
    progress: Callable[[float], None] = lambda fraction: None
    """Callback that receives the completed fraction of a long analysis."""

    @property
    def trained_model(self) -> GPT:
        """Trained model. Raises NotApplicable if there is none."""
        if self.model is None:
            raise NotApplicable("It is an untrained configuration.")
        return self.model

    @property
    def distance_encodings(self) -> Sequence[LayerEncoding]:
        """Encodings whose bias depends only on distances. Raises NotApplicable if it depends on a layer's input."""
        if any(type(layer.encoding).overrides_hook("gate") for layer in self.encodings):
            raise NotApplicable("Its bias depends on the layer's input, and is not a function of the distance.")
        return self.encodings

    @property
    def finite_encodings(self) -> Sequence[LayerEncoding]:
        """Encodings with finite parameters, which sums require. Raises NotApplicable if a parameter is not finite."""
        for layer in self.distance_encodings:
            for name, parameter in layer.encoding.named_parameters():
                if not bool(parameter.isfinite().all()):
                    raise NotApplicable(f"The parameter {name} of {layer.name} is not finite.")
        return self.encodings

    @property
    def biased_encodings(self) -> Sequence[LayerEncoding]:
        """Encodings with a bias or a window. Raises NotApplicable if there are none."""
        found = [layer for layer in self.distance_encodings if layer.has_bias]
        if not found:
            raise NotApplicable("It adds no bias.")
        return found

    @property
    def readable_windows(self) -> Mapping[int, Sequence[np.ndarray]]:
        """Windows within the model's maximum length. Raises NotApplicable if there are none."""
        max_length = self.trained_model.max_length
        if max_length is None:
            return self.windows
        readable = {length: windows for length, windows in self.windows.items() if length <= max_length}
        if not readable:
            raise NotApplicable(f"Its maximum length, {max_length:,}, is below the shortest length.")
        return readable

    @property
    def drawn_layers(self) -> list[int]:
        count = self.config.model.num_layers
        if self.options.layers is not None:
            return _resolve_indices(self.options.layers, count)
        return sorted({0, count // 2, count - 1})

    @property
    def drawn_heads(self) -> list[int]:
        count = self.config.model.num_attention_heads
        if self.options.heads is not None:
            return _resolve_indices(self.options.heads, count)
        return sorted({0, count - 1})


def _resolve_indices(indices: Sequence[int], count: int) -> list[int]:
    """Return the different indices that exist among `count` elements, with negative ones counted from the end."""
    return list(dict.fromkeys(range(count)[index] for index in indices if -count <= index < count))


@dataclass(frozen=True)
class Figure:
    """PNG figure in two widths."""

    alt: str
    draw: Callable[[bool], bytes]
    """Function that renders the PNG; its argument is True for phones."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    """Column headers, starting with that of the row names."""
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False
    """True if the table is collapsed under its caption."""


Block = str | Figure | Chart | Table
"""Block of the page; a string is a paragraph. Consecutive charts are placed side by side."""

MAX_UNFOLDED_ROWS = 12
"""Maximum number of rows of a table of heads that is not collapsed."""

HeadRow = tuple[str, str, int, Sequence[str]]
"""Model, layer, head, and cells of a row."""


def build_head_table(columns: Sequence[str], heads: Iterable[HeadRow], caption: str) -> Table:
    """Build a table of heads. Consecutive heads of a layer share a row if their cells are equal.

    Args:
        columns: headers of the cells.
        heads: rows, in order.
        caption: caption of the table.
    """
    rows = []
    for (model, layer, cells), group in groupby(heads, key=lambda head: (head[0], head[1], tuple(head[3]))):
        indices = [head for _, _, head, _ in group]
        label = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        rows.append([model, layer, label, *cells])
    return Table(["method", "layer", "heads", *columns], rows, caption, folded=len(rows) > MAX_UNFOLDED_ROWS)


def format_triangle(values: Tensor, digits: int) -> list[list[float | None]]:
    """Format the lower triangle of a map [queries, keys] with `digits` significant digits; None for masked keys."""
    return [
        [float(f"{x:.{digits}g}") if x == x else None for x in row[: i + 1]] for i, row in enumerate(values.tolist())
    ]


class Analysis:
    """Base class of analyses. A subclass measures one quantity and describes itself."""

    order: ClassVar[int]
    """Sort key on the page."""
    title: ClassVar[str]
    description: ClassVar[str]
    """Description of the measurement in one to four sentences, with its source."""
    data_format: ClassVar[Literal["csv", "json"]] = "csv"
    """Format of the data file; JSON if rows contain lists."""

    def measure(self, context: AnalysisContext) -> Any:
        """Measure one model. Raises NotApplicable."""
        raise NotImplementedError

    def render_blocks(self, results: Mapping[str, Any], names: Sequence[str]) -> list[Block]:
        """Render this analysis's section of the page.

        Args:
            results: results by model name; not empty.
            names: names of all models on the page, so that each has the same color in all figures.
        """
        raise NotImplementedError

    def list_rows(self, result: Any) -> Iterable[Mapping[str, object]]:
        """Return the result of one model as rows of the data file."""
        raise NotImplementedError


ANALYSIS_FOLDERS = ("from_bias", "from_text")


def list_analysis_names(*folders: str) -> list[str]:
    """List the names of the analyses in the given folders, or in all folders, without importing them."""
    root = Path(__file__).parent
    paths = [path for folder in folders or ANALYSIS_FOLDERS for path in (root / folder).glob("*.py")]
    return sorted(path.stem for path in paths if path.stem != "__init__")


def is_data_file(path: Path) -> bool:
    """Return True if a file was written by `AnalysisResults`: its rows begin with the method's name."""
    return path.is_file() and path.read_bytes()[:16].startswith((b"method,", b'[\n{"method":', b"[\n]\n"))


def needs_text(name: str) -> bool:
    """Return True if an analysis runs trained models on input windows."""
    return name in list_analysis_names("from_text")


@cache
def load_analyses() -> dict[str, Analysis]:
    """Load all analyses by name, in page order."""
    analyses: dict[str, Analysis] = {}
    for folder in ANALYSIS_FOLDERS:
        for name in list_analysis_names(folder):
            module = importlib.import_module(f"megatron.evaluation.analysis.{folder}.{name}")
            classes = [
                value
                for value in vars(module).values()
                if isinstance(value, type) and issubclass(value, Analysis) and value.__module__ == module.__name__
            ]
            assert len(classes) == 1, f"{module.__name__} must define exactly one Analysis, not {len(classes)}"
            analyses[name] = classes[0]()
    return dict(sorted(analyses.items(), key=lambda item: item[1].order))


def check_analysis_names(only: Sequence[str] | None) -> None:
    """Check the names of analyses.

    Raises:
        UserError: a name is unknown.
    """
    for name in only or ():
        if name not in list_analysis_names():
            raise UserError(f"--only: unknown analysis {name!r}; {format_choices(name, list_analysis_names())}")

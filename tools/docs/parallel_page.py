"""Table and picture of docs/parallel.md, written by `make docs`.

The table lists the number of A100s that each model needs with each overlay of configs/cluster, as estimated by
`megatron.planning.memory_estimate` without a GPU. The picture shows which shards of a model and a batch each of 16 GPUs
stores.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron.config.execution import resolve_mesh_shape
from megatron.config.load import load_config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.mesh import Axis, Mesh, ParallelSizes, list_context_chunks
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory
from megatron.planning.model_costs import plan_model
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/parallel.md")
BEGIN, END = "<!-- table: make docs -->\n", "<!-- end of table -->\n"
MODELS = ("125M", "350M", "1-3B", "2-7B", "6-7B")
OVERLAYS = ("a100_512", "a100_2k", "a100_2k_slow_network", "a100_8k", "a100_32k", "a100_128k")
METHOD = "cdape_kerple_log"
GPUS = {"40 GB": 39.4, "80 GB": 79.1}
"""Memory of an A100 visible to PyTorch, in GiB."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
GPT2_VOCABULARY = 50257

PICTURE = Path("docs/images/parallel.png")
SIZES = ParallelSizes(tensor=2, context=2, data=2, pipeline=2)
DRAWN_LAYERS, DRAWN_LENGTH = 4, 8
HIGHLIGHTED_GPU = 5
"""GPU whose shards are highlighted."""
PLAIN, OWN = "#eef2f7", "#f2a93b"


def list_estimates(model: str, overlay: str) -> Iterator[tuple[int, MemoryEstimate]]:
    """Yield each number of GPUs that the layout supports, with the memory estimate."""
    config = load_config([model, METHOD, overlay, "local_setup"]).config
    for gpus in COUNTS:
        try:
            settled = resolve_run(config, LocalHardware(num_gpus=gpus, num_cores=gpus)).config
        except UserError:
            continue
        yield gpus, estimate_memory(plan_model(settled), resolve_mesh_shape(settled, gpus), GPT2_VOCABULARY)


def render_table() -> str:
    """Render the table: the fewest GPUs that fit each model and overlay, with the estimate per GPU."""
    lines = [
        "| model | overlay | GPUs of 40 GB | estimate each | GPUs of 80 GB | estimate each |",
        "|---|---|---|---|---|---|",
    ]
    for overlay in OVERLAYS:
        for model in MODELS:
            found = list(list_estimates(model, overlay))
            cells = []
            for gib in GPUS.values():
                gpus, needed = next((n, m) for n, m in found if m.fits(gib))
                cells.append(f"{gpus} | {needed.total / 2**30:.1f} GiB")
            lines.append(f"| {model} | `{overlay}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_page() -> str:
    """Return the page with its current table."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + render_table() + END + rest.split(END)[1]


def _get_coordinates(rank: int) -> tuple[int, int, int, int]:
    mesh = Mesh(rank, SIZES)
    return mesh.tensor.index, mesh.context.index, mesh.data.index, mesh.pipeline.index


def list_storing_gpus(
    tensor: int | None = None, stage: int | None = None, data: int | None = None, position: int | None = None
) -> list[int]:
    """List the GPUs that store a tensor shard, a pipeline stage, a data shard and a sequence chunk."""

    def holds(rank: int) -> bool:
        t, c, d, p = _get_coordinates(rank)
        own = list_context_chunks(DRAWN_LENGTH, Axis(c, SIZES.context))
        wanted = ((tensor, t), (stage, p), (data, d))
        here = position is None or any(first <= position < first + size for first, size in own)
        return here and all(asked is None or asked == found for asked, found in wanted)

    return [rank for rank in range(SIZES.world_size) if holds(rank)]


def _draw_box(axes: Axes, x: float, y: float, width: float, height: float, ranks: list[int], text: str) -> None:
    color = OWN if HIGHLIGHTED_GPU in ranks else PLAIN
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="#3b4654", linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, linespacing=1.35)


def _format_ranks(ranks: list[int]) -> str:
    half = -(-len(ranks) // 2)
    return "\n".join(" ".join(map(str, part)) for part in (ranks[:half], ranks[half:]) if part)


def _draw_model(axes: Axes) -> None:
    for layer in range(DRAWN_LAYERS):
        for tensor in range(SIZES.tensor):
            stage = layer * SIZES.pipeline // DRAWN_LAYERS
            ranks = list_storing_gpus(tensor=tensor, stage=stage)
            _draw_box(axes, tensor * 2, DRAWN_LAYERS - 1 - layer, 1.96, 0.96, ranks, _format_ranks(ranks))
        axes.text(-0.12, DRAWN_LAYERS - 0.5 - layer, f"layer {layer + 1}", ha="right", va="center", fontsize=8)
    axes.axhline(DRAWN_LAYERS / 2 - 0.02, color="#b03a2e", linewidth=1.2)
    axes.set_xlim(-1.1, 4.0)
    axes.set_ylim(-0.95, DRAWN_LAYERS + 0.1)
    for tensor in range(SIZES.tensor):
        axes.text(2 * tensor + 1, -0.12, f"half {tensor + 1}\nof each matrix", ha="center", va="top", fontsize=8)


def _draw_batch(axes: Axes) -> None:
    for data in range(SIZES.data):
        for first in range(0, DRAWN_LENGTH, 2):
            ranks = [
                rank
                for rank in list_storing_gpus(data=data, position=first)
                if rank < SIZES.world_size // SIZES.pipeline
            ]
            _draw_box(axes, first, 1.5 - data * 2, 1.94, 1.9, ranks, _format_ranks(ranks))
        axes.text(-0.2, 2.45 - data * 2, f"sequence\n{data + 1}", ha="right", va="center", fontsize=8)
    for first in range(0, DRAWN_LENGTH, 2):
        axes.text(first + 1, -0.65, f"positions\n{first}, {first + 1}", ha="center", va="top", fontsize=8)
    axes.set_xlim(-2.6, DRAWN_LENGTH)
    axes.set_ylim(-1.9, 3.5)


def _draw_optimizer(axes: Axes) -> None:
    ranks = list_storing_gpus(tensor=_get_coordinates(HIGHLIGHTED_GPU)[0], stage=_get_coordinates(HIGHLIGHTED_GPU)[3])
    for part, rank in enumerate(ranks):
        _draw_box(axes, 0, len(ranks) - 1 - part, 1.6, 0.94, [rank], f"GPU {rank}")
    axes.set_xlim(-0.1, 1.7)
    axes.set_ylim(-0.95, len(ranks) + 0.1)
    axes.text(0.8, -0.12, "a quarter each\nof moments, masters", ha="center", va="top", fontsize=8)


def _list_panel_titles() -> Iterator[tuple[str, str]]:
    yield "the model", "tensor divides layers, pipeline\n(red line) the stack of layers"
    yield (
        "the batch",
        "data divides sequences, context their tokens\n(first stage; the second is GPUs 8–15)",
    )
    yield "its optimizer", "ZeRO, over data\nand context"


def draw_picture() -> bytes:
    """Draw the picture without dates and versions, so that equal numbers give equal files."""
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(8.0, 3.9), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1, 3, width_ratios=[3.1, 4.4, 1.5])
        for place, (draw, (title, under)) in enumerate(
            zip((_draw_model, _draw_batch, _draw_optimizer), _list_panel_titles(), strict=True)
        ):
            axes = figure.add_subplot(grid[0, place])
            axes.set_axis_off()
            draw(axes)
            axes.set_title(f"{title}\n{under}", fontsize=8.5, loc="left", linespacing=1.3)
        figure.suptitle(
            f"Shards on 16 GPUs: tensor 2 × context 2 × data 2 × pipeline 2. Orange: GPU {HIGHLIGHTED_GPU}.",
            fontsize=9.5,
        )
        raw = io.BytesIO()
        figure.savefig(
            raw, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True, "compress_level": 9}
        )
    return raw.getvalue()

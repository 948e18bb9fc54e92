"""Writes the table of docs/parallel.md: how many A100s each model needs with each overlay of configs/cluster.

`make docs` runs it. The numbers are estimates of `megatron.planning.memory_estimate`, which needs no GPU.
"""

from collections.abc import Iterator
from pathlib import Path

from megatron.config.load import load_config
from megatron.config.parallelism import resolve_mesh_shape
from megatron.distributed.hardware import LocalHardware
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/parallel.md")
BEGIN, END = "<!-- table: make docs -->\n", "<!-- end of table -->\n"
MODELS = ("125M", "350M", "1-3B", "2-7B", "6-7B")
OVERLAYS = ("a100_512", "a100_2k", "a100_2k_slow_network", "a100_8k", "a100_32k", "a100_128k")
METHOD = "cdape_kerple_log"
GPUS = {"40 GB": 39.4, "80 GB": 79.1}
"""GiB that PyTorch finds on an A100."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
GPT2_VOCABULARY = 50257


def estimates(model: str, overlay: str) -> Iterator[tuple[int, MemoryEstimate]]:
    """The numbers of GPUs that the layout divides, with what each of them needs."""
    config = load_config([model, METHOD, overlay, "local_setup"]).config
    for gpus in COUNTS:
        try:
            settled = resolve_run(config, LocalHardware(num_gpus=gpus, num_cores=gpus)).config
        except UserError:
            continue
        yield gpus, estimate_memory(settled, resolve_mesh_shape(settled, gpus), GPT2_VOCABULARY)


def table() -> str:
    """Model × overlay: the fewest GPUs that it fits on, and the estimate for each of them."""
    lines = [
        "| model | overlay | GPUs of 40 GB | estimate each | GPUs of 80 GB | estimate each |",
        "|---|---|---|---|---|---|",
    ]
    for overlay in OVERLAYS:
        for model in MODELS:
            found = list(estimates(model, overlay))
            cells = []
            for gib in GPUS.values():
                gpus, needed = next((n, m) for n, m in found if m.fits(gib))
                cells.append(f"{gpus} | {needed.total / 2**30:.1f} GiB")
            lines.append(f"| {model} | `{overlay}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The page with its table as it is today."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]

"""Count the bytes a rank keeps between forward and backward when C = 1, 2 or 4 ranks share a sequence.

    python tools/bench/context_memory.py --json docs/results/context_memory.json

The tool counts every tensor that autograd saves for the backward pass, once per storage, without parameters. Nothing is
measured, so the result is equal on all machines and devices.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__" and len(sys.argv) < 4:
    print_interrupts_in_one_line()

from megatron.distributed.launcher_environment import RankInfo  # noqa: E402
from tools.launch_ranks import run_rank, run_ranks  # noqa: E402
from tools.records import collect_provenance, format_origin, write_record  # noqa: E402

WORLD_SIZES = (1, 2, 4)
METHODS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "cdape(kerple_log)": {"pos_emb": "kerple_log", "score_processor": "cdape"},
}
MODEL = {
    "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "attention_backend": "chunked",
    "make_vocab_size_divisible_by": 64,
}  # fmt: skip


def count_saved_bytes(job: dict[str, Any], connect: Callable[[], RankInfo]) -> list[int]:
    """Return the bytes this rank saves for one sequence, for each method, with and without recomputation."""
    import torch

    from megatron.distributed.mesh import ParallelSizes
    from megatron.distributed.process_groups import init_distributed
    from megatron.model.build import build_model
    from megatron.options.model import ModelOptions
    from megatron.options.position import PositionOptions

    length, place = job["length"], connect()
    processes = init_distributed(place, ParallelSizes(context=place.world_size), device="cpu", backend="gloo")
    found = []
    for method in METHODS.values():
        for recomputed in (False, True):
            options = ModelOptions(**MODEL, seq_length=length, checkpoint_activations=recomputed)
            model = build_model(options, PositionOptions(**method), 64, groups=processes, seed=1).train()
            own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            kept: dict[int, int] = {}

            def note(tensor: torch.Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            tokens = torch.zeros(1, length // place.world_size, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = model(tokens, labels=tokens).sum()
            found.append(sum(kept.values()))
            del loss
    return found


def main() -> None:
    """Count the bytes and write a record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int_at_least(8), default=4096, help="sequence length in tokens")
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            world: run_ranks(Path(__file__).resolve(), Path(folder) / str(world), world, {"length": arguments.length})
            for world in WORLD_SIZES
        }
    rows = []
    for number, (method, recomputed) in enumerate((m, r) for m in METHODS for r in (False, True)):
        rows.append(
            {
                "method": method,
                "recomputed": recomputed,
                "bytes": {str(world): max(rank[number] for rank in found[world]) for world in WORLD_SIZES},
            }
        )
    record = {"stamp": collect_provenance(__file__, "cpu"), "length": arguments.length, "model": MODEL, "rows": rows}
    print(render_table(record))
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))


def render_table(record: dict[str, Any]) -> str:
    """Render a table with the MiB of the rank that saves most, and its ratio to a single rank."""
    lines = ["| method | layers recomputed | C = 1 | C = 2 | C = 4 |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        alone = row["bytes"]["1"]
        cells = [f"{size / 2**20:.1f} MiB ({size / alone:.0%})" for size in row["bytes"].values()]
        lines.append(f"| {row['method']} | {'yes' if row['recomputed'] else 'no'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render_page(record: dict[str, Any]) -> str:
    model = record["model"]
    return f"""# Memory saved by context parallelism

Memory of one rank between forward and backward pass for one sequence of {record["length"]:,} tokens shared by C ranks:
{model["num_layers"]} layers, width {model["hidden_size"]}, {model["num_attention_heads"]} heads, float32,
attention in recomputed row blocks (`attention_backend: chunked`).
The table shows the bytes that autograd saves, without parameters, on the rank that saves most.
They include the gathered keys and values of all positions, so kerple_log and cdape stay above one half unless layers
are recomputed (`checkpoint_activations`).

{render_table(record)}

{format_origin(record["stamp"])}; torch {record["stamp"]["versions"]["torch"]}.
"""


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2].isdigit():
        run_rank(count_saved_bytes)
    else:
        main()

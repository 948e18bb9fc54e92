#!/usr/bin/env python3
"""Time each attention kernel with every candidate tile on a GPU.

The results are the basis of the tile tables in `kernels/*/configs.py`.

    python tools/bench/tiles.py --lengths 512 2048 --json docs/results/gpu_tiles.json

Each kernel has a list of candidates (`CANDIDATES`) that starts with its current tile. A worker process takes the
candidates at one index of all lists and compiles them in parallel with the other workers. When its turn comes, it
profiles one forward and backward pass of a layer with CDAPE and one with a learned bias, kernel by kernel. A candidate
that cannot be compiled or launched is recorded with its error. Ctrl-C keeps the records of the workers that finished.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import (  # noqa: E402
    ToolParser,
    int_at_least,
    parse_device,
    parse_output_path,
    print_interrupts_in_one_line,
)

if __name__ == "__main__":
    print_interrupts_in_one_line()

import torch  # noqa: E402
from torch.profiler import ProfilerActivity  # noqa: E402

from megatron.kernels.biased_attention import configs as bias_configs  # noqa: E402
from megatron.kernels.biased_attention.configs import OpTiles  # noqa: E402
from megatron.kernels.cdape_attention import chunks, head_products, triton_mixer  # noqa: E402
from megatron.kernels.runtime import Tile, is_interpreted  # noqa: E402
from tools.bench.attention_peers import AttentionProblem, build_peers  # noqa: E402
from tools.bench.error_gate import format_exception  # noqa: E402
from tools.bench.mixer_switch import use_mixer  # noqa: E402
from tools.bench.timing import time_passes  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

NUM_PASSES = 3
SECONDS_TO_COMPILE = 75
"""Time after which a worker measures, even if others are still compiling."""


def _list_tiles(*sizes: tuple[int, int, int, int]) -> list[Tile]:
    return [Tile(*size) for size in sizes]


ATTEND = _list_tiles((64, 32, 4, 3), (64, 32, 4, 4), (64, 16, 4, 4), (32, 32, 2, 3), (32, 32, 4, 3), (64, 32, 4, 2))
CANDIDATES: dict[str, list[Tile]] = {
    "mix_fwd": _list_tiles((4, 64, 4, 1), (8, 32, 4, 1), (4, 32, 2, 1), (2, 64, 4, 2), (8, 64, 4, 1), (4, 64, 2, 1)),
    "mix_bwd": _list_tiles((2, 64, 4, 1), (1, 128, 4, 1), (1, 128, 8, 1), (2, 128, 8, 1), (4, 32, 2, 1), (2, 64, 2, 1)),
    "mix_bwd_dw": _list_tiles((4, 16, 2, 1), (8, 16, 2, 1), (2, 64, 4, 1), (8, 16, 4, 1), (4, 16, 1, 1), (8, 8, 2, 1)),
    "heads": _list_tiles(
        (16, 64, 4, 1), (16, 64, 2, 1), (16, 32, 2, 1), (16, 32, 1, 1), (16, 128, 4, 1), (32, 16, 1, 1)
    ),
    "attend_fwd": ATTEND,
    "attend_sums": ATTEND,
    "product": _list_tiles(
        (64, 64, 4, 3), (64, 32, 4, 3), (32, 64, 4, 3), (32, 64, 2, 3), (64, 64, 4, 2), (64, 64, 8, 3)
    ),
    "bias_fwd": _list_tiles(
        (64, 32, 4, 3), (64, 32, 4, 4), (64, 16, 4, 4), (32, 32, 2, 3), (64, 32, 4, 2), (128, 32, 4, 3)
    ),
    "bias_bwd_dq": _list_tiles(
        (64, 64, 4, 3), (64, 64, 4, 4), (32, 32, 4, 3), (32, 32, 2, 3), (64, 64, 4, 2), (64, 64, 4, 1)
    ),
    "bias_bwd_dkdv": _list_tiles(
        (32, 64, 4, 2), (32, 64, 4, 3), (16, 64, 4, 3), (32, 32, 4, 2), (64, 32, 4, 2), (32, 64, 2, 2)
    ),
}
KERNELS = {
    "mix_fwd": ("_processor_fwd_kernel",),
    "mix_bwd": ("_processor_bwd_kernel",),
    "mix_bwd_dw": ("_processor_bwd_dw_kernel",),
    "heads": ("_scores_kernel", "_attend_bwd_kernel"),
    "attend_fwd": ("_attend_fwd_kernel",),
    "attend_sums": ("_attend_sums_kernel",),
    "product": ("_differentiate_qkv_kernel",),
    "bias_fwd": ("_fwd_kernel",),
    "bias_bwd_dq": ("_bwd_dq_kernel",),
    "bias_bwd_dkdv": ("_bwd_dkdv_kernel",),
}
"""Kernel names in the profiler, by entry."""
OPS = {"cdape": [name for name in CANDIDATES if not name.startswith("bias")],
       "biased_attention": [name for name in CANDIDATES if name.startswith("bias")]}  # fmt: skip


def install_tiles(tiles: dict[str, Tile]) -> None:
    """Make the drivers use these tiles for all shapes; the dictionary may change later."""
    chunks.choose_processor_tile = lambda kernel, *shape: tiles[kernel]  # type: ignore[assignment]
    head_products.choose_attend_tile = lambda kernel, *shape: tiles[kernel]  # type: ignore[assignment]
    triton_mixer.choose_heads_tile = lambda *shape: tiles["heads"]  # type: ignore[assignment]
    head_products.choose_product_tile = lambda *shape: tiles["product"]  # type: ignore[assignment]

    def choose(*shape: object) -> OpTiles:
        return OpTiles(tiles["bias_fwd"], tiles["bias_bwd_dq"], tiles["bias_bwd_dkdv"])

    bias_configs.choose_tiles = choose  # type: ignore[assignment]


def compile_candidates(tiles: dict[str, Tile], run: Callable[[str, int, int], None], length: int) -> dict[str, str]:
    """Compile a worker's candidates, replace those that fail by the current tile, and return their errors."""
    errors: dict[str, str] = {}
    for op, names in OPS.items():
        try:
            run(op, 1, length)
        except Exception:  # some candidate failed; compiling the kernels separately shows which
            wanted = {name: tiles[name] for name in names}
            tiles |= {name: CANDIDATES[name][0] for name in names}
            for name in names:
                tiles[name] = wanted[name]
                try:
                    run(op, 1, length)
                except Exception as failure:
                    errors[name] = format_exception(failure)
                    tiles[name] = CANDIDATES[name][0]
    return errors


def measure_kernels(run: Callable[[], None]) -> dict[str, float]:
    """Return the median time of each kernel on a GPU, in microseconds, by name; empty on a CPU."""
    if not torch.cuda.is_available():
        run()
        return {}
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    taken: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            taken.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_share(arguments: argparse.Namespace, count: int) -> None:
    """Compile and measure the candidates at an index of the lists, and write their records into the shared folder."""
    place, folder, lengths = arguments.place, arguments.worker, arguments.lengths
    heads, dim = arguments.heads, arguments.dim
    tiles = {name: listed[min(place, len(listed) - 1)] for name, listed in CANDIDATES.items()}
    install_tiles(tiles)

    def run(op: str, batch: int, length: int, repeats: int = 1) -> None:
        problem = AttentionProblem(op, batch, heads, dim, length, arguments.width, 3, torch.bfloat16, arguments.device)
        with use_mixer(False):
            time_passes(problem, build_peers(problem)["triton"], repeats)

    start_time = time.perf_counter()
    wanted = dict(tiles)
    errors = compile_candidates(tiles, run, lengths[0])
    (folder / f"compiled{place}").touch()
    while len(list(folder.glob("compiled*"))) < count and time.perf_counter() - start_time < SECONDS_TO_COMPILE:
        time.sleep(0.1)
    records = []
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for op, names in OPS.items():
            for length in lengths:
                batch = max(1, arguments.tokens // length)
                run(op, batch, length)
                times = measure_kernels(lambda op=op, batch=batch, length=length: run(op, batch, length, NUM_PASSES))
                for name in names:
                    head = {"kernel": name, "tile": str(wanted[name]), "B": batch, "T": length, "H": heads, "d": dim}
                    if name in errors:
                        records.append({**head, "refusal": errors[name]})
                    else:
                        records.append({**head, "us": {kernel: times.get(kernel) for kernel in KERNELS[name]}})
    part = folder / f"part{place}"
    part.write_text(json.dumps(records), encoding="utf-8")
    part.replace(folder / f"records{place}.json")


def wait_for_workers(workers: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until all workers end. Return True if Ctrl-C came first; those that still run are then killed."""
    try:
        for worker in workers:
            worker.wait()
    except KeyboardInterrupt:
        for worker in workers:
            worker.kill()
            worker.wait()
        return True
    return False


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=parse_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int_at_least(16), nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int_at_least(1), default=16384, help="B·T (16384)")
    parser.add_argument("--heads", type=int_at_least(1), default=16)
    parser.add_argument("--dim", type=int_at_least(1), default=64)
    parser.add_argument("--width", type=int_at_least(1), default=32)
    parser.add_argument("--json", type=parse_output_path)
    parser.add_argument("--worker", type=Path, help="internal: folder shared by the workers")
    parser.add_argument("--place", type=int, default=0, help="internal")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not is_interpreted():
        parser.error("no CUDA device found; TRITON_INTERPRET=1 runs the tiles on a CPU without timing")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    count = max(map(len, CANDIDATES.values()))
    if arguments.worker is not None:
        measure_share(arguments, count)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--worker", folder, "--place"]
        workers = [subprocess.Popen([*command, str(place)], env=os.environ) for place in range(count)]
        is_cut = wait_for_workers(workers)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("records*.json"))]
    records: list[dict[str, Any]] = [record for part in found for record in part]
    records = list({(record["kernel"], record["tile"], record["T"]): record for record in records}.values())
    records.sort(key=lambda record: (record["kernel"], record["T"], sum(filter(None, record.get("us", {}).values()))))
    for record in records:
        times = record.get("refusal") or ", ".join(f"{name} {us} µs" for name, us in record["us"].items())
        print(f"{record['kernel']:<14} T={record['T']:<6} {record['tile']:<80} {times}")
    if arguments.json is not None:
        write_record(arguments.json, {**collect_provenance(__file__, arguments.device), "records": records})
    if is_cut:
        raise KeyboardInterrupt
    sys.exit(any(worker.returncode for worker in workers))


if __name__ == "__main__":
    main()

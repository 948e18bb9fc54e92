#!/usr/bin/env python3
"""Compare the memory that `plan` estimates with the peak of PyTorch's allocator on the null device.

    python tools/bench/planner_memory.py --json docs/results/planner_memory.json

One rank of each configuration trains for three steps on the null device (megatron/rehearsal), with `attention_backend`
auto without a self-check (PyTorch's implementation) and triton. The peak is `torch.cuda.max_memory_allocated`: the
bytes of all tensors. It is compared with the estimate of `megatron.planning.memory_estimate` for the same rank. The
tool needs no GPU, and no value depends on speed.

A row whose backend cannot compute the method contains the error. The record is written after each row: `--measured
RECORD` reuses the peaks of an earlier or interrupted record and plans anew.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from megatron.config.load import load_config  # noqa: E402
from megatron.distributed.launcher_environment import ADDRESS, RankInfo, find_free_port  # noqa: E402
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory  # noqa: E402
from megatron.planning.model_costs import plan_model  # noqa: E402
from megatron.rehearsal.null_device.environment import build_environment, get_gpu_model  # noqa: E402
from megatron.rehearsal.rank_process import RankJob, RankResult  # noqa: E402
from megatron.rehearsal.rehearsed_run import RehearsedRun, plan_rehearsal  # noqa: E402
from megatron.utils.atomic_directory import temporary_folder  # noqa: E402
from megatron.utils.errors import RunError, UserError  # noqa: E402
from megatron.utils.imports import SAFE_PATH_VARIABLE  # noqa: E402

BACKENDS = {
    "auto": ("attention_backend=auto", "attention_check=false"),
    "triton": ("attention_backend=triton",),
}
CARD = "a100-80gb"
VOCABULARY = 50257
TOLERANCE = 0.1
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """Run and the rank to measure."""

    configs: str
    """Names of overlays, as on the command line."""
    keys: tuple[str, ...] = ()
    gpus: int = 1
    rank: int = 0

    @property
    def name(self) -> str:
        """Name of the case in the record."""
        where = "" if self.gpus == 1 else f" · {self.gpus} GPUs, rank {self.rank}"
        return f"{self.configs}{where}"


def bf16(micro_batch: int, *keys: str, recompute: bool | str = False) -> tuple[str, ...]:
    """Return the keys of a bfloat16 run whose batch size follows from its micro-batch."""
    return (
        "precision=bf16",
        "train_batch_size=null",
        f"train_micro_batch_size_per_gpu={micro_batch}",
        f"checkpoint_activations={str(recompute).lower()}",
        *keys,
    )


def long(length: int) -> tuple[str, str]:
    """Return the keys for a sequence length."""
    return f"seq_length={length}", f"max_position_embeddings={length}"


OFFLOAD = "zero_optimization.offload_optimizer.device=cpu"
OFFLOAD_WEIGHTS = "zero_optimization.offload_param.device=cpu"


def zero(stage: int, accumulated: int = 1) -> tuple[str, str]:
    """Return the keys for a ZeRO stage and a number of accumulated micro-batches."""
    return f"zero_optimization.stage={stage}", f"gradient_accumulation_steps={accumulated}"


CASES = (
    # One GPU: methods, data types, recomputation.
    Case("125M none", bf16(4)),
    Case("125M rotary", bf16(32)),
    Case("125M kerple_log", bf16(32)),
    Case("125M t5", ("precision=fp16", *bf16(8)[1:])),
    Case("125M alibi", bf16(4, *long(2048), "gradient_accumulation_steps=2")),
    Case("125M fire", bf16(2, *long(2048))),
    Case("125M cope", bf16(8)),
    Case("125M transformer_xl", bf16(8)),
    *[
        Case(f"125M {method}", bf16(4, *long(1024)))
        for method in ("fox", "grape_a", "mta", "selective", "stick_breaking", "talking_heads")
    ],
    Case("125M cdape_kerple_log", bf16(8)),
    Case("125M cdape_kerple_log", bf16(1, *long(8192))),
    Case("350M cdape_kerple_log", bf16(4, *long(2048), recompute=True)),
    *[Case("350M fire", bf16(8, *long(1024), recompute=what)) for what in (False, "selective", True)],
    Case("350M cdape_kerple_log", bf16(8, *long(1024), recompute="selective")),
    Case("350M rotary", ("precision=fp32", *bf16(8)[1:])),
    Case("350M kerple_log", bf16(1, *long(32768), "attention_window=1024", recompute=True)),
    # Llama's layers, and Qwen3's with norms of queries and keys.
    *[
        Case("125M rotary", bf16(16, "norm=rmsnorm", "activation=swiglu", "num_kv_heads=4", *keys))
        for keys in ((), ("use_qk_layernorm=true", "qk_norm=rmsnorm"))
    ],
    # Layers whose compiled regions are joined between attentions, on one and two GPUs.
    *[
        Case(f"350M {method}", bf16(8, *zero(1)), gpus)
        for method in ("none", "kerple_log", "cdape_kerple_log")
        for gpus in (1, 2)
    ],
    # ZeRO, optimizers, offloading.
    Case("350M kerple_log", bf16(8, *zero(0)), 4),
    Case("350M kerple_log", bf16(8, *zero(2), recompute=True), 8),
    Case("125M sandwich", ("precision=fp32", *bf16(4, *zero(2, 4))[1:]), 2),
    Case("350M kerple_log", bf16(4, *zero(3)), 4),
    Case("1-3B kerple_log", bf16(4, *zero(3), recompute=True), 8),
    Case("125M sinusoidal", bf16(8, "optimizer.type=Muon"), 2),
    Case("125M rotary", bf16(8, *zero(0, 2), "optimizer.type=Lion"), 2),
    Case("125M rotary", bf16(4, *zero(1, 3), OFFLOAD, recompute=True), 2),
    Case("125M kerple_log", ("precision=fp16", *bf16(4, *zero(1, 2), OFFLOAD, recompute="selective")[1:]), 2),
    Case("350M kerple_log", bf16(4, *zero(2, 4), OFFLOAD), 2),
    Case("125M rotary", bf16(4, *zero(2), OFFLOAD)),
    Case("1-3B rotary", bf16(8, *zero(2), OFFLOAD, recompute=True), 4),
    Case("125M rotary", bf16(4, *zero(3, 2), OFFLOAD, recompute=True), 2),
    Case("125M kerple_log", ("precision=fp16", *bf16(4, *zero(3), OFFLOAD, OFFLOAD_WEIGHTS)[1:]), 4),
    # Tensor, context and pipeline parallelism, and combinations.
    Case("1-3B kerple_log", bf16(4, "model_parallel_size=2"), 2),
    Case("1-3B cdape_kerple_log", bf16(4, "model_parallel_size=2", recompute=True), 4),
    Case("1-3B rotary", bf16(1, "context_parallel_size=2", *long(8192), recompute=True), 4),
    Case("1-3B cdape_kerple_log", bf16(4, "context_parallel_size=2", *long(4096), recompute="selective"), 4),
    Case("1-3B kerple_log", bf16(1, "context_parallel_size=4", *long(8192)), 8),
    Case("350M rotary", bf16(1, "context_parallel_size=8", *zero(2, 2), *long(16384), recompute=True), 8),
    Case("1-3B kerple_log", bf16(2, "gradient_accumulation_steps=3", "pipe_parallel_size=2"), 2),
    Case("1-3B kerple_log", bf16(2, "gradient_accumulation_steps=3", "pipe_parallel_size=2"), 2, 1),
    Case("1-3B rotary", bf16(2, "gradient_accumulation_steps=6", "model_parallel_size=2", "pipe_parallel_size=2"), 4),
    Case("350M t5", bf16(2, "gradient_accumulation_steps=4", "context_parallel_size=2", "pipe_parallel_size=2",
                         *long(4096)), 4),
    Case("350M fire", bf16(2, "model_parallel_size=2", "context_parallel_size=2", *long(4096)), 4),
    Case("350M kerple_log", bf16(2, *zero(1, 4), "model_parallel_size=2", "context_parallel_size=2",
                                 "pipe_parallel_size=2", *long(4096), recompute="selective"), 8),
    Case(
        "6-7B cdape_kerple_log",
        bf16(1, "model_parallel_size=2", "context_parallel_size=2", *long(4096), recompute=True),
        16,
    ),
    # Shipped configurations.
    Case("350M cdape_kerple_log a100_2k_slow_network", (), 8),
    Case("2-7B rotary a100_2k", (), 64),
    Case("2-7B cdape_kerple_log a100_8k", (), 64),
    Case("350M cdape_kerple_log a100_32k", (), 8),
    Case("125M cdape_kerple_log a100_128k", (), 16),
)  # fmt: skip


def plan_case(case: Case, backend: str) -> tuple[RehearsedRun, MemoryEstimate]:
    """Return the rehearsed run of a case, and the memory estimate of the measured rank."""
    config = load_config(case.configs.split(), [*case.keys, *BACKENDS[backend]]).config
    run = plan_rehearsal(config, case.gpus, None, VOCABULARY)
    stage = run.sizes.get_coordinates(case.rank)["pipeline"]
    estimate = estimate_memory(
        plan_model(run.config), run.sizes, run.vocab_size, pipeline_stage=stage, gpu_bytes=get_gpu_model(CARD).memory
    )
    return run, estimate


def measure_peak(case: Case, run: RehearsedRun, folder: Path) -> tuple[int, str]:
    """Return the peak bytes of a rank's tensors, and the phase of the peak.

    Args:
        case: selects the rank.
        run: run to execute.
        folder: folder for its files, created and removed by this function.

    Raises:
        RunError: if the rank fails.
    """
    folder.mkdir()
    try:
        config = run.build_config(folder).replace(save=None, cuda_graph="off")
        config.save(folder / "train.yml")
        for rank in sorted({0, case.rank}):  # rank 0 builds the sample index
            result = run_rank(run, rank, folder)
            if result.error is not None:
                raise RunError(f"rank {rank}: {result.error.message}")
    finally:
        shutil.rmtree(folder)
    phase, (allocated, _) = max(result.peaks.items(), key=lambda item: item[1][0])
    return allocated, phase


def run_rank(run: RehearsedRun, rank: int, folder: Path) -> RankResult:
    """Train one rank in a separate process."""
    job = RankJob(str(folder), str(folder / "train.yml"), "train", rank, run.devices_per_node)
    path = folder / f"train-{rank}.job"
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    environment = build_environment(
        get_gpu_model(CARD), devices=run.devices_per_node, is_single_rank=run.world_size > 1, base=os.environ
    )
    info = RankInfo(rank, run.world_size, rank % run.devices_per_node, run.devices_per_node)
    environment |= info.to_environment(ADDRESS, find_free_port()) | SAFE_PATH_VARIABLE
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    command = [sys.executable, "-m", "megatron.rehearsal.rank_process", str(path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if not job.result.is_file():
        lines = (done.stdout + done.stderr).split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise RunError(f"rank {rank} exited with {done.returncode} without a result; last line: {last}")
    return RankResult.read(job.result)


def measure_row(
    case: Case, backend: str, measured: dict[tuple[str, ...], dict[str, Any]], commit: str | None, folder: Path
) -> dict[str, Any]:
    """Measure a case with a backend. `error` explains a missing peak; `commit` is the measured commit."""
    row: dict[str, Any] = {**asdict(case), "keys": list(case.keys), "backend": backend}
    row |= dict.fromkeys(("planned", "moment", "ranks", "peak", "phase", "commit", "error"))
    try:
        run, estimate = plan_case(case, backend)
        row |= {"planned": estimate.total, "moment": estimate.peak.name, "ranks": asdict(run.sizes)}
        known = measured.get(identify_row(row))
        if known is not None:
            return row | {name: known[name] for name in ("peak", "phase", "commit")}
        row["peak"], row["phase"] = measure_peak(case, run, folder)
        row["commit"] = commit
    except (UserError, RunError) as error:  # the backend cannot compute the method, or a rank failed
        row["error"] = str(error)
    return row


def identify_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the case and the backend of a row."""
    return (row["configs"], *row["keys"], str(row["gpus"]), str(row["rank"]), row["backend"])


def iter_rows(
    cases: list[Case], measured: dict[tuple[str, ...], dict[str, Any]], commit: str | None, num_processes: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows so far, in the order of the cases, whenever a row is added."""
    done: dict[int, dict[str, Any]] = {}
    pairs = [(case, backend) for case in cases for backend in BACKENDS]
    with temporary_folder("planner") as folder, ThreadPoolExecutor(num_processes) as pool:
        # The last cases are the largest. If they started last, the other processes would be idle at the end.
        tasks = {
            pool.submit(measure_row, *pairs[index], measured, commit, folder / str(index)): index
            for index in reversed(range(len(pairs)))
        }
        try:
            for task in as_completed(tasks):
                done[tasks[task]] = task.result()
                print(render_row(task.result()), file=sys.stderr, flush=True)
                yield [done[index] for index in sorted(done)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def read_measured(path: Path | None) -> dict[tuple[str, ...], dict[str, Any]]:
    """Read the rows of an earlier record, by case and backend."""
    if path is None:
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    at = {"commit": record["stamp"]["commit"]}
    return {identify_row(row): at | row for row in record["rows"] if row["peak"]}


def render_row(row: dict[str, Any]) -> str:
    """Render one line of the page's table."""
    case = Case(row["configs"], tuple(row["keys"]), row["gpus"], row["rank"])
    keys = ", ".join(key for key in case.keys if key != "train_batch_size=null")
    planned = "" if row["planned"] is None else f"{row['planned'] / GIB:.2f}"
    if not row["peak"]:
        return f"| {case.name} | {keys} | {row['backend']} | {row['error']} | {planned} | | {row['moment'] or ''} |"
    ratio = row["planned"] / row["peak"]
    return (
        f"| {case.name} | {keys} | {row['backend']} | {row['peak'] / GIB:.2f} | {planned} | {ratio:.2f} "
        f"| {row['moment']} |"
    )


def render_page(record: dict[str, Any]) -> str:
    rows = [row for row in record["rows"] if row["peak"]]
    errors = [abs(row["planned"] / row["peak"] - 1) for row in rows] or [0.0]
    within, num_cases = sum(error <= TOLERANCE for error in errors), len({identify_row(row)[:-1] for row in rows})
    table = "\n".join(render_row(row) for row in record["rows"])
    commits = " and ".join(sorted({str(row["commit"]) for row in rows}))
    return f"""# Planned memory compared with the allocator's peak

Three steps of one rank of each run, on the null device as an A100 of 80 GB:
the peak of PyTorch's caching allocator and the estimate of `./deepy.py plan` for that rank, in GiB.
`auto` is its choice without a self-check on the GPU (row blocks, or PyTorch's fused attention);
`triton` uses the kernels, compiled for the GPU.
{within} of {len(rows)} in {num_cases} configurations are within {TOLERANCE:.0%};
the mean error is {sum(errors) / len(errors):.1%} and the largest {max(errors):.1%}.
Neither number includes the memory of the driver, of NCCL and of the allocator's rounding.

| run | keys | backend | peak | planned | ratio | planned peak |
|---|---|---|---|---|---|---|
{table}

Peaks were measured at {commits}, each in a separate process. {format_provenance(record["stamp"])}
"""


def main() -> None:
    """Measure the peaks and write a record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="only cases whose line contains this text")
    parser.add_argument("--measured", type=Path, help="record whose peaks are reused")
    parser.add_argument("--processes", type=int, default=1, help="number of ranks trained at a time, up to 8 GB each")
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.only or "") in " ".join((case.name, *case.keys))]
    record = {"stamp": collect_provenance(__file__, "cpu"), "card": CARD, "vocabulary": VOCABULARY}
    measured, commit = read_measured(arguments.measured), record["stamp"]["commit"]
    for rows in iter_rows(cases, measured, commit, arguments.processes):
        record["rows"] = rows
        if arguments.json is not None:  # after each row, so that an interruption loses none
            write_record(arguments.json, record, render_page(record))
    print(render_page(record))


if __name__ == "__main__":
    main()

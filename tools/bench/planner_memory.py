#!/usr/bin/env python3
"""Is the memory that `plan` says the memory that a run takes? Peaks of PyTorch's allocator on the null device.

    python tools/bench/planner_memory.py --json docs/results/planner_memory.json

Each configuration is trained for three steps by one rank of its run, on the null device (megatron/rehearsal), with
`attention_backend` auto without a check (what PyTorch has) and triton. The peak is what
`torch.cuda.max_memory_allocated` says: of tensors, whatever computes them. Beside it stands what
`megatron.planning.memory_estimate` says of the same rank. Nothing of it needs a GPU, and no value depends on speed.

`--measured RECORD` takes the peaks of an earlier record and plans anew.
"""

import json
import os
import subprocess
import sys
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
from megatron.distributed.launcher_environment import ADDRESS, RankInfo  # noqa: E402
from megatron.launch.rank_group import find_free_port  # noqa: E402
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory  # noqa: E402
from megatron.rehearsal.null_device.cards import get_card  # noqa: E402
from megatron.rehearsal.null_device.environment import build_environment  # noqa: E402
from megatron.rehearsal.rank_process import RankJob, RankResult  # noqa: E402
from megatron.rehearsal.rehearsed_run import RehearsedRun, plan_rehearsal  # noqa: E402
from megatron.utils.temporary_folder import temporary_folder  # noqa: E402

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
    """A run, and which of its ranks is measured."""

    configs: str
    """Names of overlays, as they stand on the command line."""
    keys: tuple[str, ...] = ()
    gpus: int = 1
    rank: int = 0

    @property
    def name(self) -> str:
        """As the record has it."""
        where = "" if self.gpus == 1 else f" · {self.gpus} GPUs, rank {self.rank}"
        return f"{self.configs}{where}"


def bf16(micro_batch: int, *keys: str, recompute: bool | str = False) -> tuple[str, ...]:
    """Keys of a run in bfloat16 whose batch follows from its micro-batch."""
    return (
        "precision=bf16",
        "train_batch_size=null",
        f"train_micro_batch_size_per_gpu={micro_batch}",
        f"checkpoint_activations={str(recompute).lower()}",
        *keys,
    )


def long(length: int) -> tuple[str, str]:
    """Keys of a sequence's length."""
    return f"seq_length={length}", f"max_position_embeddings={length}"


CASES = (
    Case("125M none", bf16(4)),
    Case("125M rotary", bf16(32)),
    Case("125M kerple_log", bf16(32)),
    Case("125M t5", ("precision=fp16", *bf16(8)[1:])),
    Case("125M alibi", bf16(4, *long(2048), "gradient_accumulation_steps=2")),
    Case("125M fire", bf16(2, *long(2048))),
    Case("125M cdape_kerple_log", bf16(8)),
    Case("125M cdape_kerple_log", bf16(1, *long(8192))),
    Case("350M cdape_kerple_log", bf16(4, *long(2048), recompute=True)),
    *[Case("350M fire", bf16(8, *long(1024), recompute=what)) for what in (False, "selective", True)],
    Case("350M cdape_kerple_log", bf16(8, *long(1024), recompute="selective")),
    Case("350M rotary", ("precision=fp32", *bf16(8)[1:])),
    Case("350M kerple_log", bf16(1, *long(32768), "attention_window=1024", recompute=True)),
    Case("350M kerple_log", bf16(8, "zero_optimization.stage=0"), 4),
    Case("350M kerple_log", bf16(8, "zero_optimization.stage=2", recompute=True), 8),
    Case("1-3B kerple_log", bf16(4, "zero_optimization.stage=3", recompute=True), 8),
    Case(
        "1-3B rotary",
        bf16(8, "zero_optimization.stage=2", "zero_optimization.offload_optimizer.device=cpu", recompute=True),
        4,
    ),
    Case("1-3B kerple_log", bf16(4, "model_parallel_size=2"), 2),
    Case("1-3B cdape_kerple_log", bf16(4, "model_parallel_size=2", recompute=True), 4),
    Case("1-3B rotary", bf16(1, "context_parallel_size=2", *long(8192), recompute=True), 4),
    Case("1-3B cdape_kerple_log", bf16(4, "context_parallel_size=2", *long(4096), recompute="selective"), 4),
    Case("1-3B kerple_log", bf16(1, "context_parallel_size=4", *long(8192)), 8),
    Case("1-3B kerple_log", bf16(2, "gradient_accumulation_steps=3", "pipe_parallel_size=2"), 2),
    Case("1-3B kerple_log", bf16(2, "gradient_accumulation_steps=3", "pipe_parallel_size=2"), 2, 1),
    Case(
        "6-7B cdape_kerple_log",
        bf16(1, "model_parallel_size=2", "context_parallel_size=2", *long(4096), recompute=True),
        16,
    ),
    Case("2-7B rotary a100_2k", (), 64),
    Case("2-7B cdape_kerple_log a100_8k", (), 64),
)


def plan_case(case: Case, backend: str) -> tuple[RehearsedRun, MemoryEstimate]:
    """What is executed of a case, and what is planned of the rank that is measured."""
    config = load_config(case.configs.split(), [*case.keys, *BACKENDS[backend]]).config
    run = plan_rehearsal(config, case.gpus, None, VOCABULARY)
    stage = run.sizes.coordinates(case.rank)["pipeline"]
    estimate = estimate_memory(
        run.config, run.sizes, run.vocab_size, pipeline_stage=stage, gpu_bytes=get_card(CARD).memory
    )
    return run, estimate


def measure_peak(case: Case, run: RehearsedRun) -> tuple[int, str] | str:
    """Bytes of a rank's tensors at the worst moment and the phase it is in, or why there are none."""
    with temporary_folder("planner") as folder:
        config = run.build_config(folder).replace(save=None)
        config.save(folder / "train.yml")
        for rank in sorted({0, case.rank}):  # the first one makes the index of samples
            result = run_rank(run, rank, folder)
            if result.error is not None:
                return f"rank {rank}: {result.error.message}"
    phase, (allocated, _) = max(result.peaks.items(), key=lambda item: item[1][0])
    return allocated, phase


def run_rank(run: RehearsedRun, rank: int, folder: Path) -> RankResult:
    """Train one rank in a process of its own."""
    job = RankJob(str(folder), str(folder / "train.yml"), "train", rank, run.devices_per_node)
    path = folder / f"train-{rank}.job"
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    environment = build_environment(
        get_card(CARD), devices=run.devices_per_node, is_lone_rank=run.world_size > 1, base=os.environ
    )
    info = RankInfo(rank, run.world_size, rank % run.devices_per_node, run.devices_per_node)
    environment |= info.to_environment(ADDRESS, find_free_port())
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    command = [sys.executable, "-m", "megatron.rehearsal.rank_process", str(path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if not job.result.is_file():
        sys.exit(f"error: rank {rank} left no result:\n{(done.stdout + done.stderr)[-2000:]}")
    return RankResult.read(job.result)


def measure_rows(cases: list[Case], measured: dict[tuple[str, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each case and backend."""
    rows = []
    for case in cases:
        for backend in BACKENDS:
            run, estimate = plan_case(case, backend)
            key = (case.configs, *case.keys, str(case.gpus), str(case.rank), backend)
            row: dict[str, Any] = {**asdict(case), "keys": list(case.keys), "backend": backend}
            row |= {"planned": estimate.total, "moment": estimate.worst.name, "ranks": asdict(run.sizes)}
            if key in measured:
                row |= {name: measured[key].get(name) for name in ("peak", "phase", "error")}
            else:
                found = measure_peak(case, run)
                row |= {"peak": None, "phase": None, "error": None}
                row |= {"error": found} if isinstance(found, str) else dict(zip(("peak", "phase"), found, strict=True))
            rows.append(row)
            print(render_row(row), file=sys.stderr, flush=True)
    return rows


def read_measured(path: Path | None) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of an earlier record, by case and backend."""
    if path is None:
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(r["configs"], *r["keys"], str(r["gpus"]), str(r["rank"]), r["backend"]): r for r in rows if r["peak"]}


def render_row(row: dict[str, Any]) -> str:
    """One line of the page's table."""
    case = Case(row["configs"], tuple(row["keys"]), row["gpus"], row["rank"])
    keys = ", ".join(key for key in case.keys if key != "train_batch_size=null")
    planned = f"{row['planned'] / GIB:.2f}"
    if row["peak"] is None:
        return f"| {case.name} | {keys} | {row['backend']} | {row['error']} | {planned} | | {row['moment']} |"
    ratio = row["planned"] / row["peak"]
    return (
        f"| {case.name} | {keys} | {row['backend']} | {row['peak'] / GIB:.2f} | {planned} | {ratio:.2f} "
        f"| {row['moment']} |"
    )


def render_page(record: dict[str, Any]) -> str:
    """The record for people."""
    rows = [row for row in record["rows"] if row["peak"]]
    errors = [abs(row["planned"] / row["peak"] - 1) for row in rows]
    within = sum(error <= TOLERANCE for error in errors)
    table = "\n".join(render_row(row) for row in record["rows"])
    return f"""# The planner's memory against the allocator's

Three steps of one rank of each run, on the null device as an A100 of 80 GB:
the peak that PyTorch's caching allocator reports, and what `./deepy.py plan` says of that rank, in GiB.
`auto` is what that takes without a check on the card (row blocks, or PyTorch's fused attention);
`triton` is the kernels, compiled as they would run.
{within} of {len(rows)} are within {TOLERANCE:.0%}; the mean error is {sum(errors) / len(errors):.1%} and the largest
{max(errors):.1%}.
What the driver, NCCL and the allocator's own rounding take is in neither number.

| run | keys | backend | peak | planned | ratio | the planner's worst moment |
|---|---|---|---|---|---|---|
{table}

{record.get("peaks_from", "")}{format_provenance(record["stamp"])}
"""


def main() -> None:
    """Measure, and write a record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="cases whose line contains this text")
    parser.add_argument("--measured", type=Path, help="a record whose peaks are taken instead of measuring them again")
    parser.add_argument("--json", type=parse_output_path, help="the record; its page goes beside it")
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.only or "") in " ".join((case.name, *case.keys))]
    rows = measure_rows(cases, read_measured(arguments.measured))
    record = {"stamp": collect_provenance(__file__, "cpu"), "card": CARD, "vocabulary": VOCABULARY, "rows": rows}
    if arguments.measured is not None:
        record["peaks_from"] = "Peaks of an earlier record, planned anew; measured are those that it lacked. "
    print(render_page(record))
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Train and evaluate the methods of configs/evidence.yml on one GPU, one after another, within a time limit.

    python tools/gpu/evidence.py --seconds 600 --json evidence.json

A run starts only if its estimated time fits in the remaining time. The estimate is the time of the steps by `./deepy.py
plan` at `FIRST_MFU` plus `START_SECONDS`, corrected by the runs that this process has finished. Runs are members of an
ordinary sweep, in the order of its file. A finished run saves its records to `sweep.records` (docs/results/evidence)
and is not trained again, so the next visit begins with the first run without records.

After each run its seconds and perplexities are added to the JSON file, and its records to the archive `--archive`.
Unpack the archive into docs/results. A missing corpus is unpacked from data/evidence.tar.xz (`evidence_corpus.py`).
`--rehearse` trains two tiny models on a tiny corpus on a CPU, in a temporary folder.
"""

import argparse
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from megatron.distributed.hardware import find_gpu_spec  # noqa: E402
from megatron.planning.plan import make_plan  # noqa: E402
from megatron.planning.step_time import Cluster  # noqa: E402
from megatron.sweeps.results import compute_member_digest, load_saved_outcome  # noqa: E402
from megatron.sweeps.spec import Sweep, SweepMember, read_sweep  # noqa: E402
from megatron.utils.errors import FarfieldError  # noqa: E402
from tools.gpu.evidence_corpus import VOCABULARY_SIZE, prepare  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

SWEEP = "evidence"
CORPUS = ROOT / "data/evidence"
FIRST_MFU = 0.1
"""Assumed MFU of the first run. 125M reached 0.14 to 0.20 on an H200 (docs/gpu.md)."""
START_SECONDS = 75.0
"""Assumed time of a run outside its steps in seconds: startup, self-check, compilation, evaluation."""
STOP_SECONDS = 15.0
"""Time in seconds that a run gets to stop after the time limit."""
REHEARSED_KEYS = (
    *("num_layers=1", "hidden_size=32", "num_attention_heads=2", "seq_length=16", "max_position_embeddings=16"),
    *("train_iters=4", "train_micro_batch_size_per_gpu=2", "eval_interval=2", "eval_iters=1", "checkpoint_factor=4"),
    *("log_interval=1", "precision=fp32", "sweep.evaluate.lengths=[16, 32]", "sweep.evaluate.num_windows=2"),
    *("sweep.evaluate.targets=16", "sweep.evaluations={}"),
)
REHEARSED_DOCUMENTS = 60
REHEARSED_VARIANTS = "sweep.variants={rotary: {pos_emb: rotary}, fox: {pos_emb: fox}}"


@dataclass
class Estimator:
    """Estimator of run times, corrected by the times of finished runs."""

    cluster: Cluster
    ratios: list[float] = field(default_factory=list)
    """Ratios of measured to planned times of finished runs."""

    def plan_seconds(self, member: SweepMember) -> float:
        """Return the planned time of a run in seconds: its steps, and `START_SECONDS`."""
        backends = make_plan(member.config, VOCABULARY_SIZE, self.cluster).estimate_backends()
        # The self-check chooses the backend on the GPU; kernels are faster than row blocks if they support the method.
        chosen = backends.get("triton", backends["auto"])
        step = chosen.step_time.total if chosen.measured is None else chosen.measured.high
        return START_SECONDS + step * member.config.training.train_iters

    def estimate_seconds(self, member: SweepMember) -> float:
        """Return the estimated time of a run in seconds: the planned time times the largest ratio of finished runs."""
        return self.plan_seconds(member) * max(self.ratios, default=1.0)


def build_cluster(device: str) -> Cluster:
    """Return a cluster of one GPU like this machine's, or an H200 if the GPU is unknown."""
    name = ""
    if device == "cuda":
        import torch

        name = torch.cuda.get_device_name()
    spec = find_gpu_spec(name) or find_gpu_spec("NVIDIA H200")
    assert spec is not None
    return Cluster(spec, 1, 1, mfu=FIRST_MFU)


def unpack_corpus(folder: Path) -> None:
    """Unpack the corpus next to its archive, unless it exists. A folder appears only when it is complete.

    Raises:
        SystemExit: if there is neither, or if the archive is damaged.
    """
    archive = folder.with_name(f"{folder.name}.tar.xz")
    if folder.is_dir():
        return
    if not archive.is_file():
        sys.exit(
            f"error: {archive} not found; create it with tools/gpu/evidence_corpus.py on a machine with the packages"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        try:
            with tarfile.open(archive, "r:xz") as packed:
                packed.extractall(place, filter="data")
            (Path(place) / folder.name).replace(folder)
        except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as failure:
            sys.exit(f"error: {archive} cannot be unpacked: {failure or type(failure).__name__}; copy it again")


def find_records(sweep: Sweep, member: SweepMember) -> list[dict[str, Any]] | None:
    """Return the saved records of a finished run, or None."""
    outcome = load_saved_outcome(sweep, member, compute_member_digest(member))
    return None if outcome is None or not outcome.records else [record.to_row() for record in outcome.records]


def run_member(files: Sequence[str], index: int, seconds: float) -> str | None:
    """Train and evaluate one member within a time limit. Return the reason of a failure, or None."""
    command = [sys.executable, str(ROOT / "deepy.py"), "sweep", *files, "--run-index", str(index)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop_process(child)
        return f"cut after {seconds:.0f} s"
    except BaseException:
        stop_process(child)
        raise
    lines = [line for line in output.splitlines() if line.strip()]
    return None if child.returncode == 0 else (lines[-1][-300:] if lines else f"exit code {child.returncode}")


def stop_process(child: subprocess.Popen[str]) -> None:
    """Ask a run to stop, and kill it if it does not."""
    child.send_signal(signal.SIGINT)
    try:
        child.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()


def pack_records(folder: Path, archive: Path) -> None:
    """Write the records of all finished runs to one file."""
    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w") as packed:
        packed.add(folder, folder.name)
    part.replace(archive)


def summarize_run(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the scores of a run by method and length, and its training cost."""
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("perplexity") is not None:
            scores.setdefault(row["method"], {})[str(row["length"])] = round(row["perplexity"], 4)
    cost = {name: rows[0][name] for name in ("step_seconds", "train_memory_gib") if rows and name in rows[0]}
    return {"perplexity": scores, **cost}


def run_evidence(files: Sequence[str], arguments: argparse.Namespace, archive: Path | None) -> list[dict[str, Any]]:
    """Run the members without records within the time limit, and write the JSON file after each.

    Returns:
        The record of each member.
    """
    end = time.monotonic() + arguments.seconds
    sweep = read_sweep([name for name in files if "=" not in name], [name for name in files if "=" in name])
    assert sweep.options.records is not None
    folder = Path(sweep.options.records)
    estimator, records = Estimator(build_cluster(arguments.device)), []
    stamp = collect_provenance(__file__, arguments.device)
    for index, member in enumerate(sweep.members):
        record: dict[str, Any] = {"op": "evidence", "peer": member.variant, "seed": member.seed}
        records.append(record)
        rows = find_records(sweep, member)
        if rows is None:
            estimate, left = estimator.estimate_seconds(member), end - STOP_SECONDS - time.monotonic()
            record["estimated_seconds"] = round(estimate, 1)
            if estimate > left:
                record["refusal"] = f"needs about {estimate:.0f} s, {max(left, 0):.0f} s are left"
            else:
                start = time.monotonic()
                failure = run_member(files, index, left)
                record["seconds"] = round(time.monotonic() - start, 1)
                rows = find_records(sweep, member) if failure is None else None
                if rows is None:
                    record["refusal"] = failure or f"ended without records in {folder}"
                else:
                    estimator.ratios.append(record["seconds"] / estimator.plan_seconds(member))
        if rows is not None:
            record |= summarize_run(rows)
        print(format_console_line(record), flush=True)
        if arguments.json is not None:
            write_record(arguments.json, {**stamp, "records": records})
        if archive is not None and folder.is_dir():
            pack_records(folder, archive)
    return records


def format_console_line(record: dict[str, Any]) -> str:
    """Format a record as a console line."""
    head = f"{record['peer']:<18} seed {record['seed']} "
    if "refusal" in record:
        return head + f"not finished: {record['refusal']}"
    scores = next(iter(record["perplexity"].values()), {})
    taken = f"{record['seconds']:.0f} s" if "seconds" in record else "recorded before"
    return head + f"{taken:<16} " + "  ".join(f"{length}: {value:.2f}" for length, value in scores.items())


def parse_arguments() -> argparse.Namespace:
    import torch

    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int_at_least(1), default=600, help="time limit of all runs (600)")
    parser.add_argument("--json", type=parse_output_path, help="output file of the records")
    parser.add_argument("--archive", type=parse_output_path, help="output file with the saved records of all runs")
    parser.add_argument("--rehearse", action="store_true", help="two tiny runs on a CPU")
    parser.add_argument(
        "keys", nargs="*", metavar="KEY=VALUE", help="configuration keys to override, as for ./deepy.py sweep"
    )
    arguments = parser.parse_args()
    if wrong := next((key for key in arguments.keys if "=" not in key), None):
        parser.error(f"{wrong!r} is not of the form KEY=VALUE")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("no CUDA device found; --rehearse makes tiny runs on a CPU")
    arguments.device = "cpu" if arguments.rehearse else "cuda"
    for name in ("json", "archive"):
        if (path := getattr(arguments, name)) is not None:
            setattr(arguments, name, path.absolute())
    return arguments


def main() -> None:
    arguments = parse_arguments()
    os.chdir(ROOT)  # the runs are separate processes, which resolve the sweep's paths here
    files = [SWEEP, *arguments.keys]
    with ExitStack() as stack:
        if arguments.rehearse:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            prepare(folder / "corpus", ("rich",), REHEARSED_DOCUMENTS)
            paths = [
                f"{split}_data_paths=[{folder}/corpus/{split}_text_document]" for split in ("train", "valid", "test")
            ]
            outputs = [f"sweep.output={folder}/runs", f"sweep.records={folder}/records"]
            files = [SWEEP, *REHEARSED_KEYS, REHEARSED_VARIANTS, *paths, *outputs, *arguments.keys]
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        else:
            unpack_corpus(CORPUS)
        try:
            records = run_evidence(files, arguments, arguments.archive)
        except FarfieldError as error:
            sys.exit(f"error: {error}")
    sys.exit(any("seconds" in record and "refusal" in record for record in records))


if __name__ == "__main__":
    main()

"""Verdicts and reports of disk, time and jobs, for handmade rehearsals."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from megatron.config.load import load_config
from megatron.distributed.hardware import get_gpu_spec
from megatron.planning.plan import make_plan
from megatron.planning.step_time import Cluster
from megatron.rehearsal.matching import find_mismatches
from megatron.rehearsal.null_device.environment import get_gpu_model
from megatron.rehearsal.print_report import print_report
from megatron.rehearsal.rank_process import RankError, RankResult, describe_rank_error
from megatron.rehearsal.rehearse import RankTrace, Rehearsal
from megatron.rehearsal.rehearsed_run import plan_rehearsal
from megatron.rehearsal.report import GIB, RehearsalReport
from megatron.rehearsal.roles import Ledger, choose_roles
from megatron.utils.console import UnexpectedError
from megatron.utils.errors import RunError, UserError
from tests.support.collective_programs import write_ledgers

CHECKPOINT = {"weights": 4 * 10**9, "states": 8 * 10**9, "parts": 4 * 10**9}
KERNEL = {"name": "_fwd_kernel", "registers": 255, "stack": 16, "shared": 65536, "launches": 3}


def make_rehearsal(*keys, method="kerple_log", overlay="a100_8k", gib=9.0, error=None, gpus=8):
    """Build a rehearsal in which each rank uses the same memory."""
    run = plan_rehearsal(load_config(["125M", method, overlay], keys).config, gpus, None, None)
    rehearsal = Rehearsal(run, get_gpu_model("a100-40"), choose_roles(run.sizes), distinct_sequences=1, seconds=7.0)
    ledgers = write_ledgers(run.sizes)
    for role in rehearsal.roles:
        peaks = {
            "step": (int(gib * GIB / 2), int(gib * GIB / 2)),
            "forward and backward": (int(gib * GIB / 2) + 1,) * 2,
        }
        peaks["save"] = (0, int(gib * GIB))
        result = RankResult(role.rank, peaks, error, 125 * 10**6, 125 * 10**6, attention_backend="triton")
        result.warnings = ["dropout is left to PyTorch"]
        result.checkpoint = CHECKPOINT if role.rank == 0 and error is None else None
        summary = {"kernels": [KERNEL], "counters": {"launches": 3}}
        rehearsal.train_traces[role.rank] = RankTrace(result, ledgers[role.rank], summary, 1.0)
    return rehearsal


def judge(rehearsal):
    return RehearsalReport(rehearsal, network_gb_per_s=25, mfu=0.45)


def print_to_text(report):
    file = io.StringIO()
    print_report(report, Console(file=file, width=500, highlight=False))
    return file.getvalue()


@pytest.mark.parametrize(
    ("gib", "verdict"),
    [(9.0, "fits"), (0.9 * 39.4 - 0.1, "fits"), (0.9 * 39.4 + 0.1, "tight"), (39.0, "tight")],
)
def test_verdicts_depend_on_allocated_memory(gib, verdict):
    report = judge(make_rehearsal(gib=gib))
    assert (report.verdict, report.exit_code) == (verdict, 0)
    assert report.find_peak(0) == (int(gib * GIB / 2) + 1, int(gib * GIB), "forward and backward")


def test_no_room_for_unmodeled_memory_is_tight():
    rehearsal = make_rehearsal(gib=33.0)
    assert judge(rehearsal).verdict == "fits"
    assert judge(rehearsal).count_communicators(0) == 3
    rehearsal.gpu = replace(rehearsal.gpu, memory=int(36.9 * GIB))  # 90% of it is 33.2
    assert judge(rehearsal).verdict == "fits"
    (call,) = rehearsal.train_traces[0].ledger.calls[:1]
    many = [replace(call, communicator=replace(call.communicator, number=number)) for number in range(20)]
    rehearsal.train_traces[0] = replace(rehearsal.train_traces[0], ledger=Ledger(0, tuple(many)))
    assert judge(rehearsal).verdict == "tight"


def test_out_of_memory_is_reported_with_the_operation():
    where = ("megatron/model/gpt.py:251 _losses: losses = F.cross_entropy(flat)",)
    error = RankError("memory", "CUDA out of memory. Tried to allocate 2 GiB", "forward and backward of step 0", where)
    report = judge(make_rehearsal(error=error))
    assert (report.verdict, report.exit_code) == ("out of memory", 1)
    text = print_to_text(report)
    assert "rank 0, train in forward and backward of step 0: CUDA out of memory. Tried to allocate 2 GiB" in text
    assert where[0] in text
    assert "collectives agree" not in text


def test_ranks_that_do_not_agree_fail_the_rehearsal():
    rehearsal = make_rehearsal()
    ledgers = write_ledgers(rehearsal.run.sizes)
    ledgers[5] = Ledger(5, ledgers[5].calls[:-1])
    rehearsal.mismatches = [("train", mismatch) for mismatch in find_mismatches(ledgers, rehearsal.run.sizes)]
    report = judge(rehearsal)
    assert (report.verdict, report.exit_code) == ("fits", 1)
    assert "train: rank 5, context × data group of ranks 0-7" in print_to_text(report)
    (mismatch,) = report.to_dict()["mismatches"]
    assert mismatch["ranks"] == [5]


@pytest.mark.parametrize(
    ("backend", "exit_code", "way_out"),
    [("triton", 1, "choose another attention_backend"), ("auto", 0, "auto rejects it on the GPU")],
)
def test_a_miscompiled_kernel_fails_a_run_that_names_it(backend, exit_code, way_out):
    rehearsal = make_rehearsal(f"attention_backend={backend}")
    assert judge(rehearsal).exit_code == 0
    rehearsal.train_traces[0].result.miscompiled_kernels = ["_bwd_dq_kernel"]
    report = judge(rehearsal)
    assert (report.verdict, report.exit_code) == ("fits", exit_code)
    assert report.to_dict()["miscompiled_kernels"] == ["_bwd_dq_kernel"]
    text = print_to_text(report)
    assert "miscompiled: _bwd_dq_kernel reads uninitialized registers" in text
    assert way_out in text


def test_everything_is_printed_and_is_json(tmp_path):
    report = judge(make_rehearsal(f"save={tmp_path}", "train_iters=1000", "checkpoint_factor=100"))
    text = print_to_text(report)
    for words in (
        "fits  125M parameters, 8 × NVIDIA A100-SXM4-40GB", "data 1, context 3", "5 ranks", "9.00", "not modeled",
        "CUDA context 0.3–0.5 GiB", "0.5 GiB × 3 communicators", "collectives agree on 8 of 8 ranks", "all_gather",
        "executed: 3 steps of 2 micro-batches (the run has 32 per step), one validation", "_fwd_kernel", "255",
        "attention  triton", "dropout is left to PyTorch", "checkpoint of 11.2 GiB",
        f"free in {tmp_path}",
        "host memory  3.73 GiB per node while its 8 ranks", "estimated", "covered  2 of 8 ranks ran", "not covered",
        "assumed  ranks that did not run behave like 0,7",
    ):  # fmt: skip
        assert words in text, words
    values = json.loads(json.dumps(report.to_dict()))
    assert values["disk"]["kept"] == 4, "keep_last_n_checkpoints of the model's file"
    assert values["disk"]["needed"] == 4 * 12 * 10**9 + 16 * 10**9
    low, high = values["step_seconds_estimated"]
    assert 0 < low < high
    assert values["slurm"] is None
    assert values["rehearsed"] == {"steps": 3, "micro_batches": 2, "micro_batches_of_the_run": 32}


def test_a_slurm_job_has_its_script_and_its_starts(tmp_path):
    rehearsal = make_rehearsal("launcher=slurm", "num_gpus=4", f"save={tmp_path}", "slurm={time: '2:00:00'}", gpus=8)
    report = judge(rehearsal)
    slurm = report.to_dict()["slurm"]
    assert "#SBATCH --nodes=2" in slurm["script"]
    assert slurm["starts"][0] >= 1
    assert "time limit 2:00:00" in print_to_text(report)


@pytest.mark.parametrize("method", ["cdape_kerple_log", "kerple_log"])
def test_the_time_and_the_starts_are_those_of_the_plan(tmp_path, method):
    """The handmade ranks use Triton, so the range is that of the plan's column `triton`."""
    keys = ("launcher=slurm", "num_gpus=1", "slurm={time: '2:00:00'}", f"save={tmp_path}")
    report = judge(make_rehearsal(*keys, method=method, overlay="a100_2k", gpus=1))
    config = load_config(["125M", method, "a100_2k"]).config
    column = make_plan(config, 50257, Cluster(get_gpu_spec("a100-40gb"), 1)).estimate_backends()["triton"]
    assert (column.measured is not None) == (method == "cdape_kerple_log")
    total = column.step_time.total
    expected = (0.89 * total, 1.56 * total) if column.measured is None else (column.measured.low, column.measured.high)
    assert report.step_seconds == pytest.approx(expected)
    usable = 7200 - config.launch.slurm.signal_seconds
    starts = [math.ceil(config.training.train_iters * seconds / usable) for seconds in expected]
    assert report.to_dict()["slurm"]["starts"] == starts


def test_errors_of_ranks_show_their_cause():
    def fail(error, cause=None):
        try:
            raise error from cause
        except Exception as caught:
            return describe_rank_error(caught, "step of step 1")

    assert fail(UserError("save: no")).kind == "user"
    full = fail(RunError("the disk is full"))
    assert (full.kind, full.message, full.phase) == ("run", "the disk is full", "step of step 1")
    assert full.where[0].startswith("tests/rehearsal/test_report.py:")
    assert full.where[0].endswith(" fail: raise error from cause")
    assert fail(RunError("save: no room"), OSError(28, "full")).message == "save: no room"
    unexpected = fail(UnexpectedError("the traceback is in log"), ZeroDivisionError("division"))
    assert (unexpected.kind, unexpected.message) == ("unexpected", "ZeroDivisionError: division")
    memory = type("OutOfMemoryError", (RuntimeError,), {})
    out = fail(RunError("memory does not suffice"), memory("CUDA out of memory. Tried to allocate 2 MiB. GPU 0 has"))
    assert (out.kind, out.message) == ("memory", "CUDA out of memory. Tried to allocate 2 MiB")
    assert fail(RunError("no"), MemoryError()).kind == "host memory"

"""Self-check of the backends: comparison, rejection, timing and caching of results."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from position_methods import build

from megatron.attention.backends.backend import AttentionFormula
from megatron.attention.backends.pytorch import EagerBackend, RowBlockBackend
from megatron.attention.check import check_result
from megatron.attention.check import problem as problem_module
from megatron.attention.check import trials as trials_module
from megatron.attention.check.check_result import (
    BackendTrial,
    CheckRecord,
    CheckResult,
    describe_gpu,
    describe_software,
    read_cache,
    read_records,
    write_cache,
    write_records,
)
from megatron.attention.check.float64_reference import CheckedDocuments
from megatron.attention.check.problem import CheckProblem, build_problem
from megatron.attention.check.trials import DeviceLostError, ReferenceResults, is_within_rounding, try_backends
from megatron.attention.inputs import AttentionInputs
from megatron.position.facts import AttentionDims
from megatron.position.token_range import ALL_HEADS, TokenRange

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = AttentionDims(num_heads=3, head_dim=16, hidden_size=48, train_length=16, max_length=64)
WHOLE = (TokenRange(0, 24),)


APART = CheckedDocuments(torch.tensor([[0] * 24, [0] * 5 + [5] * 4 + [9] * 15]), masked=True)
LONG_APART = CheckedDocuments(torch.tensor([[0] * 250, [0] * 70 + [70] * 61 + [131] * 119]), masked=True)


def make_problem(
    method: tuple[str, str],
    segments: tuple[TokenRange, ...] = WHOLE,
    *,
    window: int | None = None,
    heads: slice = ALL_HEADS,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    softcap: float | None = None,
    documents: CheckedDocuments | None = None,
) -> CheckProblem:
    torch.manual_seed(1)
    formula = AttentionFormula(*build(*method, SHAPE), softcap)
    return build_problem(
        formula, segments, batch=batch, window=window, heads=heads, dtype=dtype, device=DEVICE, documents=documents
    )


class Wrong:
    """Backend that is correct except for one modification."""

    def __init__(self, spoil, backend=None) -> None:
        self.spoil, self.backend = spoil, backend or RowBlockBackend(8)

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        return self.spoil(self.backend(inputs), inputs)


class Raising:
    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        raise self.failure


def count_passes(run, device) -> float:
    run()
    return 1.0


# Comparison.


@pytest.mark.parametrize(
    ("method", "segments", "options", "exact_pairs"),
    [
        (("kerple_log", "none"), WHOLE, {}, 1 << 24),
        (("kerple_log", "none"), (TokenRange(0, 300),), {}, 1),
        (("t5", "none"), (TokenRange(20, 20), TokenRange(60, 20)), {"heads": slice(1, 3), "window": 9}, 1 << 24),
        (("fire", "none"), (TokenRange(0, 250),), {"batch": 1}, 1),
        (("kerple_log", "cdape"), (TokenRange(0, 40),), {}, 1),
        (("kerple_log", "cdape"), (TokenRange(10, 10), TokenRange(30, 10)), {"heads": slice(0, 2)}, 1 << 24),
        (("rotary", "none"), WHOLE, {}, 1 << 24),
        (("kerple_log", "none"), WHOLE, {"documents": APART}, 1 << 24),
        (("rotary", "none"), (TokenRange(0, 250),), {"documents": LONG_APART}, 1),
        (("kerple_log", "cdape"), (TokenRange(6, 6), TokenRange(18, 6)), {"documents": APART, "window": 5}, 1 << 24),
        (("fire", "none"), WHOLE, {"documents": replace(APART, masked=False)}, 1 << 24),
        (
            ("fire", "cdape"),
            (TokenRange(6, 6), TokenRange(18, 6)),
            {"documents": replace(APART, masked=False)},
            1 << 24,
        ),
    ],
)
def test_a_part_in_float64_is_that_part_of_the_whole(method, segments, options, exact_pairs, monkeypatch) -> None:
    """Exact outputs and gradients of a few rows equal those of all rows if all other gradients are zero."""
    monkeypatch.setattr(problem_module, "MAX_EXACT_PAIRS", exact_pairs)
    problem = make_problem(method, segments, dtype=torch.float64, **options)
    whole, is_zero_elsewhere = problem.select_results(*problem.run(EagerBackend()))
    part = problem.compute_exactly()
    assert is_zero_elsewhere
    assert whole.keys() == part.keys()
    for name, found in whole.items():
        torch.testing.assert_close(found.view_as(part[name]), part[name], rtol=1e-9, atol=1e-11, msg=name)
    compared = sum(row_range.stop - row_range.start for row_range in problem.row_ranges)
    assert (compared < sum(tokens.length for tokens in segments)) == (exact_pairs == 1)
    assert all(bool(part[name].abs().max() > 0) for name in ("output", "dq", "dk", "dv"))


def test_parameters_that_start_at_zero_are_moved_and_bounds_hold() -> None:
    encoding, processor = build("kerple_log", "dape", SHAPE)
    assert processor is not None
    with torch.no_grad():
        for parameter in processor.parameters():
            parameter.zero_()
        for parameter in encoding.parameters():
            parameter.fill_(0.01)  # lower bound of both parameters
    before = [parameter.clone() for parameter in (*encoding.parameters(), *processor.parameters())]
    problem = build_problem(
        AttentionFormula(encoding, processor),
        WHOLE,
        batch=1,
        window=None,
        heads=ALL_HEADS,
        dtype=torch.float32,
        device=DEVICE,
    )
    assert problem.processor is not None
    assert all(bool((parameter != 0).any()) for parameter in problem.processor.parameters())
    assert all(bool((parameter >= 0.01).all()) for parameter in problem.encoding.parameters())
    after = [*encoding.parameters(), *processor.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_slow_problem_is_reduced_by_sequences_then_rows(monkeypatch) -> None:
    pairs = 3 * 24 * 25 // 2
    monkeypatch.setattr(problem_module, "MAX_PAIRS", 2 * pairs)
    assert make_problem(("none", "none"), batch=4).batch == 2
    monkeypatch.setattr(problem_module, "MAX_PAIRS", 3 * 24 * 5)
    problem = make_problem(("none", "none"), batch=4)
    assert (problem.batch, problem.segments) == (1, (TokenRange(19, 5),))
    assert problem.describe()["rows"] == [[19, 24]]


# Verdicts.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "softcap"),
    [(("kerple_log", "none"), None), (("kerple_log", "none"), 0.8), (("kerple_log", "cdape"), None)],
)
def test_half_precision_is_held_to_its_own_rounding(method, softcap, dtype) -> None:
    trial, wrong = try_backends(
        make_problem(method, dtype=dtype, softcap=softcap),
        {"row blocks": RowBlockBackend(8), "coarse": Wrong(lambda out, _: out * 1.02)},
        timer=count_passes,
    )
    assert trial.refusal is None
    assert "errs in" in (wrong.refusal or "")


def spoil_last_row(out, _):
    return out * torch.where(torch.arange(out.shape[2], device=out.device) == out.shape[2] - 1, 1.001, 1.0)[:, None]


def spoil_gradient_of_keys(out, inputs):
    return out + 1e-4 * (inputs.k[-1:] - inputs.k[-1:].detach()).sum()


def spoil_bias_gradient(out, inputs):
    (parameter, *_) = inputs.encoding.parameters()
    return out + 1e-3 * (parameter - parameter.detach()).sum()


def spoil_other_rows(out, inputs):
    """Add a gradient to queries of a sequence whose output has none."""
    return out + (inputs.q[:1] - inputs.q[:1].detach()).sum() * 1e-3


def make_nan(out, _):
    return out * float("nan")


@pytest.mark.parametrize(
    ("spoil", "result"),
    [
        (spoil_last_row, "output"),
        (spoil_gradient_of_keys, "dk"),
        (spoil_bias_gradient, "encoding.r1.value"),
        (spoil_other_rows, "rows without a gradient"),
        (make_nan, "output"),
    ],
)
def test_a_wrong_kernel_is_named_and_rejected(spoil, result: str) -> None:
    trials = try_backends(
        make_problem(("kerple_log", "none")),
        {"row blocks": RowBlockBackend(8), "wrong": Wrong(spoil)},
        timer=count_passes,
    )
    right, wrong = trials
    assert right.refusal is None
    assert wrong.refusal is not None
    assert wrong.refusal.startswith("errs in ")
    assert wrong.excess is not None
    assert wrong.excess[result] > 10
    assert wrong.milliseconds is None
    assert CheckResult({}, {}, tuple(trials), 0.0).rank_backends() == [right]


class GatesTimes(EagerBackend):
    """Backend that multiplies the sums of gates by a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        assert inputs.row_bias is not None
        assert inputs.key_bias is not None
        row_bias, key_bias = (self.factor * bias for bias in (inputs.row_bias, inputs.key_bias))
        return super().__call__(replace(inputs, row_bias=row_bias, key_bias=key_bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("processor", ["none", "cdape"])
@pytest.mark.parametrize("documents", [None, APART])
def test_a_kernel_with_wrong_gates_is_rejected(
    processor: str, documents: CheckedDocuments | None, dtype: torch.dtype
) -> None:
    """Sums of gates are float64 in every compute type, so their rounding does not hide errors of a backend."""
    backends = {
        "row blocks": RowBlockBackend(8), "whole": GatesTimes(1.0), "none": GatesTimes(0.0), "wrong": GatesTimes(1.1),
        "scaled": Wrong(lambda out, _: out * 1.05),
    }  # fmt: skip
    problem = make_problem(("fox", processor), documents=documents, dtype=dtype)
    trials = try_backends(problem, backends, timer=count_passes)
    assert [trial.is_correct for trial in trials] == [True, True, False, False, False], trials


@pytest.mark.parametrize("method", [("kerple_log", "none"), ("kerple_log", "cdape"), ("none", "none")])
@pytest.mark.parametrize("shift", [None, 1, -1])
def test_a_kernel_that_confuses_documents_is_rejected(method, shift: int | None) -> None:
    """Kernels that ignore documents, or start them a token too early or too late, are rejected."""

    class Ignoring(RowBlockBackend):
        def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
            assert inputs.document_starts is not None
            document_starts, rows = inputs.document_starts, inputs.query.indices(inputs.q.device)
            moved = None if shift is None else torch.where(document_starts > 0, document_starts - shift, 0)
            moved = None if moved is None else torch.minimum(moved, rows).to(torch.int32)
            return super().__call__(replace(inputs, document_starts=moved))

    right, wrong = try_backends(
        make_problem(method, documents=APART, dtype=torch.float16),
        {"row blocks": RowBlockBackend(8), "wrong": Ignoring(8)},
        timer=count_passes,
    )
    assert right.refusal is None
    assert wrong.refusal is not None
    assert wrong.refusal.startswith("errs in ")
    assert max(wrong.excess["output"], wrong.excess["dk"]) > 10
    assert make_problem(method, documents=APART).describe()["documents"] == [1, 3]


def test_first_rows_of_documents_are_compared(monkeypatch) -> None:
    """If not all rows are compared, rows on both sides of the boundary nearest to the middle are."""
    monkeypatch.setattr(problem_module, "MAX_EXACT_PAIRS", 1)
    monkeypatch.setattr(problem_module, "ROWS_PER_RANGE", 9)
    problem = make_problem(("kerple_log", "none"), (TokenRange(0, 250),), documents=LONG_APART)
    assert [(row_range.start, row_range.stop) for row_range in problem.row_ranges] == [(0, 9), (128, 137), (241, 250)]
    problem = make_problem(("kerple_log", "cdape"), (TokenRange(0, 250),), documents=LONG_APART)
    assert [(row_range.start, row_range.stop) for row_range in problem.row_ranges] == [(0, 1), (131, 132), (249, 250)]


def test_documents_have_one_mask_a_problem_and_fewer_sequences_keep_the_last(monkeypatch) -> None:
    asked = []

    class Masking(RowBlockBackend):
        def compute_document_mask(self, query, key, document_starts, *rest, dropout):
            asked.append(document_starts)
            return "mask"

        def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
            assert inputs.document_mask == "mask"
            return super().__call__(inputs)

    problem, backend = make_problem(("none", "none"), documents=APART), Masking(8)
    problem.run(backend)
    problem.run(backend)
    assert len(asked) == 1
    monkeypatch.setattr(problem_module, "MAX_PAIRS", 3 * 24 * 25 // 2)
    problem = make_problem(("none", "none"), documents=APART)
    assert (problem.batch, problem.describe()["documents"]) == (1, [3])


def test_small_errors_are_checked_again(monkeypatch) -> None:
    """A backend with a small error is checked again.

    A kink may push a correct backend over the limit once, but not twice.
    """
    asked: list[int] = []
    real = ReferenceResults.compute_error_ratio

    def over_the_line(self, *args, **kwargs):
        asked.append(self.problem.seed)
        return real(self, *args, **kwargs) | ({"dq": 9.0} if len(asked) == 1 else {})

    monkeypatch.setattr(ReferenceResults, "compute_error_ratio", over_the_line)
    (trial,) = try_backends(make_problem(("none", "none")), {"row blocks": RowBlockBackend(8)}, timer=count_passes)
    assert trial.refusal is None
    assert len(set(asked)) == len(asked) == 2
    monkeypatch.setattr(ReferenceResults, "compute_error_ratio", lambda *args, **kwargs: {"dq": 9.0})
    (trial,) = try_backends(make_problem(("none", "none")), {"row blocks": RowBlockBackend(8)}, timer=count_passes)
    assert trial.refusal == "errs in dq by 9 times the rounding error of float32"


def test_nan_is_never_correct() -> None:
    assert is_within_rounding({"output": 3.9, "dq": 0.0})
    assert not is_within_rounding({"output": math.inf})
    assert not is_within_rounding({"output": math.nan})


# Failures and timeouts.


def test_failing_candidates_are_named_and_the_others_continue() -> None:
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")
    trials = try_backends(
        make_problem(("none", "none")),
        {
            "compiler": Raising(RuntimeError("ptxas failed\nwith a long story")),
            "large": Raising(out_of_memory),
            "row blocks": RowBlockBackend(8),
        },
        timer=count_passes,
    )
    assert [trial.refusal for trial in trials] == ["raised RuntimeError: ptxas failed", "ran out of memory", None]
    assert [trial.is_final for trial in trials] == [True, False, True]  # memory may be available later


def test_candidates_that_fail_during_timing_are_rejected() -> None:
    calls = []

    def spoil(out, _):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("now")
        return out

    trials = try_backends(
        make_problem(("none", "none")), {"row blocks": RowBlockBackend(8), "later": Wrong(spoil)}, timer=count_passes
    )
    assert [trial.refusal for trial in trials] == [None, "raised RuntimeError: now"]


def test_the_fastest_is_first_by_the_median_of_its_passes() -> None:
    seconds = {"row blocks": iter([2.0, 9.0, 2.0] * 9), "fast": iter([1.0, 1.0, 50.0] * 9)}
    backends = {"row blocks": RowBlockBackend(8), "fast": RowBlockBackend(8)}
    order = iter([name for _ in range(99) for name in backends])
    trials = try_backends(
        make_problem(("none", "none")), backends, timer=lambda run, device: next(seconds[next(order)])
    )
    ranked = CheckResult({}, {}, tuple(trials), 0.0).rank_backends()
    assert [(trial.backend, trial.milliseconds) for trial in ranked] == [("fast", 1000.0), ("row blocks", 2000.0)]


def test_no_backend_is_begun_when_the_time_is_over() -> None:
    now = [0.0]

    def slow(out, _):
        now[0] += trials_module.CHECK_SECONDS + 1
        return out

    backends = {"row blocks": RowBlockBackend(8), "slow": Wrong(slow), "late": RowBlockBackend(8)}
    trials = try_backends(make_problem(("none", "none")), backends, timer=count_passes, clock=lambda: now[0])
    assert [trial.refusal for trial in trials] == [None, None, "was not tried: the check had taken 20 s"]
    assert not trials[2].is_final
    assert [trial.milliseconds is None for trial in trials] == [False, False, True]


def test_a_reference_that_cannot_be_computed_is_no_backends_fault(monkeypatch) -> None:
    monkeypatch.setattr(CheckProblem, "compute_exactly", lambda self: 1 / 0)
    (trial,) = try_backends(make_problem(("none", "none")), {"row blocks": RowBlockBackend(8)}, timer=count_passes)
    assert trial.refusal == "was not compared: computing in float64 raised ZeroDivisionError: division by zero"


def test_a_lost_device_ends_the_check_with_partial_results(monkeypatch) -> None:
    monkeypatch.setattr(trials_module, "is_device_usable", lambda device: False)
    backends = {
        "row blocks": RowBlockBackend(8),
        "bad": Raising(RuntimeError("CUDA error: an illegal memory access was encountered")),
        "never": RowBlockBackend(8),
    }
    with pytest.raises(DeviceLostError, match="attention by bad raised RuntimeError: CUDA error: an illegal") as lost:
        try_backends(make_problem(("none", "none")), backends, timer=count_passes)
    assert [trial.backend for trial in lost.value.trials] == ["row blocks", "bad"]


def test_the_memory_of_a_lost_device_need_not_be_freed(monkeypatch) -> None:
    """After an illegal address, PyTorch's allocator raises the same error when it frees memory."""

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    trials_module.free_memory(torch.device("cuda"))


# Stored results.


def evidence_of(*trials: BackendTrial, card: str = "H100") -> CheckResult:
    key = {"card": {"name": card}, "software": describe_software(), "work": {"dtype": "bfloat16", "length": 512}}
    return CheckResult(key, {"batch": 2}, trials, 1.5)


RIGHT = BackendTrial("triton", excess={"output": 0.8}, milliseconds=1.0, memory_mb=3.0, first_seconds=2.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "farfield/attention_check"


def test_evidence_is_found_again_for_the_same_and_for_nothing_else(cache: Path) -> None:
    check_result = evidence_of(RIGHT, BackendTrial("sdpa", "errs in dq by inf times", excess={"dq": math.inf}))
    assert read_cache(check_result.key) is None
    write_cache(check_result)
    assert read_cache(check_result.key) == check_result
    for part, change in (("card", {"name": "A100"}), ("software", {"torch": "9"}), ("work", {"length": 513})):
        assert read_cache({**check_result.key, part: {**check_result.key[part], **change}}) is None
    assert [path.suffix for path in cache.iterdir()] == [".json"]  # no temporary file is left


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"milliseconds": 1.0', '"milliseconds": "soon"'),
        lambda text: text.replace('"name": "H100"', '"name": "A100"'),
        lambda text: text.replace('"trials"', '"trails"'),
        lambda text: "\x00" * 100,
    ],
)
def test_a_damaged_file_is_ignored(damage, cache: Path) -> None:
    check_result = evidence_of(RIGHT)
    write_cache(check_result)
    (path,) = cache.iterdir()
    path.write_text(damage(path.read_text()))
    assert read_cache(check_result.key) is None
    write_cache(check_result)
    assert read_cache(check_result.key) == check_result


def test_an_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_cache(evidence_of(RIGHT))
    assert read_cache(evidence_of(RIGHT).key) is None


def test_a_run_keeps_its_record(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    record = CheckRecord("triton", "attention: triton", evidence_of(RIGHT))
    write_records(tmp_path, [record, replace(record, backend="sdpa")])
    assert read_records(tmp_path) == [record, replace(record, backend="sdpa")]
    write_records(tmp_path, [record])
    assert read_records(tmp_path) == [record]
    assert json.loads((tmp_path / "attention_check.json").read_text())["trials"][0]["milliseconds"] == 1.0
    (tmp_path / "attention_check.json").write_text('{"backend": "triton"}')
    assert read_records(tmp_path) == []


def test_software_is_identified_by_its_sources() -> None:
    assert describe_gpu(torch.device("cpu")) == {"name": "cpu"}
    software = describe_software()
    assert software["torch"] == torch.__version__
    assert len(software["sources"]) == 16
    assert json.loads(json.dumps(software)) == software


def test_a_check_is_repeated_with_other_cuda_sources_or_another_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(check_result.KERNEL_VARIABLE, raising=False)
    before = describe_software()
    monkeypatch.setenv(check_result.KERNEL_VARIABLE, "0")
    assert describe_software() != before
    header = tmp_path / check_result.SOURCES[0] / "kernel.h"
    header.parent.mkdir(parents=True)
    monkeypatch.setattr(check_result, "PACKAGES_FOLDER", tmp_path)
    hashes = set()
    for source in ("int one;", "int two;"):
        header.write_text(source, encoding="utf-8")
        hashes.add(check_result.hash_attention_sources.__wrapped__())
    assert len(hashes) == 2


def test_a_trial_of_other_shapes_is_another_problem() -> None:
    """A trial of another shape uses other random numbers, which depend only on the seed."""
    one, two = make_problem(("none", "none")), make_problem(("none", "none"))
    assert torch.equal(one.list_inputs()[0].q, two.list_inputs()[0].q)
    assert not torch.equal(one.list_inputs()[0].q, replace(one, seed=5).list_inputs()[0].q)

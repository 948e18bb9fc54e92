"""Kernel benchmark at small sizes on a CPU; peers that fail the gate are not timed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.kernels.cdape_attention import cpu
from tools.bench import attention as attention_bench
from tools.bench import error_gate
from tools.bench.attention_peers import Attention, AttentionProblem, build_peers
from tools.bench.error_gate import RESULT_PARTS, check_peers
from tools.bench.timing import Timing, compute_quartiles, measure_memory_growth
from tools.tolerances import compute_tolerance

Run = Callable[..., int | str | None]
TINY = ("--device", "cpu", "--batch", "1", "--heads", "2", "--dim", "8", "--width", "4", "--rounds", "2")
# A gradient sums over the scores of 12 rows; four sums (scores, two convolutions, values) in each direction.
ROUNDING = compute_tolerance(12 * 12, 2 * 4)
PROBLEM = AttentionProblem("cdape", 1, 2, 8, 12, width=4)


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return build_peers(PROBLEM)["eager"](q, k, v)


def off_by_a_percent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 1.01 * right(q, k, v)


def without_dv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(q, k, v.detach())


def parameters_frozen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    frozen = AttentionProblem("cdape", 1, 2, 8, 12, width=4)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    return build_peers(frozen)["eager"](q, k, v)


def nan_in_dk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.clone()
    k.register_hook(lambda gradient: gradient * float("nan"))
    return right(q, k, v)


def one_wrong_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output = right(q, k, v).clone()
    output[0, 0, 5] *= 1.001
    return output


def out_of_memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> dict[str, Attention]:
    """Peers in addition to the problem's; memory, which needs a process each, is not measured."""
    added: dict[str, Attention] = {}
    monkeypatch.setattr(attention_bench, "build_peers", lambda problem: {**build_peers(problem), **added})
    monkeypatch.setattr(attention_bench, "measure_memory_growth", lambda problem, name: 1.0)
    return added


@pytest.mark.usefixtures("extra")
def test_a_run_writes_every_field_and_table_and_plot(command: Run, tmp_path: Path) -> None:
    names = {"json": tmp_path / "a.json", "markdown": tmp_path / "a.md", "plot": tmp_path / "a.png"}
    files = [word for kind, path in names.items() for word in (f"--{kind}", str(path))]
    words = (*TINY, "--op", "cdape", "--lengths", "12", "--peers", "chunked", "appendix", *files)
    assert command(attention_bench, *words) == 0
    result = json.loads(names["json"].read_text(encoding="utf-8"))
    assert list(result) == ["date", "command", "commit", "machine", "versions", "records"]
    assert [record["peer"] for record in result["records"]] == ["chunked", "appendix"]
    for record in result["records"]:
        expected = {"op": "cdape", "device": "cpu", "dtype": "float32", "B": 1, "T": 12, "H": 2, "d": 8, "k": 3}
        assert {key: record[key] for key in expected} == expected
        assert set(record) - set(expected) == {
            "peer", "width", "ms", "ratio", "ratio_to", "peak_memory_mb", "error", "judged_at", "rounds",
        }  # fmt: skip
        assert list(record["ms"]) == ["forward", "backward", "both"]
        for low, middle, high in record["ms"].values():
            assert low <= middle <= high
            assert middle > 0
        assert record["ms"]["both"][1] > record["ms"]["forward"][1]
        assert record["peak_memory_mb"] >= 0
        assert 0 < record["error"] < ROUNDING
        assert record["ratio_to"] == "chunked"
    assert result["records"][0]["ratio"] == 1
    table = names["markdown"].read_text(encoding="utf-8").splitlines()
    assert table[0].split(" | ")[0] == "| op"
    assert len(table[0].split("|")) == len(table[2].split("|"))
    assert table[2].startswith("| cdape k=3 | 12 | 1 | 2 | float32 | chunked |")
    assert table[5].endswith(f"`{result['command']}`.")
    assert names["plot"].read_bytes().startswith(b"\x89PNG")


def test_quartiles_are_between_the_values() -> None:
    assert compute_quartiles([7.0]) == [7, 7, 7]
    assert compute_quartiles([100.0, 2.0]) == [26.5, 51, 75.5]
    assert compute_quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2, 3, 4]


def test_memory_on_a_cpu_is_at_least_that_of_the_maps() -> None:
    """Eager's backward pass stores probabilities and gradient of the logits together, float32 [H, T, T] each."""
    problem = AttentionProblem("biased_attention", 1, 2, 8, 1024)
    assert measure_memory_growth(problem, "eager") >= 2 * 4 * 2 * 1024 * 1024 / 1e6


WRONG = [off_by_a_percent, without_dv, parameters_frozen, nan_in_dk, one_wrong_row]


@pytest.mark.parametrize("wrong", [*WRONG, out_of_memory], ids=lambda peer: peer.__name__)
def test_no_gate_no_speed(wrong: Attention, extra: dict[str, Attention]) -> None:
    extra["right"], extra["wrong"] = right, wrong
    records = {record["peer"]: record for record in attention_bench.benchmark_problem(PROBLEM, 2, None, lambda _: None)}
    refused = records.pop("wrong")
    assert [refused[key] for key in ("ms", "ratio", "peak_memory_mb")] == [None] * 3
    assert refused["refusal"]
    assert "\n" not in refused["refusal"]
    assert (refused["error"] is None) == (wrong in (out_of_memory, nan_in_dk))
    compiled = {"native"} if cpu.describe_unavailable() is None else set()
    assert set(records) == {"eager", "chunked", "kept", "flash", "appendix", "right"} | compiled
    assert all(record["ms"] and "refusal" not in record for record in records.values())


def test_coarse_gradients_of_parameters_do_not_hide_a_wrong_output() -> None:
    """In bfloat16 eager's parameter gradients have errors of a percent; an output with larger errors is rejected."""
    problem, (output, parameters) = replace(PROBLEM, dtype=torch.bfloat16), RESULT_PARTS
    eager = build_peers(problem)["eager"]

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = eager(q, k, v)
        return found + 0.05 * torch.cat([found[:, :1], 0 * found[:, 1:]], dim=1).detach()

    verdicts = dict(check_peers(problem, {"eager": eager, "wrong": wrong}))
    assert verdicts["eager"].refusal is None
    assert verdicts["eager"].errors[parameters] > 0.005
    assert verdicts["wrong"].refusal is not None
    assert verdicts["wrong"].refusal.startswith(f"errs in {output} by ")


@pytest.mark.parametrize("wanted", [["wrong"], ["wrong", "appendix"]])
def test_a_long_problem_is_judged_at_a_shorter_one(
    wanted: list[str], extra: dict[str, Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths.append(q.shape[2])
        return q + k + v

    extra["wrong"] = wrong
    monkeypatch.setattr(attention_bench, "MAX_GATE_LENGTH", {"cpu": 6})
    records = {
        record["peer"]: record for record in attention_bench.benchmark_problem(PROBLEM, 2, wanted, lambda _: None)
    }
    assert sorted(records) == sorted(wanted)
    assert {record["judged_at"] for record in records.values()} == {6}
    assert {record["T"] for record in records.values()} == {12}
    assert "errs in" in records.pop("wrong")["refusal"]
    assert all("refusal" not in record for record in records.values())
    assert all(record["ms"] and record["ratio"] is None for record in records.values())  # none of our peers ran
    assert lengths == [6]


@pytest.mark.parametrize(
    ("ratios", "judged", "refusal"),
    [
        ([4.1, 1.0], 2, None),
        ([4.1, 4.1], 2, "errs in output, dq, dk, dv by 4.1 times"),
        ([101.0, 1.0], 1, "errs in output, dq, dk, dv by 101 times"),
        ([3.9, 101.0], 1, None),
        ([(4.1, float("inf")), 1.0], 1, "errs in output, dq, dk, dv by 4.1 times"),
        ([(1.0, float("nan")), 1.0], 1, "errs in the parameters' gradients by nan times"),
    ],
)
def test_small_excess_errors_are_judged_again_with_other_inputs(
    ratios: list[float | tuple[float, float]], judged: int, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def read_ratio(gate: error_gate.ErrorGate, name: str, found: object, part: slice) -> float:
        if gate.problem.seed not in seeds:
            seeds.append(gate.problem.seed)
        ratio = ratios[len(seeds) - 1]
        return ratio[list(RESULT_PARTS.values()).index(part)] if isinstance(ratio, tuple) else ratio

    monkeypatch.setattr(error_gate.ErrorGate, "_compute_error_ratio", read_ratio)
    (record,) = attention_bench.benchmark_problem(PROBLEM, 0, ["eager"], lambda _: None)
    assert len(seeds) == judged
    assert (refusal or "") in record.get("refusal", "")
    assert ("refusal" in record) == (refusal is not None)
    assert record.get("judged_twice", False) == (judged == 2)


def test_a_peer_that_is_too_large_to_time_leaves_the_others(
    extra: dict[str, Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = build_peers(replace(PROBLEM, length=6))["eager"]
    extra["grows"] = lambda q, k, v: (short if q.shape[2] == 6 else out_of_memory)(q, k, v)
    monkeypatch.setattr(attention_bench, "MAX_GATE_LENGTH", {"cpu": 6})
    monkeypatch.setattr(error_gate.ErrorGate, "_compute_error_ratio", lambda *_: 0.0)
    records = {record["peer"]: record for record in attention_bench.benchmark_problem(PROBLEM, 2, None, lambda _: None)}
    assert records["grows"]["ms"] is None
    assert records["grows"]["refusal"].startswith("OutOfMemoryError: CUDA out of memory. Tried")
    assert records["eager"]["ms"]


def test_ours_wrong_is_no_measure_for_others(extra: dict[str, Attention]) -> None:
    extra["triton"] = off_by_a_percent
    records = {record["peer"]: record for record in attention_bench.benchmark_problem(PROBLEM, 2, None, lambda _: None)}
    assert records["triton"]["ms"] is None
    assert {record["ratio_to"] for record in records.values()} == {"native" if "native" in records else "chunked"}


def test_every_length_is_compiled_afresh(extra: dict[str, Attention], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every length is compiled separately: Dynamo allows eight versions, and FlexAttention (learned, frozen) needs two
    per length.
    """
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    attention_bench.benchmark_problem(PROBLEM, 2, ["appendix"], lambda _: None)
    assert resets == [1]


def test_a_rejected_peer_is_an_error_line_and_exit_code_1(
    extra: dict[str, Attention], command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra["wrong"] = out_of_memory
    files = {kind: tmp_path / name for kind, name in (("json", "a.json"), ("markdown", "a.md"), ("plot", "a.png"))}
    words = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert command(attention_bench, *TINY, "--lengths", "12", *words) == 1
    assert capsys.readouterr().err == (
        "error: wrong at T = 12: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    )
    records: list[dict[str, Any]] = json.loads(files["json"].read_text(encoding="utf-8"))["records"]
    assert [record["ms"] is None for record in records] == [record["peer"] == "wrong" for record in records]
    assert "| cdape k=3 | 12 | 1 | 2 | float32 | wrong | — | — | — | — | — |  |" in files["markdown"].read_text(
        encoding="utf-8"
    )
    assert files["plot"].is_file()


def interrupt(monkeypatch: pytest.MonkeyPatch, length: int, after: int) -> None:
    """Raise KeyboardInterrupt at a length after a number of timed passes."""
    time_passes, taken = attention_bench.time_passes, iter(range(99))

    def interrupted(problem: AttentionProblem, *rest: Any) -> Timing:
        if problem.length == length and next(taken) == after:
            raise KeyboardInterrupt
        return time_passes(problem, *rest)

    monkeypatch.setattr(attention_bench, "time_passes", interrupted)


@pytest.mark.usefixtures("extra")
def test_an_interrupted_run_keeps_its_measurements(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupted run keeps its measurements, also those of the current problem, for `make gpu-check`."""
    interrupt(monkeypatch, 16, 5)  # two passes warm up, two form a round, one more is timed
    words = ("--lengths", "12", "16", "20", "--peers", "eager", "chunked", "--json", str(tmp_path / "a.json"))
    with pytest.raises(KeyboardInterrupt):
        command(attention_bench, *TINY, *words)
    records = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert [(record["T"], record["peer"], record["rounds"], record.get("cut")) for record in records] == [
        (12, "eager", 2, None), (12, "chunked", 2, None), (16, "eager", 2, True), (16, "chunked", 1, True),
    ]  # fmt: skip
    assert all(record["ms"]["both"][1] > 0 and record["ratio"] for record in records)


@pytest.mark.usefixtures("extra")
@pytest.mark.parametrize(("after", "rounds"), [(1, [1, 0]), (3, [1, 1])])
def test_an_interruption_after_the_warmup_pass_reports_its_time(
    after: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up pass may compile for minutes, so there is no ratio to or of its time."""
    interrupt(monkeypatch, PROBLEM.length, after)
    first, last = attention_bench.benchmark_problem(PROBLEM, 2, ["eager", "chunked"], lambda _: None)
    assert [first["rounds"], last["rounds"]] == rounds
    assert first["ms"]
    assert bool(last["ms"]) == bool(rounds[1])
    assert first["ratio"] is last["ratio"] is None


def test_an_interruption_of_the_gate_keeps_its_verdicts(
    extra: dict[str, Attention], command: Run, tmp_path: Path
) -> None:
    """A peer that compiles until the time limit does not cost the verdicts of those before it."""

    def compile_for_minutes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise KeyboardInterrupt

    extra["slow"] = compile_for_minutes
    words = ("--lengths", "12", "--gate-only", "--peers", "eager", "slow", "--json", str(tmp_path / "a.json"))
    with pytest.raises(KeyboardInterrupt):
        command(attention_bench, *TINY, *words)
    (record,) = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert (record["peer"], record["cut"], record["ms"]) == ("eager", True, None)
    assert record["error"] < ROUNDING
    assert "refusal" not in record


def test_the_gate_alone_takes_no_times(command: Run, tmp_path: Path) -> None:
    words = ("--gate-only", "--op", "biased_attention", "cdape", "--dtype", "fp32", "bf16", "--lengths", "12",
             "--peers", "chunked", "--json", str(tmp_path / "a.json"))  # fmt: skip
    assert command(attention_bench, *TINY, *words) == 0
    records = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert [(record["op"], record["dtype"]) for record in records] == [
        ("biased_attention", "float32"), ("biased_attention", "bfloat16"), ("cdape", "float32"), ("cdape", "bfloat16"),
    ]  # fmt: skip
    for record in records:
        assert record["ms"] is None
        assert record["peak_memory_mb"] is None
        assert record["rounds"] == 0
        assert 0 < record["error"] < (ROUNDING if record["dtype"] == "float32" else 0.5)


def test_judges_and_peers_compute_float32_in_full() -> None:
    """References and peers compute float32 in full precision; PyTorch's default on GPUs is TF32 with 10 bits in
    convolutions.
    """
    switches = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = True
        dict(check_peers(PROBLEM, {"right": right}))
        assert [switch.allow_tf32 for switch in switches] == [False, False]
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("op", "peer"), [("cdape", "appendix"), ("biased_attention", "sdpa mask")])
def test_a_gpu_is_rehearsed(
    op: str, peer: str, command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU run is rehearsed with events, memory and provenance; cuDNN's attention is reported as unavailable on a
    CPU.
    """
    words = ("--device", "cuda", *TINY[2:], "--op", op, "--lengths", "12", "--json", str(tmp_path / "a.json"))
    assert command(attention_bench, *words, "--peers", "triton", peer, "flash", "flash cudnn") == 1
    result = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert result["machine"].startswith("NVIDIA H200 (141 GiB), ")
    records = {record["peer"]: record for record in result["records"]}
    assert set(records) == {"triton", peer, "flash", "flash cudnn"}
    assert records.pop("flash cudnn")["refusal"].startswith("RuntimeError: No viable backend")
    for record in records.values():
        assert "refusal" not in record
        assert record["device"] == "cuda"
        assert record["dtype"] == "bfloat16"
        assert record["ratio_to"] == "triton"
        assert record["ms"]["forward"][1] > 0
        assert record["ms"]["backward"][1] > 0
        assert record["peak_memory_mb"] == 5
    assert "flash cudnn at T = 12" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_references_exist_in_the_types_of_their_kernels() -> None:
    floors = {"flash", "flash cudnn"}
    problem = replace(PROBLEM, device="cuda")
    assert not floors & set(build_peers(problem))  # float32
    assert floors < set(build_peers(replace(problem, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--op", "none"), "--op"),
        (("--device", "tpu"), "it must be cpu or cuda, not 'tpu'"),
        (("--lengths", "0"), "--lengths: it must be an integer of at least 2, not '0'"),
        (("--lengths", "many"), "not 'many'"),
        (("--rounds", "1"), "--rounds: it must be an integer of at least 2"),
        (("--kernel-size", "2"), "--kernel-size: must be odd, not 2"),
        (("--peers", "nobody"), "nobody not available; choose from eager, chunked"),
        (("--kernel-size", "11", "--lengths", "5"), "11 leaves no row to compare at length 5"),
        (("--plot", "a.docx"), "a.docx must end in .png, .svg, .pdf"),
        (("--dtype", "int8"), "--dtype"),
        (("--json", "no/such/folder/a.json"), "its folder does not exist"),
        (("--plot", "."), "is a folder"),
        (("--plot", "a.png", "--gate-only"), "there are no times to draw"),
        (("--hurry",), "--hurry"),
    ],
)
def test_a_bad_argument_is_one_line(words: tuple[str, ...], says: str, refuses: Callable[..., None]) -> None:
    refuses(attention_bench, *TINY, *words, says=says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_one_line(refuses: Callable[..., None]) -> None:
    refuses(attention_bench, "--device", "cuda", says="no CUDA device found")


def test_it_starts_on_a_bare_gpu_machine_with_clear_errors(run_tool: Callable[..., Any]) -> None:
    """The tool starts on a machine with only torch, triton and numpy, and reports errors in one line."""
    code = (
        "import runpy, sys\n"
        "class Bare:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'pydantic', 'deepspeed', 'rich', 'matplotlib'} or name == 'megatron.core':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Bare())\n"
        "sys.argv = ['tools/bench/attention.py', '--op', 'cdape', '--peers', 'nobody']\n"
        "runpy.run_path('tools/bench/attention.py', run_name='__main__')\n"
    )
    done = run_tool("-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: argument --peers: nobody not available; choose from eager, chunked")
    assert done.stderr.count("\n") == 1


def test_the_gate_judges_as_many_rows_as_a_longer_problem_has() -> None:
    """The number of rows decides between kernels: a gate of fewer rows would judge others than are timed."""
    problem = AttentionProblem("cdape", 2, 4, 16, 1024)
    judged = attention_bench.shorten_problem(problem)
    assert (judged.batch, judged.length) == (8, 256)
    assert attention_bench.shorten_problem(judged) == judged
    longer = attention_bench.shorten_problem(replace(problem, length=1 << 17))
    assert (longer.batch, longer.length) == (attention_bench.MAX_GATE_SEQUENCES, 256)

"""Goals that require measurements on a GPU, and the page that reports which of them are met.

Each goal reads the records of one part of `make gpu-check` (tools/gpu/parts.py). The page gives a reason for every
missing measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.bench.attention_tables import COLUMN_HEADERS, format_cells, format_measured_line, render_markdown_table

Records = list[dict[str, Any]]
MAX_MEMORY_RATIO = 2.2
"""Largest allowed memory ratio when the length doubles: 2, plus a tenth for uneven growth."""


class NotMeasured(Exception):
    """Raised with the reason why a goal has no measurement."""


@dataclass(frozen=True)
class Goal:
    """Goal with one or more levels."""

    name: str
    part: str
    read: Callable[[dict[str, Any]], tuple[float, str]]
    """Function from the part's result to the compared number and its displayed text; raises NotMeasured."""
    levels: tuple[tuple[str, float], ...]
    """Levels: description and limit."""
    at_least: bool = False
    """True if larger is better."""


def _select_timed(part: dict[str, Any], **wanted: Any) -> Records:
    """Select the part's records with these field values that have times.

    Raises:
        NotMeasured: if there are none.
    """
    fitting = [r for r in part.get("records", ()) if all(r.get(key) == value for key, value in wanted.items())]
    found = [record for record in fitting if record.get("ms")]
    if not found:
        refused = next((record["refusal"] for record in fitting if "refusal" in record), None)
        raise NotMeasured(refused or (_format_end(part) if part["exit"] != 0 else "no such record"))
    return found


def _format_end(part: dict[str, Any]) -> str:
    """Describe the end of a part, as the reason for a missing measurement."""
    if isinstance(part["exit"], str):
        return part["exit"]
    return f"exit code {part['exit']}" if part["exit"] else "finished"


def _format_cut(record: dict[str, Any]) -> str:
    return f", cut to {record['rounds']} rounds" if record.get("cut") else ""


def _read_gate_fraction(part: dict[str, Any]) -> tuple[float, str]:
    """Return the fraction of the kernels' problems that pass the gate."""
    ours = [record for record in part.get("records", ()) if record["peer"] == "triton"]
    if not ours:
        raise NotMeasured(_format_end(part))
    passed = [record for record in ours if "refusal" not in record]
    worst = max((record["error"] for record in ours if record["error"] is not None), default=None)
    types = ", ".join(dict.fromkeys(record["dtype"] for record in ours))
    reported = f"{len(passed)} of {len(ours)} problems in {types}"
    if len(passed) == len(ours) and part["exit"] != 0:
        raise NotMeasured(f"{reported} so far, then {_format_end(part)}")
    return len(passed) / len(ours), reported + ("" if worst is None else f", largest error {worst:.1e}")


def _read_self_check_fraction(part: dict[str, Any]) -> tuple[float, str]:
    """Return the fraction of methods whose kernels pass the self-check."""
    records = part.get("records", ())
    if not records:
        raise NotMeasured(_format_end(part))
    right = [record for record in records if "refusal" not in record]
    taken = ", ".join(f"{record['method']} → {record['taken'] or 'nothing'}" for record in records)
    reported = f"{len(right)} of {len(records)} methods; taken: {taken}"
    if len(right) == len(records) and part["exit"] != 0:
        raise NotMeasured(f"{reported} so far, then {_format_end(part)}")
    return len(right) / len(records), reported


def _read_test_fraction(part: dict[str, Any]) -> tuple[float, str]:
    """Return the fraction of tests that pass."""
    counts = part.get("counts")
    if not counts or not counts["tests"]:
        raise NotMeasured(_format_end(part))
    wrong = counts["failures"] + counts["errors"]
    passed = counts["tests"] - wrong - counts["skipped"]
    reported = f"{passed} passed, {wrong} failed, {counts['skipped']} skipped"
    if not wrong and part["exit"] != 0:
        raise NotMeasured(f"{reported} so far, then {_format_end(part)}")
    return passed / (passed + wrong) if passed else 0.0, reported


def _select_size(part: dict[str, Any], field: str, largest: bool) -> int:
    """Return the smallest or largest value of a field. An interrupted part with a single value has no largest value.

    Raises:
        NotMeasured: if the value is missing.
    """
    sizes = sorted({record[field] for record in part.get("records", ())})
    if not sizes or (largest and len(sizes) == 1 and part["exit"] != 0):
        raise NotMeasured(_format_end(part))
    return sizes[-1 if largest else 0]


def _build_step_reader(
    peer: str = "cdape", other: str = "kerple_log", *, largest: bool
) -> Callable[[dict[str, Any]], tuple[float, str]]:
    """Build a reader of the ratio of a peer's step time to another's, at the smallest or largest batch."""

    def read(part: dict[str, Any]) -> tuple[float, str]:
        batch = _select_size(part, "B", largest)
        _select_timed(part, peer=other, B=batch)
        record = _select_timed(part, peer=peer, B=batch)[0]
        ratio = record[f"ratio_to_{other}"]
        shape = f"{record['model']}, T = {record['T']}, B = {batch}"
        return ratio, f"{ratio:.3f} ({record['ms']['both'][1]:.2f} ms; {shape}{_format_cut(record)})"

    return read


def _build_peer_reader(peer: str, *, largest: bool = False) -> Callable[[dict[str, Any]], tuple[float, str]]:
    """Build a reader of the ratio of a peer's time to ours, at the smallest or largest length."""

    def read(part: dict[str, Any]) -> tuple[float, str]:
        length = _select_size(part, "T", largest)
        ours = _select_timed(part, peer="triton", T=length)[0]
        record = _select_timed(part, peer=peer, T=length)[0]
        if record["ratio"] is None:
            raise NotMeasured(f"only first passes ran, then {_format_end(part)}")
        times = f"{ours['ms']['both'][1]:.3g} ms against {record['ms']['both'][1]:.3g}"
        return record["ratio"], f"{record['ratio']:.2f} ({times}; T = {length}, B = {record['B']}{_format_cut(record)})"

    return read


def _build_inverse_reader(peer: str, *, largest: bool) -> Callable[[dict[str, Any]], tuple[float, str]]:
    """Build a reader of the ratio of our time to a peer's."""

    def read(part: dict[str, Any]) -> tuple[float, str]:
        ratio, reported = _build_peer_reader(peer, largest=largest)(part)
        if not ratio:
            raise NotMeasured("the peer's time is too short for a comparison")
        return 1 / ratio, f"{1 / ratio:.2f} {reported[reported.index('(') :]}"

    return read


def _build_memory_reader(op: str) -> Callable[[dict[str, Any]], tuple[float, str]]:
    """Build a reader of the ratio of memory at the largest length to memory at half of it."""

    def read(part: dict[str, Any]) -> tuple[float, str]:
        used = {r["T"]: r["peak_memory_mb"] for r in _select_timed(part, op=op, peer="triton")}
        longest = max(used)
        half = longest // 2
        if not used[longest] or not used.get(half):
            raise NotMeasured(f"no memory was measured at T = {half} or {longest}")
        ratio = used[longest] / used[half]
        return ratio, f"{ratio:.2f} ({used[half]:,.0f} → {used[longest]:,.0f} MB; T = {half:,} → {longest:,})"

    return read


def _read_longest(part: dict[str, Any]) -> tuple[float, str]:
    """Return the longest length that ran."""
    record = max(_select_timed(part), key=lambda r: r["T"])
    memory = record["peak_memory_mb"]
    reported = "" if memory is None else f", {memory / 1e3:,.1f} GB"
    return record["T"], f"{record['ms']['both'][1] / 1e3:,.2f} s{reported} (T = {record['T']:,}{_format_cut(record)})"


def _build_counter_reader(field: str) -> Callable[[dict[str, Any]], tuple[float, str]]:
    """Build a reader of the clocks per causal score position of all kernels of CDAPE's attention together."""

    def read(part: dict[str, Any]) -> tuple[float, str]:
        records = [record for record in part.get("records", ()) if record["peer"] == "cdape"]
        counts = [record[field] for record in records if field in record]
        if not counts:
            reasons = [record["refusal"] for record in records if "refusal" in record]
            raise NotMeasured(reasons[0] if reasons else _format_end(part))
        return sum(counts), f"{sum(counts):.1f} in {len(counts)} kernels"

    return read


BIAS = (("≤ 1.35", 1.35),)
STEP = (("≤ 1.33, whatever happens", 1.33), ("≤ 1.15, wanted", 1.15), ("≤ 1.10, moonshot", 1.10))
MODULE = (("≥ 5", 5.0), ("≥ 10", 10.0))
LAYER = (("runs on one GPU", 131072.0),)
GOALS = (
    Goal("Self-check of auto: our kernels are right", "self_check", _read_self_check_fraction, (("all", 1.0),), True),
    Goal("Learned-bias kernels within the gate against float64", "correct_bias", _read_gate_fraction, (("all", 1.0),),
        True),
    Goal("CDAPE kernels within the gate against float64", "correct_cdape", _read_gate_fraction, (("all", 1.0),), True),
    Goal("350M step, CDAPE over kerple_log, T = 512, bf16, micro-batch 1", "step_350m",
        _build_step_reader(largest=False), STEP),
    Goal("350M step, CDAPE over kerple_log, T = 512, bf16, micro-batch 32", "step_350m",
        _build_step_reader(largest=True), STEP),
    Goal("The paper's CDAPE module over ours, forward + backward, T = 2,048", "cdape", _build_peer_reader("appendix"),
        MODULE,
         True),
    Goal("The same module compiled over ours", "cdape_compiled", _build_peer_reader("appendix compiled"), (("—",
        0.0),), True),
    Goal("Learned-bias flash over plain FlashAttention-2, T = 2,048", "bias", _build_inverse_reader("flash",
        largest=False), BIAS),
    Goal("Learned-bias flash over plain FlashAttention-2, T = 8,192", "bias", _build_inverse_reader("flash",
        largest=True), BIAS),
    Goal("Learned-bias flash over cuDNN's plain attention, T = 8,192", "bias", _build_inverse_reader("flash cudnn",
        largest=True),
         (("—", float("inf")),)),
    Goal("FlexAttention with a learned bias over ours, T = 2,048", "flex", _build_peer_reader("flex learned"),
         (("≥ 1.3", 1.3),), True),
    Goal("CDAPE's memory at T = 8,192 over that at 4,096", "memory", _build_memory_reader("cdape"),
         ((f"about 2 (≤ {MAX_MEMORY_RATIO})", MAX_MEMORY_RATIO),)),
    Goal("Learned-bias memory at T = 8,192 over that at 4,096", "memory", _build_memory_reader("biased_attention"),
         ((f"about 2 (≤ {MAX_MEMORY_RATIO})", MAX_MEMORY_RATIO),)),
    Goal("131,072 tokens in CDAPE attention of the 125M model, forward + backward", "long", _read_longest, LAYER, True),
    Goal("131,072 tokens in one whole layer of the 125M model", "long_layer", _read_longest, LAYER, True),
    Goal("Kernel tests on the device", "tests", _read_test_fraction, (("all pass", 1.0),), True),
)  # fmt: skip


VISIT_GOALS = (
    *(
        Goal(f"Kernels within the gate against float64, `{part}`", part, _read_gate_fraction, (("all", 1.0),), True)
        for part in ("correct_bias", "correct_bias_wide", "correct_mixer", "correct_wide")
    ),
    Goal("CDAPE on forget gates within the self-check", "correct_gates", _read_self_check_fraction, (("all", 1.0),),
        True),
    Goal("350M step, CDAPE over kerple_log, T = 512, bf16, micro-batch 32", "step_512",
        _build_step_reader(largest=False), (("≤ 1.10", 1.10),)),
    Goal("350M step, kerple_log over the compiled plain GPT", "step_512",
        _build_step_reader("kerple_log", "plain", largest=False), (("≤ 1.10", 1.10),)),
    Goal("350M step, rotary over the compiled plain GPT", "step_512",
        _build_step_reader("rotary", "plain", largest=False), (("≤ 1.05", 1.05),)),
    Goal("The paper's CDAPE module over ours, forward + backward, T = 2,048", "paper", _build_peer_reader("appendix"),
        (("≥ 10", 10.0),), True),
    Goal("Learned-bias attention over plain FlashAttention-2, T = 8,192", "bias", _build_inverse_reader("flash",
        largest=True), (("≤ 1.25", 1.25),)),
    Goal("Learned-bias attention over cuDNN's plain attention, T = 8,192", "bias", _build_inverse_reader("flash cudnn",
        largest=True), (("—", float("inf")),)),
    Goal("FlexAttention with a learned bias over ours, T = 2,048", "compiled", _build_peer_reader("flex learned"),
        (("≥ 1.3", 1.3),), True),
    Goal("CDAPE's attention over plain FlashAttention-2, T = 2,048", "mixer", _build_inverse_reader("flash",
        largest=True), (("—", float("inf")),)),
    Goal("Issue slots of CDAPE's kernels, clocks per causal score position", "counters",
        _build_counter_reader("issued_clocks"), (("≤ 17", 17.0),)),
    Goal("Load/store instructions of CDAPE's kernels, clocks per causal score position", "counters",
        _build_counter_reader("load_store_clocks"), (("≤ 23", 23.0),)),
)  # fmt: skip
"""Goals of a visit (tools/gpu/visit.py)."""


def check_goals(result: dict[str, Any], goals: tuple[Goal, ...] = GOALS) -> list[list[str]]:
    """Return a row for each goal and level: goal, measurement, limit, and "met", "not met" or a reason."""
    rows = []
    for goal in goals:
        try:
            if goal.part not in result["parts"]:
                raise NotMeasured("not run")
            value, reported = goal.read(result["parts"][goal.part])
        except NotMeasured as why:
            rows += [[goal.name, "—", wanted, f"not measured: {_escape_cell(str(why))}"] for wanted, _ in goal.levels]
            continue
        for wanted, limit in goal.levels:
            met = value >= limit if goal.at_least else value <= limit
            rows.append([goal.name, reported, wanted, "" if wanted == "—" else "met" if met else "not met"])
    return rows


def _escape_cell(text: str) -> str:
    """Escape text for a table cell."""
    return " ".join(text.replace("|", "\\|").split())[:200]


def render_page(result: dict[str, Any]) -> str:
    """Render the whole check: goals first, then the parts, failures and all records."""
    parts = result["parts"]
    kernels = [record for part in parts.values() for record in part.get("records", ()) if "H" in record]
    steps = [record for part in parts.values() for record in part.get("records", ()) if "model" in record]
    reported = [
        "# GPU check",
        format_measured_line(result)
        + f" Commit {result['commit'] or 'unknown'}; {result['seconds']:.0f} s in all."
        + "\nMade by `make gpu-check`; see [gpu.md](../gpu.md) for its requirements and meaning.",
    ]
    if result["rehearsal"]:
        reported.append("**A rehearsal on a CPU with tiny shapes: these numbers do not apply to a GPU.**")
    reported += ["## Goals", render_markdown_table(["goal", "measured", "wanted", "met?"], check_goals(result))]
    ran = [[name, _escape_cell(_format_end(part)), f"{part['seconds']:.0f}"] for name, part in parts.items()]
    reported += ["## Parts", render_markdown_table(["part", "end", "seconds"], ran)]
    if failures := [line for name, part in parts.items() for line in _list_failures(name, part)]:
        reported += ["## Failures", "\n".join(failures)]
    if checked := parts.get("self_check", {}).get("records"):
        cells = [row for record in checked for row in format_self_check_rows(record)]
        reported += ["## Self-check", render_markdown_table(SELF_CHECK_HEADERS, cells)]
    if kernels:
        reported += [
            "## Attention",
            render_markdown_table(COLUMN_HEADERS, [[_escape_cell(cell) for cell in format_cells(r)] for r in kernels]),
        ]
    if steps:
        reported += ["## Steps and layers", render_step_table(steps)]
    return "\n\n".join(reported) + "\n"


SELF_CHECK_HEADERS = ["method", "dtype", "T", "B", "backend", "ms", "error / rounding", "memory MB", "first pass s",
                      "end"]  # fmt: skip


def format_self_check_rows(record: dict[str, Any]) -> list[list[str]]:
    """Return a row for each backend."""
    rows = []
    for trial in record["trials"]:
        numbers = [trial[key] for key in ("ms", "excess", "memory_mb", "first_seconds")]
        end = trial["refusal"] or ("taken" if trial["backend"] == record["taken"] else "right")
        head = [record["method"], record["dtype"], f"{record['T']:,}", str(record["B"]), trial["backend"]]
        rows.append([*head, *("—" if number is None else f"{number:,.3g}" for number in numbers), _escape_cell(end)])
    return rows


STEP_COLUMN_HEADERS = ["what", "model", "T", "B", "dtype", "method", "ms", "tokens/s", "over rotary", "over kerple_log",
                 "over plain", "MFU", "memory MB"]  # fmt: skip


def render_step_table(records: Records) -> str:
    """Render times of steps or layers and their ratios to other methods."""
    return render_markdown_table(STEP_COLUMN_HEADERS, [_format_step_cells(record) for record in records])


def _format_step_cells(record: dict[str, Any]) -> list[str]:
    head = [record["op"], record["model"], str(record["T"]), str(record["B"]), record["dtype"], record["peer"]]
    if record["ms"] is None:
        return [*head, *["—"] * (len(STEP_COLUMN_HEADERS) - len(head))]
    ratios = [record.get(f"ratio_to_{other}") for other in ("rotary", "kerple_log", "plain")]
    numbers = ["—" if number is None else f"{number:.3f}" for number in (*ratios, record.get("mfu"))]
    memory = "—" if record["peak_memory_mb"] is None else f"{record['peak_memory_mb']:,.0f}"
    return [*head, f"{record['ms']['both'][1]:,.2f}", f"{record['tokens_per_second']:,}", *numbers, memory]


def _list_failures(name: str, part: dict[str, Any]) -> list[str]:
    """List rejected peers and failed tests, one line each, and the end of a failed part's output."""
    lines = [
        f"* {name}: {record['peer']} at T = {record['T']} in {record['dtype']}: {_escape_cell(record['refusal'])}"
        for record in part.get("records", ())
        if "refusal" in record
    ]
    lines += [f"* {name}: {_escape_cell(test)}" for test in part.get("failed", ())]
    if not lines and part["exit"] != 0:
        output = [line for line in part.get("output", "").splitlines() if line.strip()]
        lines.append(
            f"* {name}: {_escape_cell(_format_end(part))}" + (f": {_escape_cell(output[-1])}" if output else "")
        )
    return lines

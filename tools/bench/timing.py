"""Time and memory of a forward and backward pass of one peer."""

import ctypes
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # run as a script by `measure_memory_growth`
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tools.bench.attention_peers import Attention, AttentionProblem, build_peers  # noqa: E402


@dataclass(frozen=True)
class Timing:
    """Time of a forward and a backward pass in milliseconds, and on GPUs the memory that both added in MB."""

    forward: float
    backward: float
    memory: float | None = None

    @property
    def both(self) -> float:
        return self.forward + self.backward


def time_passes(problem: AttentionProblem, attention: Attention, repeats: int) -> Timing:
    """Return the mean of several passes."""
    inputs, seed = problem.inputs(), problem.output_gradient()
    wanted = [*inputs, *problem.parameters()]
    cuda = problem.device != "cpu"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    forward = backward = 0.0
    for _ in range(repeats):
        marks = [_record_time(cuda)]
        output = attention(*inputs)
        marks.append(_record_time(cuda))
        torch.autograd.grad(output, wanted, seed, allow_unused=True)
        marks.append(_record_time(cuda))
        del output  # otherwise it counts toward the next pass's memory
        if cuda:
            torch.cuda.synchronize()
        forward += _compute_elapsed_ms(marks[0], marks[1])
        backward += _compute_elapsed_ms(marks[1], marks[2])
    memory = (torch.cuda.max_memory_allocated() - before) / 1e6 if cuda else None
    return Timing(forward / repeats, backward / repeats, memory)


def _record_time(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _compute_elapsed_ms(first: Any, second: Any) -> float:
    return 1e3 * (second - first) if isinstance(first, float) else first.elapsed_time(second)


def compute_quartiles(values: list[float], digits: int = 4) -> list[float]:
    """Return the first quartile, median and third quartile of a non-empty list."""
    # "inclusive" interpolates between the values. The default extrapolates from two values, possibly below zero.
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(value, digits) for value in found]


def measure_memory_growth(problem: AttentionProblem, name: str) -> float:
    """Measure the MB that one forward and backward pass of a peer adds on a CPU, in a separate process."""
    fields = {**asdict(problem), "dtype": str(problem.dtype).removeprefix("torch.")}
    command = [sys.executable, __file__, json.dumps({"problem": fields, "peer": name})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _print_memory_growth(what: dict[str, Any]) -> None:
    """Print the growth of the peak resident set size after a warm-up on a tiny problem."""
    torch.set_num_threads(2)
    fields = {**what["problem"], "dtype": getattr(torch, what["problem"]["dtype"])}
    tiny = AttentionProblem(**{**fields, "length": 16})
    time_passes(tiny, build_peers(tiny)[what["peer"]], 1)
    problem = AttentionProblem(**fields)
    attention = build_peers(problem)[what["peer"]]
    problem.inputs()  # generated beforehand, as in the rounds
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _read_status_kb("VmRSS")
    time_passes(problem, attention, 1)
    print((_read_status_kb("VmHWM") - before) / 1e3)


def _read_status_kb(field: str) -> float:
    """Return a field of /proc/self/status, in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    _print_memory_growth(json.loads(sys.argv[1]))

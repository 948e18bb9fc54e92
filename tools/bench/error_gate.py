"""Error gate of the benchmark.

Every peer must stay within the rounding errors of its type, for the output and all gradients.

The limit is derived from rounding errors (`megatron/utils/rounding.py`), not from another backend, whose error depends
on the machine. A fused kernel rounds the factors of its products and the values it stores. Peers in UNFUSED_PEERS may
round every intermediate result, as unfused code does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.attention.check.trials import CERTAIN_ERROR_RATIO
from tools.bench.attention_peers import (
    BIASLESS_PEERS,
    FROZEN_PEERS,
    Attention,
    AttentionProblem,
    build_exact_attention,
)
from tools.tolerances import SAFETY_FACTOR, compute_size_ratio, estimate_rounding_sizes

RESULT_PARTS = {"output, dq, dk, dv": slice(0, 4), "the parameters' gradients": slice(4, None)}
"""Groups of results in a record. Sums over all scores have larger rounding errors than rows."""
UNCHECKED_PARTS = {
    **dict.fromkeys(BIASLESS_PEERS, tuple(RESULT_PARTS)),
    **dict.fromkeys(FROZEN_PEERS, tuple(RESULT_PARTS)[1:]),
}
"""Results that a peer does not compute."""
UNFUSED_PEERS = ("sdpa mask", "appendix", "appendix compiled", "by hand compiled", "flex learned", "flex frozen")
"""Peers that store bias, hidden values or their gradients in the compute type."""


@dataclass(frozen=True)
class GateResult:
    """Verdict of the gate on one peer."""

    errors: dict[str, float]
    """Errors by group; empty for plain attention and for peers that raised an error."""
    refusal: str | None = None
    """Reason why the peer is not timed, or None."""
    is_doubtful: bool = False
    """True if the peer exceeds the limit by so little that it may be chance."""
    is_second_check: bool = False
    """True if this is the second verdict, on other numbers, because the first was doubtful."""

    @property
    def error(self) -> float | None:
        """Largest error; None if there is no error or only NaN."""
        largest = max(self.errors.values(), default=float("inf"))
        return largest if largest < float("inf") else None


def disable_tf32() -> None:
    """Compute float32 products and convolutions in IEEE precision.

    GPUs use TF32 with 10 bits for convolutions by default.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def run_forward_backward(problem: AttentionProblem, attention: Attention) -> list[Tensor]:
    """Return the output and all gradients of one forward and backward pass."""
    inputs = problem.inputs()
    output = attention(*inputs)
    wanted = [*inputs, *problem.parameters()]
    gradients = torch.autograd.grad(
        output, wanted, problem.output_gradient(), allow_unused=True, materialize_grads=True
    )  # plain attention does not use the parameters
    if problem.op == "cdape" and problem.kernel_size > 1:
        output = output[:, :, : -(problem.kernel_size // 2)]
    return [output.detach(), *gradients]


def compute_errors(problem: AttentionProblem, ours: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """Return the largest error of a tensor in each group, relative to the tensor's largest value; inf for NaN.

    Conv2's bias, the last parameter of CDAPE, shifts all logits of a row equally. Its true gradient is therefore zero,
    and its computed gradient is rounding. It is compared with the gradient of Conv2's weight, which comes from the same
    sums.
    """
    scales = [max(float(x.abs().max()), torch.finfo(torch.float64).tiny) for x in exact]
    if problem.op == "cdape":
        scales[-1] = scales[-2]
    wrong = [
        float((a.double() - b).abs().nan_to_num(nan=float("inf")).max()) / scale
        for a, b, scale in zip(ours, exact, scales, strict=True)
    ]
    return {name: max(wrong[part]) for name, part in RESULT_PARTS.items()}


class ErrorGate:
    """Reference results of a problem, and the limits of rounding errors for its peers."""

    def __init__(self, problem: AttentionProblem) -> None:
        disable_tf32()
        self.problem, self.exact_problem = problem, problem.in_float64()
        self.attention = build_exact_attention(self.exact_problem)
        self.exact = run_forward_backward(self.exact_problem, self.attention)
        self.sizes: dict[bool, list[Tensor]] = {}

    def sizes_of(self, name: str, kinds: list[torch.dtype]) -> list[Tensor]:
        """Return the size of the rounding errors of each result for a peer.

        Conv2's bias has no gradient of its own; its error has the size of the weight's.
        """
        rounds_every_op = name in UNFUSED_PEERS
        if rounds_every_op not in self.sizes:
            found = estimate_rounding_sizes(
                _key_by_index(kinds),
                _key_by_index(self.exact),
                lambda: _key_by_index(run_forward_backward(self.exact_problem, self.attention)),
                self.problem.dtype,
                stored=True,
                rounds_every_op=rounds_every_op,
            )
            sizes = list(found.values())
            if self.problem.op == "cdape":
                sizes[-1] = torch.maximum(sizes[-1], sizes[-2])
            self.sizes[rounds_every_op] = sizes
        return self.sizes[rounds_every_op]

    def judge(self, name: str, attention: Attention) -> GateResult:
        """Judge a peer's errors and decide whether it is timed."""
        try:
            found = run_forward_backward(self.problem, attention)
        except Exception as failure:  # out of memory or a compiler error; the other peers still count
            return GateResult({}, format_exception(failure))
        measured = compute_errors(self.problem, found, self.exact)
        measured = {part: value for part, value in measured.items() if part not in UNCHECKED_PARTS.get(name, ())}
        ratios = {part: self._compute_error_ratio(name, found, RESULT_PARTS[part]) for part in measured}
        if all(ratio <= SAFETY_FACTOR for ratio in ratios.values()):  # False for NaN
            return GateResult(measured)
        part = next(part for part, ratio in ratios.items() if not ratio <= SAFETY_FACTOR)
        text = f"errs in {part} by {ratios[part]:.3g} times the rounding error of {self.problem.dtype}"
        is_doubtful = all(ratio <= CERTAIN_ERROR_RATIO for ratio in ratios.values())
        return GateResult(measured, f"{text}; not timed", is_doubtful)

    def _compute_error_ratio(self, name: str, found: list[Tensor], part: slice) -> float:
        sizes = self.sizes_of(name, [x.dtype for x in found])
        judged = zip(found[part], self.exact[part], sizes[part], strict=True)
        return max(compute_size_ratio(mine.double() - exact, size) for mine, exact, size in judged)


def check_peers(problem: AttentionProblem, found: dict[str, Attention]) -> Iterator[tuple[str, GateResult]]:
    """Judge the peers one by one. A peer that raises or exceeds rounding errors is not timed."""
    judge = ErrorGate(problem)
    for name, attention in found.items():
        yield name, judge.judge(name, attention)


def _key_by_index(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def format_exception(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"

"""Who may have a speed: every peer of a problem is held to the rounding of its type, in the output and all gradients.

How far rounding may take a result is derived (`megatron/utils/rounding.py`), not taken from another backend, whose
error is one machine's luck. A kernel rounds the factors of its products and what it stores; a peer of UNFUSED_PEERS may
round every result to the type, as code does that nobody fused by hand.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.attention.check.trials import CERTAIN_EXCESS
from tools.bench.attention_peers import (
    BIASLESS_PEERS,
    FROZEN_PEERS,
    Attention,
    AttentionProblem,
    build_exact_attention,
)
from tools.rounding import SAFETY_FACTOR, compute_size_ratio, estimate_rounding_sizes

RESULT_PARTS = {"output, dq, dk, dv": slice(0, 4), "the parameters' gradients": slice(4, None)}
"""What a record tells apart: sums over all scores round coarser than rows do."""
UNCHECKED_PARTS = {
    **dict.fromkeys(BIASLESS_PEERS, tuple(RESULT_PARTS)),
    **dict.fromkeys(FROZEN_PEERS, tuple(RESULT_PARTS)[1:]),
}
"""What a peer does not compute."""
UNFUSED_PEERS = ("sdpa mask", "appendix", "appendix compiled", "by hand compiled", "flex learned", "flex frozen")
"""Peers that hold bias, hidden values or their gradients in the compute type."""


@dataclass(frozen=True)
class GateVerdict:
    """What the gate says of a peer."""

    errors: dict[str, float]
    """By part; none of floors and of peers that raised."""
    refusal: str | None = None
    """Why it gets no speed."""
    is_doubtful: bool = False
    """Is it refused for so little that it may be chance?"""
    judged_twice: bool = False
    """Is it the verdict on other numbers, the first having been doubtful?"""

    @property
    def error(self) -> float | None:
        """The largest; None if there is none, or none that is a number."""
        largest = max(self.errors.values(), default=float("inf"))
        return largest if largest < float("inf") else None


def disable_tf32() -> None:
    """float32 products and convolutions as IEEE has them: a GPU's default for convolutions is TF32, with 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def run_forward_backward(problem: AttentionProblem, attention: Attention) -> list[Tensor]:
    """Output and all gradients of one forward and backward pass."""
    inputs = problem.inputs()
    output = attention(*inputs)
    wanted = [*inputs, *problem.parameters()]
    gradients = torch.autograd.grad(
        output, wanted, problem.output_gradient(), allow_unused=True, materialize_grads=True
    )  # a floor leaves parameters out
    if problem.op == "cdape" and problem.kernel_size > 1:
        output = output[:, :, : -(problem.kernel_size // 2)]
    return [output.detach(), *gradients]


def compute_errors(problem: AttentionProblem, ours: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """The largest error of a tensor in each part, relative to the largest value of that tensor; inf where one is NaN.

    Conv2's constant, the last of CDAPE's parameters, is added to all logits of a row, so its true gradient is zero and
    what it gets is rounding: it is measured against the gradient of Conv2's weight, from the same sums.
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
    """The truth of a problem, and how far from it rounding may take a peer."""

    def __init__(self, problem: AttentionProblem) -> None:
        disable_tf32()
        self.problem, self.exact_problem = problem, problem.in_float64()
        self.attention = build_exact_attention(self.exact_problem)
        self.exact = run_forward_backward(self.exact_problem, self.attention)
        self.sizes: dict[bool, list[Tensor]] = {}

    def sizes_of(self, name: str, kinds: list[torch.dtype]) -> list[Tensor]:
        """Of the rounding errors of each result, as a peer rounds. Conv2's constant has no gradient of its own: what it
        gets is of the size of its weight's."""
        throughout = name in UNFUSED_PEERS
        if throughout not in self.sizes:
            found = estimate_rounding_sizes(
                _key_by_index(kinds),
                _key_by_index(self.exact),
                lambda: _key_by_index(run_forward_backward(self.exact_problem, self.attention)),
                self.problem.dtype,
                stored=True,
                throughout=throughout,
            )
            sizes = list(found.values())
            if self.problem.op == "cdape":
                sizes[-1] = torch.maximum(sizes[-1], sizes[-2])
            self.sizes[throughout] = sizes
        return self.sizes[throughout]

    def judge(self, name: str, attention: Attention) -> GateVerdict:
        """What a peer's errors are, and whether it gets a speed."""
        try:
            found = run_forward_backward(self.problem, attention)
        except Exception as failure:  # out of memory, or refused by a compiler: the other peers still count
            return GateVerdict({}, format_exception(failure))
        measured = compute_errors(self.problem, found, self.exact)
        measured = {part: value for part, value in measured.items() if part not in UNCHECKED_PARTS.get(name, ())}
        ratios = {part: self._excess(name, found, RESULT_PARTS[part]) for part in measured}
        if all(ratio <= SAFETY_FACTOR for ratio in ratios.values()):  # false of what is not a number
            return GateVerdict(measured)
        part = next(part for part, ratio in ratios.items() if not ratio <= SAFETY_FACTOR)
        text = f"errs in {part} by {ratios[part]:.3g} times what rounding in {self.problem.dtype} gives"
        is_doubtful = all(ratio <= CERTAIN_EXCESS for ratio in ratios.values())
        return GateVerdict(measured, f"{text}: no speed is reported", is_doubtful)

    def _excess(self, name: str, found: list[Tensor], part: slice) -> float:
        sizes = self.sizes_of(name, [x.dtype for x in found])
        judged = zip(found[part], self.exact[part], sizes[part], strict=True)
        return max(compute_size_ratio(mine.double() - exact, size) for mine, exact, size in judged)


def judge_peers(problem: AttentionProblem, found: dict[str, Attention]) -> dict[str, GateVerdict]:
    """The errors of every peer, and who gets no speed: a peer that raises, or errs by more than rounding."""
    judge = ErrorGate(problem)
    return {name: judge.judge(name, attention) for name, attention in found.items()}


def _key_by_index(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def format_exception(failure: Exception) -> str:
    """What a record says of it."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"

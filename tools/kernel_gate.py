"""Who may have a speed: every peer of a problem is judged against float64, in the output and all gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.kernel_peers import FLOORS, FROZEN, Attention, Problem, peers

JUDGES = ("eager", "chunked")
"""The peer whose error in the same type sets the gate: the first that is there (eager's maps do not fit long ones)."""
PARTS = {"output, dq, dk, dv": slice(0, 4), "the parameters' gradients": slice(4, None)}
"""What the gate compares apart: sums over all scores round coarser than rows do, and would hide a wrong row."""
SLACK = dict(zip(PARTS, (1, 8), strict=True))
"""Roundings that are allowed beside twice the judge's error: of few sums over all scores the judge's may be lucky."""
UNGATED = {**dict.fromkeys(FLOORS, tuple(PARTS)), **dict.fromkeys(FROZEN, tuple(PARTS)[1:])}
"""What a peer does not compute."""


@dataclass(frozen=True)
class Verdict:
    """What the gate says of a peer."""

    errors: dict[str, float]
    """By part; none of floors and of peers that raised."""
    refusal: str | None = None
    """Why it gets no speed."""

    @property
    def error(self) -> float | None:
        """The largest; None if there is none, or none that is a number."""
        largest = max(self.errors.values(), default=float("inf"))
        return largest if largest < float("inf") else None


def products_in_full() -> None:
    """float32 products and convolutions as IEEE has them: a GPU's default for convolutions is TF32, with 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def passes(problem: Problem, attention: Attention) -> list[Tensor]:
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


def errors(problem: Problem, ours: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
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
    return {name: max(wrong[part]) for name, part in PARTS.items()}


def gate(problem: Problem, found: dict[str, Attention]) -> dict[str, Verdict]:
    """The errors of every peer, and who gets no speed: a peer that raises, or in some part errs more than twice as much
    as the judge in the same type."""
    products_in_full()
    exact_problem = problem.in_float64()
    exact = passes(exact_problem, peers(exact_problem)["chunked"])
    verdicts = {name: _verdict(problem, name, attention, exact) for name, attention in found.items()}
    judge = next((name for name in JUDGES if name in verdicts and verdicts[name].error is not None), None)
    for name, verdict in verdicts.items():
        for part, value in verdict.errors.items():
            judged = verdicts[judge].errors[part] if judge else float("nan")  # without a judge nobody passes
            allowed = 2 * judged + SLACK[part] * torch.finfo(problem.dtype).eps
            if not value <= allowed or value == float("inf"):
                refusal = f"errs by {value:.2g} in {part}, {judge} by {judged:.2g}: no speed is reported"
                verdicts[name] = Verdict(verdict.errors, refusal)
    return verdicts


def _verdict(problem: Problem, name: str, attention: Attention, exact: list[Tensor]) -> Verdict:
    try:
        ours = passes(problem, attention)
    except Exception as failure:  # out of memory, or refused by a compiler: the other peers still count
        return Verdict({}, in_a_line(failure))
    found = errors(problem, ours, exact)
    return Verdict({part: value for part, value in found.items() if part not in UNGATED.get(name, ())})


def in_a_line(failure: Exception) -> str:
    """What a record says of it."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"

"""Who may have a speed: every peer of a problem is held to the rounding of its type, in the output and all gradients.

How far rounding may take a result is derived (`tools/rounding.py`), not taken from another backend, whose error is one
machine's luck. A kernel rounds the factors of its products and what it stores; a peer of ROUNDED_THROUGHOUT may round
every result to the type, as code does that nobody fused by hand.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tools.bench.attention_peers import FLOORS, FROZEN, Attention, Problem, peers
from tools.rounding import FACTOR, allowed, times

PARTS = {"output, dq, dk, dv": slice(0, 4), "the parameters' gradients": slice(4, None)}
"""What a record tells apart: sums over all scores round coarser than rows do."""
UNGATED = {**dict.fromkeys(FLOORS, tuple(PARTS)), **dict.fromkeys(FROZEN, tuple(PARTS)[1:])}
"""What a peer does not compute."""
ROUNDED_THROUGHOUT = ("sdpa mask", "appendix", "appendix compiled", "by hand compiled", "flex learned", "flex frozen")
"""Peers that hold bias, hidden values or their gradients in the compute type."""


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


class Gate:
    """The truth of a problem, and how far from it rounding may take a peer."""

    def __init__(self, problem: Problem) -> None:
        products_in_full()
        self.problem, self.exact_problem = problem, problem.in_float64()
        self.attention = peers(self.exact_problem)["chunked"]  # memory linear in the length
        self.exact = passes(self.exact_problem, self.attention)
        self.sizes: dict[bool, list[Tensor]] = {}

    def sizes_of(self, name: str, kinds: list[torch.dtype]) -> list[Tensor]:
        """Of the rounding errors of each result, as a peer rounds. Conv2's constant has no gradient of its own: what it
        gets is of the size of its weight's."""
        throughout = name in ROUNDED_THROUGHOUT
        if throughout not in self.sizes:
            found = allowed(
                _named(kinds),
                _named(self.exact),
                lambda: _named(passes(self.exact_problem, self.attention)),
                self.problem.dtype,
                stored=True,
                throughout=throughout,
            )
            sizes = list(found.values())
            if self.problem.op == "cdape":
                sizes[-1] = torch.maximum(sizes[-1], sizes[-2])
            self.sizes[throughout] = sizes
        return self.sizes[throughout]

    def judge(self, name: str, attention: Attention) -> Verdict:
        """What a peer's errors are, and whether it gets a speed."""
        try:
            found = passes(self.problem, attention)
        except Exception as failure:  # out of memory, or refused by a compiler: the other peers still count
            return Verdict({}, in_a_line(failure))
        measured = errors(self.problem, found, self.exact)
        measured = {part: value for part, value in measured.items() if part not in UNGATED.get(name, ())}
        for part in measured:
            ratio = self._excess(name, found, PARTS[part])
            if ratio > FACTOR:
                text = f"errs in {part} by {ratio:.3g} times what rounding in {self.problem.dtype} gives"
                return Verdict(measured, f"{text}: no speed is reported")
        return Verdict(measured)

    def _excess(self, name: str, found: list[Tensor], part: slice) -> float:
        sizes = self.sizes_of(name, [x.dtype for x in found])
        judged = zip(found[part], self.exact[part], sizes[part], strict=True)
        return max(times(mine.double() - exact, size) for mine, exact, size in judged)


def gate(problem: Problem, found: dict[str, Attention]) -> dict[str, Verdict]:
    """The errors of every peer, and who gets no speed: a peer that raises, or errs by more than rounding."""
    judge = Gate(problem)
    return {name: judge.judge(name, attention) for name, attention in found.items()}


def _named(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def in_a_line(failure: Exception) -> str:
    """What a record says of it."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"

"""Every peer of the kernel benchmark computes the output and gradients of the problem within the same tolerance.

FlexAttention and compiled peers use the part of torch.compile that needs no GPU: Dynamo traces them whole, AOT autograd
derives the backward pass, and PyTorch's own kernels run.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from tools.bench.attention_peers import (
    BIASLESS_PEERS,
    FROZEN_PEERS,
    Attention,
    AttentionProblem,
    build_compiled_peers,
    build_peers,
    compile_whole,
)
from tools.bench.error_gate import UNCHECKED_PARTS, check_peers, compute_errors, run_forward_backward

REHEARSAL = partial(compile_whole, backend="aot_eager")
PROBLEMS = {
    "biased_attention": AttentionProblem("biased_attention", 2, 3, 16, 24),
    "cdape": AttentionProblem("cdape", 2, 3, 16, 24, width=5, kernel_size=3),
}
# float64 rounds at 2^-53; parameter gradients sum B·T·T = 1152 terms that partly cancel.
EXACT = 2.0**-53 * 2**14


@pytest.fixture(autouse=True)
def _compiled_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # FlexAttention computes gradients on CPUs once its device check is disabled.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def every_peer(problem: AttentionProblem) -> dict[str, Attention]:
    return {**build_peers(problem), **build_compiled_peers(problem, REHEARSAL)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_peers_equal_the_reference_in_float64(name: str) -> None:
    problem = PROBLEMS[name].in_float64()
    found = every_peer(problem)
    expected = run_forward_backward(problem, found["eager"])
    assert len(expected) == (6 if name == "biased_attention" else 10)
    for peer in sorted(set(found) - set(BIASLESS_PEERS)):
        computed = run_forward_backward(problem, found[peer])
        for part, value in compute_errors(problem, computed, expected).items():
            assert value < EXACT or part in UNCHECKED_PARTS.get(peer, ()), (peer, part)
        if peer in FROZEN_PEERS:
            assert not any(gradient.any() for gradient in computed[-len(problem.parameters()) :])


@pytest.mark.parametrize("name", PROBLEMS)
def test_peers_pass_the_gate_in_the_type_of_gpus(name: str) -> None:
    problem = replace(PROBLEMS[name], dtype=torch.bfloat16)
    verdicts = dict(check_peers(problem, every_peer(problem)))
    assert {peer: verdict.refusal for peer, verdict in verdicts.items() if verdict.refusal} == {}
    assert {peer for peer, verdict in verdicts.items() if verdict.error is None} == {"flash"}


def functions(node: Any) -> set[str]:
    """Return the names of the autograd functions reachable from a node."""
    found, waiting = set(), [node]
    while waiting:
        if (node := waiting.pop()) is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in found}


@pytest.mark.parametrize(("op", "name"), [("biased_attention", "sdpa mask"), ("cdape", "appendix")])
def test_no_peer_is_slow_by_the_bias_it_is_given(op: str, name: str) -> None:
    """No peer is slowed down by its bias: the gradient of an indexed table adds T²/2 elements at one address.

    On a GPU this would take longer than the attention.
    """
    problem = PROBLEMS[op]
    run = functions(build_peers(problem)[name](*problem.inputs()).grad_fn)
    assert any("Log1P" in function for function in run)
    assert not [function for function in run if any(word in function for word in ("Index", "Gather", "Scatter"))]


def test_the_exact_problem_has_the_numbers_as_the_type_rounds_them() -> None:
    problem = AttentionProblem("cdape", 1, 2, 16, 8, width=4, dtype=torch.bfloat16)
    exact = problem.in_float64()
    for ours, theirs in zip(
        [*problem.inputs(), problem.output_gradient(), *problem.parameters()],
        [*exact.inputs(), exact.output_gradient(), *exact.parameters()],
        strict=True,
    ):
        assert theirs.dtype == torch.float64
        assert torch.equal(ours.double(), theirs)


def test_inputs_are_the_same_numbers_as_new_leaves() -> None:
    problem = PROBLEMS["biased_attention"]
    first, second = problem.inputs(), problem.inputs()
    first[0].sum().backward()
    assert torch.equal(first[0], second[0])
    assert second[0].is_leaf
    assert second[0].grad is None


def test_a_cpu_has_the_triton_peer_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has the Triton peer only in the interpreter; otherwise the backend would silently use row blocks for CPU
    tensors.
    """
    monkeypatch.setattr("tools.bench.attention_peers.TritonBackend.describe_unsupported", lambda *_: None)
    for interpreted in (False, True):
        monkeypatch.setattr("tools.bench.attention_peers.is_interpreted", lambda here=interpreted: here)
        assert ("triton" in build_peers(PROBLEMS["biased_attention"])) == interpreted

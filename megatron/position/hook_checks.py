"""Checks of an encoding's hooks when it is built: a mistake in a file is one line, not a crash in the middle of a step.

H heads, N distances, T tokens, d head dimension, D hidden size.
"""

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.position.catalog import MethodFileError, format_path
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import HOOKS
from megatron.position.token_range import ALL_HEADS, TokenRange


def check_hook_names(encoding: type[Encoding]) -> None:
    """Refuse a hook whose name is misspelt, and an encoding that answers none.

    Raises:
        MethodFileError: names the file, the class and the function.
    """
    for name in vars(encoding):
        if name.startswith("_") or hasattr(Encoding, name) or not inspect.isfunction(vars(encoding)[name]):
            continue
        if matches := difflib.get_close_matches(name, [*HOOKS, "bias_tails"], 1, cutoff=0.75):
            raise MethodFileError(f"{_describe(encoding, name)} is no hook of an encoding; did you mean {matches[0]}?")
    if encoding.takes_positions and not any(encoding.overrides_hook(hook) for hook in HOOKS):
        raise MethodFileError(
            f"{_describe(encoding)} answers none of the hooks {', '.join(HOOKS)}; an encoding that is told no "
            f"positions "
            "says takes_positions = False"
        )


def check_hook_results(encoding: Encoding) -> None:
    """Ask each hook that the encoding answers about one token, and refuse what is no answer to it.

    Raises:
        MethodFileError: names the file, the class, the hook, and what it must return.
    """
    dims, one = encoding.dims, TokenRange(0, 1)
    device = next(encoding.parameters(), torch.empty(0)).device
    hidden = torch.zeros(1, 1, dims.hidden_size, device=device)
    q = torch.zeros(1, dims.num_heads, 1, dims.head_dim, device=device)
    scores = torch.zeros(1, dims.num_heads, 1, 1, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "embed": lambda: encoding.embed(one, hidden),
        "rotate": lambda: encoding.rotate(q, one),
        "table": lambda: encoding.table(torch.zeros(1, device=device)),
        "dense": lambda: encoding.dense(one, one, q, ALL_HEADS),
        "contextual": lambda: encoding.contextual(q, q, scores, one, one, ALL_HEADS),
    }
    shapes = {
        "embed": (1, dims.hidden_size),
        "rotate": tuple(q.shape),
        "table": (dims.num_heads, 1),
        "dense": (dims.num_heads, 1, 1),
        "contextual": tuple(scores.shape),
    }
    with torch.no_grad():
        for hook in (hook for hook in HOOKS if type(encoding).overrides_hook(hook)):
            try:
                result = calls[hook]()
            except Exception as error:
                message = f"{_describe(type(encoding), hook)} raised {type(error).__name__}: {error}"
                raise MethodFileError(" ".join(message.split())) from error
            if hook in ("table", "dense"):
                _check_terms(encoding, hook, result, shapes[hook])
            elif result is not None or hook == "rotate":
                _check_tensor(encoding, hook, result, shapes[hook])


def _check_terms(encoding: Encoding, hook: str, result: object, shape: tuple[int, ...]) -> None:
    name = _describe(type(encoding), hook)
    if not isinstance(result, ScoreTerms):
        raise MethodFileError(f"{name} must return ScoreTerms(bias, weight), not {_describe_type(result)}")
    for term, value, fact in zip(("bias", "weight"), result, ("adds_bias", "multiplies_scores"), strict=True):
        declared = getattr(encoding, fact)
        if (value is not None) != declared:
            returned = f"no {term}" if value is None else f"a {term}"
            raise MethodFileError(f"{name} returns {returned}, but {type(encoding).__name__}.{fact} is {declared}")
        if value is not None:
            _check_tensor(encoding, hook, value, shape)


def _check_tensor(encoding: Encoding, hook: str, result: object, shape: tuple[int, ...]) -> None:
    name = _describe(type(encoding), hook)
    if not isinstance(result, Tensor):
        raise MethodFileError(f"{name} must return a tensor of the shape {list(shape)}, not {_describe_type(result)}")
    if tuple(result.shape) != shape:
        raise MethodFileError(
            f"{name} returns the shape {list(result.shape)} for one token of {encoding.dims.num_heads} heads; it must "
            f"be {list(shape)}"
        )
    if not result.is_floating_point():
        raise MethodFileError(f"{name} returns {result.dtype}; it must be a floating-point tensor")


def _describe(encoding: type[Encoding], function: str | None = None) -> str:
    source = inspect.getsourcefile(encoding)
    path = "" if source is None else f"{format_path(Path(source))}: "
    return path + encoding.__name__ + ("" if function is None else f".{function}")


def _describe_type(value: object) -> str:
    return "None" if value is None else type(value).__name__

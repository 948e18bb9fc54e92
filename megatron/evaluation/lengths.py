"""Which lengths are asked for: in tokens, in training lengths, or 1 to 32 training lengths if nothing is said."""

import math
from collections.abc import Sequence

from megatron.errors import UserError
from megatron.options.evaluation import EvaluationOptions

DEFAULT_MULTIPLES = (1, 2, 4, 8, 16, 32)
LONGEST = 2**40


def read_lengths(text: str) -> dict[str, list[int] | list[float]]:
    """Lengths as the command line has them: `128,256` in tokens, `1x,1.5x` in training lengths, or both.

    Returns:
        `lengths` and `multiples` of `EvaluationOptions`, those that are given.

    Raises:
        UserError: a part is no length.
    """
    tokens: list[int] = []
    multiples: list[float] = []
    for part in (part.strip() for part in text.split(",")):
        bare = part.replace("_", "")
        number = bare.removesuffix("x").removesuffix("×")
        try:
            value = float(number) if number != bare else int(number)
        except ValueError:
            value = 0  # refused below
        if not 0 < value < LONGEST:
            raise _none(part)
        if isinstance(value, int):
            tokens.append(value)
        else:
            multiples.append(value)
    return ({"lengths": tokens} if tokens else {}) | ({"multiples": multiples} if multiples else {})


def wanted_lengths(options: EvaluationOptions, train_lengths: Sequence[int]) -> tuple[int, ...]:
    """Window lengths in tokens, ascending.

    Args:
        options: what was asked for.
        train_lengths: of the runs; multiples need them to be equal.

    Raises:
        UserError: multiples that are no whole number of tokens, or of runs with different training lengths.
    """
    multiples: Sequence[float] = options.multiples or ()
    alike = len(set(train_lengths)) == 1
    if options.lengths is None and options.multiples is None:
        if not alike:
            trained = ", ".join(f"{length:,}" for length in sorted(set(train_lengths)))
            raise UserError(f"lengths: name them in tokens, as the runs were trained at different ones ({trained})")
        multiples = DEFAULT_MULTIPLES
    found = set(options.lengths or ())
    for multiple in multiples:
        if not alike:
            raise UserError(
                f"lengths: {multiple:g}x is ambiguous, as the runs were trained at different lengths; name tokens"
            )
        length = multiple * train_lengths[0]
        if not (1 <= length < LONGEST and math.floor(length) == length):
            raise _none(f"{multiple:g}x")
        found.add(int(length))
    return tuple(sorted(found))


def _none(part: str) -> UserError:
    return UserError(f"lengths: {part!r} is not a length; write tokens (128,256) or training lengths (1x,2x)")

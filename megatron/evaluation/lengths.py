"""Which lengths are asked for: in tokens, in training lengths, or 1 to 32 training lengths if nothing is said."""

import math
from collections.abc import Sequence

from megatron.options.evaluation import MAX_LENGTH, EvaluationOptions, build_length_error
from megatron.utils.errors import UserError

DEFAULT_MULTIPLES = (1, 2, 4, 8, 16, 32)


def choose_lengths(options: EvaluationOptions, train_lengths: Sequence[int]) -> tuple[int, ...]:
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
        if not (1 <= length < MAX_LENGTH and math.floor(length) == length):
            raise build_length_error(f"{multiple:g}x")
        found.add(int(length))
    return tuple(sorted(found))

"""Which places of a sequence each context-parallel rank holds, without any process.

A causal row sees all places before it, so C equal parts would be unequal work: the last rank's rows see about twice as
many keys as the mean. Cut into 2C chunks instead, rank r holds chunk r and chunk 2C − 1 − r, one from either end, and
every rank has the same number of scores:

    C = 2:   chunk    0  1  2  3
             rank     0  1  1  0
"""

from megatron.distributed.mesh import Axis


def held(length: int, context: Axis) -> tuple[tuple[int, int], ...]:
    """The chunks of a sequence that a rank holds: (first place, number of places) of each, in order.

    Raises:
        ValueError: the sequence does not divide into chunks.
    """
    if context.size == 1:
        return ((0, length),)
    if length % (2 * context.size):
        raise ValueError(f"a sequence of {length} tokens does not divide into {2 * context.size} chunks (2 per rank)")
    size = length // (2 * context.size)
    return tuple((size * chunk, size) for chunk in (context.index, 2 * context.size - 1 - context.index))


def holders(size: int) -> tuple[tuple[int, int], ...]:
    """Who holds the chunks of a sequence, in the order of places: (rank, which of its chunks) of each."""
    if size == 1:
        return ((0, 0),)
    return (*((rank, 0) for rank in range(size)), *((rank, 1) for rank in reversed(range(size))))

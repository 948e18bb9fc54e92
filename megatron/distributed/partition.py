"""Which layers a pipeline stage holds, and which tokens of a sequence a context-parallel rank: arithmetic, without
torch.

Layers are divided in order. Where they do not divide evenly, the first stages have one more: the last one also computes
the logits.

A causal row sees all tokens before it, so C equal parts of a sequence would be unequal work: the last rank's rows see
about twice as many keys as the mean. Cut into 2C chunks instead, rank r holds chunk r and chunk 2C − 1 − r, one from
either end, and every rank has the same number of scores:

    C = 2:   chunk    0  1  2  3
             rank     0  1  1  0
"""

from megatron.distributed.mesh import Axis


def list_context_chunks(length: int, context: Axis) -> tuple[tuple[int, int], ...]:
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


def list_chunk_owners(size: int) -> tuple[tuple[int, int], ...]:
    """Who holds the chunks of a sequence, in the order of places: (rank, which of its chunks) of each."""
    if size == 1:
        return ((0, 0),)
    return (*((rank, 0) for rank in range(size)), *((rank, 1) for rank in reversed(range(size))))


def pipeline_layer_range(num_layers: int, stage: Axis) -> range:
    """The layers of a stage."""
    base_count, num_larger = divmod(num_layers, stage.size)
    first = base_count * stage.index + min(stage.index, num_larger)
    return range(first, first + base_count + (stage.index < num_larger))

"""What attention exchanges between ranks that share a layer's heads or a sequence's places.

Tensor parallelism: megatron-core divides the linear layers, so a rank computes some of the heads, in order. What is
ours follows from that:

* every rank holds all parameters of encodings and processors and uses what concerns its heads, so each rank's gradient
  is one part of the whole: they are summed (otherwise the copies drift apart);
* a processor mixes the scores of all heads: queries and keys are gathered, which is linear in T, never the maps.

Context parallelism: a rank holds some of the places (`distributed/places.py`). Rows are independent of each other in
every method, so a rank needs the keys and values of all places and computes the rows of its own; its gradient of the
others' keys is theirs to add.

B batch, H heads, h heads of a rank, T sequence, t places of a rank, d head dimension.
"""

from torch import Tensor

from megatron.distributed.collectives import gather
from megatron.distributed.mesh import Axis
from megatron.distributed.processes import Processes
from megatron.position.shape import ALL_HEADS


def tensor_parallel_heads(tensor: Axis, num_heads: int) -> slice:
    """The heads that a rank of the tensor dimension computes; its size divides num_heads."""
    if tensor.size == 1:
        return ALL_HEADS
    count = num_heads // tensor.size
    first = count * tensor.index
    return slice(first, first + count)


def gather_heads(x: Tensor, groups: Processes) -> Tensor:
    """Queries or keys of all heads, [B, h, t, d] → [B, H, t, d]; each rank goes on with its own share of the work, so
    the gradient is the sum over ranks."""
    return gather(x, 1, groups, "tensor", summed=True)


def gather_sequence(x: Tensor, groups: Processes) -> Tensor:
    """Keys or values of all places in their order, [B, H or h, t, d] → [B, H or h, T, d]; the gradient is the sum over
    ranks."""
    return gather(x, 2, groups, "context", summed=True)


def gather_vocabulary(logits: Tensor, groups: Processes) -> Tensor:
    """Logits over the whole vocabulary from each rank's part, along the last dimension; all ranks go on alike."""
    return gather(logits, logits.dim() - 1, groups, "tensor", summed=False)

"""Our Triton kernels: memory linear in T, for biases, multiplicative weights and convolutional processors.

| encoding             | processor     | computed by                                                            |
|----------------------|---------------|------------------------------------------------------------------------|
| Toeplitz or none     | none          | `kernels/biased_attention`; under dropout `kernels/bias` and PyTorch's |
| Toeplitz or none     | convolutional | `kernels/cdape_attention`                                              |
| a network (FIRE)     | none          | `kernels/bias` and PyTorch's fused attention                           |
| a network (FIRE)     | any           | `kernels/bias` and PyTorch's row blocks                                |

What only shows at run time (padding, drawn positions, a processor's heads divided over ranks, a model that was moved to
the CPU, dropout under a processor) goes to PyTorch's row blocks, which is said once.
"""

import logging
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from megatron.model.backends import fused_processor
from megatron.model.backends.backend import Backend
from megatron.model.backends.bias_matrix import attend_with_matrix, with_network_in_kernel
from megatron.position.encoding import Encoding, Terms
from megatron.position.forms import Network
from megatron.position.processor import Processor
from megatron.position.rows import Rows
from megatron.position.scores import table_for

logger = logging.getLogger(__name__)

# Triton is imported where it is asked for, and only there: it takes a second and needs no GPU machine to fail on.


def runs_here() -> bool:
    """Is there a GPU, or Triton's interpreter (tests)?"""
    from kernels.runtime import interpreted

    return torch.cuda.is_available() or interpreted()


class Triton:
    """The kernels of `kernels/`.

    Args:
        rest: computes what they cannot, in plain PyTorch.
    """

    def __init__(self, rest: Backend) -> None:
        self.rest = rest

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        if not runs_here():
            return "it needs a CUDA device"
        from kernels.rows import MAX_HEAD_DIM

        if encoding.shape.head_dim > MAX_HEAD_DIM:
            return f"its head dimension is at most {MAX_HEAD_DIM}, not {encoding.shape.head_dim}"
        if type(encoding).overrides("contextual"):
            return "it cannot add contextual terms"
        if type(encoding).overrides("dense"):
            return _refuses_network(encoding)
        if processor is None:
            return None
        from kernels.cdape_attention.op import WIDEST

        return fused_processor.refuses(encoding, processor, widest=WIDEST)

    def __call__(self, rows: Rows) -> Tensor:
        table = table_for(rows.encoding, rows.query, rows.key, rows.q.device) or Terms()
        route, why = plan(rows, table)
        match route:
            case Route.FUSED_BIAS:
                return _biased(rows, table)
            case Route.FUSED_PROCESSOR:
                from kernels.cdape_attention.op import cdape_attention

                return fused_processor.attend(cdape_attention, rows, table.bias)
            case Route.MATRIX:
                return attend_with_matrix(rows, table.bias, _network(rows.encoding))
            case Route.PROCESSED_MATRIX:
                network = _network(rows.encoding)
                assert network is not None
                return self.rest(with_network_in_kernel(rows, network))
            case Route.PYTORCH:
                _say(why)
                return self.rest(rows)


class Route(Enum):
    """By what a call is computed."""

    FUSED_BIAS = "kernels/biased_attention"
    FUSED_PROCESSOR = "kernels/cdape_attention"
    MATRIX = "kernels/bias, then PyTorch's fused attention"
    PROCESSED_MATRIX = "kernels/bias, then PyTorch's row blocks"
    PYTORCH = "PyTorch's row blocks"


def plan(rows: Rows, table: Terms) -> tuple[Route, str]:
    """The route of one call, of rows that the backend did not refuse, and why if no kernel has a part in it.

    Args:
        rows: what attention is asked for.
        table: the encoding's table over the distances of these rows; empty if it has none.
    """
    from kernels.runtime import DTYPES, interpreted

    dtype, network = rows.q.dtype, _network(rows.encoding)
    if not (rows.q.is_cuda or interpreted()):
        return Route.PYTORCH, "a model on the CPU"
    if dtype not in DTYPES or (interpreted() and dtype == torch.bfloat16):
        return Route.PYTORCH, f"{dtype}{' in the interpreter' if interpreted() else ''}"
    if rows.query.drawn is not None:
        return Route.PYTORCH, "randomized positions"
    if rows.key_mask is not None:
        return Route.PYTORCH, "padding"
    if rows.processor is not None:
        if network is not None:
            return Route.PROCESSED_MATRIX, ""
        why = fused_processor.left_out(rows)
        return (Route.FUSED_PROCESSOR, "") if why is None else (Route.PYTORCH, why)
    if network is not None or (rows.dropout and table.weight is None and table.bias is not None):
        return Route.MATRIX, ""
    if rows.dropout:
        return Route.PYTORCH, "attention_dropout without a bias or with a weight"
    return Route.FUSED_BIAS, ""


@cache
def _say(why: str) -> None:
    """Once for each reason, not once for each layer and step."""
    logger.warning("attention_backend triton: %s is left to PyTorch's row blocks", why)


def _network(encoding: Encoding) -> Network | None:
    form = encoding.form()
    return form if isinstance(form, Network) else None


def _refuses_network(encoding: Encoding) -> str | None:
    from kernels.bias.configs import MAX_HEADS, MAX_WIDTH

    network = _network(encoding)
    if network is None:
        return "it cannot compute a bias that is not a function of the distance"
    heads, width = network.weight2.shape
    if heads > MAX_HEADS or width > MAX_WIDTH:
        return f"its networks have at most {MAX_HEADS} heads and width {MAX_WIDTH}, not {heads} and {width}"
    return None


def _biased(rows: Rows, table: Terms) -> Tensor:
    from kernels.biased_attention.op import biased_attention

    bias, weight = (None if t is None else t[rows.heads] for t in table)
    offset = rows.query.start - rows.key.start
    return biased_attention(rows.q, rows.k, rows.v, bias, weight, offset=offset, window=rows.window)

"""Our Triton kernels: memory linear in T, for Toeplitz biases, multiplicative weights and convolutional processors."""

import torch
from torch import Tensor

from megatron.model.backends.backend import Backend, Rows
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.scores import table_for

LARGEST_HEAD_DIM = 128

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_here() -> bool:
    """Is there a GPU, or Triton's interpreter (tests)?"""
    from kernels.runtime import interpreted  # Triton: only where it is asked for

    return torch.cuda.is_available() or interpreted()


class Triton:
    """The kernels of `kernels/`.

    Args:
        rest: computes what only shows at run time that the kernels cannot: padding, drawn positions, dropout, a
            processor's heads divided over ranks, a model that was moved to the CPU.
    """

    def __init__(self, rest: Backend) -> None:
        self.rest = rest

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        if not runs_here():
            return "it needs a CUDA device"
        if encoding.shape.head_dim > LARGEST_HEAD_DIM:
            return f"its head dimension is at most {LARGEST_HEAD_DIM}, not {encoding.shape.head_dim}"
        if type(encoding).overrides("dense"):
            return "it cannot compute a bias that is not a function of the distance"
        if type(encoding).overrides("contextual"):
            return "it cannot add contextual terms"
        if processor is not None and processor.convolutions() is None:
            return "it cannot compute this processor"
        if processor is not None and encoding.has_weight():
            return "it cannot multiply the scores before a processor"
        return None

    def __call__(self, rows: Rows) -> Tensor:
        from kernels.runtime import interpreted

        elsewhere = not (rows.q.is_cuda or interpreted()) or rows.q.dtype not in DTYPES
        divided = rows.processor is not None and (rows.v.shape[1] != rows.q.shape[1] or rows.key.start > 0)
        if elsewhere or rows.key_mask is not None or rows.query.drawn is not None or rows.dropout or divided:
            return self.rest(rows)
        from kernels.biased_attention.op import biased_attention
        from kernels.cdape_attention.op import cdape_attention

        table = table_for(rows.encoding, rows.query, rows.key, rows.q.device)
        offset = rows.query.start - rows.key.start
        if rows.processor is None:
            bias, weight = (None if t is None else t[rows.heads] for t in table or (None, None))
            return biased_attention(rows.q, rows.k, rows.v, bias, weight, offset=offset, window=rows.window)
        convolutions = rows.processor.convolutions()
        assert convolutions is not None
        *weights, residual_bias = convolutions
        return cdape_attention(
            rows.q,
            rows.k,
            rows.v,
            None if table is None else table.bias,
            *weights,
            offset=offset,
            window=rows.window,
            residual_bias=residual_bias,
        )

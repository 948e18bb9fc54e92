"""Score processors of a form that kernels compute together with attention, wherever these run."""

from collections.abc import Callable

from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.forms import Convolutions
from megatron.position.processor import Processor
from megatron.position.rows import Rows


def refuses(
    encoding: Encoding, processor: Processor, *, widest: int | None = None, most_taps: int | None = None
) -> str | None:
    """Why no kernel can compute the combination, or None.

    Args:
        encoding, processor: the combination.
        widest, most_taps: the largest width and size of a convolution that a kernel takes, if it has such limits.
    """
    if type(encoding).overrides("contextual"):
        return "it cannot add contextual terms"
    if type(encoding).overrides("dense"):
        return "it cannot compute a bias that is not a function of the distance"
    convolutions = processor.form()
    if not isinstance(convolutions, Convolutions):
        return "it cannot compute this processor"
    width, *_, taps = convolutions.weight1.shape
    if widest is not None and width > widest:
        return f"its processors have a width of at most {widest}, not {width}"
    if most_taps is not None and taps > most_taps:
        return f"its kernels have a size of at most {most_taps}, not {taps}"
    return "it cannot multiply the scores before a processor" if encoding.has_weight() else None


def left_out(rows: Rows) -> str | None:
    """Why no kernel can compute these rows of a combination that is not refused, or None."""
    if rows.query.drawn is not None:
        return "randomized positions"
    if rows.key_mask is not None:
        return "padding"
    if rows.dropout:
        return "attention_dropout with a score processor"
    if rows.v.shape[1] != rows.q.shape[1] or rows.key.start > 0:
        return "a score processor over divided heads"
    return None


def attend(kernel: Callable[..., Tensor], rows: Rows, bias: Tensor | None) -> Tensor:
    """A kernel's output for rows that are not left out.

    Args:
        kernel: `cdape_attention` of a device.
        bias: the encoding's table, float32 [H, N], or None.
    """
    assert rows.processor is not None
    convolutions = rows.processor.form()
    assert isinstance(convolutions, Convolutions)
    return kernel(
        rows.q,
        rows.k,
        rows.v,
        bias,
        convolutions.weight1,
        convolutions.bias1,
        convolutions.weight2,
        convolutions.bias2,
        offset=rows.query.start - rows.key.start,
        window=rows.window,
        residual_bias=convolutions.residual_bias,
    )

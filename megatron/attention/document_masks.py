"""Document masks.

This module defines which backends and methods compute all documents of a row at once, and prepares masks before the
layers.

See also `documents.mask_documents`.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megatron.attention.backends.backend import AttentionBackend, takes_first_keys
from megatron.attention.segments import Segment
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor


def depends_on_document_start(encoding: Encoding) -> bool:
    """Return True if the scores of a query and a key would differ if their document began elsewhere in the row."""
    adds_terms = any(type(encoding).overrides_hook(hook) for hook in ("dense", "contextual"))
    return adds_terms and not encoding.relative


def can_mask_documents(
    encoding: Encoding, backend: AttentionBackend, processor: Processor | None = None, *, randomized: bool
) -> bool:
    """Return True if attention is computed for all documents of a row at once.

    Randomized positions are drawn for the length of each document, so distances in a row are not differences of
    columns. A processor that reads rows above must not read rows of another document.
    """
    is_right = processor is None or processor.takes_first_columns
    return takes_first_keys(backend) and is_right and not randomized and not depends_on_document_start(encoding)


def compute_document_masks(
    segments: Sequence[Segment],
    starts: Tensor,
    backend: AttentionBackend,
    encoding: Encoding,
    window: int | None,
    like: Tensor,
    *,
    dropout: bool,
) -> tuple[Segment, ...]:
    """Return the segments with masks that the backend prepares once for all layers and their recomputation.

    Args:
        segments: segments of all tokens from column P on, or of some of them.
        starts: document starts, as defined by `documents.check_document_starts`.
        backend: backend of all layers, with or without `compute_document_mask`.
        encoding: encoding of a layer.
        window: window of the layers.
        like: tensor with the type and device of the queries.
        dropout: True if attention weights are dropped.
    """
    compute = getattr(backend, "compute_document_mask", None)
    if compute is None:
        return tuple(segments)
    return tuple(
        segment
        if segment.first_keys is None
        else replace(
            segment,
            document_mask=compute(
                segment.tokens, segment.context, segment.first_keys, starts, encoding, window, like, dropout=dropout
            ),
        )
        for segment in segments
    )

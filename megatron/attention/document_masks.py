"""Masks of documents: backends and methods that compute all documents of a row at once (`documents.mask_documents`),
and masks that a backend prepares before the layers."""

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

    Randomized positions are drawn for each document's own length, so that distances in a row are not differences of
    columns; and what a processor reads of rows above must not be another document's.
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
    """The segments with what a backend makes of their documents, which all layers share, and their recomputation.

    Args:
        segments: of all tokens from column P on, or of some of them.
        starts: as `documents.check_document_starts` wants them.
        backend: of all layers, whether it has `compute_document_mask` or not.
        encoding: of a layer.
        window: of the layers.
        like: has the queries' type and device.
        dropout: are attention weights dropped?
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

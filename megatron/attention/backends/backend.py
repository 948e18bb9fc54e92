"""Interface of an attention backend, limits on keeping score matrices, and document masks.

The limits concern score matrices kept for the backward pass. Document masks include which backends and methods compute
all documents of a row at once, and masks prepared before the layers.

This module does not import torch at run time, so that the memory planner can read the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from megatron.attention.backends.capabilities import find_unsupported_feature, list_score_features
from megatron.position.facts import HOOKS

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.attention.inputs import AttentionInputs
    from megatron.attention.segments import Segment
    from megatron.position.encoding import Encoding
    from megatron.position.processor import Processor

MAX_KEYS_SAVED = 1024
"""Maximum number of keys up to which `auto` keeps score matrices in training: for small maps this is faster than
recomputation."""

MIN_ROWS_SAVED = 128
"""Minimum number of rows per kept block without a processor: smaller blocks cost more than they save."""


def reads_whole_table(backend: AttentionBackend) -> bool:
    """Return True if a backend reads the whole table of a Toeplitz encoding.

    A caller can then compute the table once for several calls.

    A backend declares this in its attribute of the same name. Backends in plain PyTorch do not: they sum the gradients
    of a table in their own order, on which the bits of a training run depend.
    """
    return getattr(backend, "reads_whole_table", False)


def needs_heads_first_layout(backend: AttentionBackend) -> bool:
    """Return True if a backend needs contiguous queries, keys and values [B, h, T, d], and returns such gradients.

    A backend declares this in its attribute of the same name. Compiled regions then write this layout, which saves a
    copy.
    """
    return getattr(backend, "needs_heads_first_layout", False)


def supports_document_starts(backend: AttentionBackend) -> bool:
    """Return True if a backend computes rows of several documents in one call (`AttentionInputs.document_starts`).

    A backend declares this in its attribute of the same name. Other backends are called document by document.
    """
    return getattr(backend, "supports_document_starts", False)


def find_unsupported_combination(
    backend: str, encoding: Encoding, processor: Processor | None, softcap: float | None, softmax_type: str
) -> str | None:
    """Explain why a backend supports no call of a combination, or return None if nothing is known.

    `capabilities.py` is the source.

    Args:
        backend: a value of `attention_backend`.
    """
    features = list_score_features(
        [hook for hook in HOOKS if type(encoding).overrides_hook(hook)],
        multiplies_scores=encoding.multiplies_scores,
        has_kernel_parameters=encoding.kernel_parameters() is not None,
        has_processor=processor is not None,
        has_softcap=softcap is not None,
        num_rotations=1 if encoding.far_distance is None else 2,
        has_processor_kernel=processor is not None and processor.kernel_parameters() is not None,
        softmax_type=softmax_type,
    )
    return find_unsupported_feature(backend, features)


class AttentionBackend(Protocol):
    """Implementation of weights·v, with the weights of `megatron.attention.reference.compute_weights`."""

    def describe_unsupported(
        self,
        encoding: Encoding,
        processor: Processor | None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
    ) -> str | None:
        """Explain why this backend does not support the combination; None if it does.

        Args:
            softcap: bound of q·k/√d.
            softmax_type: how weights are computed from logits, a value of the configuration key
                (`megatron/attention/softmax.py`).
        """

    def __call__(self, inputs: AttentionInputs, /) -> Tensor:
        """Compute the attention output [B, h, R, d]."""


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
    is_correct = processor is None or processor.takes_first_columns
    return (
        supports_document_starts(backend) and is_correct and not randomized and not depends_on_document_start(encoding)
    )


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
        if segment.document_starts is None
        else replace(
            segment,
            document_mask=compute(
                segment.tokens,
                segment.context,
                segment.document_starts,
                starts,
                encoding,
                window,
                like,
                dropout=dropout,
            ),
        )
        for segment in segments
    )

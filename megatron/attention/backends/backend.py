"""Interface of attention backends, their capabilities by features of a method, and document masks.

A method is described by features of its scores. A backend lists the features that it does not support, and features of
which it requires at least one. The configuration, the planner and the construction of a model use these lists. Limits
that depend on sizes or on the machine, such as a processor's width, are checked by the backend.

The second part defines which backends and methods compute all documents of a row at once, and prepares their masks
before the layers. This module does not import torch at run time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megatron.position.catalog import MethodFacts
from megatron.position.facts import HOOKS, ProcessorCost

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.attention.inputs import AttentionInputs
    from megatron.attention.segments import Segment
    from megatron.position.encoding import Encoding
    from megatron.position.processor import Processor

logger = logging.getLogger(__name__)

UNSUPPORTED_REASONS = {
    "processor": "it cannot process scores",
    "two rotations": "it cannot rotate far keys differently from near ones",
    "processor without kernel": "it cannot compute this processor",
    "head maps": "it cannot map the heads to each other",
    "softcap": "it cannot cap the scores (attn_logit_softcapping)",
    "bias": "it cannot add a position bias to the scores",
    "contextual": "it cannot add contextual terms",
    "matrix": "it cannot compute a bias that is not a function of the distance",
    "kernel matrix": "it cannot compute a bias that is not a function of the distance",
    "gate": "it cannot add a bias that differs between sequences",
    "weight": "it cannot multiply the scores",
    "weight before a processor": "it cannot multiply the scores before a processor",
    "sink": "it cannot add a sink to the softmax (softmax_type)",
    "stick-breaking": "it computes a softmax and not stick-breaking (softmax_type)",
}
"""Features of a method, and the reason reported by a backend that does not support them.

    two rotations               queries and keys are rotated again for far keys (`Encoding.far_distance`)
    processor without kernel    a score processor without a form that kernels support
    head maps                   a score processor with linear maps between the heads
    bias                        a term added to the scores or multiplied into them
    matrix                      a bias with an entry for each row and column
    kernel matrix               such a bias in a form that kernels compute (FIRE)
    contextual                  terms computed from queries and keys
    gate                        a term per row and a term per key, computed from the layer's input
    weight                      a matrix multiplied into the scores
    sink                        a logit without a value, in addition to those of a row's keys
"""


@dataclass(frozen=True)
class BackendCapabilities:
    """Capabilities of a backend.

    Attributes:
        unsupported: features that the backend does not support. The first of them that a method has is reported.
        requires: features of which a method must have at least one, or empty.
        requires_reason: reason reported for a method with none of them.
        graph_obstacle: why a CUDA graph cannot contain the backend's calls, or None if it can.
    """

    unsupported: tuple[str, ...] = ()
    requires: frozenset[str] = frozenset()
    requires_reason: str = ""
    graph_obstacle: str | None = None


BACKEND_CAPABILITIES = {
    "sdpa": BackendCapabilities(("processor", "two rotations", "softcap", "bias", "sink", "stick-breaking")),
    "flex": BackendCapabilities(
        ("processor", "two rotations", "matrix", "kernel matrix", "contextual", "weight", "stick-breaking"),
        frozenset({"bias", "softcap", "sink"}),
        "it needs a bias, a soft cap or a sink",
        graph_obstacle="FlexAttention keeps its masks outside of the graph",
    ),
    "native": BackendCapabilities(
        (
            *("two rotations", "softcap", "contextual", "matrix", "kernel matrix", "gate", "weight"),
            *("processor without kernel", "head maps", "stick-breaking"),
        ),
        frozenset({"processor"}),
        "it needs a score processor",
    ),
    "triton": BackendCapabilities(
        (
            *("two rotations", "contextual", "softcap", "matrix", "weight before a processor"),
            *("processor without kernel", "stick-breaking"),
        ),
    ),
}
"""Capabilities by value of `attention_backend`. Backends in plain PyTorch are not listed, because they support
everything."""


def list_score_features(
    hooks: Collection[str],
    *,
    multiplies_scores: bool,
    has_kernel_parameters: bool,
    has_processor: bool,
    has_softcap: bool,
    softmax_type: str,
    num_rotations: int = 1,
    has_processor_kernel: bool = True,
    maps_heads: bool = False,
) -> frozenset[str]:
    """List the features of a method's scores: keys of `UNSUPPORTED_REASONS`.

    Args:
        hooks: hooks that the encoding implements.
        multiplies_scores, has_kernel_parameters: declarations of the encoding.
        has_processor: True if there is a score processor.
        has_softcap: True if the scores are capped.
        softmax_type: how weights are computed from logits.
        num_rotations: number of rotations of queries and keys, by distance.
        has_processor_kernel: True if the processor has a form that kernels support.
        maps_heads: True if this form has linear maps between the heads (`ProcessorCost.maps_heads`).
    """
    is_matrix = "dense" in hooks
    present = {
        "processor": has_processor,
        "two rotations": num_rotations > 1,
        "processor without kernel": has_processor and not has_processor_kernel,
        "head maps": maps_heads,
        "softcap": has_softcap,
        "bias": bool({"table", "dense", "contextual", "gate"} & set(hooks)),
        "contextual": "contextual" in hooks,
        "gate": "gate" in hooks,
        "matrix": is_matrix and not has_kernel_parameters,
        "kernel matrix": is_matrix and has_kernel_parameters,
        "weight": multiplies_scores,
        "weight before a processor": multiplies_scores and has_processor,
        "sink": softmax_type in ("off-by-one", "learnable"),
        "stick-breaking": softmax_type.startswith("stick-breaking"),
    }
    return frozenset(feature for feature, is_there in present.items() if is_there)


def maps_heads(cost: object) -> bool:
    """Return True if a processor with these declared costs has linear maps between the heads that kernels support."""
    return isinstance(cost, ProcessorCost) and cost.maps_heads


def list_method_features(
    facts: MethodFacts,
    *,
    processor_facts: MethodFacts | None,
    has_softcap: bool = False,
    softmax_type: str = "vanilla",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> frozenset[str]:
    """List the features of a method's scores from the declarations in its files.

    Args:
        facts: declarations of the encoding.
        processor_facts: declarations of the score processor, or None without one.
        has_softcap, softmax_type: as for `list_score_features`.
        options: options of the encoding; missing ones have their defaults.
    """
    return list_score_features(
        facts.hooks,
        multiplies_scores=facts.multiplies_scores,
        has_kernel_parameters=facts.has_kernel_parameters,
        has_processor=processor_facts is not None,
        has_softcap=has_softcap,
        num_rotations=facts.count_rotations(options),
        has_processor_kernel=processor_facts is not None and processor_facts.has_kernel_parameters,
        maps_heads=processor_facts is not None and maps_heads(processor_facts.cost),
        softmax_type=softmax_type,
    )


def find_unsupported_feature(backend: str, features: Collection[str]) -> str | None:
    """Explain in a clause why a backend does not support a method with these features; None if it does.

    Args:
        backend: a value of `attention_backend`.
        features: result of `list_score_features` or `list_method_features`.
    """
    capabilities = BACKEND_CAPABILITIES.get(backend, BackendCapabilities())
    if capabilities.requires and not capabilities.requires & set(features):
        return capabilities.requires_reason
    return next((UNSUPPORTED_REASONS[feature] for feature in capabilities.unsupported if feature in features), None)


MAX_KEYS_SAVED = 1024
"""Maximum number of keys for which `auto` saves score matrices in training, which is faster than recomputing them."""

MIN_ROWS_SAVED = 128
"""Minimum number of rows per saved block without a processor. Smaller blocks are slower."""


def get_gate_sum_function(backend: Any, default: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backend's function for running sums of gates (`reference.sum_gates`), or `default` if it has none."""
    found: Callable[..., Any] = getattr(backend, "sum_gates", default)
    return found


def reads_whole_table(backend: AttentionBackend) -> bool:
    """Return True if a backend reads the whole table of a Toeplitz encoding.

    A caller can then compute the table once for several calls.

    A backend declares this in its attribute of the same name. Backends in plain PyTorch do not,
    because another order of summing the table's gradients would change the bits of training runs.
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


@dataclass(frozen=True)
class AttentionFormula:
    """Formula of a layer's attention, as far as it decides which backends support the layer."""

    encoding: Encoding
    processor: Processor | None = None
    softcap: float | None = None
    """Bound of q·k/√d, or None."""
    softmax_type: str = "vanilla"
    """Function that turns logits into weights, a value of the configuration key (`megatron/attention/softmax.py`)."""

    @property
    def uses_stick_breaking(self) -> bool:
        return self.softmax_type.startswith("stick-breaking")

    @property
    def adds_remainder(self) -> bool:
        """True if stick-breaking gives the remaining weight to a row's own key."""
        return self.softmax_type == "stick-breaking-remainder"

    @cached_property
    def features(self) -> frozenset[str]:
        """Features of the scores (`list_score_features`)."""
        encoding, processor = self.encoding, self.processor
        return list_score_features(
            [hook for hook in HOOKS if type(encoding).overrides_hook(hook)],
            multiplies_scores=encoding.multiplies_scores,
            has_kernel_parameters=encoding.kernel_parameters() is not None,
            has_processor=processor is not None,
            has_softcap=self.softcap is not None,
            num_rotations=1 if encoding.far_distance is None else 2,
            has_processor_kernel=processor is not None and processor.kernel_parameters() is not None,
            maps_heads=processor is not None and maps_heads(processor.cost),
            softmax_type=self.softmax_type,
        )


@cache
def warn_fallback(backend: str, reason: str) -> None:
    """Warn that calls of a requested backend fall back to row blocks, once per reason."""
    logger.warning("attention_backend %s: falling back to PyTorch's row blocks for %s", backend, reason)


class AttentionBackend(Protocol):
    """Implementation of weights·v, with the weights of `megatron.attention.reference.compute_weights`."""

    def describe_unsupported(self, formula: AttentionFormula) -> str | None:
        """Explain why this backend does not support the formula; None if it does."""

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
    is_correct = processor is None or processor.supports_packed_documents
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

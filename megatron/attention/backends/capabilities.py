"""Capabilities of each attention backend, as far as a method's file determines them, without importing torch.

A method is described by features of its scores. A backend lists the features that it does not support, and features of
which it requires at least one. Backends use this module when a model is built, the configuration uses it before that,
and the planner uses it for its columns. Limits that depend on sizes or on the machine, such as a processor's width, are
checked by the backend.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.position.catalog import MethodFacts

UNSUPPORTED_REASONS = {
    "processor": "it cannot process scores",
    "two rotations": "it cannot rotate far keys differently from near ones",
    "processor without kernel": "it cannot compute this processor",
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
"""Features of a method, and the reason given by a backend that does not support them.

    two rotations               queries and keys are rotated again for far keys (`Encoding.far_distance`)
    processor without kernel    a score processor without a form that kernels support
    bias                        a term added to the scores or multiplied into them
    matrix, kernel matrix       a bias with an entry for each row and column; kernels support the form of the second
    contextual                  a bias that depends on the queries
    gate                        a term per row and a term per key, computed from the layer's input
    weight                      a matrix multiplied into the scores
    sink                        a logit without a value, in addition to those of a row's keys
"""


@dataclass(frozen=True)
class BackendCapabilities:
    """Capabilities of a backend.

    Attributes:
        unsupported: features that the backend does not support. The first one that a method has is the reason given.
        requires: features of which a method must have at least one, or empty.
        requires_reason: reason given for a method with none of them.
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
            *("processor without kernel", "stick-breaking"),
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
    """
    is_matrix = "dense" in hooks
    present = {
        "processor": has_processor,
        "two rotations": num_rotations > 1,
        "processor without kernel": has_processor and not has_processor_kernel,
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


def find_unsupported_method(
    backend: str,
    facts: MethodFacts,
    *,
    processor_facts: MethodFacts | None,
    has_softcap: bool,
    softmax_type: str = "vanilla",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:
    """Explain why a backend does not support an encoding with these settings; None if it does.

    Args:
        options: options of the encoding, as far as given.
    """
    features = list_score_features(
        facts.hooks,
        multiplies_scores=facts.multiplies_scores,
        has_kernel_parameters=facts.has_kernel_parameters,
        has_processor=processor_facts is not None,
        has_softcap=has_softcap,
        num_rotations=facts.count_rotations(options),
        has_processor_kernel=processor_facts is not None and processor_facts.has_kernel_parameters,
        softmax_type=softmax_type,
    )
    return find_unsupported_feature(backend, features)


def find_unsupported_feature(backend: str, features: Collection[str]) -> str | None:
    """Explain in a clause why a backend does not support a method with these features; None if it does.

    Args:
        backend: a value of `attention_backend`.
        features: result of `list_score_features`.
    """
    capabilities = BACKEND_CAPABILITIES.get(backend, BackendCapabilities())
    if capabilities.requires and not capabilities.requires & set(features):
        return capabilities.requires_reason
    return next((UNSUPPORTED_REASONS[feature] for feature in capabilities.unsupported if feature in features), None)

"""Which methods each attention backend can compute, as far as the method's file tells: known without torch.

A method is described by the features of its scores. A backend lists those that it does not support, and those of which
it requires one. Backends ask this module when a model is built, the configuration before anything is built, and the
planner for its columns. What depends on sizes or on the machine, such as a processor's width, a backend adds.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.position.catalog import MethodFacts

UNSUPPORTED_REASONS = {
    "processor": "it cannot process scores",
    "two rotations": "it cannot rotate far keys otherwise than near ones",
    "processor without kernel": "it cannot compute this processor",
    "softcap": "it cannot cap the scores (attn_logit_softcapping)",
    "bias": "it cannot add a position bias to the scores",
    "contextual": "it cannot add contextual terms",
    "matrix": "it cannot compute a bias that is not a function of the distance",
    "kernel matrix": "it cannot compute a bias that is not a function of the distance",
    "gate": "it cannot add a bias that is another for every sequence",
    "gate before a processor": "it cannot add a bias that is another for every sequence before a processor",
    "weight": "it cannot multiply the scores",
    "weight before a processor": "it cannot multiply the scores before a processor",
    "sink": "it cannot add a sink to the softmax (softmax_type)",
    "stick-breaking": "it computes a softmax and not stick-breaking (softmax_type)",
}
"""The features of a method, with what a backend says that does not support one.

    two rotations               queries and keys are rotated once more for keys that are far (`Encoding.far_distance`)
    processor without kernel    a score processor that is not in a form that kernels know
    bias                        anything is added to the scores, or multiplied into them
    matrix, kernel matrix       a bias with an entry for each row and column; of the second, kernels know the form
    contextual                  a bias that depends on the queries
    gate                        a term of each row and one of each key, which the layer's input decides
    weight                      a matrix is multiplied into the scores
    sink                        a logit without a value beside those of a row's keys
"""


@dataclass(frozen=True)
class BackendCapabilities:
    """What a backend can compute.

    Attributes:
        unsupported: features of which it can compute none. The first that a method has is the reason that is given.
        requires: features of which a method must have one, or empty.
        requires_reason: what the backend says of a method that has none of them.
    """

    unsupported: tuple[str, ...] = ()
    requires: frozenset[str] = frozenset()
    requires_reason: str = ""


BACKEND_CAPABILITIES = {
    "sdpa": BackendCapabilities(("processor", "two rotations", "softcap", "bias", "sink", "stick-breaking")),
    "flex": BackendCapabilities(
        ("processor", "two rotations", "matrix", "kernel matrix", "contextual", "weight", "stick-breaking"),
        frozenset({"bias", "softcap", "sink"}),
        "it is for a bias of the distance alone",
    ),
    "native": BackendCapabilities(
        (
            *("two rotations", "softcap", "contextual", "matrix", "kernel matrix", "gate", "weight"),
            *("processor without kernel", "stick-breaking"),
        ),
        frozenset({"processor"}),
        "it is for score processors",
    ),
    "triton": BackendCapabilities(
        (
            *("two rotations", "contextual", "softcap", "matrix", "weight before a processor"),
            *("gate before a processor", "processor without kernel", "stick-breaking"),
        ),
    ),
}
"""By the values of `attention_backend`. Those in plain PyTorch, which are not named here, can compute everything."""


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
    """The features of a method's scores: keys of `UNSUPPORTED_REASONS`.

    Args:
        hooks: that its encoding answers.
        multiplies_scores, has_kernel_parameters: what the encoding declares.
        has_processor: whether a score processor works on it.
        has_softcap: whether the scores are capped.
        softmax_type: what makes weights of the logits.
        num_rotations: of queries and keys, by their distance.
        has_processor_kernel: whether that processor is in a form that kernels know.
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
        "gate before a processor": "gate" in hooks and has_processor,
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
    """Why a backend cannot compute an encoding with or without a score processor, a bound of the scores and a sink.

    options: of the encoding, as far as they are given.
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
    """Why a backend cannot compute a method with these features: a clause, or None if it can.

    Args:
        backend: a value of `attention_backend`.
        features: from `list_score_features`.
    """
    capabilities = BACKEND_CAPABILITIES.get(backend, BackendCapabilities())
    if capabilities.requires and not capabilities.requires & set(features):
        return capabilities.requires_reason
    return next((UNSUPPORTED_REASONS[feature] for feature in capabilities.unsupported if feature in features), None)

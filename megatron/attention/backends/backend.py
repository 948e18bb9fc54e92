"""The interface of an attention backend, and how long score maps are kept for the backward pass.

Without torch at run time, so that whoever plans memory knows the limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from megatron.attention.backends.capabilities import find_unsupported_feature, list_score_features
from megatron.position.facts import HOOKS

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.attention.inputs import AttentionInputs
    from megatron.position.encoding import Encoding
    from megatron.position.processor import Processor

MAX_KEYS_KEPT = 1024
"""`auto` keeps training's score maps up to this many keys: faster than computing them again while they are small."""

MIN_ROWS_KEPT = 128
"""Rows per block that is kept, at least, where no processor works on them: smaller ones cost more than they save."""


def reads_whole_table(backend: AttentionBackend) -> bool:
    """Does it read a Toeplitz encoding's table whole, so that whoever calls it several times computes that once?

    A backend says so in its attribute of this name. Those in plain PyTorch do not: they add up the gradients of a
    table in an order that is theirs, on which a training's every bit depends.
    """
    return getattr(backend, "reads_whole_table", False)


def takes_first_keys(backend: AttentionBackend) -> bool:
    """Does it compute rows of several documents in one call (`AttentionInputs.first_keys`)?

    A backend says so in its attribute of this name. The others are asked document by document.
    """
    return getattr(backend, "takes_first_keys", False)


def find_unsupported_combination(
    backend: str, encoding: Encoding, processor: Processor | None, softcap: float | None, softmax_type: str
) -> str | None:
    """Why a backend can compute no call of a combination, as far as `capabilities.py` knows; None if nothing is known.

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
    """A way to compute weights·v, the weights being `megatron.attention.reference.compute_weights`."""

    def unsupported_reason(
        self,
        encoding: Encoding,
        processor: Processor | None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
    ) -> str | None:
        """Why this backend cannot do the combination, or None if it can.

        softcap: a bound of q·k/√d.
        softmax_type: what makes weights of the logits, as the configuration's key (`megatron/attention/softmax.py`).
        """

    def __call__(self, inputs: AttentionInputs, /) -> Tensor:
        """Attention output [B, h, R, d]."""

"""Registry of attention backends by name, and selection of one when the model is built."""

import logging

from megatron.attention.backends.backend import MAX_KEYS_SAVED, AttentionBackend, AttentionFormula
from megatron.attention.backends.flex import FlexBackend
from megatron.attention.backends.fused_processor import NativeBackend
from megatron.attention.backends.pytorch import ChunkedBackend, EagerBackend, RowBlockBackend, SdpaBackend
from megatron.attention.backends.triton import TritonBackend
from megatron.attention.inputs import AttentionInputs
from megatron.utils.errors import UserError

logger = logging.getLogger(__name__)

ROW_BLOCKS = "row blocks"
"""Name of `auto`'s row blocks, saved or recomputed depending on the length. Users cannot request them by name."""

CHECKED_BACKENDS = ("triton", ROW_BLOCKS, "sdpa", "flex")
"""Backends that `auto` tries on a GPU, in this order after its unchecked default. The last takes longest to compile."""

REUSED_BACKENDS = ("triton", "sdpa")
"""Checked backends that a loaded model reuses from its training run.

Row blocks need no check, and FlexAttention would be compiled for every length.
"""


def describe_row_blocks_reason(formula: AttentionFormula) -> str | None:
    """Explain why `auto` uses row blocks without a self-check; None if it uses sdpa."""
    reason = SdpaBackend().describe_unsupported(formula)
    if reason is None:
        return None
    return f"row blocks, saved up to {MAX_KEYS_SAVED:,} keys in training: sdpa {reason.removeprefix('it ')}"


def get_default_backend(formula: AttentionFormula) -> str:
    """Return the backend that `auto` uses without a self-check, on CPUs and GPUs: sdpa or row blocks."""
    return "sdpa" if SdpaBackend().describe_unsupported(formula) is None else ROW_BLOCKS


def select_backend(name: str, chunk_rows: int, formula: AttentionFormula) -> AttentionBackend:
    """Select a backend by name.

    `auto` is the fastest backend that needs no check (`get_default_backend`, or the C code on a CPU).

    Raises:
        UserError: the named backend does not support the formula. The message lists the reason and backends that
            do.
    """
    backends = _build_backends(chunk_rows)
    row_blocks = backends.pop(ROW_BLOCKS)
    if name not in ("auto", *backends):
        raise UserError(f"attention_backend {name!r}: choose from auto, {', '.join(backends)}")
    if name == "auto":
        reason = describe_row_blocks_reason(formula)
        logger.info("attention backend: %s", reason or "sdpa")
        if reason is None:
            return backends["sdpa"]
        if NativeBackend.describe_unsupported_formula(formula) is not None:
            return row_blocks
        return NativeBackend(row_blocks, is_requested=False)
    reason = backends[name].describe_unsupported(formula)
    if reason is not None:
        supported = [other for other, backend in backends.items() if backend.describe_unsupported(formula) is None]
        raise UserError(f"attention_backend {name!r}: {reason}; choose from auto, {', '.join(supported)}")
    return backends[name]


def _build_backends(chunk_rows: int) -> dict[str, AttentionBackend]:
    row_blocks = RowBlockBackend(chunk_rows)
    return {
        ROW_BLOCKS: row_blocks,
        "sdpa": SdpaBackend(),
        "triton": TritonBackend(row_blocks),
        "native": NativeBackend(row_blocks, is_requested=True),
        "flex": FlexBackend(row_blocks),
        "eager": EagerBackend(),
        "chunked": ChunkedBackend(chunk_rows),
    }


def list_candidates(chunk_rows: int, formula: AttentionFormula) -> dict[str, AttentionBackend]:
    """List the backends that support the formula, from which `auto` chooses on a GPU; the default is first."""
    backends = _build_backends(chunk_rows)
    default = get_default_backend(formula)
    order = [default, *(name for name in CHECKED_BACKENDS if name != default)]
    return {name: backends[name] for name in order if backends[name].describe_unsupported(formula) is None}


def describe_fallback(backend: AttentionBackend, inputs: AttentionInputs) -> str | None:
    """Explain why a backend falls back to row blocks for this call of a supported formula; None if it does not."""
    return backend.describe_fallback(inputs) if isinstance(backend, TritonBackend | FlexBackend) else None


def stores_scores_in_compute_type(backend: AttentionBackend, inputs: AttentionInputs) -> bool:
    """Return True if a backend stores scores, biases or values derived from them in the compute type.

    Other backends round only the factors and the results of products.
    """
    return isinstance(backend, RowBlockBackend) or (
        isinstance(backend, TritonBackend) and not backend.is_one_kernel(inputs)
    )

"""Checks of the operator's arguments."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.head_dim import MAX_HEAD_DIM
from megatron.kernels.runtime import DTYPES


class TensorSignature(NamedTuple):
    """Properties of a tensor that are checked before a call."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def describe_tensor(x: Tensor | None) -> TensorSignature | None:
    return None if x is None else TensorSignature(x.shape, x.dtype, x.device)


@lru_cache(maxsize=64)
def check_call(
    q: TensorSignature,
    k: TensorSignature,
    v: TensorSignature,
    bias: TensorSignature | None,
    weight: TensorSignature | None,
    key_bias: TensorSignature | None,
    offset: int,
    window: int | None,
    document_starts: TensorSignature | None,
    sinks: TensorSignature | None,
) -> None:
    """Reject invalid arguments. The result is cached for equal calls, across layers and steps, to save host time."""
    _check_qkv(q, k, v)
    _check_tables(q, bias, weight, _count_distances(q, k, offset, window))
    if key_bias is not None:
        expected = TensorSignature(k.shape[:3], key_bias.dtype, q.device)
        if key_bias != expected or key_bias.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"key_bias is {key_bias.dtype} {list(key_bias.shape)} on {key_bias.device}; it must be float32 or "
                f"float64 {list(k.shape[:3])} on {q.device}"
            )
    if sinks is not None and key_bias is not None:
        # lse is relative to the row's own key, so the sinks' gradient would need more than the kernels return.
        raise ValueError("sinks and key_bias cannot be combined")
    for name, given, expected in (
        (
            "document_starts",
            document_starts,
            TensorSignature(torch.Size((q.shape[0], q.shape[2])), torch.int32, q.device),
        ),
        ("sinks", sinks, TensorSignature(torch.Size((q.shape[1],)), torch.float32, q.device)),
    ):
        if given is not None and given != expected:
            found, wanted = (f"{x.dtype} {list(x.shape)} on {x.device}" for x in (given, expected))
            raise ValueError(f"{name} is {found}; it must be {wanted}")


def _check_qkv(q: TensorSignature, k: TensorSignature, v: TensorSignature) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, heads, length, head dimension]")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}; q, k and v must all be float16, all bfloat16 or all float32")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; no dimension may be 0")
    batch, heads, _, dim = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[1], k.shape[3]) != (batch, heads, dim):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"head dimension {dim}; it must be at most {MAX_HEAD_DIM}")
    if batch * heads > 65535:
        raise ValueError(f"{batch} sequences of {heads} heads; batch times heads must be at most 65535")


def _count_distances(q: TensorSignature, k: TensorSignature, offset: int, window: int | None) -> int:
    """Return the number of distances between rows and keys."""
    if offset < 0:
        raise ValueError(f"offset {offset}; it must not be negative, or rows see no key")
    needed = offset + q.shape[2]
    if window is not None:
        if window < 1:
            raise ValueError(f"window {window}; it must be at least 1")
        if needed - window >= k.shape[2]:
            raise ValueError(f"window {window}: the row at {needed - 1} sees none of the {k.shape[2]} keys")
        needed = min(needed, window)
    return needed


def _check_tables(
    q: TensorSignature, bias: TensorSignature | None, weight: TensorSignature | None, needed: int
) -> None:
    heads = q.shape[1]
    for name, table in (("bias", bias), ("weight", weight)):
        if table is None:
            continue
        if table.dtype != torch.float32 or table.device != q.device:
            raise ValueError(f"{name} is {table.dtype} on {table.device}; it must be float32 on {q.device}")
        if len(table.shape) != 2 or table.shape[0] != heads or table.shape[1] < needed:
            raise ValueError(f"{name} has shape {list(table.shape)}; it must be [{heads}, at least {needed}]")
    if bias is not None and weight is not None and bias.shape != weight.shape:
        raise ValueError(f"bias {list(bias.shape)} and weight {list(weight.shape)} must have the same shape")

"""bfloat16 in Triton's interpreter: float32 numbers, rounded to bfloat16 whenever a value is created.

NumPy has no bfloat16. Triton 3.7 stores the bits as integers, computes with those, and truncates conversions from
float32. Here a block of type bfloat16 contains float32 numbers, each of which bfloat16 represents. An operation
computes in float32 and rounds its result once, as a GPU does; only loads, stores and bit casts use the 16 bits.
"""

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

NAME = tl.bfloat16.name
_check_handle, _check_reduced, _get_numpy_dtype, _validate_size = (
    interpreter.TensorHandle.__post_init__,
    interpreter.ReduceScanOpInterface.check_tensor,
    interpreter._get_np_dtype,
    interpreter._validate_np_data_size,
)


def round_to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round float32 numbers to the nearest bfloat16, ties to even. NaN stays NaN, and large numbers become infinite."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32).reshape(x.shape))


def get_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of rounded numbers as bfloat16."""
    bits = np.ascontiguousarray(x).view(np.uint32) >> 16
    # A NaN whose payload is in the lower half would become an infinity.
    return np.where(np.isnan(x), bits | 0x40, bits).astype(np.uint16).reshape(x.shape)


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers with the given bits as bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_bfloat16(type: Any) -> bool:
    """Return True for bfloat16 and for blocks of it, but not for pointers to it."""
    return type.scalar.name == NAME


class Bfloat16Builder(interpreter.InterpreterBuilder):
    """Builder of the interpreter whose blocks of bfloat16 contain float32 numbers."""

    def get_bf16(self, value: float) -> Any:
        """Return a constant, which Triton 3.7 cannot create."""
        return interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.bfloat16)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *hints: Any) -> Any:
        """Load numbers from their bits."""
        if ptrs.get_element_ty().name != NAME:
            return super().create_masked_load(ptrs, mask, other, *hints)
        bits = np.zeros(ptrs.data.shape, np.uint16) if other is None else get_bits(other.data)
        loaded = interpreter._interpreter.load(ptrs.data, mask.data, bits, np.dtype(np.uint16))
        return interpreter.TensorHandle(from_bits(loaded), tl.bfloat16)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *hints: Any) -> Any:
        """Store the bits of numbers."""
        if ptrs.get_element_ty().name != NAME:
            return super().create_masked_store(ptrs, value, mask, *hints)
        return interpreter._interpreter.store(ptrs.data, get_bits(value.data), mask.data)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Convert numbers between any two types. Numbers beyond the range become infinite, as on a GPU."""
        with np.errstate(over="ignore"):
            return interpreter.TensorHandle(src.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        """Reinterpret bits as another type of the same size."""
        bits = get_bits(src.data) if _is_bfloat16(src.dtype) else src.data
        if _is_bfloat16(dst_type):
            return interpreter.TensorHandle(from_bits(bits.view(np.uint16)), tl.bfloat16)
        return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        """Return the larger numbers. A GPU returns the other number for a NaN, unless NaN is to be propagated."""
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        """Return the smaller numbers, as in `create_maxnumf`."""
        return self.binary_op(lhs, rhs, np.fmin)

    def create_fabs(self, arg: Any) -> Any:
        """Return absolute values."""
        return self.unary_op(arg, np.abs)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """Convert numbers to or from eight bits, or with another rounding than to the nearest.

        Raises:
            NotImplementedError: for bfloat16.
        """
        if _is_bfloat16(src.dtype) or _is_bfloat16(dst_type):
            raise NotImplementedError("bfloat16 is rounded to nearest, and not converted from or to eight bits")
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_atomic_rmw(self, operation: Any, ptr: Any, *rest: Any) -> Any:
        """Combine numbers with those in memory.

        Raises:
            NotImplementedError: for bfloat16.
        """
        if ptr.get_element_ty().name == NAME:
            raise NotImplementedError("no atomic operation of the interpreter takes bfloat16")
        return super().create_atomic_rmw(operation, ptr, *rest)


def round_handle(handle: Any) -> None:
    """Round the numbers of a new block of bfloat16, and check the size of all others."""
    _check_handle(handle)
    if handle.dtype.name == NAME and handle.data.dtype == np.float32:  # a comparison has truth values
        handle.data = round_to_bfloat16(handle.data)


def check_reduced(reduction: Any, blocks: Any) -> None:
    """Check the blocks that a reduction or a scan takes.

    Raises:
        NotImplementedError: for bfloat16, whose partial results a GPU would round one by one.
    """
    _check_reduced(reduction, blocks)
    if any(_is_bfloat16(block.type) for block in blocks):
        raise NotImplementedError("partial results in bfloat16 are inexact: convert to float32 before a reduction")


def get_numpy_dtype(type: Any) -> np.dtype[Any]:
    """Return NumPy's type of a block's numbers."""
    return np.dtype(np.float32) if _is_bfloat16(type) else _get_numpy_dtype(type)


def fits_size(data: NDArray[Any], type: Any) -> bool:
    """Return True if an element of the array is no larger than one of the type, or float32 for bfloat16."""
    return data.itemsize <= 4 if _is_bfloat16(type) else _validate_size(data, type)

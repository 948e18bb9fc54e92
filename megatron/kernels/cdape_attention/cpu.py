"""CDAPE attention on a CPU, in float32: the C code in `native/`, with gradients.

Shape letters are those of `op.py`. The code processes row blocks in tiles of columns and never stores a whole score
map, so memory is linear in R and C. The inputs, the output and two numbers per row are saved for the backward pass.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron.kernels.cdape_attention.args import CdapeArgs, check_shapes
from megatron.kernels.cdape_attention.bias_term import compute_bias_contributions
from megatron.kernels.jit_build import CompileError, build_library

NATIVE = Path(__file__).parent / "native"
MAX_KERNEL_SIZE = 15
"""Maximum kernel size. Beyond it, tiles of native/problem.h would keep few of their results, and from 25 on none."""
NO_WINDOW_INT64 = 1 << 40
"""Window of calls without one, as a C long."""
MAX_THREADS = 64
"""Maximum number of threads of a call; native/threads.h has room for 256."""
MAX_SPLITS = 16
"""Maximum number of parts of a sequence with separate gradients of keys and values."""
MAX_BLOCK_ROWS, MIN_BLOCK_ROWS = 64, 8
"""Maximum and minimum number of query rows of a unit of work."""


class _Problem(ctypes.Structure):
    """Struct `Problem` of native/problem.h."""

    _SIZES = "batch heads rows columns dim width kernel_size offset window"
    _DERIVED_SIZES = "num_threads padded_dim padded_width block_rows margin"
    _POINTERS = "next_block q k v kt vt bias_contributions edge bias w1 w2 w1t w2t document_starts out row_max row_sum"
    _BACKWARD_POINTERS = "dout delta dq dk dv dbias_contributions dedge dbias dw1 dw2"
    _fields_ = (
        *((name, ctypes.c_long) for name in (_SIZES + " " + _DERIVED_SIZES).split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        ("splits", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in _BACKWARD_POINTERS.split()),
    )


@cache
def describe_unavailable() -> str | None:
    """Return the reason why the C code cannot run on this machine, or None."""
    try:
        _load_library()
    except CompileError as error:
        return str(error)
    return None


@cache
def _load_library() -> ctypes.CDLL:
    return set_signatures(build_library(NATIVE))


def set_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the types of the library's functions, and compare its struct with `_Problem`.

    Raises:
        RuntimeError: if a field has another offset in C than here, so that a call would access the wrong memory.
    """
    library.cdape_lanes.restype = library.cdape_margin.restype = ctypes.c_long
    library.cdape_margin.argtypes = [ctypes.c_long]
    library.cdape_problem_size.restype = library.cdape_field_offset.restype = ctypes.c_long
    library.cdape_field_offset.argtypes = [ctypes.c_char_p]
    for name, *_ in _Problem._fields_:
        offset, expected = library.cdape_field_offset(name.encode()), getattr(_Problem, name).offset
        if offset != expected:
            actual = "absent from" if offset < 0 else f"at byte {offset} in"
            raise RuntimeError(f"Problem.{name} is at byte {expected} in cpu.py, but {actual} native/problem.h")
    if (size := library.cdape_problem_size()) != ctypes.sizeof(_Problem):
        raise RuntimeError(f"Problem has {ctypes.sizeof(_Problem)} bytes in cpu.py, {size} in native/problem.h")
    return library


def cdape_attention(args: CdapeArgs) -> Tensor:
    """Compute softmax(S + bias + Conv2(LeakyReLU(Conv1([S, bias])))) · v in memory linear in R and C, on a CPU.

    Result and errors are those of `op.cdape_attention`, but the type is always float32, head dimension and width are
    arbitrary, and k is at most MAX_KERNEL_SIZE.
    """
    check_shapes(args)
    q, k, v, bias, w1, b1, w2, b2, offset, window, document_starts, residual_bias, sinks, scale, *_ = args
    if args.is_linear or args.head_map is not None:
        raise ValueError("is_linear and head_map need the kernels for GPUs")
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "w1": w1, "b1": b1, "w2": w2, "b2": b2}
    for name, x in inputs.items():
        if x is not None and (x.dtype != torch.float32 or x.device.type != "cpu"):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be float32 on a CPU")
    if w1.shape[-1] > MAX_KERNEL_SIZE:
        raise ValueError(f"w1 is {list(w1.shape)}; k must be at most {MAX_KERNEL_SIZE}")
    heads, rows = q.shape[1:3]
    # Rows of packed documents can have any distance from their left edge.
    of_rows = (rows, offset) if document_starts is None else (offset + rows, 0)
    bias_contributions = compute_bias_contributions(bias, w1, b1, *of_rows, window, q.dtype)
    bias_table = bias[:, : offset + rows] if bias is not None and residual_bias else q.new_empty(heads, 0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = k[:, :, : offset + rows], v[:, :, : offset + rows]
    inputs_of_call = (q * scale, k, v, bias_contributions, bias_table, w1[:, :heads, 0], w2[:, :, 0])
    if sinks is not None:
        sinks = sinks - b2  # the C code omits b2: raising the logits of all keys equals lowering the sink
    return _Attention.apply(b2, sinks, offset, window, document_starts, *inputs_of_call)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        b2: Tensor,
        sinks: Tensor | None,
        offset: int,
        window: int | None,
        document_starts: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        """Run the C code; `inputs` are those of `_Call`."""
        del b2  # softmax cancels a constant of all of a head's logits, and sinks already include it
        ctx.sizes = {"offset": offset, "window": window, "document_starts": document_starts}
        call = _Call(*inputs, **ctx.sizes)
        out, row_max, row_sum = call.forward()
        if sinks is not None:
            out, row_max, row_sum = _add_sinks(sinks, out, row_max, row_sum)
        ctx.save_for_backward(*inputs, sinks, out, row_max, row_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks, out, row_max, row_sum = ctx.saved_tensors
        gradients = _Call(*inputs, **ctx.sizes).backward(dout, out, row_max, row_sum)
        dsinks = None
        if sinks is not None:  # as for any key, P ∘ (0 − Σ P ∘ dP), since its value is zero
            probabilities = torch.exp(sinks[:, None] - row_max) / row_sum
            dsinks = -(probabilities * (dout * out).sum(-1)).sum((0, 2))
        return out.new_zeros(out.shape[1]), dsinks, None, None, None, *gradients


def _add_sinks(sinks: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, maximum and sum of rows with an additional key without a value: the sink of their head.

    The backward pass of the C code needs only these.
    """
    maximum = torch.maximum(row_max, sinks[:, None])
    of_keys = row_sum * torch.exp(row_max - maximum)
    total = of_keys + torch.exp(sinks[:, None] - maximum)
    return out * (of_keys / total)[..., None], maximum, total


class _Call:
    """One call of the C code: arguments converted to its layout, and results converted back."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias_contributions: Tensor,
        bias_table: Tensor,
        w1: Tensor,
        w2: Tensor,
        *,
        offset: int,
        window: int | None,
        document_starts: Tensor | None,
    ) -> None:
        self.library = _load_library()
        self.batch, self.heads, self.rows, self.dim = q.shape
        self.width, _, self.kernel_size = w1.shape
        self.padding, self.count = self.kernel_size // 2, offset + self.rows
        self.lanes = self.library.cdape_lanes()
        self.margin = self.library.cdape_margin(self.kernel_size)
        self.padded_dim, self.padded_width = (-(-n // self.lanes) * self.lanes for n in (self.dim, self.width))
        self.num_threads = min(torch.get_num_threads(), MAX_THREADS)
        # Units are small enough that each thread gets several.
        self.block_rows = MAX_BLOCK_ROWS
        while self.block_rows > MIN_BLOCK_ROWS and self.batch * -(-self.rows // self.block_rows) < 4 * self.num_threads:
            self.block_rows //= 2
        self.has_bias = bias_table.shape[1] > 0
        distances = bias_contributions[: self.padding + self.count]
        edge = bias_contributions[self.padding + self.count :].view(
            self.rows if document_starts is None else self.count, self.padding, self.width
        )
        self.inputs = {
            "q": self._pad_dim(q),
            "k": self._pad_dim(k),
            "v": self._pad_dim(v),
            "kt": self._add_margins(k.transpose(-1, -2), self.margin),
            "bias_contributions": self._add_margins(distances.flip(0).t(), self.margin + self.block_rows),
            "edge": edge.transpose(1, 2).contiguous(),
            "w1": w1.permute(1, 2, 0).contiguous(),
            "w2": w2.permute(1, 2, 0).contiguous(),
        }
        if document_starts is not None:
            self.inputs["document_starts"] = document_starts.contiguous()
        if self.has_bias:
            self.inputs["bias"] = self._add_margins(bias_table.flip(1), self.margin + self.block_rows)
        self.sizes = {
            "batch": self.batch,
            "heads": self.heads,
            "rows": self.rows,
            "columns": k.shape[2],
            "dim": self.dim,
            "width": self.width,
            "kernel_size": self.kernel_size,
            "offset": offset,
            "window": NO_WINDOW_INT64 if window is None else min(window, NO_WINDOW_INT64),
            "num_threads": self.num_threads,
            "padded_dim": self.padded_dim,
            "padded_width": self.padded_width,
            "block_rows": self.block_rows,
            "margin": self.margin,
        }

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [B, H, R, d], and the softmax's maximum and sum, both [B, H, R]."""
        q = self.inputs["q"]
        outputs = {
            "next_block": torch.zeros(1, dtype=torch.int64),
            "out": torch.empty_like(q),
            "row_max": q.new_empty(q.shape[:3]),
            "row_sum": q.new_empty(q.shape[:3]),
        }
        self._run(self.library.cdape_forward, outputs)
        return self._unpad_dim(outputs["out"]), outputs["row_max"], outputs["row_sum"]

    def backward(self, dout: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, bias_contributions, bias_table, w1 and w2."""
        inputs, num_threads, width, kernel_size = self.inputs, self.num_threads, self.width, self.kernel_size
        dout = dout.contiguous()  # contiguous, so that the order of sums does not depend on the memory layout
        splits = self._choose_splits()
        shape = splits, self.batch, self.heads, inputs["k"].shape[2], self.padded_dim
        zeros = out.new_zeros
        outputs = {
            "vt": self._add_margins(self._unpad_dim(inputs["v"]).transpose(-1, -2), self.margin),
            "w1t": inputs["w1"].flip(1).permute(2, 1, 0).contiguous(),
            "w2t": inputs["w2"].flip(1).permute(2, 1, 0).contiguous(),
            "dout": self._pad_dim(dout),
            "delta": (dout * out).sum(-1),
            "row_max": row_max,
            "row_sum": row_sum,
            "dq": torch.empty_like(inputs["q"]),
            "dk": zeros(shape),
            "dv": zeros(shape),
            "dbias_contributions": zeros(num_threads, *inputs["bias_contributions"].shape),
            "dedge": zeros(num_threads, *inputs["edge"].shape),
            "dw1": zeros(num_threads, self.heads, kernel_size, self.padded_width),
            "dw2": zeros(num_threads, self.heads, kernel_size, self.padded_width),
        }
        if self.has_bias:
            outputs["dbias"] = zeros(num_threads, *inputs["bias"].shape)
        self._run(self.library.cdape_backward, outputs, splits=splits)
        margin = self.margin + self.block_rows
        by_distance = outputs["dbias_contributions"].sum(0)[:, margin:-margin].t().flip(0)
        edge = outputs["dedge"].sum(0).transpose(1, 2).flatten(0, 1)
        dbias = outputs["dbias"].sum(0)[:, margin:-margin].flip(1) if self.has_bias else zeros(self.heads, 0)
        return (
            self._unpad_dim(outputs["dq"]),
            self._unpad_dim(outputs["dk"].sum(0)),
            self._unpad_dim(outputs["dv"].sum(0)),
            torch.cat([by_distance, edge]),
            dbias,
            outputs["dw1"].sum(0)[..., :width].flip(1).permute(2, 0, 1),
            outputs["dw2"].sum(0)[..., :width].transpose(1, 2),
        )

    def _choose_splits(self) -> int:
        """Return the smallest number of parts per sequence that balances the threads, or nearly so."""
        for splits in range(1, MAX_SPLITS):
            parts = self.batch * splits
            if parts % self.num_threads == 0 or parts >= 8 * self.num_threads:
                return splits
        return MAX_SPLITS

    def _run(self, function: Callable[[Any], Any], outputs: dict[str, Tensor], **extra_sizes: int) -> None:
        problem = _Problem(**self.sizes, **extra_sizes)
        for name, tensor in (self.inputs | outputs).items():
            assert tensor.is_contiguous()
            setattr(problem, name, tensor.data_ptr())
        function(ctypes.byref(problem))

    def _pad_dim(self, x: Tensor) -> Tensor:
        """Pad the head dimension with zeros to a multiple of the vector length."""
        filled = x if self.padded_dim == self.dim else F.pad(x, (0, self.padded_dim - self.dim))
        return filled.contiguous()  # padding keeps the order of axes in memory

    def _unpad_dim(self, x: Tensor) -> Tensor:
        return x[..., : self.dim]

    def _add_margins(self, x: Tensor, margin: int) -> Tensor:
        lines = x.new_zeros(*x.shape[:-1], x.shape[-1] + 2 * margin)
        lines[..., margin:-margin] = x
        return lines

"""Problem and peers of the kernel benchmark: one attention problem and all implementations that compute it.

B batch, H heads, T sequence, d head dimension, W processor width, k kernel size. A peer takes q, k, v [B, H, T, d] and
returns the attention output in the same shape. All peers of a problem share one encoding and one processor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megatron.attention.backends.backend import MAX_KEYS_SAVED, AttentionBackend, AttentionFormula
from megatron.attention.backends.fused_processor import NativeBackend
from megatron.attention.backends.pytorch import ChunkedBackend, EagerBackend
from megatron.attention.backends.registry import RowBlockBackend
from megatron.attention.backends.triton import TritonBackend
from megatron.attention.check.float64_reference import attend_as_fused
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import build_distances, compute_attention_in_blocks
from megatron.kernels.runtime import is_interpreted
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.numerics import promote_to_float32
from megatron.position.processor import Processor
from megatron.position.registry import build_encoding, build_processor
from megatron.position.token_range import TokenRange
from tools.bench.mixer_switch import use_mixer
from tools.bench.plain_gpt import AppendixCdape

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
OPS = ("biased_attention", "cdape")
CHUNK_ROWS = 64
"""Query rows per block of the chunked backend: the fastest of 16, 32, 64 and 128 at T = 512 and 2048 on two cores."""
BIASLESS_PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "flash cudnn": SDPBackend.CUDNN_ATTENTION}
"""Peers that compute plain attention without bias and processor, as a lower bound; they have no error. Each uses one
named kernel, FlashAttention-2 or cuDNN, because PyTorch's automatic choice depends on version and shape."""
FROZEN_PEERS = ("flex frozen",)
"""Peers that compute no gradient for the parameters. Their error covers the output, dq, dk and dv."""
compile_whole = partial(torch.compile, fullgraph=True, dynamic=False)
"""torch.compile with fullgraph=True. Without it, a peer would silently run uncompiled after Dynamo's recompilation
limit."""


@dataclass(frozen=True)
class AttentionProblem:
    """Attention with the bias of kerple_log and, for `cdape`, the processor applied to it."""

    op: str
    batch: int
    heads: int
    dim: int
    length: int
    width: int = 32
    kernel_size: int = 3
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    rounding: torch.dtype | None = None
    """Data type to which the inputs are rounded before conversion to the compute type."""

    @cached_property
    def methods(self) -> tuple[Encoding, Processor | None]:
        """Encoding with float32 parameters, and processor in the compute type."""
        shape = AttentionDims(self.heads, self.dim, self.heads * self.dim, self.length, self.length)
        torch.manual_seed(self.seed)
        encoding = build_encoding("kerple_log", shape).to(self.device)
        if self.op != "cdape":
            return encoding, None
        options = {"width": self.width, "kernel_size": self.kernel_size}
        processor = build_processor("cdape", shape, options, has_bias=True)
        return encoding, processor.to(self.device, self.dtype)

    @cached_property
    def drawn(self) -> tuple[Tensor, ...]:
        """q, k, v and dL/d(output), [B, H, T, d], generated once on the CPU.

        Generating them takes longer than a pass on a GPU.
        """
        generator = torch.Generator().manual_seed(self.seed + 1)
        size = (self.batch, self.heads, self.length, self.dim)
        drawn = [torch.randn(size, generator=generator) for _ in range(4)]
        if self.op == "cdape" and self.kernel_size > 1:
            drawn[3][:, :, -(self.kernel_size // 2) :] = 0
        return tuple(x.to(self.device, self.rounding or self.dtype).to(self.dtype) for x in drawn)

    def inputs(self) -> list[Tensor]:
        """Return q, k, v as new leaf tensors that require gradients, with the same values every time."""
        return [x.detach().requires_grad_() for x in self.drawn[:3]]

    def output_gradient(self) -> Tensor:
        """Return dL/d(output). It is zero in the last k//2 rows, where the published module depends on T."""
        return self.drawn[3]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the encoding and the processor."""
        encoding, processor = self.methods
        return [*encoding.parameters(), *(processor.parameters() if processor is not None else ())]

    def in_float64(self) -> "AttentionProblem":
        """Return the same problem in float64, with inputs rounded to this problem's type."""
        exact = replace(self, dtype=torch.float64, rounding=self.dtype)
        encoding, processor = self.methods
        exact.methods[0].load_state_dict(encoding.state_dict())
        exact.methods[0].double()
        if processor is not None and exact.methods[1] is not None:
            exact.methods[1].load_state_dict(processor.state_dict())
        return exact

    def bias_matrix(self) -> Tensor:
        """Return the bias as a matrix [H, T, T] in the straightforward way: the formula for every element.

        Indexing a table would be shorter. But its gradient would add all T²/2 elements above the diagonal, and every
        diagonal below it, at one address each. The peer would then be slow because of its input.
        """
        i = build_distances(self.length, self.device)
        n = (i[:, None] - i[None, :]).clamp(min=0)
        return _compute_bias(self.methods[0], n.flatten()).unflatten(1, n.shape)

    def future(self) -> Tensor:
        """Return a boolean mask [T, T], True where the key is in the future."""
        return torch.ones(self.length, self.length, dtype=torch.bool, device=self.device).triu(1)


def build_peers(problem: AttentionProblem) -> dict[str, Attention]:
    """Return every implementation for the problem's device; those in BIASLESS_PEERS omit bias and processor."""
    found: dict[str, Attention] = {
        "eager": _wrap_backend(problem, EagerBackend()),
        "chunked": _wrap_backend(problem, ChunkedBackend(CHUNK_ROWS)),
        **_build_biasless_peers(problem),
    }
    ours = TritonBackend(ChunkedBackend(CHUNK_ROWS))
    if problem.length <= MAX_KEYS_SAVED:  # longer problems are chunked
        found["kept"] = _wrap_backend(problem, RowBlockBackend(CHUNK_ROWS))
    native = NativeBackend(ChunkedBackend(CHUNK_ROWS), is_requested=True)
    on_host = problem.device == "cpu" and problem.dtype == torch.float32
    if on_host and native.describe_unsupported(AttentionFormula(*problem.methods)) is None:
        found["native"] = _wrap_backend(problem, native)
    here = problem.device != "cpu" or is_interpreted()
    if (
        here
        and problem.dtype != torch.float64
        and ours.describe_unsupported(AttentionFormula(*problem.methods)) is None
    ):
        found["triton"] = _wrap_backend(problem, ours)
    if problem.op == "cdape":
        if problem.device != "cpu":
            found["triton alone"] = _wrap_without_mixer(problem, ours)
        found["appendix"] = _build_appendix(problem)
    else:
        found["sdpa mask"] = _build_masked_sdpa(problem)
    return found if problem.device == "cpu" else {**found, **build_compiled_peers(problem)}


def build_exact_attention(problem: AttentionProblem) -> Attention:
    """Return the formula in row blocks, with the gradient of fused kernels: the reference when run in float64."""
    encoding, processor = problem.methods
    span = TokenRange(0, problem.length)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = AttentionInputs(q, k, v, span, span, encoding, processor)
        return compute_attention_in_blocks(inputs, CHUNK_ROWS, _attend_with_recompute)

    return attention


def _attend_with_recompute(inputs: AttentionInputs) -> Tensor:
    """Recompute score matrices in the backward pass, so that memory is linear in the length."""
    return checkpoint(attend_as_fused, inputs, use_reentrant=False, preserve_rng_state=False)


def build_compiled_peers(
    problem: AttentionProblem, compiler: Callable[..., Attention] = compile_whole
) -> dict[str, Attention]:
    """Return torch.compile of the straightforward implementations, and FlexAttention.

    They compile on the first call.
    """
    if problem.op == "cdape":
        return {"appendix compiled": compiler(_build_appendix(problem))}
    return {
        "by hand compiled": compiler(_build_handwritten(problem)),
        "flex learned": _build_flex(problem, compiler, learned=True),
        "flex frozen": _build_flex(problem, compiler, learned=False),
    }


def _wrap_backend(problem: AttentionProblem, backend: AttentionBackend) -> Attention:
    encoding, processor = problem.methods
    span = TokenRange(0, problem.length)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend(AttentionInputs(q, k, v, span, span, encoding, processor))

    return attention


def _wrap_without_mixer(problem: AttentionProblem, backend: TritonBackend) -> Attention:
    """Return the Triton backend with the mixer's CUDA kernels disabled."""
    attention = _wrap_backend(problem, backend)

    def without_mixer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with use_mixer(False):
            return attention(q, k, v)

    return without_mixer


def _build_biasless_peers(problem: AttentionProblem) -> dict[str, Attention]:
    """Return plain attention: both kernels for half-precision types on GPUs, one flash kernel on CPUs."""
    if problem.device == "cpu":
        return {"flash": partial(_run_plain_attention, SDPBackend.FLASH_ATTENTION)}
    half = problem.dtype in (torch.bfloat16, torch.float16)
    return {name: partial(_run_plain_attention, kernel) for name, kernel in BIASLESS_PEERS.items()} if half else {}


def _run_plain_attention(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kernel):  # raises if the kernel is unavailable, instead of falling back
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _compute_bias(encoding: Encoding, n: Tensor) -> Tensor:
    bias = encoding.table(n).bias
    assert bias is not None
    return bias


def _build_handwritten(problem: AttentionProblem) -> Attention:
    """Return attention with full score matrices, which the compiler may fuse."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        logits = promote_to_float32(scores) + problem.bias_matrix()
        return torch.matmul(torch.softmax(logits.masked_fill(problem.future(), float("-inf")), dim=-1).to(v.dtype), v)

    return attention


def _build_masked_sdpa(problem: AttentionProblem) -> Attention:
    """Return PyTorch's attention with a dense learned mask."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = problem.bias_matrix().masked_fill(problem.future(), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype)[None])

    return attention


def _build_appendix(problem: AttentionProblem) -> Attention:
    """Return DAPE V2's module as printed in its appendix N, with the same weights."""
    processor = problem.methods[1]
    assert processor is not None
    module = AppendixCdape(problem.heads, problem.width, problem.kernel_size).to(problem.device, problem.dtype)
    for ours, theirs in ((processor.hidden, module.mlp[0]), (processor.output, module.mlp[2])):
        theirs.weight, theirs.bias = ours.weight, ours.bias

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        bias = problem.bias_matrix().to(q.dtype)[None]
        logits = promote_to_float32(module(scores, bias)).masked_fill(problem.future(), float("-inf"))
        return torch.matmul(torch.softmax(logits, dim=-1).to(v.dtype), v)

    return attention


def _build_flex(problem: AttentionProblem, compiler: Callable[..., Attention], *, learned: bool) -> Attention:
    """Return FlexAttention with a captured table in its score function; if not learned, the table gets no gradient.

    The gradient of a captured tensor is accumulated element by element. A table spreads it over T addresses per head;
    the formula would send all of it to two parameters per head. The table is therefore the faster variant.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    length = problem.length
    compiled = compiler(flex_attention)

    @cache
    def mask() -> BlockMask:  # temporarily allocates [T, T], so only on demand
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=problem.device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = _compute_bias(problem.methods[0], build_distances(length, problem.device))
        table = bias if learned else bias.detach()
        return compiled(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j], block_mask=mask())

    return attention

"""float64 reference of the self-check: compared rows, documents, modules, and the gradient formula of fused kernels.

`attend_as_fused` is the attention formula with the gradient of fused kernels, to derive the size of their rounding
errors. The gradient of a softmax subtracts a row's mean, Σ_j P∘dP. Fused kernels do not have P at that point and use
Σ_d dO∘O, which is equal except for the rounding of the output to its type (FlashAttention, Dao et al. 2022, appendix
B.4). The score gradients of a row then no longer sum to zero. Parameters whose gradient nearly cancels (a constant of a
bias, the rate of its decay) get errors many times those of the formula's own rounding.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron.attention.documents import split_documents
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, compute_logits, sum_gates
from megatron.attention.segments import (
    SampleFunction,
    Segment,
    select_chunks,
    skip_sampling,
)
from megatron.attention.softmax import SoftmaxSink, append_sink
from megatron.position.bounded_parameter import BoundedParameter
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.token_range import TokenRange
from megatron.utils.rounding import suspend_rounding

SEED = 20
PARAMETER_PREFIXES = ("encoding.", "processor.", "sink.")
"""Prefixes of parameter names in results."""
ROWS_PER_RANGE = 64
"""Number of consecutive rows that are compared, if not all are: first, last and middle rows of a segment."""


@dataclass(frozen=True)
class RowRange:
    """Compared rows start … stop − 1 of a segment."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True)
class CheckedDocuments:
    """Documents that do not attend to each other."""

    starts: Tensor
    """int64 [B, T] on the CPU: the column at which the document of each token of the whole rows begins."""
    masked: bool
    """True if attention is computed for whole rows (`backend.can_mask_documents`), not for each document."""
    sample: SampleFunction = skip_sampling
    """Sampling function of randomized positions."""

    def select_last(self, num_rows: int) -> "CheckedDocuments":
        """Return the documents of the last sequences."""
        return replace(self, starts=self.starts[-num_rows:])

    def split_rows(self, start: int, length: int) -> tuple[Segment, ...]:
        """Return the segments of rows start … start + length − 1 of all sequences, one per document."""
        segments = split_documents(self.starts, sample=self.sample)
        return select_chunks(segments, [(start, length)], join_adjacent=False)

    def find_borders(self, tokens: TokenRange) -> list[int]:
        """Return the rows of a segment, from 0, at which a new document of the last sequence begins."""
        row = self.starts[-1, tokens.start : tokens.stop]
        return ((row[1:] != row[:-1]).nonzero()[:, 0] + 1).tolist()


def count_documents(starts: Tensor) -> list[int]:
    """Return the number of documents of each sequence."""
    return (starts == torch.arange(starts.shape[1])).sum(1).tolist()


def count_pairs(tokens: TokenRange, window: int | None) -> int:
    if window is None or window >= tokens.stop:
        return tokens.length * (tokens.start + tokens.stop + 1) // 2
    return tokens.length * window


def choose_row_ranges(
    segments: tuple[TokenRange, ...], rows_per_segment: int, borders: Sequence[Sequence[int]]
) -> Iterator[RowRange]:
    """Choose the compared rows of each segment: all rows if they are few, else first, middle and last ones.

    Middle rows begin in the middle of a tile.

    Args:
        borders: rows of each segment at which documents begin; the middle rows are then on both sides of one of them.
    """
    for index, tokens in enumerate(segments):
        if tokens.length <= rows_per_segment:
            yield RowRange(index, 0, tokens.length)
            continue
        size = max(min(rows_per_segment // 3, ROWS_PER_RANGE), 1)
        border = min(borders[index], key=lambda row: abs(row - tokens.length // 2), default=tokens.length // 2)
        middle = max(border - size // 3, size)
        for start in sorted({0, min(middle, tokens.length - 2 * size), tokens.length - size}):
            yield RowRange(index, start, start + size)


def sum_gates_exactly(gates: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Compute `reference.sum_gates`, which is exact in every compute type, without perturbations."""
    with suspend_rounding():
        return sum_gates(gates, num_rows)


def attend_as_fused(inputs: AttentionInputs) -> Tensor:
    """Compute `reference.compute_attention` without dropout, with the gradient of fused kernels: [B, h, R, d]."""
    processor = inputs.processor
    changes_weights = processor is not None and (
        processor.overrides("process_weights") or processor.overrides("process_output")
    )
    if inputs.uses_stick_breaking or changes_weights:  # no kernel fuses these with the gradient below
        return compute_attention(replace(inputs, dropout=0.0))
    logits, v, sinks = compute_logits(inputs), inputs.v, inputs.head_sinks
    if sinks is not None:  # a key without a value
        logits, v = append_sink(logits, sinks), torch.nn.functional.pad(v, (0, 0, 0, 1))
    output: Tensor = _FusedSoftmax.apply(logits, v)
    return output


class _FusedSoftmax(torch.autograd.Function):
    """softmax(logits)·v with the gradient of fused kernels: with Σ_d dO∘O instead of Σ_j P∘dP.

    The two are equal except for the rounding of the output.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, v: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, dim=-1)
        output = torch.matmul(probabilities, v)
        ctx.save_for_backward(probabilities, v, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, v, output = ctx.saved_tensors
        mean = (gradient * output).sum(-1, keepdim=True)
        of_probabilities = torch.matmul(gradient, v.transpose(-1, -2))
        return probabilities * (of_probabilities - mean), torch.matmul(probabilities.transpose(-1, -2), gradient)


ModuleT = TypeVar("ModuleT", bound=nn.Module)


PERTURBATION = 0.1
"""Relative perturbation of the parameters. Some start values, such as zero, would hide a wrong gradient."""


def copy_perturbed(module: ModuleT, dtype: torch.dtype, device: torch.device) -> ModuleT:
    """Copy a module with perturbed parameters of the given type. Its tables keep their type, as in training."""
    copied = copy.deepcopy(module).to(device)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in copied.parameters():
            drawn = 2 * torch.rand(parameter.shape, generator=generator) - 1
            size = parameter.cpu().float().abs()
            change = PERTURBATION * drawn * torch.where(size > 0, size, 1.0)
            parameter.data = (parameter.cpu().float() + change).to(device, dtype)
        for part in copied.modules():
            if isinstance(part, BoundedParameter):
                part.clamp_to_bounds()
    return copied.requires_grad_(True)


def list_parameters(
    encoding: Encoding, processor: Processor | None, sink: SoftmaxSink | None
) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in zip(PARAMETER_PREFIXES, (encoding, processor, sink), strict=True):
        if module is not None:
            yield from ((f"{prefix}{name}", parameter) for name, parameter in module.named_parameters())

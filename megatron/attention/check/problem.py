"""One layer's attention at a run's shapes with random inputs, and the part of it that is also computed in float64.

A backend computes all rows of a rank, as in the run. The gradient of the output is zero except for a few rows of one
sequence, and for a few heads if nothing mixes heads. The exact outputs of these rows, and the exact gradients of all
queries, keys, values and parameters, only need these rows against all keys, which is cheap enough in float64. All other
gradients must be exactly zero.

B batch, h heads of a rank, R its rows of a segment, C columns, d head dimension.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron.attention.backends.backend import (
    AttentionBackend,
    AttentionFormula,
    compute_document_masks,
    get_gate_sum_function,
)
from megatron.attention.check.float64_reference import (
    PARAMETER_PREFIXES,
    ROWS_PER_RANGE,
    SEED,
    CheckedDocuments,
    RowRange,
    attend_as_fused,
    choose_row_ranges,
    copy_perturbed,
    count_documents,
    count_pairs,
    list_parameters,
    sum_gates_exactly,
)
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import precompute_terms
from megatron.attention.segments import ALL_SEQUENCES, Segment, attend_segments
from megatron.attention.softmax import SoftmaxSink, build_softmax_sink
from megatron.position.base import ConvolutionParameters
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS, TokenRange

MAX_PAIRS = 1 << 33
"""Maximum number of scores that a backend computes: about a second of row blocks with a processor on an A100."""
MAX_EXACT_PAIRS = 1 << 24
"""Maximum number of scores in float64, 128 MB: all heads of 512 rows, or the last rows of a long sequence."""
GRADIENT_SIZE = 1 / 16
"""Size of the output's gradient. Its sums over all rows fit in float16, as with a loss scale in training."""


@dataclass(frozen=True)
class CheckProblem:
    """Attention of one layer on a rank. Build it with `build_problem`."""

    formula: AttentionFormula
    """Formula whose modules have parameters in the compute type, on the device."""
    segments: tuple[TokenRange, ...]
    """Rows of the rank; each sees the keys from index 0 to its own."""
    batch: int
    window: int | None
    heads: slice
    """Heads of the rank."""
    dtype: torch.dtype
    device: torch.device
    sink: SoftmaxSink | None = None
    """Sink of this softmax type, with parameters like those of the encoding."""
    documents: CheckedDocuments | None = None
    """Documents, which limit each row to the keys of its own document; None if each sequence is one document."""
    seed: int = SEED
    """Seed of queries, keys, values and the gradient of the output."""

    @property
    def encoding(self) -> Encoding:
        return self.formula.encoding

    @property
    def processor(self) -> Processor | None:
        return self.formula.processor

    @property
    def num_heads(self) -> int:
        """Number of heads of the rank, h."""
        return len(range(self.encoding.dims.num_heads)[self.heads])

    @property
    def num_columns(self) -> int:
        """Number of keys, C."""
        return max(tokens.stop for tokens in self.segments)

    @property
    def pairs_per_head(self) -> int:
        """Number of visible scores of one head and sequence."""
        return sum(count_pairs(tokens, self.window) for tokens in self.segments)

    @cached_property
    def row_ranges(self) -> tuple[RowRange, ...]:
        """Compared rows."""
        borders = [[] if self.documents is None else self.documents.find_borders(tokens) for tokens in self.segments]
        return tuple(choose_row_ranges(self.segments, self._rows_per_segment, borders))

    @property
    def _rows_per_segment(self) -> int:
        heads = self.num_heads if self.processor is None else self.encoding.dims.num_heads
        affordable = MAX_EXACT_PAIRS // (heads * self.num_columns * len(self.segments))
        wanted = 3 * ROWS_PER_RANGE if self.processor is None else 3
        return max(affordable, wanted)

    @cached_property
    def head_ranges(self) -> tuple[slice, ...]:
        """Compared heads of the rank: all, or the first and the last if all are too many."""
        rows = sum(row_range.stop - row_range.start for row_range in self.row_ranges)
        if self.processor is not None or rows * self.num_columns * self.num_heads <= MAX_EXACT_PAIRS:
            return (slice(0, self.num_heads),)
        return tuple(slice(head, head + 1) for head in sorted({0, self.num_heads - 1}))

    def describe(self) -> dict[str, object]:
        """Describe the computed and compared problem for a record."""
        return {
            "batch": self.batch,
            "heads": self.num_heads,
            "rows": [[tokens.start, tokens.stop] for tokens in self.segments],
            "keys": self.num_columns,
            "compared_rows": [[row_range.start, row_range.stop] for row_range in self.row_ranges],
            "compared_heads": [[heads.start, heads.stop] for heads in self.head_ranges],
            **({} if self.documents is None else {"documents": count_documents(self.documents.starts)}),
        }

    @cached_property
    def _random_tensors(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor, tuple[Tensor, ...]]:
        """Queries of each segment, keys and values in the compute type, and the gradient of each segment's output."""
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(heads: int, length: int, head_dim: int) -> Tensor:
            # Use the memory layout of the model's layers, whose activations are [T, B, D].
            size = (length, self.batch, heads, head_dim)
            drawn = torch.randn(size, generator=generator, device=self.device, dtype=torch.float32)
            return drawn.to(self.dtype).permute(1, 2, 0, 3)

        score_heads = self.num_heads if self.processor is None else self.encoding.dims.num_heads
        rotated_dim, head_dim = self.encoding.qk_head_dim, self.encoding.dims.head_dim
        queries = tuple(draw(score_heads, tokens.length, rotated_dim) for tokens in self.segments)
        k, v = draw(score_heads, self.num_columns, rotated_dim), draw(self.num_heads, self.num_columns, head_dim)
        gradients = [torch.zeros_like(v[:, :, : tokens.length]) for tokens in self.segments]
        for row_range in self.row_ranges:
            for heads in self.head_ranges:
                rows = gradients[row_range.segment][-1:, heads, row_range.start : row_range.stop]
                rows.copy_(GRADIENT_SIZE * torch.randn(rows.shape, generator=generator, device=self.device))
        return queries, k, v, tuple(gradients)

    @cached_property
    def _layer_input(self) -> Tensor:
        """Input of gates: [B, C, D] in the compute type, normalized as in a layer."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        size = (self.num_columns, self.batch, self.encoding.dims.hidden_size)
        return torch.randn(size, generator=generator, device=self.device).to(self.dtype).transpose(0, 1)

    def _compute_gates(self, encoding: Encoding, heads: slice, sequences: slice = ALL_SEQUENCES) -> Tensor | None:
        """Compute the gates [B, h, C] of the heads whose scores are computed; None if the encoding has none."""
        if not type(encoding).overrides_hook("gate"):
            return None
        dtype = next((p.dtype for p in encoding.parameters()), self.dtype)
        return encoding.gate(self._layer_input[sequences].to(dtype), heads)

    @property
    def _score_heads(self) -> slice:
        """Heads whose scores are computed."""
        return self.heads if self.processor is None else ALL_HEADS

    def build_inputs(self, compute: Any, segment: int, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """Build the inputs of a backend from the queries of a segment and all keys and values."""
        query = self.segments[segment]
        document_starts = None
        if self.documents is not None:
            document_starts = self.documents.starts[:, query.start : query.stop].to(self.device, torch.int32)
        gates = self._compute_gates(self.encoding, self._score_heads)
        own_gates = None if gates is None else gates[..., : query.stop]
        row_bias, key_bias = get_gate_sum_function(compute, sum_gates_exactly)(own_gates, query.length)
        return AttentionInputs(
            q=q,
            row_bias=row_bias,
            key_bias=key_bias,
            k=k[:, :, : query.stop],
            v=v[:, :, : query.stop],
            query=query,
            key=TokenRange(0, query.stop, query.sampled),
            encoding=self.encoding,
            processor=self.processor,
            document_starts=document_starts,
            window=self.window,
            softcap=self.formula.softcap,
            heads=self.heads,
            **self._describe_softmax(self.sink, q),
        )

    def _describe_softmax(self, sink: SoftmaxSink | None, like: Tensor) -> dict[str, Any]:
        """Return the fields of the inputs that describe the softmax."""
        return {
            "sinks": None if sink is None else sink(like),
            "uses_stick_breaking": self.formula.uses_stick_breaking,
            "adds_remainder": self.formula.adds_remainder,
        }

    def list_inputs(self) -> list[AttentionInputs]:
        """List a backend's inputs for each segment, or for each of its documents."""
        queries, k, v, _ = self._random_tensors
        results: list[AttentionInputs] = []

        def keep(inputs: AttentionInputs) -> Tensor:
            results.append(inputs)
            return inputs.v[:, :, -inputs.query.length :]

        for segment, q in enumerate(queries):
            self._attend(keep, segment, q, k, v)
        return results

    def _attend(
        self, compute: Callable[[AttentionInputs], Tensor], segment: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Compute the output of a segment's rows in one call, or document by document, like a layer of a model."""
        if self.documents is None:
            return compute(self.build_inputs(compute, segment, q, k, v))
        tokens = self.segments[segment]
        if not self.documents.masked:
            gates = self._compute_gates(self.encoding, self._score_heads)
            return self._attend_by_document(compute, self.documents, tokens, q, k, v, gates)
        inputs = self.build_inputs(compute, segment, q, k, v)
        return compute(replace(inputs, document_mask=self._get_document_mask(compute, inputs)))

    def _get_document_mask(self, compute: Any, inputs: AttentionInputs) -> Any:
        """Return the mask that a backend prepares from the documents, computed once like in a model."""
        key = (compute, inputs.query.start)
        if key not in self._document_masks:
            assert self.documents is not None
            assert inputs.document_starts is not None
            segment = Segment(inputs.query, document_starts=inputs.document_starts)
            (segment,) = compute_document_masks(
                [segment], self.documents.starts, compute, self.encoding, self.window, inputs.q, dropout=False
            )
            self._document_masks[key] = segment.document_mask
        return self._document_masks[key]

    @cached_property
    def _document_masks(self) -> dict[tuple[Any, int], Any]:
        return {}

    def _attend_by_document(
        self,
        compute: Callable[[AttentionInputs], Tensor],
        documents: CheckedDocuments,
        rows: TokenRange,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        **changes: Any,
    ) -> Tensor:
        """Compute the output of some rows of all sequences, each document separately, with changed inputs."""

        def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, segment: Segment) -> Tensor:
            row_bias, key_bias = get_gate_sum_function(compute, sum_gates_exactly)(gates, segment.tokens.length)
            inputs = AttentionInputs(
                q=q,
                k=k,
                v=v,
                row_bias=row_bias,
                key_bias=key_bias,
                query=segment.tokens,
                key=segment.context,
                encoding=self.encoding,
                processor=self.processor,
                window=self.window,
                softcap=self.formula.softcap,
                heads=self.heads,
                **self._describe_softmax(self.sink, q),
            )
            return compute(replace(inputs, **changes))

        return attend_segments(q, k, v, documents.split_rows(rows.start, rows.length), attend, gates)

    def run(self, backend: AttentionBackend) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run a backend.

        Returns the outputs of the segments, and the gradients of queries, keys, values and parameters by name.
        """
        queries, k, v, gradients = self._random_tensors
        q_leaves = [q.detach().requires_grad_() for q in queries]
        k_leaf, v_leaf = k.detach().requires_grad_(), v.detach().requires_grad_()
        outputs = [self._attend(backend, i, q, k_leaf, v_leaf) for i, q in enumerate(q_leaves)]
        named = dict(list_parameters(self.encoding, self.processor, self.sink))
        leaves = [*q_leaves, k_leaf, v_leaf, *named.values()]
        results = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True)
        names = [*(f"dq{i}" for i in range(len(queries))), "dk", "dv", *named]
        return [output.detach() for output in outputs], dict(zip(names, results, strict=True))

    def select_results(self, outputs: list[Tensor], gradients: dict[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """Select the results that are also computed in float64, by name; True if all other gradients are zero."""
        selected: dict[str, list[Tensor]] = {"output": [], "dq": [], "dk": [], "dv": []}
        rest = [gradients[f"dq{i}"].clone() for i in range(len(self.segments))]
        rest += [gradients[name].clone() for name in ("dk", "dv")]
        for heads in self.head_ranges:
            score_heads = heads if self.processor is None else ALL_HEADS
            for row_range in self.row_ranges:
                rows = slice(row_range.start, row_range.stop)
                selected["output"].append(outputs[row_range.segment][-1:, heads, rows])
                selected["dq"].append(gradients[f"dq{row_range.segment}"][-1:, score_heads, rows])
                rest[row_range.segment][-1:, score_heads, rows] = 0
            selected["dk"].append(gradients["dk"][-1:, score_heads])
            selected["dv"].append(gradients["dv"][-1:, heads])
            rest[-2][-1:, score_heads], rest[-1][-1:, heads] = 0, 0
        parameters = {name: x for name, x in gradients.items() if name.startswith(PARAMETER_PREFIXES)}
        joined = {name: torch.cat([part.flatten() for part in parts]) for name, parts in selected.items()}
        return joined | parameters, not any(int(torch.count_nonzero(part)) for part in rest)

    def compute_exactly(self) -> dict[str, Tensor]:
        """Compute the same results in float64 with the reference, from the same inputs.

        Differentiable tensors are rebuilt at each call, so that the results can be computed under `RoundingMode`.
        """
        encoding, processor, sink = self._exact_modules
        queries, k, v, gradients = self._random_tensors
        outputs, upstream, q_leaves, k_leaves, v_leaves = [], [], [], [], []
        for heads in self.head_ranges:
            score_heads = heads if self.processor is None else ALL_HEADS
            first = self.heads.start or 0
            own = slice(first + heads.start, first + heads.stop)
            k_leaves.append(k[-1:, score_heads].double().requires_grad_())
            v_leaves.append(v[-1:, heads].double().requires_grad_())
            gates = self._compute_gates(encoding, own if self.processor is None else ALL_HEADS, slice(-1, None))
            for row_range in self.row_ranges:
                rows = slice(row_range.start, row_range.stop)
                q_leaves.append(queries[row_range.segment][-1:, score_heads, rows].double().requires_grad_())
                tokens = self.segments[row_range.segment]
                own_heads = own if self.processor is None else self.heads
                compared = replace(tokens, start=tokens.start + row_range.start, length=rows.stop - rows.start)
                upstream.append(gradients[row_range.segment][-1:, heads, rows].double())
                if self.documents is not None:  # each document separately, even if the backend combines several
                    output = self._attend_by_document(
                        lambda inputs: attend_as_fused(precompute_terms(inputs)),
                        self.documents.select_last(1),
                        compared,
                        *(q_leaves[-1], k_leaves[-1], v_leaves[-1], gates),
                        encoding=encoding,
                        processor=processor,
                        heads=own_heads,
                        **self._describe_softmax(sink, q_leaves[-1]),
                    )
                    outputs.append(output)
                    continue
                row_bias, key_bias = sum_gates_exactly(gates, self.num_columns)
                inputs = AttentionInputs(
                    q=q_leaves[-1],
                    row_bias=None if row_bias is None else row_bias[..., compared.start : compared.stop],
                    key_bias=key_bias,
                    k=k_leaves[-1],
                    v=v_leaves[-1],
                    query=compared,
                    key=TokenRange(0, self.num_columns, tokens.sampled),
                    encoding=encoding,
                    processor=processor,
                    window=self.window,
                    softcap=self.formula.softcap,
                    heads=own_heads,
                    **self._describe_softmax(sink, q_leaves[-1]),
                )
                # Drop columns that no row depends on.
                block = inputs.select_rows(0, compared.length)
                outputs.append(attend_as_fused(precompute_terms(block)))
        named = dict(list_parameters(encoding, processor, sink))
        leaves = [*q_leaves, *k_leaves, *v_leaves, *named.values()]
        found = list(torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True))
        parts = {"output": outputs, "dq": q_leaves, "dk": k_leaves, "dv": v_leaves}
        results = {}
        for name, leaves_of in parts.items():
            taken = leaves_of if name == "output" else [found.pop(0) for _ in leaves_of]
            results[name] = torch.cat([part.detach().flatten() for part in taken])
        return results | dict(zip(named, found, strict=True))

    @cached_property
    def _exact_modules(self) -> tuple[Encoding, Processor | None, SoftmaxSink | None]:
        encoding = copy.deepcopy(self.encoding).double()
        processor = None if self.processor is None else copy.deepcopy(self.processor).double()
        return encoding, processor, None if self.sink is None else copy.deepcopy(self.sink).double()

    @cached_property
    def logit_constants(self) -> dict[str, str]:
        """Names of parameters whose exact gradient is zero, mapped to the names of parameters that scale their errors.

        A processor's last constant shifts all logits of a row equally, so a softmax without a sink cancels it. Its
        gradient consists of rounding errors only, which are compared with the size of those of its last weight.
        """
        if self.processor is None or self.formula.softmax_type != "vanilla":
            return {}
        convolutions = self.processor.kernel_parameters()
        if not isinstance(convolutions, ConvolutionParameters):
            return {}
        names = {id(x): name for name, x in list_parameters(self.encoding, self.processor, None)}
        pair = names.get(id(convolutions.bias2)), names.get(id(convolutions.weight2))
        return {} if pair[0] is None or pair[1] is None else {pair[0]: pair[1]}


def build_problem(
    formula: AttentionFormula,
    segments: tuple[TokenRange, ...],
    *,
    batch: int,
    window: int | None,
    heads: slice,
    dtype: torch.dtype,
    device: torch.device,
    documents: CheckedDocuments | None = None,
) -> CheckProblem:
    """Build the attention problem of one layer on copies of its modules.

    If the full problem would take too long, it uses fewer sequences first, then only the last rows of each segment.

    Args:
        formula: formula of a layer; its modules are not changed.
        segments: the rank's rows of a sequence.
        batch: sequences per micro-batch.
        window: number of last keys that a row sees; None for all.
        heads: heads of the rank.
        dtype: compute type of the run, also of its parameters.
        device: device to compute on.
        documents: documents of the sequences, if separated; the last sequence is compared.
    """
    own_encoding = copy_perturbed(formula.encoding, dtype, device)
    own_processor = None if formula.processor is None else copy_perturbed(formula.processor, dtype, device)
    own = replace(formula, encoding=own_encoding, processor=own_processor)
    sink = build_softmax_sink(formula.softmax_type, formula.encoding.dims.num_heads)
    own_sink = None if sink is None else copy_perturbed(sink, dtype, device)
    problem = CheckProblem(own, segments, batch, window, heads, dtype, device, own_sink, documents)
    affordable = MAX_PAIRS // (problem.num_heads * problem.pairs_per_head)
    if affordable >= batch:
        return problem
    fewer = max(min(affordable, batch), 1)
    problem = replace(problem, batch=fewer, documents=None if documents is None else documents.select_last(fewer))
    if affordable >= 1:
        return problem
    rows = max(MAX_PAIRS // (problem.num_heads * problem.num_columns * len(segments)), 1)
    last = [min(rows, tokens.length) for tokens in segments]
    cut = tuple(replace(s, start=s.stop - n, length=n) for s, n in zip(segments, last, strict=True))
    return replace(problem, segments=cut)

"""Choice of the attention backend of a model, made once when the model is built.

A named backend is used as is. `auto` on a CPU selects a backend that needs no check (`attention/backends/registry.py`).
On a GPU each rank runs the backends that support its part of a layer, compares their errors with the rounding of their
data type, and times them (`attention/check/`), or reads the result of an earlier identical check. All ranks then use
the fastest backend of rank 0 that is correct on every rank's GPU.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from megatron.attention.backends.backend import AttentionBackend, AttentionFormula, can_mask_documents
from megatron.attention.backends.registry import (
    REUSED_BACKENDS,
    describe_fallback,
    describe_row_blocks_reason,
    get_default_backend,
    list_candidates,
    select_backend,
)
from megatron.attention.check.check_result import (
    BackendTrial,
    CheckKey,
    CheckRecord,
    CheckResult,
    describe_gpu,
    describe_software,
    read_cache,
    read_records,
    write_cache,
    write_records,
)
from megatron.attention.check.float64_reference import CheckedDocuments
from megatron.attention.check.problem import CheckProblem, build_problem
from megatron.attention.check.trials import DeviceLostError, free_memory, try_backends
from megatron.attention.segments import SampleFunction, concatenate_ranges, select_chunks, skip_sampling
from megatron.distributed.mesh import list_context_chunks
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.attention import get_tensor_parallel_heads
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.catalog import compute_method_digests
from megatron.position.token_range import ALL_HEADS, TokenRange, sample_positions
from megatron.utils.errors import RunError
from megatron.utils.rounding import SAFETY_FACTOR

CHECKED_DEVICES = ("cuda",)
"""Device types on which `auto` runs the self-check. CPU backends are PyTorch's own or covered by tests."""


@dataclass(frozen=True)
class AttentionTarget:
    """Device, data type and shapes of a model's attention, for the self-check."""

    device: torch.device
    dtype: torch.dtype
    """Data type of activations and weights."""
    batch: int
    """Sequences per micro-batch."""
    length: int
    """Tokens of the longest sequence."""
    document_starts: torch.Tensor | None = None
    """Document starts of rows like the run's, int64 [B, T] on the CPU: for each token the column at which its document
    starts. None if documents are not masked.
    """
    resumed_run: Path | None = None
    """Folder of the run being resumed; its backend choice is reused."""
    previous_backend: str | None = None
    """Backend chosen by an earlier process of this run. It takes precedence over the stored choice if it passes the
    check.
    """


@dataclass(frozen=True)
class LayerType:
    """Group of layers with the same attention: their options, and the formula of one of them."""

    position: PositionOptions
    formula: AttentionFormula

    def describe(self) -> str:
        """Return a short description."""
        processor = "" if self.formula.processor is None else f"{self.position.processor}+"
        window = "" if self.position.window is None else f", window {self.position.window}"
        softmax = "" if self.position.softmax == "vanilla" else f", softmax {self.position.softmax}"
        return f"{processor}{self.position.encoding}{window}{softmax}"


@dataclass(frozen=True)
class BackendChoice:
    """Backends of a model, with the messages and records of the choice."""

    backends: tuple[AttentionBackend, ...]
    """One backend per layer type."""
    name: str | None = None
    """Name of the backend, as in `attention_backend`, or `ROW_BLOCKS`; comma-separated for several layer types.
    None unless `auto` made a choice or a backend was named.
    """
    lines: tuple[str, ...] = ()
    """Lines for the console; empty if nothing was chosen."""
    records: tuple[CheckRecord, ...] = ()
    """Records of self-checks for the run's folder."""
    row_blocks_reason: str | None = None
    """Reason why attention is computed in row blocks without a check, or None."""

    def write_records(self, run: Path) -> None:
        """Write the records of checks, if any, to the run's folder. Raises UserError or RunError if that fails."""
        if self.records:
            write_records(run, self.records)


def choose_backends(
    name: str,
    model: ModelOptions,
    layer_types: Sequence[LayerType],
    groups: ProcessGroups,
    target: AttentionTarget | None,
) -> BackendChoice:
    """Return the named backend, or the choice of `auto`, separately for each layer type.

    With a target on a GPU all processes must call this, even those without such layers.

    Args:
        name: `attention_backend`, or its override.
        layer_types: layer types of the whole model; they are not changed.
        groups: process groups that share the model.
        target: None for a model with unknown shapes or used for inspection only: `auto` then runs no check.

    Raises:
        UserError: if the named backend does not support a formula.
        RunError: if a backend made a device unusable; the next start skips that backend.
    """
    previous = [] if target is None or target.previous_backend is None else target.previous_backend.split(",")
    choices = []
    for number, layer_type in enumerate(layer_types):
        own = target
        if target is not None and len(previous) == len(layer_types):
            own = replace(target, previous_backend=previous[number])
        choices.append(_choose_backend(name, model, layer_type, groups, own))
    if len(choices) == 1:
        return choices[0]
    names = [choice.name for choice in choices if choice.name is not None]
    lines = [
        line.replace("attention:", f"attention ({layer_type.describe()}):", 1)
        for layer_type, choice in zip(layer_types, choices, strict=True)
        for line in choice.lines
    ]
    return BackendChoice(
        tuple(backend for choice in choices for backend in choice.backends),
        ", ".join(dict.fromkeys(names)) or None,
        tuple(lines),
        tuple(record for choice in choices for record in choice.records),
        next((choice.row_blocks_reason for choice in choices if choice.row_blocks_reason is not None), None),
    )


def _choose_backend(
    name: str, model: ModelOptions, layer_type: LayerType, groups: ProcessGroups, target: AttentionTarget | None
) -> BackendChoice:
    """Return the backend of one layer type.

    Args:
        name: `attention_backend`, or its override.
        layer_type: layer type; it is not changed.
        groups: process groups that share the model.
        target: None for a model with unknown shapes or used for inspection only: `auto` then runs no check.

    Raises:
        UserError: if the named backend does not support the formula.
        RunError: if a backend made a device unusable; the next start skips that backend.
    """
    formula = layer_type.formula
    if name != "auto" or target is None or target.device.type not in CHECKED_DEVICES:
        backend = select_backend(name, model.attention_chunk_rows, formula)
        if name == "auto":
            return BackendChoice((backend,), row_blocks_reason=describe_row_blocks_reason(formula))
        return BackendChoice((backend,), name)
    candidates = list_candidates(model.attention_chunk_rows, formula)
    default = get_default_backend(formula)
    why = None
    if not model.attention_check:
        why = "unchecked (attention_check: false)"
    elif model.attention_dropout:
        why = "unchecked: attention_dropout is random, so results cannot be compared"
    elif max(groups.gather_objects(len(candidates))) == 1:  # ranks with other software may have other candidates
        why = "no other backend supports this model"
    if why is not None:
        line = f"attention: {describe_row_blocks_reason(formula) or default}; {why}"
        return BackendChoice((candidates[default],), default, (line,))
    try:
        with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []), torch.enable_grad():
            return _choose_by_check(model, layer_type, groups, target, candidates, default)
    except RuntimeError as error:
        if isinstance(error.__context__, RunError):  # an unusable device cannot restore its random state either
            raise error.__context__ from None
        raise


def _choose_by_check(
    model: ModelOptions,
    layer_type: LayerType,
    groups: ProcessGroups,
    target: AttentionTarget,
    candidates: Mapping[str, AttentionBackend],
    default: str,
) -> BackendChoice:
    position = layer_type.position
    key = build_check_key(model, position, groups, target)
    recorded = _find_record(key, target.resumed_run) if groups.is_main and target.resumed_run is not None else None
    recorded = groups.gather_objects(recorded)[0]
    start_time, error = monotonic(), None
    is_same = recorded is not None and recorded.check_result.key == key and recorded.check_result.is_compared
    check_result = recorded.check_result if recorded is not None and is_same else read_cache(key)
    was_checked_earlier = check_result is not None and check_result.is_final
    if not was_checked_earlier:
        rows, heads = get_local_rows_and_heads(
            position, model.num_attention_heads, layer_type.formula.processor is not None, groups, target
        )
        problem = build_problem(
            layer_type.formula,
            rows,
            batch=target.batch,
            window=position.window,
            heads=heads,
            dtype=target.dtype,
            device=target.device,
            documents=_describe_documents(layer_type, candidates[default], target),
        )
        check_result, error = _check(key, problem, candidates, check_result, start_time)
        del problem
        free_memory(target.device)  # its tensors are in reference cycles
    assert check_result is not None
    results: list[tuple[CheckResult, str | None]] = groups.gather_objects((check_result, error))
    if not was_checked_earlier and [other.key for other, _ in results].index(key) == groups.rank:
        write_cache(check_result)
    if (failed := next((text for _, text in results if text is not None), None)) is not None:
        raise RunError(failed)
    previous = (
        recorded.backend
        if recorded is not None and recorded.check_result.key["card"] == results[0][0].key["card"]
        else None
    )
    previous = target.previous_backend or previous
    chosen, lines = agree_on_backend(
        [each for each, _ in results], default, previous, was_checked_earlier=was_checked_earlier
    )
    record = CheckRecord(chosen, lines[0], results[0][0])
    return BackendChoice((candidates[chosen],), chosen, tuple(lines), (record,))


def _find_record(key: CheckKey, run: Path) -> CheckRecord | None:
    """Return a run's record for these layers, even for sequences of another shape, or None."""
    results = read_records(run)
    if len(results) == 1:
        return results[0]
    methods = [_get_method(record.check_result.key) for record in results]
    return results[methods.index(_get_method(key))] if _get_method(key) in methods else None


def _get_method(key: CheckKey) -> Mapping[str, Any]:
    position: Mapping[str, Any] = key["work"]["position"]
    return position


def build_check_key(
    model: ModelOptions, position: PositionOptions, groups: ProcessGroups, target: AttentionTarget
) -> CheckKey:
    """Return the conditions on which the result of a rank's check depends, in JSON types."""
    sizes, softcap = groups.mesh.sizes, model.attn_logit_softcapping
    processors = [name for name in position.processors if name != "none"]
    digests = compute_method_digests({"encodings": position.encodings, "processors": processors})
    return {
        "card": describe_gpu(target.device),
        "software": describe_software(),
        "work": {
            "position": position.model_dump(mode="json"),
            "hidden_size": model.hidden_size,
            "heads": model.num_attention_heads,
            # Absent if unset, so that results of earlier versions stay valid.
            **({} if model.head_dim is None else {"head_dim": model.head_dim}),
            **({} if softcap is None else {"softcap": softcap}),
            **({"methods": digests} if digests else {}),
            **({} if target.document_starts is None else {"documents": _hash_starts(target.document_starts)}),
            "length": target.length,
            "batch": target.batch,
            "dtype": str(target.dtype).removeprefix("torch."),
            "chunk_rows": model.attention_chunk_rows,
            "tensor": sizes.tensor,
            "context": sizes.context,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
    }


def _hash_starts(starts: torch.Tensor) -> str:
    return hashlib.sha256(starts.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def get_local_rows_and_heads(
    position: PositionOptions, num_heads: int, has_processor: bool, groups: ProcessGroups, target: AttentionTarget
) -> tuple[tuple[TokenRange, ...], slice]:
    """Return the rows of a sequence and the heads that this rank computes, as in `GPT` and `PositionedAttention`."""
    limit, mesh = position.randomized_positions, groups.mesh
    continuous = position.continuous_positions
    sampled = None
    if limit is not None:
        sampled = sample_positions(target.length, limit, target.length, continuous=continuous)
    chunks = list_context_chunks(target.length, mesh.context)
    segments = concatenate_ranges([TokenRange(start, size, sampled) for start, size in chunks])
    rows, heads = target.length // mesh.context.size, get_tensor_parallel_heads(mesh.tensor, num_heads)
    if has_processor and mesh.tensor.size > 1 and rows % (2 * mesh.tensor.size) == 0:
        # Ranks exchange heads for rows.
        segments, heads = select_chunks(segments, list_context_chunks(rows, mesh.tensor)), ALL_HEADS
    return tuple(segment.tokens for segment in segments), heads


def _describe_documents(
    layer_type: LayerType, backend: AttentionBackend, target: AttentionTarget
) -> CheckedDocuments | None:
    """Return the documents of a check's rows, in the layout of `GPT` and the same for all checked backends."""
    formula, starts, limit = layer_type.formula, target.document_starts, layer_type.position.randomized_positions
    if starts is None:
        return None
    masked = can_mask_documents(formula.encoding, backend, formula.processor, randomized=limit is not None)
    sample: SampleFunction = skip_sampling
    if limit is not None:
        continuous = layer_type.position.continuous_positions
        sample = lambda length: sample_positions(length, limit, length, continuous=continuous)  # noqa: E731
    return CheckedDocuments(starts, masked, sample)


def _check(
    key: CheckKey,
    problem: CheckProblem,
    candidates: Mapping[str, AttentionBackend],
    earlier: CheckResult | None,
    start_time: float,
) -> tuple[CheckResult, str | None]:
    """Run the self-check of each candidate. Return the result, and the error after which this process must exit.

    If an earlier check ran out of time or memory, backends with a final rejection are not tried again.
    """
    inputs = problem.list_inputs()
    rejected: list[BackendTrial] = []
    tried: dict[str, AttentionBackend] = {}
    for name, backend in candidates.items():
        known = None if earlier is None else earlier.get_trial(name)
        left_out = next(filter(None, (describe_fallback(backend, rows) for rows in inputs)), None)
        if known is not None and known.is_final and not known.is_correct:
            rejected.append(known)
        elif left_out is not None:
            rejected.append(BackendTrial(name, f"falls back to row blocks for {left_out}"))
        else:
            tried[name] = backend
    error = None
    try:
        trials = try_backends(problem, tried)
    except DeviceLostError as failure:
        # The next start knows of this failure and tries the remaining backends.
        trials = [replace(trial, is_final=trial.is_final and not trial.is_correct) for trial in failure.trials]
        error = f"{failure}, and the device is unusable; the next start skips this backend"
    return CheckResult(key, problem.describe(), (*rejected, *trials), round(monotonic() - start_time, 1)), error


def agree_on_backend(
    results: Sequence[CheckResult], default: str, previous: str | None, *, was_checked_earlier: bool
) -> tuple[str, list[str]]:
    """Choose the backend of all ranks. Return its name and console lines, the first of which describes the choice.

    Args:
        results: result of each rank, by rank.
        default: backend used if none passes the check.
        previous: backend that the run used before, if it resumes on the same card.
        was_checked_earlier: True if the results are those of an earlier check.
    """
    correct_elsewhere = [{trial.backend for trial in each.trials if trial.is_correct} for each in results[1:]]
    correct = [
        trial for trial in results[0].rank_backends() if all(trial.backend in names for names in correct_elsewhere)
    ]
    left = _describe_rejected(results)
    if not correct:
        return default, [f"attention: {default}, because no backend passed the check{left}"]
    chosen = next((trial for trial in correct if trial.backend == previous), correct[0])
    dtype = results[0].key["work"]["dtype"]
    errors = f"errors up to {chosen.largest_error_ratio:.2g} times rounding in {dtype} ({SAFETY_FACTOR:g} allowed)"
    errors = errors if chosen.excess else "values not compared"
    line = f"attention: {chosen.backend}, {_compare_speed(chosen, correct, default)}, {errors}"
    line += "; same as before" if chosen.backend == previous else ""
    line += "; result of an earlier check" if was_checked_earlier else f"; checked in {results[0].seconds:.0f} s"
    return chosen.backend, [line + left, *_describe_disagreement(results, chosen.backend)]


def _compare_speed(chosen: BackendTrial, correct: Sequence[BackendTrial], default: str) -> str:
    """Describe the speed relative to the default or the next backend, with the times of a layer in both passes."""
    others = [trial for trial in correct if trial is not chosen]
    other = next((trial for trial in others if trial.backend == default), others[0] if others else None)
    own = chosen.milliseconds or 0.0
    if other is None or not own:
        return f"the only backend that passed the check ({own:.3g} ms for a layer)"
    theirs = other.milliseconds or 0.0
    return f"{theirs / own:.2f} times as fast as {other.backend} ({own:.3g} ms instead of {theirs:.3g} for a layer)"


def _describe_rejected(results: Sequence[CheckResult]) -> str:
    """Describe the backends that any rank rejected, with the reason of the first such rank."""
    reasons: dict[str, str] = {}
    for rank, check_result in enumerate(results):
        for trial in check_result.trials:
            where = f" on rank {rank}" if rank else ""
            if trial.refusal is not None:
                reasons.setdefault(trial.backend, f"{trial.backend} {trial.refusal}{where}")
        for trial in results[0].trials:
            if check_result.get_trial(trial.backend) is None:
                reasons.setdefault(trial.backend, f"{trial.backend} is not available on rank {rank}")
    return f"; rejected: {'; '.join(reasons.values())}" if reasons else ""


def _describe_disagreement(results: Sequence[CheckResult], chosen: str) -> list[str]:
    """Return a line if a rank with another GPU than rank 0's would choose another backend."""
    mine: Any = results[0].key["card"]
    for rank, check_result in enumerate(results):
        ranked = check_result.rank_backends()
        if check_result.key["card"] != mine and ranked and ranked[0].backend != chosen:
            return [
                f"attention: rank {rank} has another GPU ({check_result.key['card']['name']}, rank 0 "
                f"{mine['name']}), on "
                f"which {ranked[0].backend} would be faster; all ranks use rank 0's choice"
            ]
    return []


def load_backend_choice(run: Path, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the backend that a run's own check chose, for a model loaded from the run.

    Return None unless GPU, software and data type are those of the check.
    """
    results = read_records(run)
    if not results or device.type not in CHECKED_DEVICES or len({record.backend for record in results}) > 1:
        return None  # a loaded model has one backend for all layers, so all records must agree
    if any(record.backend not in REUSED_BACKENDS or not record.check_result.is_compared for record in results):
        return None
    key, dtype_name = results[0].check_result.key, str(dtype).removeprefix("torch.")
    is_same = key["card"] == describe_gpu(device) and key["software"] == describe_software()
    return results[0].backend if is_same and key["work"]["dtype"] == dtype_name else None

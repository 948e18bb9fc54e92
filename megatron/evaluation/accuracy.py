"""Score the answers of a model to the sequences of a task, and build accuracy records.

accuracy        correct answers divided by counted answers, over all sequences of a length
exact_match     share of sequences without an error, for tasks with one answer of several tokens
mean_accuracy   mean of the accuracies at the lengths beyond training, with equal weights
intervals       95%, percentile bootstrap over sequences (`megatron.reports.significance`)

The loss is a softmax over the answers of the task only. It ignores the probability that a model assigns to other ids.
Each length has its own sequences, so the draws behind the interval of a change or of a mean are independent.

B: sequences in a batch, T: tokens in a sequence, n: last positions, V: vocabulary size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron.data.tasks.task import TaskBatch
from megatron.reports.records import Record
from megatron.reports.uncertainty import build_interval_fields, draw_bootstrap_means

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron.model.kv_cache import KVCache

# torch is imported inside functions, so that errors in the options are reported at once.

MIN_SHARED_FRACTION = 0.1
"""Smallest share of a sequence for which a prefix common to all sequences is read only once."""


def score_answers(
    model: nn.Module,
    batch: TaskBatch,
    choices: range | None,
    *,
    batch_tokens: int | None = None,
    on_batch_done: Callable[[float], None] = lambda fraction: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the losses and the correctness of a model's answers.

    Args:
        model: called as `model(tokens [B, T], num_logits=n)`, returns logits [B, n, V]. If the sequences have position
            ids, it also receives `position_ids`, int64 [B, T] on the CPU.
        batch: sequences to answer.
        choices: ids of valid answers; the whole vocabulary if None.
        batch_tokens: input tokens per forward pass; a batch has at least one sequence.
        on_batch_done: called with the fraction of the sequences scored so far.

    Returns:
        Losses at each position in nats, float64 [sequences, T], 0 where there is no loss; and whether the likeliest
            answer is correct, bool [sequences, T], False at positions that do not count.

    Raises:
        RunError: a single sequence does not fit in device memory.
    """
    import torch

    from megatron.evaluation.forward_passes import run_batched

    device = next(model.parameters()).device
    num_sequences, length = batch.tokens.shape
    num_logits = length - int(batch.loss_mask.any(axis=0).argmax())  # earlier positions have no loss
    losses, correct = np.zeros(batch.labels.shape), np.zeros(batch.labels.shape, dtype=bool)
    num_done, first_choice = 0, choices.start if choices else 0
    cache = _read_shared_tokens(model, batch, num_logits, device)
    num_shared = 0 if cache is None else cache.length

    @torch.inference_mode()
    def forward(rows: slice) -> None:
        tokens, labels = (torch.from_numpy(array[rows]).to(device) for array in (batch.tokens, batch.labels))
        placed: dict[str, Any] = {}
        if batch.position_ids is not None:
            placed["position_ids"] = torch.from_numpy(batch.position_ids[rows])
        if cache is not None:  # the cache holds the common prefix
            placed["kv_cache"] = cache.repeat(len(tokens))
        logits = model(tokens[:, num_shared:], num_logits=num_logits, **placed)
        logits = logits[:, :, first_choice : choices.stop if choices else None].float()
        indices = labels[:, -num_logits:] - first_choice
        log_probs = logits.log_softmax(dim=2).gather(2, indices[:, :, None])[:, :, 0]
        losses[rows, -num_logits:] = -log_probs.double().cpu().numpy()
        correct[rows, -num_logits:] = (logits.argmax(dim=2) == indices).cpu().numpy()

    def count_rows(num_rows: int) -> None:
        nonlocal num_done
        num_done += num_rows
        on_batch_done(num_done / num_sequences)

    too_large = f"one sequence of {length:,} tokens does not fit the memory of {device}; use shorter lengths"
    run_batched(
        num_sequences, length, device, forward, too_large=too_large, batch_tokens=batch_tokens, on_batch_done=count_rows
    )
    return np.where(batch.loss_mask, losses, 0.0), correct & batch.accuracy_mask


def _read_shared_tokens(model: nn.Module, batch: TaskBatch, num_logits: int, device: torch.device) -> KVCache | None:
    """Build a KV cache of the prefix common to all sequences, computed once.

    Return None if the prefix is too short to be worth it, or if the model cannot decode from a cache.
    """
    import torch

    from megatron.model.gpt import GPT
    from megatron.utils.errors import UserError

    count, length = batch.tokens.shape
    is_shared = (batch.tokens == batch.tokens[:1]).all(axis=0)
    num_shared = min(length if is_shared.all() else int(is_shared.argmin()), length - num_logits)
    if count < 2 or num_shared < MIN_SHARED_FRACTION * length or batch.position_ids is not None:
        return None
    if not isinstance(model, GPT) or model.end_of_document is not None:
        return None
    try:
        cache = model.create_kv_cache(length)
    except UserError:
        return None
    with torch.inference_mode():
        tokens = torch.from_numpy(batch.tokens[:1, :num_shared]).to(device)
        model.compute_hidden_states(tokens, num_logits=1, kv_cache=cache)
    return cache


class AccuracySample(NamedTuple):
    """Value of a metric at one length, with its bootstrap draws."""

    record: Record
    draws: np.ndarray | None = None
    """Bootstrap draws of the value, float64 [resamples], or None if its variance is unknown."""


def compute_accuracies(
    correct: np.ndarray, batch: TaskBatch, record_fields: Mapping[str, Any], *, exact_match: bool = False
) -> list[AccuracySample]:
    """Compute the metrics at one length.

    Args:
        correct: True for correct answers, bool [sequences, T].
        batch: the sequences.
        record_fields: fields to add to the records.
        exact_match: also compute the share of sequences without an error.
    """
    num_counted, num_right = batch.accuracy_mask.sum(axis=1), correct.sum(axis=1)
    numerators = {"accuracy": (num_right, num_counted)}
    if exact_match:
        numerators["exact_match"] = ((num_right == num_counted).astype(np.int64), np.ones_like(num_counted))
    samples = []
    for metric, (sums, counts) in numerators.items():
        means = draw_bootstrap_means(sums[None].astype(np.float64), counts)
        draws = None if means is None else means[0]
        value, tokens = float(sums.sum() / counts.sum()), int(num_counted.sum())
        record = Record(metric=metric, value=value, tokens=tokens, **build_interval_fields(draws), **record_fields)
        samples.append(AccuracySample(record, draws))
    return samples


def aggregate_accuracies(samples: Sequence[AccuracySample]) -> list[Record]:
    """Build the records of one predictor at all lengths, with their changes and the mean over lengths."""
    draws = {(sample.record.metric, sample.record.length): sample.draws for sample in samples}
    records = add_relative_changes([sample.record for sample in samples])
    return [*(_add_change_interval(record, draws) for record in records), *_list_mean_records(samples)]


def _add_change_interval(record: Record, draws: Mapping[tuple[str, int], np.ndarray | None]) -> Record:
    """Add the interval of the change to a record, if both lengths have draws.

    Args:
        draws: bootstrap draws by metric and length.
    """
    own = draws[record.metric, record.length]
    base = None if record.change_from is None else draws[record.metric, record.change_from]
    if own is None or base is None:
        return record
    return record.replace(**build_interval_fields(own - _unpair_draws(base, 1), "change_"))


def _unpair_draws(draws: np.ndarray, shift: int) -> np.ndarray:
    """Rotate draws so that they are not paired with those of another length.

    The draws of all lengths share a seed. With equal numbers of sequences, draw n would use the same indices at every
    length, although the sequences are unrelated.
    """
    return np.roll(draws, shift)


def _list_mean_records(samples: Sequence[AccuracySample]) -> list[Record]:
    """List the record of the mean over lengths beyond training, or no record if there are none."""
    beyond = [
        sample
        for sample in samples
        if sample.record.metric == "accuracy" and sample.record.length > sample.record.train_length
    ]
    if not beyond:
        return []
    draws = [_unpair_draws(sample.draws, shift) for shift, sample in enumerate(beyond) if sample.draws is not None]
    mean_draws = np.mean(draws, axis=0) if len(draws) == len(beyond) else None
    return [build_mean_record([sample.record for sample in beyond], mean_draws)]


def build_mean_record(records: Sequence[Record], draws: np.ndarray | None) -> Record:
    """Build the record of the mean accuracy over lengths.

    Its digest covers the lengths, because means over other lengths are not comparable.

    Args:
        records: accuracies of one model, one for each length, ascending.
        draws: bootstrap draws of the mean, float64 [resamples], or None if its variance is unknown.
    """
    last = records[-1]
    lengths = ", ".join(f"{record.length:,}" for record in records)
    digest = hashlib.sha256(f"{last.target_digest} mean over {lengths}".encode()).hexdigest()[:16]
    losses = [record.nll for record in records if record.nll is not None]
    unknown = ("low", "high", "change", "change_from", "change_low", "change_high", "flops", "seconds", "cpu_seconds")
    fields: dict[str, Any] = dict.fromkeys(unknown) | {
        "metric": "mean_accuracy",
        "value": sum(record.value for record in records) / len(records),
        "tokens": sum(record.tokens for record in records),
        "nll": sum(losses) / len(losses) if len(losses) == len(records) else None,
        "target_digest": digest,
        "remark": f"Mean over the lengths {lengths}. {last.remark or ''}".strip(),
    }
    return last.replace(**fields | build_interval_fields(draws))


def add_relative_changes(records: Sequence[Record]) -> list[Record]:
    """Add to each record of a predictor its change from the shortest length with the same metric and protocol.

    Use this function if each length has its own sequences. The values are then not paired, and no interval is added.
    If all lengths score the same tokens, `loss_records.py` adds both.
    """
    shortest: dict[tuple[str, str], Record] = {}
    for record in records:
        base = shortest.setdefault((record.metric, record.protocol), record)
        if record.length < base.length:
            shortest[record.metric, record.protocol] = record
    return [_add_change(record, shortest[record.metric, record.protocol]) for record in records]


def _add_change(record: Record, base: Record) -> Record:
    if record is base:
        return record
    return record.replace(change=record.metric_info.compute_change(record.value, base.value), change_from=base.length)

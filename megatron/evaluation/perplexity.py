"""Scores a model: the negative log-likelihood of every target of a plan, and the perplexity that it amounts to.

    nll = −1/N Σ log p(target | context)          perplexity = exp(nll)

Only the scored positions go through the output layer, so a long context costs what its attention costs and not
`length × vocabulary` logits. Windows are batched up to a number of tokens; the long ones rely on the model's chunked
attention for memory linear in length. Losses are summed in float64.

B windows of a batch, T window length.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from megatron.errors import RunError, UserError
from megatron.evaluation.bootstrap import intervals
from megatron.evaluation.names import method_name
from megatron.evaluation.protocols import Plan
from megatron.reports.records import Record

LARGEST_NLL = 700.0
"""Nats per token that still have a perplexity: exp overflows at 709."""

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.data.vocabulary import Vocabulary
    from megatron.model.gpt import GPT

Progress = Callable[[int, float, float], None]
"""Called after every batch with the window length, the work done and the whole work (both in FLOPs)."""

BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Input tokens per forward pass unless said otherwise: beyond these a batch only takes more memory."""


class Summary(NamedTuple):
    """The mean over all scored targets."""

    nll: float  # nats per token
    stderr: float | None  # of nll over blocks; None for one block
    tokens: int  # targets counted


def known_lengths(model: "GPT", lengths: Sequence[int]) -> list[int]:
    """Those of the lengths that the model has positions for, ascending. Raises UserError if there is none."""
    known = sorted(length for length in lengths if model.max_length is None or length <= model.max_length)
    if not known:
        raise UserError(f"its positions end at {model.max_length:,}, length {min(lengths):,} is past them")
    return known


def forward_flops(model: "GPT", plan: Plan) -> dict[int, float]:
    """FLOPs of scoring each length, a third of forward and backward: they set the pace of the progress bar."""
    return {
        length: model.flops_per_token(length) / 3 * length * plan.windows(length)
        for length in known_lengths(model, plan.lengths)
    }


@torch.inference_mode()
def window_losses(
    model: nn.Module,
    stream: np.ndarray,
    starts: np.ndarray,
    length: int,
    scored: int,
    *,
    batch_tokens: int | None = None,
    after_batch: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Negative log-likelihood, in nats, of the last targets of each window.

    Args:
        model: called as `model(tokens [B, T], labels=[B, T], last=scored)`, returns losses [B, scored].
        stream: token ids [N], of any integer type; may be memory-mapped.
        starts: first input token of each window, int64 [windows].
        length: T.
        scored: targets at the end of each window.
        batch_tokens: input tokens per forward pass; at least one window is always taken.
        after_batch: called with the number of windows of each finished batch.

    Returns:
        float64 [windows, scored].

    Raises:
        RunError: the device's memory is too small for a single window.
    """
    device = next(model.parameters()).device
    size = max(1, (batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"])) // length)
    losses = np.empty((len(starts), scored), dtype=np.float64)
    done = 0
    while done < len(starts):
        chosen = starts[done : done + size]
        # Input and labels are the same T + 1 tokens, shifted by one.
        window = torch.from_numpy(stream[chosen[:, None] + np.arange(length + 1)].astype(np.int64)).to(device)
        try:
            batch = model(window[:, :-1].contiguous(), labels=window[:, 1:].contiguous(), last=scored)
            losses[done : done + len(chosen)] = batch.double().cpu().numpy()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if size == 1:
                raise RunError(
                    f"length {length:,}: one window does not fit the memory of {device}; use shorter lengths or "
                    "attention_backend=chunked with fewer attention_chunk_rows"
                ) from None
            size = (len(chosen) + 1) // 2
            if device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        done += len(chosen)
        if after_batch is not None:
            after_batch(len(chosen))
    return losses


def summarize(losses: np.ndarray, counted: np.ndarray | None = None) -> Summary:
    """Mean and standard error of losses [blocks, targets].

    The standard error treats blocks as the independent samples: neighbouring tokens share their context and their
    subject, blocks far apart do not. With unequal counts per block it is that of a ratio estimate.

    Args:
        losses: float64 [blocks, targets].
        counted: bool [blocks, targets], False for targets to leave out; all count if None.
    """
    counted = np.ones(losses.shape, dtype=bool) if counted is None else counted
    sums, counts = np.where(counted, losses, 0.0).sum(axis=1), counted.sum(axis=1)
    tokens, blocks = int(counts.sum()), len(losses)
    nll = float(sums.sum() / tokens)
    if blocks < 2:
        return Summary(nll, None, tokens)
    residuals = sums - nll * counts
    return Summary(nll, math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / tokens, tokens)


@dataclass(frozen=True)
class Targets:
    """The tokens that a plan scores: the same at every length."""

    counted: np.ndarray
    """Which of them count, bool [blocks, targets]."""
    bytes: int
    """How many of them stand for a byte of text; 0 if tokens are not bytes."""
    digest: str
    """Equal digests, equal targets."""


def scored_targets(
    stream: np.ndarray, plan: Plan, vocabulary: "Vocabulary | None", *, eod_mask_loss: bool = False
) -> Targets:
    """Look up what a plan scores.

    Args:
        stream: token ids [N].
        plan: whose targets are meant.
        vocabulary: of the stream, if it is known.
        eod_mask_loss: the model was not trained to predict the token that follows an end of document.

    Raises:
        RunError: no token is left to score.
    """
    positions = plan.target_positions(plan.lengths[0])
    labels = np.asarray(stream[positions])
    counted = np.ones(labels.shape, dtype=bool)
    if eod_mask_loss and vocabulary is not None:
        counted = np.asarray(stream[positions - 1]) != vocabulary.eod
        if not counted.any():
            raise RunError("no token to score: with eod_mask_loss every target of these windows is left out")
    of_bytes = vocabulary is not None and vocabulary.name == "bytes"
    digest = hashlib.sha256(np.ascontiguousarray(labels, dtype="<i8").tobytes() + counted.tobytes()).hexdigest()
    return Targets(
        counted=counted,
        bytes=int((counted & (labels != vocabulary.eod)).sum()) if of_bytes and vocabulary is not None else 0,
        digest=digest[:16],
    )


class Measured(NamedTuple):
    """One length, scored."""

    length: int
    summary: Summary
    sums: np.ndarray  # summed losses of each block, float64 [blocks]
    seconds: float
    date: str  # ISO 8601, UTC


def evaluate(
    loaded: "LoadedModel",
    stream: np.ndarray,
    plan: Plan,
    *,
    vocabulary: "Vocabulary | None" = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
    about: Mapping[str, Any] | None = None,
) -> list[Record]:
    """Perplexity of a model at each length of a plan, every length scored on the same target tokens.

    Args:
        loaded: a trained model and its configuration.
        stream: token ids [N] of held-out text.
        plan: what to score.
        vocabulary: of the stream. The token that follows its end-of-document is left out if the run was trained so
            (eod_mask_loss); if tokens are bytes, bits_per_byte is reported, over all targets but end-of-document.
        batch_tokens: input tokens per forward pass.
        progress: called after every batch.
        about: fields of the records that say where model and text come from; they come before what is known here.

    Returns:
        One record per length that the model has positions for, in ascending order. The targets are those of all
        lengths, so that they are the same for every model.

    Raises:
        UserError: the model has positions for none of the lengths.
        RunError: a loss is not finite, or the memory is too small.
    """
    config, model = loaded.config, loaded.model
    name = method_name(config.position, loaded.position.attention_window)
    targets = scored_targets(stream, plan, vocabulary, eod_mask_loss=config.data.eod_mask_loss)
    measured = list(_measured(name, model, stream, plan, targets, batch_tokens, progress))
    shared = {"protocol": plan.protocol, "blocks": plan.blocks, "target_digest": targets.digest}
    return _records(measured, plan, targets, {**about_model(loaded), **shared, **(about or {})})


def about_model(loaded: "LoadedModel") -> dict[str, Any]:
    """What records say of a model."""
    config, model = loaded.config, loaded.model
    name = method_name(config.position, loaded.position.attention_window)
    parameter = next(model.parameters())
    return {
        "method": name,
        "train_length": config.model.seq_length,
        "seed": config.training.seed,
        "position": name,
        "max_length": model.max_length,
        "parameters": model.num_parameters(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": _device_name(parameter.device),
    }


def _measured(
    name: str,
    model: "GPT",
    stream: np.ndarray,
    plan: Plan,
    targets: Targets,
    batch_tokens: int | None,
    progress: Progress | None,
) -> Iterator[Measured]:
    """Score one length after the other. Arguments and errors as for `evaluate`; `name` is for messages."""
    work = forward_flops(model, plan)
    total, done = sum(work.values()), 0.0
    for length in work:
        finished = 0

        def after_batch(count: int, length: int = length, before: float = done) -> None:
            nonlocal finished
            finished += count
            if progress is not None:
                progress(length, before + work[length] * finished / plan.windows(length), total)

        begun = time.perf_counter()
        losses = window_losses(
            model,
            stream,
            plan.starts[length],
            length,
            plan.scored[length],
            batch_tokens=batch_tokens,
            after_batch=after_batch,
        ).reshape(plan.blocks, plan.targets)
        seconds = time.perf_counter() - begun
        done += work[length]
        summary = summarize(losses, targets.counted)
        # Such a model predicts nothing, and a table could not hold it.
        if not math.isfinite(summary.nll) or summary.nll > LARGEST_NLL:
            raise RunError(f"{name}: the loss at length {length:,} is {summary.nll}, no perplexity to report")
        sums = np.where(targets.counted, losses, 0.0).sum(axis=1)
        yield Measured(length, summary, sums, seconds, datetime.now(UTC).isoformat(timespec="seconds"))


def _records(measured: Sequence[Measured], plan: Plan, targets: Targets, about: Mapping[str, Any]) -> list[Record]:
    """Records of one model, with bootstrap intervals and the change against the first of them.

    Args:
        measured: K lengths, ascending.
        plan, targets: what was scored.
        about: fields that are the same for all.
    """
    found = intervals(np.stack([each.sums for each in measured]), targets.counted.sum(axis=1))
    first = measured[0]
    result = []
    for row, each in enumerate(measured):
        nll, tokens = each.summary.nll, each.summary.tokens
        uncertain: dict[str, Any] = {}
        if found is not None:
            low, high = found.nll[row]
            uncertain |= {"low": _exp(low), "high": _exp(high)}
        if row > 0:
            uncertain |= {"change": _exp(nll - first.summary.nll), "change_from": first.length}
            if found is not None:
                low, high = found.change[row]
                uncertain |= {"change_low": _exp(low), "change_high": _exp(high)}
        own: dict[str, Any] = {
            "length": each.length,
            "metric": "perplexity",
            "value": math.exp(nll),
            "tokens": tokens,
            "nll": nll,
            "stderr": each.summary.stderr,
            "bits_per_byte": nll * tokens / math.log(2) / targets.bytes if targets.bytes else None,
            "targets": plan.scored[each.length],
            "windows": plan.windows(each.length),
            "seconds": round(each.seconds, 3),
            "date": each.date,
        }
        result.append(Record(**own, **uncertain, **about))
    return result


def _exp(nats: float) -> float:
    return math.exp(min(nats, LARGEST_NLL))  # the upper end of an interval may lie beyond what floats hold


def out_of_memory(error: RuntimeError) -> bool:
    """Is this what torch raises where memory does not suffice?"""
    # On CPU the allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

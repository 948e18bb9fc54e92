"""Scores a model: the negative log-likelihood of every target of a plan, of which `measures` tell what they tell.

    nll = −1/N Σ log p(target | context)          perplexity = exp(nll)

Only the scored positions go through the output layer, so a long context costs what its attention costs and not
`length × vocabulary` logits. Windows are batched up to a number of tokens; the long ones rely on the model's chunked
attention for memory linear in length. Losses are summed in float64.

B windows of a batch, T window length.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from megatron.evaluation.batching import run_batched
from megatron.evaluation.measures import RecordBuilder, ScoredLength, TargetCounts
from megatron.evaluation.protocols import ScoringPlan, TargetSet
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.evaluation.subject import ScoringContext
from megatron.evaluation.texts import EvalText
from megatron.evaluation.work import count_plan_flops
from megatron.reports.records import Record
from megatron.utils.errors import RunError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel


@torch.inference_mode()
def compute_window_losses(
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
        model: called as `model(tokens [B, T], labels=[B, T], num_logits=scored)`, returns losses [B, scored].
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
    losses = np.empty((len(starts), scored), dtype=np.float64)

    def take(rows: slice) -> None:
        # Input and labels are the same T + 1 tokens, shifted by one.
        window = torch.from_numpy(stream[starts[rows, None] + np.arange(length + 1)].astype(np.int64)).to(device)
        batch = model(window[:, :-1].contiguous(), labels=window[:, 1:].contiguous(), num_logits=scored)
        losses[rows] = batch.double().cpu().numpy()

    run_batched(
        len(starts),
        length,
        device,
        take,
        too_large=f"length {length:,}: one window does not fit the memory of {device}; use shorter lengths or "
        "attention_backend=chunked with fewer attention_chunk_rows",
        batch_tokens=batch_tokens,
        after=after_batch,
    )
    return losses


def find_scored_targets(
    text: EvalText, plan: ScoringPlan, cut: TargetSet, *, eod_mask_loss: bool = False
) -> TargetCounts:
    """Look up what a plan scores.

    Args:
        text: that is scored.
        plan, cut: whose targets are meant.
        eod_mask_loss: the model was not trained to predict the token that follows an end of document.

    Raises:
        RunError: no token is left to score.
    """
    positions = plan.target_positions(cut, cut.lengths[0])
    eod, labels = text.vocabulary.eod, np.asarray(text.tokens[positions])
    counted = np.ones(labels.shape, dtype=bool)
    if eod_mask_loss:
        counted = np.asarray(text.tokens[positions - 1]) != eod
        if not counted.any():
            raise RunError("no token to score: with eod_mask_loss every target of these windows is left out")
    digest = hashlib.sha256(np.ascontiguousarray(labels, dtype="<i8").tobytes() + counted.tobytes()).hexdigest()
    return TargetCounts(
        counted=counted,
        bytes=int((counted & (labels != eod)).sum()) if text.vocabulary.name == "bytes" else 0,
        digest=digest[:16],
    )


def evaluate_perplexity(
    loaded: "LoadedModel",
    text: EvalText,
    plan: ScoringPlan,
    scoring: ScoringContext,
    measures: Sequence[str] = ("perplexity",),
) -> list[Record]:
    """What is told of a model's losses at each length of a plan, every length scored on the same target tokens.

    The token that follows an end of document is left out if the run was trained so (eod_mask_loss). If tokens are
    bytes, bits_per_byte is reported, over all targets but ends of documents.

    Args:
        loaded: a trained model and its configuration.
        text: what is held out.
        plan: which of its tokens are scored.
        scoring: what goes with it.
        measures: what is told of the losses (`megatron.evaluation.measures`).

    Returns:
        For each measure, records in ascending order of the lengths that the model has positions for. The targets are
        those of all lengths, so that they are the same for every model.

    Raises:
        UserError: the model has positions for none of the lengths.
        RunError: a loss is not finite, or the memory is too small.
    """
    config, model = loaded.config, loaded.model
    source = {"dataset": text.name, "text_digest": text.digest, "tokenizer": text.vocabulary.name}
    shared = {**describe_model(loaded), **scoring.about, **source}
    sheets = []
    for cut in plan.target_sets:
        targets = find_scored_targets(text, plan, cut, eod_mask_loss=config.data.eod_mask_loss)
        sheets.append(RecordBuilder(plan, cut, targets, config.model.seq_length, measures, shared))
    work = count_plan_flops(model, plan)
    total, done = sum(work.values()), 0.0
    for length in work:
        finished = 0

        def after_batch(count: int, length: int = length, before: float = done) -> None:
            nonlocal finished
            finished += count
            scoring.progress(length, before + work[length] * finished / plan.select_windows(length), total)

        taken = start_stopwatch()
        losses = compute_window_losses(
            model,
            text.tokens,
            plan.starts[length],
            length,
            plan.scored(length),
            batch_tokens=scoring.batch_tokens,
            after_batch=after_batch,
        )
        cost = {"flops": work[length], **taken()}
        done += work[length]
        for sheet in sheets:
            if length not in sheet.cut.scored:
                continue
            sheet.add(ScoredLength(length, sheet.cut.from_rows(losses, length), cost))
    return [record for sheet in sheets for record in sheet.build_records()]

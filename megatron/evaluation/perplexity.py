"""Score a model: compute the negative log-likelihood of every target of a plan. `loss_records` builds the records.

    nll = −1/N Σ log p(target | context)          perplexity = exp(nll)

Only the scored positions go through the output layer. A long context therefore costs its attention, not `length ×
vocabulary` logits. Windows are batched up to a number of tokens. Long windows rely on the model's chunked attention,
whose memory is linear in length. Losses are summed in float64.

B windows of a batch, T window length.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.forward_passes import run_batched
from megatron.evaluation.key_tokens import KeyTokenFile
from megatron.evaluation.loss_records import RecordBuilder, ScoredLength, TargetTokens
from megatron.evaluation.protocols import ScoringPlan, TargetSet
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.evaluation.texts import EvalText
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
    num_scored: int,
    *,
    batch_tokens: int | None = None,
    on_batch_done: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Compute the negative log-likelihood, in nats, of the last targets of each window.

    Args:
        model: called as `model(tokens [B, T], labels=[B, T], num_logits=num_scored)`, returns losses [B, num_scored].
        stream: token ids [N] of any integer type; may be memory-mapped.
        starts: first input token of each window, int64 [windows].
        length: T.
        num_scored: number of targets at the end of each window.
        batch_tokens: input tokens per forward pass; a batch has at least one window.
        on_batch_done: called with the number of windows of each finished batch.

    Returns:
        float64 [windows, num_scored].

    Raises:
        RunError: a single window does not fit in device memory.
    """
    device = next(model.parameters()).device
    losses = np.empty((len(starts), num_scored), dtype=np.float64)

    def forward(rows: slice) -> None:
        # Inputs and labels are the same T + 1 tokens, shifted by one.
        window = torch.from_numpy(stream[starts[rows, None] + np.arange(length + 1)].astype(np.int64)).to(device)
        batch = model(window[:, :-1].contiguous(), labels=window[:, 1:].contiguous(), num_logits=num_scored)
        losses[rows] = batch.double().cpu().numpy()

    run_batched(
        len(starts),
        length,
        device,
        forward,
        too_large=f"length {length:,}: one window does not fit the memory of {device}; use shorter lengths or "
        "attention_backend=chunked with fewer attention_chunk_rows",
        batch_tokens=batch_tokens,
        on_batch_done=on_batch_done,
    )
    return losses


def find_target_tokens(
    text: EvalText, plan: ScoringPlan, target_set: TargetSet, *, eod_mask_loss: bool = False
) -> TargetTokens:
    """Look up the tokens that a plan scores.

    Args:
        text: text to score.
        plan, target_set: scoring plan, and one of its target sets.
        eod_mask_loss: True if the model was not trained to predict the token after an end of document.

    Raises:
        RunError: no token is left to score.
    """
    positions = plan.locate_targets(target_set, target_set.lengths[0])
    eod, labels = text.vocabulary.eod, np.asarray(text.tokens[positions])
    loss_mask = np.ones(labels.shape, dtype=bool)
    if eod_mask_loss:
        loss_mask = np.asarray(text.tokens[positions - 1]) != eod
        if not loss_mask.any():
            raise RunError("no token to score: eod_mask_loss excludes every target of these windows")
    digest = hashlib.sha256(np.ascontiguousarray(labels, dtype="<i8").tobytes() + loss_mask.tobytes()).hexdigest()
    return TargetTokens(
        loss_mask=loss_mask,
        num_bytes=int((loss_mask & (labels != eod)).sum()) if text.vocabulary.name == "bytes" else 0,
        digest=digest[:16],
    )


def evaluate_perplexity(
    loaded: "LoadedModel",
    text: EvalText,
    plan: ScoringPlan,
    scoring: ScoringContext,
    measures: Sequence[str] = ("perplexity",),
    *,
    smoothing: int | None = None,
    key_tokens: KeyTokenFile | None = None,
) -> list[Record]:
    """Score a model at each length of a plan, with the same target tokens at every length.

    Tokens after an end of document are skipped if the run was trained with eod_mask_loss. If tokens are bytes, records
    include bits_per_byte over all targets except end-of-document tokens.

    Args:
        loaded: trained model with its configuration.
        text: held-out text.
        plan: windows and targets to score.
        scoring: settings and callbacks.
        measures: measures to build records for (`megatron.evaluation.loss_records`).
        smoothing, key_tokens: as for `RecordBuilder`.

    Returns:
        Records of each measure, by ascending length, for the lengths that the model supports. The targets are common to
            all lengths, so they are the same for every model.

    Raises:
        UserError: the model supports none of the lengths.
        RunError: a loss is not finite, or device memory is too small.
    """
    config, model = loaded.run.config, loaded.model
    source = {"dataset": text.name, "text_digest": text.digest, "tokenizer": text.vocabulary.name}
    shared = {**describe_model(loaded), **scoring.record_fields, **source}
    builders = []
    for target_set in plan.target_sets:
        tokens = find_target_tokens(text, plan, target_set, eod_mask_loss=config.data.eod_mask_loss)
        builders.append(
            RecordBuilder(
                plan,
                target_set,
                tokens,
                config.model.seq_length,
                measures,
                shared,
                smoothing=smoothing,
                key_tokens=key_tokens,
            )
        )
    flops = plan.count_flops(model)
    total, done = sum(flops.values()), 0.0
    for length in flops:
        num_finished = 0

        def report_windows(count: int, length: int = length, before: float = done) -> None:
            nonlocal num_finished
            num_finished += count
            scoring.progress(length, before + flops[length] * num_finished / plan.count_windows(length), total)

        stop_stopwatch = start_stopwatch(model)
        losses = compute_window_losses(
            model,
            text.tokens,
            plan.starts[length],
            length,
            plan.count_scored(length),
            batch_tokens=scoring.batch_tokens,
            on_batch_done=report_windows,
        )
        cost = {"flops": flops[length], **stop_stopwatch()}
        done += flops[length]
        for builder in builders:
            if length in builder.target_set.num_scored:
                builder.add(ScoredLength(length, builder.target_set.select_values(losses, length), cost))
    return [record for builder in builders for record in builder.build_records()]

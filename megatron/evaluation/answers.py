"""What a model answers to the sequences of a task: the loss at each place that is asked, and what is right.

The loss is taken over the task's answers alone: what share of the softmax a model leaves to ids that are never right is
not what is asked.

B sequences of a batch, T tokens of a sequence, n last places, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from megatron.evaluation.batching import run_batched
from megatron.tasks.task import TaskBatch


def score_answers(
    model: nn.Module,
    batch: TaskBatch,
    choices: range,
    *,
    batch_tokens: int | None = None,
    after_batch: Callable[[float], None] = lambda share: None,
) -> tuple[np.ndarray, np.ndarray]:
    """What a model answers to sequences.

    Args:
        model: called as `model(tokens [B, T], num_logits=n)`, returns logits [B, n, V].
        batch: the sequences.
        choices: ids that may be answered.
        batch_tokens: input tokens per forward pass; at least one sequence is always taken.
        after_batch: called with the share of the sequences that is done.

    Returns:
        Losses of each place in nats, float64 [sequences, T], 0 where nothing is asked; and whether the likeliest answer
        is right, bool [sequences, T], False where nothing counts.

    Raises:
        RunError: the device's memory is too small for a single sequence.
    """
    device = next(model.parameters()).device
    sequences, places = batch.tokens.shape
    last = places - int(batch.loss_mask.any(axis=0).argmax())  # nothing is asked before
    losses, correct = np.zeros(batch.labels.shape), np.zeros(batch.labels.shape, dtype=bool)
    done = 0

    @torch.inference_mode()
    def take(rows: slice) -> None:
        tokens, labels = (torch.from_numpy(array[rows]).to(device) for array in (batch.tokens, batch.labels))
        logits = model(tokens, num_logits=last)[:, :, choices.start : choices.stop].float()
        wanted = labels[:, -last:] - choices.start
        chances = logits.log_softmax(dim=2).gather(2, wanted[:, :, None])[:, :, 0]
        losses[rows, -last:] = -chances.double().cpu().numpy()
        correct[rows, -last:] = (logits.argmax(dim=2) == wanted).cpu().numpy()

    def after(count: int) -> None:
        nonlocal done
        done += count
        after_batch(done / sequences)

    too_large = f"one sequence of {places:,} tokens does not fit the memory of {device}; use shorter lengths"
    run_batched(sequences, places, device, take, too_large=too_large, batch_tokens=batch_tokens, after=after)
    return np.where(batch.loss_mask, losses, 0.0), correct & batch.accuracy_mask

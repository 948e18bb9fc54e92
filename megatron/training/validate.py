"""The loss on held-out sequences, during training and at its end.

Each validation scores the same sequences, the first `eval_iters · train_batch_size` of the split's order, however they
are divided among processes, so that its curve moves only because the model does. It leaves no trace: random states
are put back, and nothing of the optimizer is touched.
"""

import time
from collections.abc import Callable
from itertools import islice

import torch
from torch.utils.data import Dataset

from megatron.checkpoint import rng_state
from megatron.config.schema import Config
from megatron.data.batches import build_dataloader
from megatron.distributed.process_groups import ProcessGroups
from megatron.training.engine import Engine
from megatron.training.metrics import ValidationRecord, perplexity


@torch.no_grad()
def validate(
    engine: Engine,
    dataset: Dataset,
    config: Config,
    groups: ProcessGroups,
    *,
    step: int,
    split: str,
    progress: Callable[[str, int, int], None] = lambda split, done, total: None,
) -> ValidationRecord:
    """Mean loss per counted token of `eval_iters` global batches. All processes must call this.

    `progress` is called with the split, the micro-batches that are done, and all there are.
    """
    training = config.training
    start_time = time.perf_counter()
    states = rng_state.capture_rng_state()
    engine.model.eval()
    losses = torch.zeros((), dtype=torch.float64, device=groups.device)
    counted = 0.0
    order = build_dataloader(dataset, micro_batch_size=training.train_micro_batch_size_per_gpu, mesh=groups.mesh)
    steps = training.gradient_accumulation_steps
    total = training.eval_iters * steps
    for done in range(0, total, steps):
        if not (micro := list(islice(order, steps))):
            break
        counted += sum(float(batch["loss_mask"].sum(dtype=torch.float64)) for batch in micro)
        losses += engine.evaluate_loss(micro, progress=lambda more, done=done: progress(split, done + more, total))  # type: ignore[misc]
    progress(split, total, total)
    engine.model.train()
    rng_state.restore_rng_state(states)
    once = groups.mesh.count_once
    all_losses, all_counted = groups.all_reduce_sum(once(float(losses)), once(counted))
    loss = all_losses / max(all_counted, 1.0)
    return ValidationRecord(
        step=step,
        split=split,
        loss=loss,
        perplexity=perplexity(loss),
        tokens=round(all_counted),
        seconds=time.perf_counter() - start_time,
    )

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

from megatron.checkpoint import random_states
from megatron.config.schema import Config
from megatron.data.batches import batches
from megatron.distributed.processes import Processes
from megatron.training.engine import Engine
from megatron.training.metrics import EvaluationRecord, perplexity


@torch.no_grad()
def validate(
    engine: Engine,
    dataset: Dataset,
    config: Config,
    processes: Processes,
    *,
    step: int,
    split: str,
    progress: Callable[[str, int, int], None] = lambda split, done, total: None,
) -> EvaluationRecord:
    """Mean loss per counted token of `eval_iters` global batches. All processes must call this.

    `progress` is called with the split, the micro-batches that are done, and all there are.
    """
    training = config.training
    begun = time.perf_counter()
    states = random_states.capture()
    engine.model.eval()
    losses = torch.zeros((), dtype=torch.float64, device=processes.device)
    counted = 0.0
    order = batches(dataset, micro_batch=training.train_micro_batch_size_per_gpu, mesh=processes.mesh)
    steps = training.gradient_accumulation_steps
    total = training.eval_iters * steps
    for done in range(0, total, steps):
        if not (micro := list(islice(order, steps))):
            break
        counted += sum(float(batch["loss_mask"].sum(dtype=torch.float64)) for batch in micro)
        losses += engine.score(micro, progress=lambda more, done=done: progress(split, done + more, total))  # type: ignore[misc]
    progress(split, total, total)
    engine.model.train()
    random_states.restore(states)
    once = processes.mesh.once
    all_losses, all_counted = processes.sum(once(float(losses)), once(counted))
    loss = all_losses / max(all_counted, 1.0)
    return EvaluationRecord(
        step=step,
        split=split,
        loss=loss,
        perplexity=perplexity(loss),
        tokens=round(all_counted),
        seconds=time.perf_counter() - begun,
    )

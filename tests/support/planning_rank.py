"""One of two data-parallel ranks: `planning_rank.py FOLDER RANK` writes the memory of engines in bytes per parameter.

For each precision, ZeRO stage and number of micro-batches, FOLDER/0.json gets the memory between two steps, before the
last micro-batch, and before the step.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SMALL = dict.fromkeys(
    ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), 10
) | {"stage3_param_persistence_threshold": 0}  # fmt: skip


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])

    from memory_measurement import reached
    from tiny_runs import VOCABULARY, tiny_config

    from megatron.distributed.launcher_environment import RankInfo
    from megatron.distributed.mesh import ParallelSizes
    from megatron.distributed.process_groups import init_distributed
    from megatron.model.build import build_model
    from megatron.training.engine import Engine

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    processes = init_distributed(RankInfo(rank, 2), ParallelSizes(data=2), device="cpu", backend="gloo")
    batch = {name: torch.zeros(1, 16, dtype=torch.int64) for name in ("tokens", "labels")}
    batch["loss_mask"] = torch.ones(1, 16)

    # Collecting an engine during an import raised a KeyError in Python's import lock, so engines are collected between
    # cases.
    gc.disable()

    def measured(precision: str, stage: int, steps: int, algorithm: str) -> dict[str, float]:
        config = tiny_config(
            Path(), pos_emb="rotary", hidden_size=128, zero_optimization={"stage": stage, **SMALL},
            precision=precision, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=steps,
            train_batch_size=2 * steps, num_gpus=2, optimizer={"type": algorithm},
        )  # fmt: skip
        gc.collect()
        sums = {}
        model = build_model(config.model, config.position, VOCABULARY, seed=1, groups=processes)
        parameters = model.num_parameters()
        engine = Engine(config, model, processes)
        model.train()

        def note(when: str) -> None:
            sums[when] = (
                reached(list(model.parameters()), engine.deepspeed.optimizer, engine.inner_optimizer.state) / parameters
            )

        engine.forward_backward([batch] * steps, 32 * steps)
        engine.step(1e-3)
        note("between")
        engine.forward_backward(
            [batch] * steps, 32 * steps, progress=lambda done: note("accumulating") if done else None
        )
        note("before the step")
        engine.step(1e-3)
        return sums

    cases: list[tuple[Any, ...]] = [
        *((p, stage, steps, "AdamW") for p in ("fp32", "bf16") for stage in range(4) for steps in (1, 2)),
        *((p, stage, 1, "Muon") for p in ("fp32", "bf16") for stage in range(3)),
        *(("bf16", stage, 1, "Lion") for stage in (0, 3)),
    ]
    found = {" ".join(map(str, case)): measured(*case) for case in cases}
    if rank == 0:
        (folder / "0.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

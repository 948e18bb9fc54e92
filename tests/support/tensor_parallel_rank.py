"""One of two tensor-parallel ranks: `tensor_parallel_rank.py FOLDER RANK` writes losses and gradients.

FOLDER/cases.pt lists the models. For each, FOLDER/RANK.pt gets the losses and every parameter's gradient with its
sharding (dimension and stride; None if replicated).
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])

    from tensor_parallel_cases import gradients

    from megatron.distributed.launcher_environment import RankInfo
    from megatron.distributed.mesh import ParallelSizes
    from megatron.distributed.process_groups import init_distributed
    from megatron.utils.errors import UserError

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    processes = init_distributed(RankInfo(rank, 2), ParallelSizes(tensor=2), device="cpu", backend="gloo")
    results = {}
    for name, case in torch.load(folder / "cases.pt", weights_only=True).items():
        try:
            results[name] = gradients(processes, **case)
        except UserError as error:
            results[name] = str(error)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

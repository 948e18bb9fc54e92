"""One of four ranks that form one mesh after another: `mesh_rank.py FOLDER RANK` writes its results for each."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MESHES = [{"data": 4}, {"tensor": 2, "data": 2}, {"context": 2, "data": 2}, {"tensor": 2, "pipeline": 2}]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])

    from megatron.distributed.launcher_environment import RankInfo
    from megatron.distributed.mesh import ParallelSizes
    from megatron.distributed.process_groups import build_single_process_groups, init_distributed
    from megatron.distributed.process_groups import parallel_state as core
    from megatron.utils.errors import RunError

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=rank, world_size=4)
    found = []
    for sizes in MESHES:
        processes = init_distributed(RankInfo(rank, 4), ParallelSizes(**sizes), device="cpu", backend="gloo")
        mesh = processes.mesh
        names = ("tensor", "context", "data", "pipeline", "context data", "tensor pipeline")
        groups = {name: processes.group(*name.split()) for name in names}
        try:
            build_single_process_groups()
            refused = ""
        except RunError as error:
            refused = str(error)
        found.append(
            {
                "groups": {
                    name: [list(mesh.list_members(*name.split())), dist.get_process_group_ranks(group)]
                    for name, group in groups.items()
                },
                "whole": processes.all_reduce_sum(2**53 + 1, rank),
                "parts": processes.all_reduce_sum(0.25, float(rank)),
                "once": processes.all_reduce_sum(mesh.count_on_one_rank(10**mesh.dp_cp.index)),
                "max": processes.all_reduce_max(-1.5 * rank),
                "gather": processes.gather_objects([rank, mesh.data.index]),
                "agree": [
                    processes.find_first_error(None),
                    processes.find_first_error(f"error of {rank}" if rank > 1 else None),
                ],
                "alone": refused,
            }
        )
        core.destroy_model_parallel()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One of four ranks that meet as one mesh after the other: `mesh_rank.py FOLDER RANK` writes what it found of each."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MESHES = [{"data": 4}, {"tensor": 2, "data": 2}, {"context": 2, "data": 2}, {"tensor": 2, "pipeline": 2}]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])

    from megatron.distributed.megatron_core import parallel_state as core
    from megatron.distributed.mesh import Sizes
    from megatron.distributed.place import Place
    from megatron.distributed.processes import alone, join
    from megatron.errors import RunError

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=rank, world_size=4)
    found = []
    for sizes in MESHES:
        processes = join(Place(rank, 4), Sizes(**sizes), device="cpu", backend="gloo")
        mesh = processes.mesh
        names = ("tensor", "context", "data", "pipeline", "context data", "tensor pipeline")
        groups = {name: processes.group(*name.split()) for name in names}
        try:
            alone()
            refused = ""
        except RunError as error:
            refused = str(error)
        found.append(
            {
                "groups": {
                    name: [list(mesh.members(*name.split())), dist.get_process_group_ranks(group)]
                    for name, group in groups.items()
                },
                "whole": processes.sum(2**53 + 1, rank),
                "parts": processes.sum(0.25, float(rank)),
                "once": processes.sum(mesh.once(10**mesh.batch.index)),
                "max": processes.max(-1.5 * rank),
                "gather": processes.gather([rank, mesh.data.index]),
                "agree": [processes.agree(None), processes.agree(f"error of {rank}" if rank > 1 else None)],
                "alone": refused,
            }
        )
        core.destroy_model_parallel()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of a run of several: `train_rank.py JOB RANK WORLD` trains JOB/*.yml one after another.

A run that fails writes its error to JOB/NAME.RANK.error, and the next starts; the others write their exit code to
JOB/NAME.RANK.code.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    job, rank, world = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1")

    import torch.distributed as dist

    from megatron.config.load import read_config
    from megatron.distributed.process_groups import parallel_state
    from megatron.training.train import train
    from megatron.utils.errors import FarfieldError

    for file in sorted(job.glob("*.yml")):
        # The next run may use another mesh. Process groups are destroyed because each keeps threads.
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        store = dist.FileStore(str(job / f"{file.stem}.store"), int(world))
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
        try:
            code = train(read_config(file)).exit_code
            (job / f"{file.stem}.{rank}.code").write_text(str(code), encoding="utf-8")
        except FarfieldError as error:
            (job / f"{file.stem}.{rank}.error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Keys that decide where the processes run."""

from typing import Literal

from megatron.options import Section, key


class LaunchOptions(Section):
    """Processes and devices of one machine."""

    num_gpus: int | None = key(
        None, "processes on this machine; all GPUs, or one process on CPU, if absent", ge=1, le=1024, role="machine"
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto is cuda where there is one", role="machine")
    master_port: int | None = key(None, "port of the rendezvous; a free one if absent", ge=1, le=65535, role="machine")
    distributed_backend: Literal["auto", "nccl", "gloo"] = key("auto", "nccl on GPUs, gloo on CPU", role="machine")
    model_parallel_size: Literal[1] = key(
        1, "tensor parallelism; more than 1 is not supported yet, use ZeRO", role="machine"
    )
    pipe_parallel_size: Literal[0, 1] = key(
        1, "pipeline parallelism; more than 1 is not supported yet, use ZeRO", role="machine"
    )

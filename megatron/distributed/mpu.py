"""The mesh as DeepSpeed asks for it: a "model parallel unit", an object with these nine functions.

To DeepSpeed, ranks that divide the tokens of a batch (data and context) are data-parallel, and those that hold parts of
one model (tensor and pipeline) are model-parallel. A function of sequence parallelism must not be here: its presence
changes what DeepSpeed does.
"""

import torch.distributed as dist

from megatron.distributed.processes import Processes


class ModelParallelUnit:
    """`mpu` of `deepspeed.initialize`."""

    def __init__(self, processes: Processes) -> None:
        self._mesh = processes.mesh
        self._data = processes.group("context", "data")
        self._model = processes.group("tensor", "pipeline")
        self._tensor = processes.group("tensor")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.batch.size

    def get_data_parallel_rank(self) -> int:
        return self._mesh.batch.index

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return self._model.size()

    def get_model_parallel_rank(self) -> int:
        return self._model.rank()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.tensor.size

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.tensor.index

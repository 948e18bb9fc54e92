"""The mesh as DeepSpeed asks for it: a "model parallel unit", an object with these nine functions.

To DeepSpeed, ranks that divide the tokens of a batch (data and context) are data-parallel, and those that hold parts of
one model (tensor and pipeline) are model-parallel. A function of sequence parallelism must not be here: its presence
changes what DeepSpeed does.
"""

import torch.distributed as dist

from megatron.distributed.process_groups import ProcessGroups


class ModelParallelUnit:
    """`mpu` of `deepspeed.initialize`."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._mesh = groups.mesh
        self._data = groups.group("context", "data")
        self._model = groups.group("tensor", "pipeline")
        self._tensor = groups.group("tensor")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp_cp.size

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp_cp.index

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

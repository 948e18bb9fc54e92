"""Reading DeepSpeed's own files of a checkpoint (legacy.py) without running code from them.

DeepSpeed reads its files with an unrestricted pickle, which runs whatever code a file contains. They hold nothing but
tensors, numbers, text and a few of DeepSpeed's own plain classes, so here they are read with `weights_only`, those
classes allowed by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from megatron.checkpoint import tensor_files
from megatron.checkpoint.stored_config import migrate_weight_name


def _list_safe_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


class SafeTorchCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's file layer, for reading. Weights get today's names.

    Args:
        written: the format of the checkpoint.
    """

    def __init__(self, written: int) -> None:
        super().__init__()
        self.written = written

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        states = tensor_files.read_torch_file(path, classes=_list_safe_classes(), map_location=map_location)
        return self._migrate_names(states)

    def _migrate_names(self, states: Any) -> Any:
        """The same with today's names of weights, wherever they are keys or stand in a list."""
        if isinstance(states, dict):
            migrated = {self._migrate_names(key): self._migrate_names(value) for key, value in states.items()}
            states.clear()  # in place: torch's dictionaries of weights have attributes
            states.update(migrated)
            return states
        if type(states) in (list, tuple, set):
            return type(states)(self._migrate_names(value) for value in states)
        return migrate_weight_name(states, self.written) if isinstance(states, str) else states


@contextmanager
def use_safe_loading(engine: Any, written: int) -> Iterator[None]:
    """Let a DeepSpeed engine use `SafeTorchCheckpointEngine` inside the block, for a checkpoint of a format."""
    usual, engine.checkpoint_engine = engine.checkpoint_engine, SafeTorchCheckpointEngine(written)
    try:
        yield
    finally:
        engine.checkpoint_engine = usual

"""Safe reading of DeepSpeed's checkpoint files (see legacy.py).

DeepSpeed reads its files with an unrestricted pickle, which runs any code a file contains. The files consist of
tensors, numbers, text and a few plain DeepSpeed classes. This module therefore reads them with `weights_only` and
allows those classes by name.
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
    """Read-only checkpoint engine for DeepSpeed.

    It migrates weights to their current names.

    Args:
        written: format version of the checkpoint.
    """

    def __init__(self, written: int) -> None:
        super().__init__()
        self.written = written

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        states = tensor_files.read_torch_file(path, classes=_list_safe_classes(), map_location=map_location)
        return self._migrate_names(states)

    def _migrate_names(self, states: Any) -> Any:
        """Return the states with current weight names, both in dictionary keys and in lists."""
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
    """Make a DeepSpeed engine use `SafeTorchCheckpointEngine` in the block, for a checkpoint of the given format."""
    usual, engine.checkpoint_engine = engine.checkpoint_engine, SafeTorchCheckpointEngine(written)
    try:
        yield
    finally:
        engine.checkpoint_engine = usual

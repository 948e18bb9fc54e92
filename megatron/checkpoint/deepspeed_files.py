"""How DeepSpeed's own checkpoint files are written and read: safely, and without leaving a rank behind.

DeepSpeed reads its files with an unrestricted pickle, which runs whatever code a file contains. They hold nothing but
tensors, numbers, text and a few of DeepSpeed's own plain classes, so here they are read with `weights_only`, those
classes allowed by name.

DeepSpeed ends a save with a barrier. A rank whose disk is full would leave by an exception and let the others wait for
ever; here it notes the error and goes on to the barrier, and `save.py` asks all ranks afterwards.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from megatron.checkpoint import tensor_files
from megatron.errors import reason


def _plain_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


class SafeFiles(TorchCheckpointEngine):
    """DeepSpeed's file layer. `error` is the first thing that went wrong while saving."""

    def __init__(self) -> None:
        super().__init__()
        self.error: str | None = None
        self.paths: list[Path] = []
        """Files that this process wrote."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with self._noting():
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        with self._noting(), open(path, "wb") as file:
            torch.save(state_dict, file)
        self.paths.append(Path(path))

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        return tensor_files.read(path, classes=_plain_classes(), map_location=map_location)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, pickle.PicklingError) as error:
            self.error = self.error or reason(error)


@contextmanager
def safe_files(engine: Any) -> Iterator[SafeFiles]:
    """Let a DeepSpeed engine use `SafeFiles` inside the block."""
    files = SafeFiles()
    usual, engine.checkpoint_engine = engine.checkpoint_engine, files
    # The script that it copies beside its files, unguarded, makes full weights of them: model.safetensors has those.
    script, engine._copy_recovery_script = engine._copy_recovery_script, lambda path: None
    try:
        yield files
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = usual, script

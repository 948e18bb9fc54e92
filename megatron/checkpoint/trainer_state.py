"""`progress.json`: progress of a run at a checkpoint, and the settings that resuming must match."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.layout import PROGRESS
from megatron.config.method_names import compute_user_method_digests
from megatron.config.schema import Config
from megatron.distributed.mesh import ParallelSizes
from megatron.options.position import PositionOptions
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, describe_cause


class Stateful(Protocol):
    """Component of the training loop that owns some fields of `TrainerState`.

    The protocol matches torch.distributed.checkpoint.stateful, which cannot be imported without torch.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current values of the component's fields. All ranks must call this."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the component's fields from a checkpoint and ignore others."""


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run: the fields of all components of the training loop."""

    step: int = 0
    """Optimizer steps taken, including skipped ones."""
    train_samples: int = 0
    """Number of samples for which the order of the training data was built; unchanged when a run is extended."""
    consumed_samples: int = 0
    """Training sequences read so far; the data resume at this index."""
    consumed_tokens: int = 0
    interval_loss: float = 0.0
    """Sum of the losses not reported yet, so that the next report matches that of an uninterrupted run."""
    interval_steps: int = 0
    interval_z_loss: float | None = None
    """Sum of the z-losses of the same steps, or None without z-loss."""
    vocabulary: dict[str, Any] | None = None
    """`size` and `name` of the tokenizer; with document masking also `eod`, the end-of-document token."""
    world: int = 1
    """Number of processes that wrote the checkpoint."""
    tensor: int = 1
    """Tensor-parallel size."""
    context: int = 1
    """Context-parallel size."""
    pipeline: int = 1
    """Pipeline-parallel size."""
    zero_stage: int = 0
    precision: str = "fp32"
    method_digests: dict[str, str] | None = None
    """Code digests of methods defined outside the project (`catalog.compute_method_digests`)."""
    data_digests: dict[str, str] | None = None
    """Digests of the training datasets by prefix (`indexed_dataset.compute_dataset_digest`)."""
    directory: str | None = None
    """Working directory of the training, to which relative paths in its configuration refer."""
    origin: str | None = None
    """Digest and step of the training that produced the initial weights, if any. Kept when resuming."""
    data_order: dict[str, Any] | None = None
    """Order of the text in the current stage (`megatron.data.stage_order.StageOrder`); None without stages."""
    rollbacks: int = 0
    """Number of automatic rollbacks after a loss spike."""
    skipped_samples: int = 0
    """Consumed samples that these rollbacks skipped, on which no weight was trained."""
    usual_loss: float | None = None
    """Running mean of the loss that spikes are compared with (`LossGuard`), or None before there is one."""
    counts: dict[str, Any] | None = None
    """Counters of the engine (`EngineCounters`); None in formats whose engine states contain them."""

    @property
    def sizes(self) -> ParallelSizes:
        """Parallel layout that wrote the checkpoint."""
        return ParallelSizes.from_world_size(
            self.world, tensor=self.tensor, context=self.context, pipeline=self.pipeline
        )

    def find_changed_methods(self, position: PositionOptions) -> list[str]:
        """Return the files of methods outside the project whose code has changed since this checkpoint.

        position: position options of the model built from it.

        Raises UserError if a method's file is missing.
        """
        now = compute_user_method_digests(position)
        return [file for file, digest in (self.method_digests or {}).items() if now.get(file, digest) != digest]

    def compute_training_digest(self, config: Config) -> str:
        """Return a hash of how a checkpoint was trained, without its seed and number of steps.

        It covers the keys that affect training, the code of methods outside the project, the tokenizer, the initial
        weights, and the working directory if data paths are relative.

        config: the configuration stored in the checkpoint.
        """
        corpora = (config.data.data_path, config.data.train_data_paths)
        has_relative_paths = any(not os.path.isabs(path) for path in _flatten(corpora))
        digest = config.compute_training_digest(
            origin=self.origin,
            methods=sorted(self.method_digests.values()) if self.method_digests else None,
            tokenizer=(self.vocabulary or {}).get("name"),
            directory=self.directory if has_relative_paths else None,
        )
        return digest[:16]

    def collect(self, *parts: Stateful) -> "TrainerState":
        """Return this state updated with the current fields of all components. All ranks must call this."""
        return replace(self, **{name: value for part in parts for name, value in part.state_dict().items()})

    def restore(self, *parts: Stateful) -> None:
        """Restore the components of the training loop from this state."""
        for part in parts:
            part.load_state_dict(asdict(self))

    def write(self, folder: Path) -> None:
        """Write `progress.json` into a checkpoint."""
        (folder / PROGRESS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "TrainerState":
        """Read a checkpoint's `progress.json`. Raises RunError if it is missing or damaged."""
        path = Path(folder) / PROGRESS
        try:
            values = parse_json(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            known = {field.name for field in fields(TrainerState)}
            progress = TrainerState(**{key: value for key, value in values.items() if key in known})
            if not all(isinstance(n, int) for n in (progress.step, progress.train_samples, progress.consumed_samples)):
                raise ValueError("its counts are not integers")
            if not isinstance(progress.directory, str | None):
                raise ValueError("its directory is not a string")
            _ = progress.sizes  # raises for an invalid layout
        except OSError as error:
            raise RunError(f"{path}: cannot be read ({describe_cause(error)})") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise RunError(f"{path}: not a checkpoint's progress ({error})") from None
        return progress


def _flatten(paths: Any) -> Iterator[str]:
    if isinstance(paths, str):
        yield paths
    else:
        for part in paths or ():
            yield from _flatten(part)

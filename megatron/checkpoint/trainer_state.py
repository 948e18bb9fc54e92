"""`progress.json`: how far a run was at a checkpoint, and what resuming must agree with."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.layout import PROGRESS
from megatron.config.method_names import compute_own_method_digests
from megatron.config.schema import Config
from megatron.distributed.mesh import ParallelSizes
from megatron.options.position import PositionOptions
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, describe_cause


class Stateful(Protocol):
    """A part of a training that owns some fields of `TrainerState`.

    The protocol is that of torch.distributed.checkpoint.stateful, which cannot be imported without torch.
    """

    def state_dict(self) -> dict[str, Any]:
        """Its fields as they are now. All ranks must call this."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from fields of a checkpoint; those of other parts are passed over."""


@dataclass(frozen=True)
class TrainerState:
    """How far a run is: the fields of all parts of a training."""

    step: int = 0
    """Optimizer steps taken, skipped ones included."""
    train_samples: int = 0
    """The number of samples that the order of the training data was built for; it stays when a run is extended."""
    consumed_samples: int = 0
    """Training sequences read so far: the data go on at this one."""
    consumed_tokens: int = 0
    interval_loss: float = 0.0
    """Sum of the losses of the steps that were not reported yet, so that the next report is that of an unbroken run."""
    interval_steps: int = 0
    interval_z_loss: float | None = None
    """Sum of the z-losses of the same steps; None without any."""
    vocabulary: dict[str, Any] | None = None
    """`size` and `name` of the tokenizer; with documents kept apart also `eod`, the token that ends one."""
    world: int = 1
    """Processes that wrote the checkpoint."""
    tensor: int = 1
    """Of them, those that shared each layer."""
    context: int = 1
    """Of them, those that shared each sequence."""
    pipeline: int = 1
    """Of them, those that held different layers."""
    zero_stage: int = 0
    precision: str = "fp32"
    method_digests: dict[str, str] | None = None
    """Digests of the code of methods that lie outside the project (`catalog.compute_method_digests`)."""
    directory: str | None = None
    """Where it was trained: what relative paths of its configuration are relative to."""
    origin: str | None = None
    """Digest and step of the training that the initial weights come from, if any. Resuming keeps it."""
    data_order: dict[str, Any] | None = None
    """How the stage that it was in reads the text (`megatron.data.stage_order.StageOrder`); None without stages."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint because of its loss."""
    skipped_samples: int = 0
    """Of the consumed samples, those that such a rollback stepped over: no weight has seen them."""
    usual_loss: float | None = None
    """The running mean that a spike is compared with (`LossGuard`); None before there is one."""
    counts: dict[str, Any] | None = None
    """What the engine counts (`EngineCounters`); None in formats whose engine states say so themselves."""

    @property
    def sizes(self) -> ParallelSizes:
        """The layout that wrote the checkpoint."""
        return ParallelSizes.from_world_size(
            self.world, tensor=self.tensor, context=self.context, pipeline=self.pipeline
        )

    def find_changed_methods(self, position: PositionOptions) -> list[str]:
        """The files of methods outside the project whose code is another one now than at this checkpoint.

        position: of the model that is built from it.

        Raises UserError: a method's file is not there.
        """
        now = compute_own_method_digests(position)
        return [file for file, digest in (self.method_digests or {}).items() if now.get(file, digest) != digest]

    def compute_training_digest(self, config: Config) -> str:
        """Return a hash of how a checkpoint was trained, but for its seed and number of steps.

        It covers the keys that decide what is trained, the code of methods from outside the project, the tokenizer, the
        weights that training began with, and the folder that relative paths of the data start from.

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
        """This state with what the parts of a training have of it now. All ranks must call this."""
        return replace(self, **{name: value for part in parts for name, value in part.state_dict().items()})

    def restore(self, *parts: Stateful) -> None:
        """Let the parts of a training go on from this state."""
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
                raise ValueError("it is no object")
            known = {field.name for field in fields(TrainerState)}
            progress = TrainerState(**{key: value for key, value in values.items() if key in known})
            if not all(isinstance(n, int) for n in (progress.step, progress.train_samples, progress.consumed_samples)):
                raise ValueError("its counts are not whole numbers")
            if not isinstance(progress.directory, str | None):
                raise ValueError("its directory is not text")
            _ = progress.sizes  # a layout that cannot be
        except OSError as error:
            raise RunError(f"{path}: cannot be read ({describe_cause(error)})") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise RunError(f"{path}: not the progress of a checkpoint ({error})") from None
        return progress


def _flatten(paths: Any) -> Iterator[str]:
    """Yield the paths of nested lists."""
    if isinstance(paths, str):
        yield paths
    else:
        for part in paths or ():
            yield from _flatten(part)

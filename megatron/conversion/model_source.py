"""Source of an import, independent of its file format."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from megatron.config.schema import Config, describe_validation_error
from megatron.config.validation import validate_config
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class WeightReader(Protocol):
    """Reader of a source's weights by our names."""

    num_embeddings: int
    """Number of rows of the embedding."""

    def check_names(self, names: list[str]) -> None:
        """Check that the source contains exactly these weights. Raises RunError."""

    def __call__(self, name: str) -> "Tensor":
        """Return one of our weights in its stored type. Raises RunError if a file is damaged."""


@dataclass(frozen=True)
class ModelSource:
    """Model from another project: its configuration has been read, its weights have not."""

    path: Path
    format_name: str
    """Name of the format."""
    config_keys: dict[str, Any]
    """Our keys of model and position, except for vocabulary padding."""
    open_weights: Callable[[Config], AbstractContextManager[WeightReader]]
    """Opens the weights; the configuration built from the keys determines their names."""
    tokenizer_folder: Path | None = None
    """Folder to search for tokenizer files."""
    notes: tuple[str, ...] = field(default=())
    """Notes for the user."""

    def build_config(self, **overrides: Any) -> Config:
        """Build the configuration of a run.

        Raises UserError if the model is not supported.
        """
        try:
            config = Config.from_flat({**self.config_keys, **overrides})
        except ValidationError as error:
            raise UserError(f"{self.path}: {next(describe_validation_error(error, lambda _: None))}") from None
        for _, problem in validate_config(config):
            raise UserError(f"{self.path}: {problem}")
        return config

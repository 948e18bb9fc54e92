"""What an import is made of, whatever the files are."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from megatron.config.schema import Config
from megatron.config.validation import validate_config
from megatron.config.validation_errors import describe_validation_error
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class WeightReader(Protocol):
    """The weights of a source, by our names."""

    num_embeddings: int
    """Of the embedding."""

    def check_names(self, names: list[str]) -> None:
        """See that there is everything for these weights of ours, and nothing else. Raises RunError."""

    def __call__(self, name: str) -> "Tensor":
        """A weight of ours, in the type that it was stored in. Raises RunError: a file is damaged."""


@dataclass(frozen=True)
class ModelSource:
    """A model from elsewhere, its configuration read and its weights not."""

    path: Path
    format_name: str
    """What it is, in a word."""
    config_keys: dict[str, Any]
    """Our keys of model and position, but for the padding of the vocabulary."""
    open_weights: Callable[[Config], AbstractContextManager[WeightReader]]
    """Its weights, of which the configuration that was made of the keys says the names."""
    tokenizer_folder: Path | None = None
    """The folder where its tokenizer's files are looked for."""
    notes: tuple[str, ...] = field(default=())
    """Lines worth telling."""

    def build_config(self, **overrides: Any) -> Config:
        """The configuration of a run.

        Raises UserError: it cannot be one of ours.
        """
        try:
            config = Config.from_flat({**self.config_keys, **overrides})
        except ValidationError as error:
            raise UserError(f"{self.path}: {next(describe_validation_error(error, lambda _: None))}") from None
        for _, problem in validate_config(config):
            raise UserError(f"{self.path}: {problem}")
        return config

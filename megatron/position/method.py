"""What encodings and processors have in common: they describe themselves, and their options are read off their code."""

import inspect
from typing import ClassVar

from torch import nn

from .forms import KernelParameters
from .shape import AttentionDims

MODEL_ARGUMENTS = ("self", "dims", "has_bias")
"""Constructor arguments that the model gives; all others are options."""
INITIALIZATION_SUFFIXES = ("_start", "_below", "_init")
"""How the names of options end that say where parameters start. `std`, of a normal distribution, is one too."""


class PositionModule(nn.Module):
    """Base of encodings and processors.

    A constructor takes the `AttentionDims` and then the options as keyword arguments with defaults; it raises
    ValueError for a value that makes no sense.
    """

    formula: ClassVar[str]
    """The definition in one line of plain text."""
    parameters_summary: ClassVar[str] = "none"
    """Learned parameters, start values and bounds, in one line."""
    source: ClassVar[str]
    """Where the definition comes from: paper and equation or section."""
    advice: ClassVar[str]
    """When to use it, in one to three sentences, and who found so."""

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__()
        self.dims = dims

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Names, types and defaults of the options: the keys of `pos_emb_options` or `score_processor_options`."""
        parameters = inspect.signature(cls.__init__).parameters
        return {name: parameter for name, parameter in parameters.items() if name not in MODEL_ARGUMENTS}

    @classmethod
    def initialization_options(cls) -> set[str]:
        """Options that say where parameters start, on which a trained model no longer depends."""
        return {name for name in cls.options() if name == "std" or name.endswith(INITIALIZATION_SUFFIXES)}

    def kernel_parameters(self) -> KernelParameters | None:
        """Its parameters in a form that kernels fuse; None if only its code says what it computes."""
        return None

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        """What it does and which laws it obeys, in single words or short phrases."""
        raise NotImplementedError

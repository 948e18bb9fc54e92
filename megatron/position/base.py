"""What encodings and processors have in common: they describe themselves, and their options are read off their code."""

import inspect
from typing import Any, ClassVar, Self

from torch import nn

from megatron.position.facts import MODEL_ARGUMENTS, AttentionDims, EncodingCost, MethodOptions, ProcessorCost
from megatron.position.kernel_parameters import KernelParameters

INITIALIZATION_SUFFIXES = ("_start", "_below", "_init")
"""How the names of options end that say where parameters start. `std`, of a normal distribution, is one too."""


class OptionError(ValueError):
    """A value that an option of a method cannot take.

    Args:
        option: its name.
        problem: what is wrong, as a clause that follows the name: "is 0; it must be at least 1".
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(option, problem)
        self.option, self.problem = option, problem
        self.method: str | None = None
        """The name of the method, which the registry knows."""

    def __str__(self) -> str:
        method = "" if self.method is None else f" of {self.method}"
        return f"option {self.option}{method} {self.problem}"


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
    other_names: ClassVar[tuple[str, ...]] = ()
    """What papers and people call it besides."""
    cost: ClassVar[EncodingCost | ProcessorCost | None] = None
    """Parameters, memory and FLOPs, which planning reads without torch (`facts.py`); None if they are not declared."""

    option_values: MethodOptions
    """All options that this module was built with."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        module = super().__new__(cls)
        defaults = {name: parameter.default for name, parameter in cls.options().items()}
        values = {name: options.get(name, default) for name, default in defaults.items()}
        object.__setattr__(module, "option_values", values)  # before torch's own attributes are there
        return module

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

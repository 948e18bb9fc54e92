"""What encodings, processors and temperatures have in common: they describe themselves, and options
are read off their code."""

import inspect
from typing import Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor, nn

from megatron.position.facts import (
    MODEL_ARGUMENTS,
    AttentionDims,
    EncodingCost,
    MethodOptions,
    ProcessorCost,
    TemperatureCost,
)

INITIALIZATION_SUFFIXES = ("_start", "_below", "_init")
"""How the names of options end that say where parameters start. `std`, of a normal distribution, is one too."""


class FireParameters(NamedTuple):
    """A bias f(log(1 + c·n) / (log(1 + c·max(L, i)) + 1e-6)), L = multiplier · half_length, f a network 1 → W → H with
    ReLU. All tensors are float32."""

    c: Tensor
    """[1]."""
    multiplier: Tensor
    """[1]."""
    weight1: Tensor
    """[W, 1]."""
    bias1: Tensor
    """[W]."""
    weight2: Tensor
    """[H, W]."""
    bias2: Tensor
    """[H]."""
    half_length: float


class ConvolutionParameters(NamedTuple):
    """A processor that is S + B + Conv2(LeakyReLU(Conv1([S, B]))) along the keys."""

    weight1: Tensor
    """[W, 2H, 1, k], scores first; [W, H, 1, k] without a bias."""
    bias1: Tensor
    """[W]."""
    weight2: Tensor
    """[H, W, 1, k]."""
    bias2: Tensor
    """[H]."""
    residual_bias: bool
    """Is B added at the end?"""


KernelParameters = FireParameters | ConvolutionParameters
"""Forms of encodings and processors that kernels fuse. A new one is a class here and a `KernelChoice` of the backend.

What a method computes is in its code, and that is what backends in plain PyTorch run. A kernel cannot run it, so a
method that has one of these forms hands its parameters over as a value (`PositionModule.kernel_parameters`).
"""


class PositionModule(nn.Module):
    """Base of encodings, processors and temperatures.

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
    cost: ClassVar[EncodingCost | ProcessorCost | TemperatureCost | None] = None
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
        """Names, types and defaults of the options: the keys of `pos_emb_options`, `score_processor_options`
        or `attention_temperature_options`."""
        parameters = inspect.signature(cls.__init__).parameters
        return {name: parameter for name, parameter in parameters.items() if name not in MODEL_ARGUMENTS}

    @classmethod
    def initialization_options(cls) -> set[str]:
        """Options that say where parameters start, on which a trained model no longer depends."""
        return {name for name in cls.options() if name == "std" or name.endswith(INITIALIZATION_SUFFIXES)}

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        """Weights whose fan-in grows with the model, and with what: they sum over all hidden units or all heads, so muP
        scales their start values and rates (`megatron/model/mup.py`)."""
        return []

    def list_decayed(self) -> list[nn.Parameter]:
        """Weights of an encoding or a temperature that weight decay acts on: projections, as any of a layer. Those of a
        processor are decayed as a layer's are, matrices alone."""
        return []

    def list_biases(self) -> list[nn.Parameter]:
        """Return biases of linear layers, which `decay_positions` leaves without weight decay as GPT-NeoX does."""
        return [parameter for name, parameter in self.named_parameters() if name.endswith(".bias")]

    def kernel_parameters(self) -> KernelParameters | None:
        """Its parameters in a form that kernels fuse; None if only its code says what it computes."""
        return None

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        """What it does and which laws it obeys, in single words or short phrases."""
        raise NotImplementedError

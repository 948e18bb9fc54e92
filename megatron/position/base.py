"""Common base class of encodings, processors and temperatures, with their descriptions and constructor options."""

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
"""Suffixes of options that set start values of parameters. The option `std` of a normal distribution is one too."""


class FireParameters(NamedTuple):
    """Bias f(log(1 + c·n) / (log(1 + c·max(L, i)) + 1e-6)) with L = multiplier · half_length.

    f is a network 1 → W → H with ReLU. All tensors are float32.
    """

    c: Tensor
    """Rate c of the logarithm, [1]."""
    multiplier: Tensor
    """Multiplier of the threshold L, [1]."""
    weight1: Tensor
    """Weight of the first layer of f, [W, 1]."""
    bias1: Tensor
    """Bias of the first layer of f, [W]."""
    weight2: Tensor
    """Weight of the second layer of f, [H, W]."""
    bias2: Tensor
    """Bias of the second layer of f, [H]."""
    half_length: float
    """Half of the training length, in tokens."""


class ConvolutionParameters(NamedTuple):
    """Processor S + B + Conv2(LeakyReLU(Conv1([S, B]))), with convolutions along the keys."""

    weight1: Tensor
    """Weight of Conv1, [W, 2H, 1, k] with the channels of the scores first; [W, H, 1, k] if there is no bias B."""
    bias1: Tensor
    """Constant of Conv1, [W]."""
    weight2: Tensor
    """Weight of Conv2, [H, W, 1, k]."""
    bias2: Tensor
    """Constant of Conv2, [H]."""
    residual_bias: bool
    """True if B is added to the result."""
    is_linear: bool = False
    """True without LeakyReLU between the convolutions."""
    bias_map: Tensor | None = None
    """Map between the heads that is applied to B first, as its difference from the identity, [H, H]; or None."""
    head_map: Tensor | None = None
    """Map between the heads of the weights after the softmax, as its difference from the identity, [H, H]; or None."""


KernelParameters = FireParameters | ConvolutionParameters
"""Forms of encodings and processors that kernels can fuse. Each form needs a class here and a `KernelChoice` in the
backend.

Backends in plain PyTorch run the method's own code. A kernel cannot, so a method of one of these forms returns its
parameters from `PositionModule.kernel_parameters`.
"""


class PositionModule(nn.Module):
    """Base of encodings, processors and temperatures.

    A constructor takes the `AttentionDims`, then the options as keyword arguments with defaults. It raises ValueError
    for an invalid value.
    """

    formula: ClassVar[str]
    """Definition of the method, in one line of plain text."""
    parameters_summary: ClassVar[str] = "none"
    """Learned parameters with start values and bounds, in one line."""
    source: ClassVar[str]
    """Source of the definition: paper and equation or section."""
    advice: ClassVar[str]
    """Advice on when to use the method, in one to three sentences, with sources."""
    other_names: ClassVar[tuple[str, ...]] = ()
    """Other names of the method in papers and code."""
    cost: ClassVar[EncodingCost | ProcessorCost | TemperatureCost | None] = None
    """Parameters, memory and FLOPs, which the planner reads without torch (`facts.py`); None if not declared."""

    option_values: MethodOptions
    """All options of this module, defaults included."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        module = super().__new__(cls)
        defaults = {name: parameter.default for name, parameter in cls.options().items()}
        values = {name: options.get(name, default) for name, default in defaults.items()}
        object.__setattr__(module, "option_values", values)  # torch's own attributes do not exist yet
        return module

    def __init__(self, dims: AttentionDims) -> None:
        super().__init__()
        self.dims = dims

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return names, types and defaults of the options.

        These are the keys of `pos_emb_options`, `score_processor_options` or `attention_temperature_options`.
        """
        parameters = inspect.signature(cls.__init__).parameters
        return {name: parameter for name, parameter in parameters.items() if name not in MODEL_ARGUMENTS}

    @classmethod
    def initialization_options(cls) -> set[str]:
        """Return the options that set start values of parameters. A trained model does not depend on them."""
        return {name for name in cls.options() if name == "std" or name.endswith(INITIALIZATION_SUFFIXES)}

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        """Return weights whose fan-in grows with the hidden size or the number of heads, and which of the two.

        muP scales their start values and learning rates (`megatron/model/mup.py`).
        """
        return []

    def list_weights_initialized_by_fan_in(self) -> list[nn.Parameter]:
        """Return weights whose initial standard deviation is already proportional to 1/√(hidden size).

        They are among `list_growing_fan_ins`. muP does not rescale their initial values.
        """
        return []

    def list_decayed(self) -> list[nn.Parameter]:
        """Return the weights of an encoding or temperature to which weight decay applies: projections.

        In processors, as in layers, weight decay applies to matrices.
        """
        return []

    def list_biases(self) -> list[nn.Parameter]:
        """Return biases of linear layers, which `decay_positions` excludes from weight decay as GPT-NeoX does."""
        return [parameter for name, parameter in self.named_parameters() if name.endswith(".bias")]

    def kernel_parameters(self) -> KernelParameters | None:
        """Return the parameters in a form that kernels can fuse, or None if the method has no such form."""
        return None

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        """Return the properties of the method as single words or short phrases."""
        raise NotImplementedError

"""Forms of encodings and processors that kernels fuse. A new one is a class here and a route in the backend.

What a method computes is in its code, and that is what backends in plain PyTorch run. A kernel cannot run it, so a
method that has one of these forms hands its parameters over as a value (`PositionModule.kernel_parameters`).
"""

from typing import NamedTuple

from torch import Tensor


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

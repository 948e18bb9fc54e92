"""Declarations of a method that are available without torch: its cost, and the sizes that the cost depends on.

Planning a run must not import torch, but encodings are torch modules. So declarations are expressions in the class body
that use only this module and Python's builtins. `catalog.py` evaluates them without importing the file.

H heads, D hidden size, d head dimension, N distances, R rows and C columns of a score matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HOOKS = ("embed", "rotate", "table", "dense", "contextual", "gate")
"""Hooks that an encoding can implement (`encoding.py`)."""
ORDER_FREE_HOOKS = ("embed", "rotate")
"""Hooks that accept positions in any order, and several tokens at one position."""
OVERRIDABLE = (
    *HOOKS,
    "rotate_keys",
    "get_cos_sin",
    "bias_tails",
    "describe_unsupported_length",
    "product_flops",
    "kernel_parameters",
    "traits",
)
"""Functions that an encoding can override. A function with a similar name is treated as misspelled."""
MODEL_ARGUMENTS = ("self", "dims", "has_bias")
"""Constructor arguments that the model passes. All others are options."""

MethodOptions = Mapping[str, Any]
"""All options of a method by name, including defaults."""


@dataclass(frozen=True)
class AttentionDims:
    """Sizes of the attention layer that a method is built for."""

    num_heads: int
    head_dim: int
    hidden_size: int
    train_length: int
    """Length of a training sequence, in tokens."""
    max_length: int
    """Number of rows of an absolute position table."""
    layer: int = 0
    """Index of the layer, from 0, of a processor or a per-layer encoding; 0 for a shared encoding."""


class OptionError(ValueError):
    """Invalid value of a method's option.

    Args:
        option: name of the option.
        problem: clause that follows the name, for example "is 0; it must be at least 1".
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(option, problem)
        self.option, self.problem = option, problem
        self.method: str | None = None
        """Name of the method, set by the registry."""

    def __str__(self) -> str:
        method = "" if self.method is None else f" of {self.method}"
        return f"option {self.option}{method} {self.problem}"


@dataclass(frozen=True)
class EncodingCost:
    """Parameters of an encoding, and memory that autograd saves in addition to what its hooks imply."""

    num_parameters: Callable[[AttentionDims, MethodOptions], int] = lambda dims, options: 0
    num_saved_tables: int = 0
    """Number of float32 tables [H, N] over distances kept for the backward pass, per layer."""
    num_saved_maps: int = 0
    """Number of score matrices [R, C] in the compute type saved per sequence and head."""
    saved_bytes_per_head_score: int = 0
    """Bytes saved per score of each sequence and head."""
    saved_bytes_per_score: Callable[[MethodOptions], int] = lambda options: 0
    """Bytes saved per score, shared by all sequences and heads."""
    num_products: Callable[[MethodOptions, float], float] = lambda options, num_keys: 0.0
    """Products of d-element vectors per token and head in the forward pass, for a token that sees `num_keys` keys.

    These are the products of contextual terms. Bias and weight are computed once for all sequences of a batch and not
    counted.
    """
    num_input_products: Callable[[AttentionDims, MethodOptions], int] = lambda dims, options: 0
    """Scalar products of gates with the layer's input, per token in the forward pass."""
    qk_width: int = 1
    """Elements of a rotated query or key per dimension of the head."""
    num_rotations: Callable[[MethodOptions], int] = lambda options: 1
    """Number of rotations: 2 if queries and keys are rotated again for far keys (`Encoding.far_distance`), else 1."""
    has_cos_sin: Callable[[MethodOptions], bool] = lambda options: False
    """True if compiled regions can rotate queries and keys (`Encoding.get_cos_sin` does not return None)."""
    num_rotation_tables: Callable[[MethodOptions], int] = lambda options: 0
    """Number of float32 rotation tables [H, T, d] kept for the backward pass, per layer, shared by all sequences."""
    promotes_keys: bool = False
    """True if each block of query rows saves its keys in float32, in addition to the keys of all rows."""
    keeps_unrotated: bool = False
    """True if the rotation saves its input queries and keys for the backward pass."""

    def count_qk_numbers(self, options: MethodOptions) -> int:
        """Return the elements of a rotated query or key per dimension of the head, all rotations together."""
        return self.qk_width * self.num_rotations(options)


@dataclass(frozen=True)
class TemperatureCost:
    """Parameters of an attention temperature, per layer."""

    num_parameters: Callable[[AttentionDims, MethodOptions], int] = lambda dims, options: 0


@dataclass(frozen=True)
class ProcessorCost:
    """Parameters of a processor per layer, and its compute and autograd memory per score."""

    num_parameters: Callable[[AttentionDims, MethodOptions, bool], int] = lambda dims, options, has_bias: 0
    """Number of parameters of a processor for an encoding with or without a bias."""
    num_products: Callable[[AttentionDims, MethodOptions], float] = lambda dims, options: 0.0
    """Scalar products per row and column, over all heads. Products of a bias are shared by all sequences and not
    counted."""
    width: Callable[[MethodOptions], int] = lambda options: 0
    """Channels between two convolutions along the keys, with maps in the compute type; 0 for other processors."""
    left_context: Callable[[MethodOptions], int] = lambda options: 0
    """Columns left of a row's first visible column that the row reads (`Processor.left_context`)."""
    preceding_rows: Callable[[MethodOptions], int] = lambda options: 0
    """Rows above a row that the row reads (`Processor.preceding_rows`)."""
    num_head_maps: Callable[[MethodOptions], int] = lambda options: 0
    """Number of float32 matrices [R, C] saved per sequence and head before the softmax."""
    num_weight_maps: Callable[[MethodOptions], int] = lambda options: 0
    """Number of float32 matrices [R, C] saved per sequence and head after the softmax, in addition to the weights."""
    num_sequence_maps: Callable[[MethodOptions], int] = lambda options: 0
    """Number of float32 matrices [R, C] saved per sequence, shared by all heads."""
    changes_weights: Callable[[MethodOptions], bool] = lambda options: False
    """True if the processor changes the weights after the softmax (`Processor.process_weights`)."""
    maps_heads: bool = False
    """True if kernels compute the processor as linear maps between the heads. The C code for CPUs has none."""

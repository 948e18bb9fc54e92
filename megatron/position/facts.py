"""What a method declares of itself so that it is known without torch: its cost, and the sizes that this depends on.

Planning a run must not import torch, but encodings are torch modules. So the declarations are expressions in the class
body, made of what stands here and of Python's builtins: `catalog.py` evaluates them without importing the file.

H heads, D hidden size, d head dimension, N distances, R rows and C columns of a score map.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HOOKS = ("embed", "rotate", "table", "dense", "contextual", "gate")
"""The questions that an encoding may answer (`encoding.py`)."""
ORDER_FREE_HOOKS = ("embed", "rotate")
"""Those that take positions in any order, and several tokens at one."""
OVERRIDABLE = (
    *HOOKS,
    "rotate_keys",
    "bias_tails",
    "describe_unsupported_reach",
    "product_flops",
    "kernel_parameters",
    "traits",
)
"""All that an encoding may override. A function whose name is almost one of these is a misspelt one."""
MODEL_ARGUMENTS = ("self", "dims", "has_bias")
"""Constructor arguments that the model gives; all others are options."""

MethodOptions = Mapping[str, Any]
"""All options of a method by name, defaults filled in."""


@dataclass(frozen=True)
class AttentionDims:
    """Sizes of the attention that a method is built for."""

    num_heads: int
    head_dim: int
    hidden_size: int
    train_length: int
    """Tokens per training sequence."""
    max_length: int
    """Rows of an absolute position table."""
    layer: int = 0
    """The number of the layer, from 0, that a processor or a layer's own encoding is built for; 0 for a shared one."""


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


@dataclass(frozen=True)
class EncodingCost:
    """The parameters of an encoding, and what it makes autograd keep beyond what its hooks imply."""

    num_parameters: Callable[[AttentionDims, MethodOptions], int] = lambda dims, options: 0
    num_saved_tables: int = 0
    """float32 tables [H, N] over the distances that are kept for the backward pass, per layer."""
    num_saved_maps: int = 0
    """Maps [R, C] in the compute type that are kept per sequence and head."""
    saved_bytes_per_head_score: int = 0
    """Bytes kept per score of each sequence and head."""
    saved_bytes_per_score: Callable[[MethodOptions], int] = lambda options: 0
    """Bytes kept per score, once for all sequences and heads."""
    num_products: Callable[[MethodOptions, float], float] = lambda options, num_keys: 0.0
    """Products of d numbers per token and head in the forward pass, of a token that sees `num_keys` keys: those of
    contextual terms. Bias and weight are computed once for all sequences of a batch and not counted."""
    num_input_products: Callable[[AttentionDims, MethodOptions], int] = lambda dims, options: 0
    """Products of two numbers per token in the forward pass: those of a gate with the layer's input."""
    qk_width: int = 1
    """Numbers of a rotated query or key for each of the head's dimensions."""
    num_rotations: Callable[[MethodOptions], int] = lambda options: 1
    """2 where queries and keys are rotated once more for keys that are far (`Encoding.far_distance`), else 1."""
    num_turn_tables: Callable[[MethodOptions], int] = lambda options: 0
    """float32 tables [H, T, d] of a rotation that are kept for the backward pass, once for all sequences, per layer."""
    keeps_unrotated: bool = False
    """Does the rotation keep the queries and keys that it is given for the backward pass?"""

    def count_qk_numbers(self, options: MethodOptions) -> int:
        """Of a rotated query or key, for each of the head's dimensions, all rotations together."""
        return self.qk_width * self.num_rotations(options)


@dataclass(frozen=True)
class TemperatureCost:
    """The parameters of an attention temperature, per layer."""

    num_parameters: Callable[[AttentionDims, MethodOptions], int] = lambda dims, options: 0


@dataclass(frozen=True)
class ProcessorCost:
    """The parameters of a processor, per layer, and what it computes and makes autograd keep for each score."""

    num_parameters: Callable[[AttentionDims, MethodOptions, bool], int] = lambda dims, options, has_bias: 0
    """Of a processor for an encoding with or without a bias."""
    num_products: Callable[[AttentionDims, MethodOptions], float] = lambda dims, options: 0.0
    """Products of two numbers for each row and column, over all heads; those of a bias are shared by all sequences and
    not counted."""
    width: Callable[[MethodOptions], int] = lambda options: 0
    """Channels between two convolutions along the keys, whose maps are in the compute type; 0 for another processor."""
    left_context: Callable[[MethodOptions], int] = lambda options: 0
    """Columns left of a row's first visible one that it reads (`Processor.left_context`)."""
    rows_above: Callable[[MethodOptions], int] = lambda options: 0
    """Rows above a row that it reads (`Processor.rows_above`)."""
    num_head_maps: Callable[[MethodOptions], int] = lambda options: 0
    """float32 maps [R, C] that are kept for each sequence and head, beside the weights."""
    num_sequence_maps: Callable[[MethodOptions], int] = lambda options: 0
    """The same for each sequence, for all heads together."""
    changes_weights: Callable[[MethodOptions], bool] = lambda options: False
    """Are the weights that values are multiplied by others than those of the softmax (`Processor.process_weights`)?"""

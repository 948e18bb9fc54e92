"""The interface of a position encoding.

An encoding answers any of six questions; the attention module asks and never looks at the encoding's name.

| hook         | asked once per  | answer                                                                        |
|--------------|-----------------|-------------------------------------------------------------------------------|
| `embed`      | forward pass    | a vector per position, added to the token embeddings (learned, sinusoidal)    |
| `rotate`     | layer           | queries or keys turned by their positions (rotary)                            |
| `table`      | layer           | bias and weight as functions of n = i − j alone: a Toeplitz method            |
| `dense`      | block of rows   | bias and weight for every (i, j), where they are not functions of n alone     |
| `contextual` | block of rows   | terms that depend on queries and keys, added to the scores                    |
| `gate`       | layer           | how much each head forgets at each token, from the layer's input (fox)        |

Positions are exact: integer spans, and float32 distances whatever the compute type (bfloat16 holds integers exactly
only up to 256, float16 up to 2048). Tables and everything computed from parameters are float32.
"""

from collections.abc import Sequence
from copy import copy
from typing import ClassVar, NamedTuple

from torch import Tensor

from megatron.position.base import PositionModule
from megatron.position.bounded_parameter import JoinedParameter
from megatron.position.facts import HOOKS, ORDER_FREE_HOOKS, EncodingCost
from megatron.position.series_tails import SeriesTail, constant_tail, unknown_tail
from megatron.position.token_range import ALL_HEADS, TokenRange


class ScoreTerms(NamedTuple):
    """What an encoding adds to and multiplies into the scores; None where it does neither.

    From `table`: float32 [H, N]. From `dense`: float32 [H, R, C].
    """

    bias: Tensor | None = None
    weight: Tensor | None = None


class Encoding(PositionModule):
    """Base of all position encodings. A subclass overrides the hooks it needs and describes itself.

    An encoding whose parameters are shared by all layers is built once and handed to each layer.
    """

    relative: bool = True
    """Does moving all positions by the same amount change nothing?"""
    takes_positions: ClassVar[bool] = True
    """Is it told where tokens are? If not, only their order matters, through the causal mask."""
    adds_bias: ClassVar[bool] = False
    """Does `table`, `dense` or `gate` give a bias?"""
    multiplies_scores: ClassVar[bool] = False
    """Does `table` or `dense` give a weight?"""

    has_independent_heads: ClassVar[bool] = False
    """Are all parameters `BoundedParameter`s of its own, [H], and a head's row of the table a function of its entries
    alone, for any number of heads? Then the tables of all layers are computed as one (`join_heads`)."""

    has_position_table: ClassVar[bool] = False
    """Has it a table of `dims.max_length` positions, and knows none beyond? Then `max_length` says how many."""

    depends_on_length: bool = False
    """Does what it answers of a token depend on the length that the sequence reaches (`TokenRange.known_length`)?"""

    max_length: int | None = None
    """The largest number of positions that the encoding knows, or None."""

    takes_real_positions: ClassVar[bool] = True
    """Is it defined at positions and distances that are no integers?"""

    rotates_alike: bool = True
    """Does `rotate` turn queries and keys, and all heads, alike? If not, `rotate_keys` turns the keys."""

    rotates_linearly: ClassVar[bool] = True
    """Is the rotation of a multiple of a query that multiple of its rotation?"""

    far_distance: int | None = None
    """From this distance on, scores are products of the second halves of rotated queries and keys, else of the first;
    None where there is one rotation."""

    # Traits are read off the hooks that a subclass overrides, so they cannot disagree with its code.

    @classmethod
    def overrides_hook(cls, hook: str) -> bool:
        """Does this encoding answer the hook?"""
        return getattr(cls, hook) is not getattr(Encoding, hook)

    @classmethod
    def only_adds_embeddings(cls) -> bool:
        """Is all that it does to add something to the token embeddings?"""
        return cls.overrides_hook("embed") and not any(cls.overrides_hook(hook) for hook in HOOKS if hook != "embed")

    @classmethod
    def takes_any_positions(cls) -> bool:
        """May positions come in any order, and more than once? So they may where they only add something to the token
        embeddings, or turn queries and keys: a bias is a function of distances to keys that came before."""
        return not any(cls.overrides_hook(hook) for hook in HOOKS if hook not in ORDER_FREE_HOOKS)

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        """The hooks it answers, and whether it is relative and Toeplitz."""
        hooks = [hook for hook in HOOKS if cls.overrides_hook(hook)]
        toeplitz = cls.overrides_hook("table")
        return (*hooks, *(("toeplitz",) if toeplitz else ()), *(("relative",) if cls.relative else ()))

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a rotated query or key: d, unless it says in `cost` that there are more."""
        cost = self.cost
        return self.dims.head_dim * (cost.count_qk_numbers(self.option_values) if isinstance(cost, EncodingCost) else 1)

    def describe_unsupported_reach(self, num_positions: int) -> str | None:
        """Why it cannot be told positions 0 … num_positions − 1, whatever `max_length` says; None if it can."""
        return None

    def bias_tails(self) -> list[SeriesTail]:
        """How the series Σ_t exp(bias at the distance t) ends, for each head. An encoding with a bias declares it."""
        if self.overrides_hook("gate"):
            tail = unknown_tail("what a layer reads decides how the bias falls")
        else:
            tail = unknown_tail() if self.adds_bias else constant_tail(1.0, "it adds no bias")
        return [tail] * self.dims.num_heads

    # The hooks.

    def embed(self, tokens: TokenRange, like: Tensor) -> Tensor | None:
        """Vectors to add to the token embeddings: [T, D] in the type and on the device of `like`."""
        return None

    def rotate(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        """Queries or keys [B, H, T, d] turned by their positions, [B, H, T, e] of the same type.

        e is `qk_head_dim`. Scores are products of these over the root of *their* length, √e, or √(e/2) with two
        rotations (`far_distance`): an encoding with more numbers than d makes up for it.

        heads: which of the encoding's the H heads are, where it does not turn all alike.
        """
        return x

    def rotate_keys(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        """Keys [B, g, T, d], where `rotates_alike` is False; `heads` are then the first of those that share a key."""
        return self.rotate(x, tokens) if self.rotates_alike else self.rotate(x, tokens, heads)

    def get_turns(self, like: Tensor, tokens: TokenRange) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin [T, r] of `rotate`, if x·cos + swap(x)·sin is all that it does to queries and keys, swap
        exchanging the halves of the first r dimensions; else None.

        like: has the queries' type and device.
        """
        return None

    def table(self, distances: Tensor) -> ScoreTerms:
        """Bias and weight [H, N] at the distances n = i − j ≥ 0, given as float32 [N]; no integers where positions are
        continuous."""
        return ScoreTerms()

    # A tensor-parallel rank holds some of the heads: `heads` says which ones the answer is wanted for, h of them.

    def dense(self, query: TokenRange, key: TokenRange, like: Tensor, heads: slice) -> ScoreTerms:
        """Bias and weight [h, R, C] for rows and columns; entries with j > i are never used but must be finite."""
        return ScoreTerms()

    def contextual(
        self, q: Tensor, k: Tensor, scores: Tensor, query: TokenRange, key: TokenRange, heads: slice
    ) -> Tensor | None:
        """Terms [B, h, R, C] added to the scores, from q [B, h, R, d], k [B, h, C, d] and q·k/√d [B, h, R, C]."""
        return None

    def gate(self, x: Tensor, heads: slice) -> Tensor | None:
        """What a token adds to the bias between every key before it and every row from it on: float32 [B, h, T].

        The bias of row i and key j is the sum over the tokens j + 1 … i, so 0 for a row's own key; of the logarithms of
        gates in 0 … 1 it is the logarithm of how much of the key is left. Wherever the sums begin, it is the same.

        Args:
            x: what the layer's queries, keys and values are made of, [B, T, D] in the compute type.
            heads: h of them.
        """
        return None

    def product_flops(self, num_keys: float) -> float:
        """Forward FLOPs of the matrix products of contextual terms and gates per token, over all heads.

        Args:
            num_keys: keys that a token sees, on average.
        """
        if not isinstance(self.cost, EncodingCost):
            return 0.0
        terms = self.dims.num_heads * self.dims.head_dim * self.cost.num_products(self.option_values, num_keys)
        return 2.0 * (terms + self.cost.num_input_products(self.dims, self.option_values))


def join_heads(encodings: Sequence[Encoding]) -> Encoding:
    """An encoding whose heads are those of several encodings of one class, one after the other. It has their own
    parameters and is for its table alone, which takes few operations where those of all would take many.

    Args:
        encodings: with independent heads.
    """
    joined = copy(encodings[0])
    parameters = {name: [encoding._modules[name] for encoding in encodings] for name in joined._modules}
    joined.__dict__["_modules"] = {
        name: JoinedParameter(each)  # type: ignore[arg-type]
        for name, each in parameters.items()
    }
    return joined

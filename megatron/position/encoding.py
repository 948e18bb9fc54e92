"""Interface of a position encoding.

An encoding implements any of six hooks. The attention module calls them and never checks the name of the encoding.

| hook         | called once per | result                                                                        |
|--------------|-----------------|-------------------------------------------------------------------------------|
| `embed`      | forward pass    | a vector per position, added to the token embeddings (learned, sinusoidal)    |
| `rotate`     | layer           | queries or keys rotated by their positions (rotary)                           |
| `table`      | layer           | bias and weight as functions of n = i − j alone: a Toeplitz method            |
| `dense`      | row block   | bias and weight for every (i, j), if they are not functions of n alone        |
| `contextual` | row block   | terms that depend on queries and keys, added to the scores                    |
| `gate`       | layer           | forget gate of each head and token, computed from the layer's input (fox)     |

Positions are exact: integer spans, and float32 distances in every compute type. bfloat16 represents integers exactly
only up to 256, float16 up to 2048. Tables and all values computed from parameters are float32.
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
    """Bias added to the scores and weight multiplied into them; None if there is none.

    Shapes are float32 [H, N] from `table` and float32 [H, R, C] from `dense`.
    """

    bias: Tensor | None = None
    weight: Tensor | None = None


class Encoding(PositionModule):
    """Base class of all position encodings. A subclass overrides the hooks it needs and describes itself.

    An encoding whose parameters are shared by all layers is built once and passed to each layer.
    """

    relative: bool = True
    """True if shifting all positions by the same amount changes nothing."""
    takes_positions: ClassVar[bool] = True
    """True if the encoding receives positions. If False, only the order of tokens matters, through the causal mask."""
    adds_bias: ClassVar[bool] = False
    """True if `table`, `dense` or `gate` returns a bias."""
    multiplies_scores: ClassVar[bool] = False
    """True if `table` or `dense` returns a weight."""

    has_independent_heads: ClassVar[bool] = False
    """True if the heads are independent, so that the tables of all layers can be computed as one (`join_heads`).

    All parameters must be `BoundedParameter`s [H] of this encoding. A head's row of the table must be a function of its
    own entries, for any number of heads.
    """

    has_position_table: ClassVar[bool] = False
    """True if the encoding has a table of `dims.max_length` positions and supports no others. `max_length` is then
    set."""

    depends_on_length: bool = False
    """True if the result for a token depends on the final length of the sequence (`TokenRange.known_length`)."""

    max_length: int | None = None
    """Largest number of positions that the encoding supports, or None if unlimited."""

    takes_real_positions: ClassVar[bool] = True
    """True if the encoding is defined for non-integer positions and distances."""

    rotates_alike: bool = True
    """True if `rotate` rotates queries and keys, and all heads, by the same angles. If False, `rotate_keys` rotates
    keys."""

    rotates_linearly: ClassVar[bool] = True
    """True if the rotation is linear: rotating a multiple of a query gives that multiple of the rotated query."""

    far_distance: int | None = None
    """Distance from which scores use the second halves of rotated queries and keys, instead of the first halves.

    None if there is one rotation.
    """

    # Traits are derived from the hooks that a subclass overrides, so they cannot disagree with its code.

    @classmethod
    def overrides_hook(cls, hook: str) -> bool:
        """Return True if this encoding implements the hook."""
        return getattr(cls, hook) is not getattr(Encoding, hook)

    @classmethod
    def only_adds_embeddings(cls) -> bool:
        """Return True if the encoding only adds to the token embeddings."""
        return cls.overrides_hook("embed") and not any(cls.overrides_hook(hook) for hook in HOOKS if hook != "embed")

    @classmethod
    def takes_any_positions(cls) -> bool:
        """Return True if positions may come in any order and repeat.

        This holds if the encoding only adds to the token embeddings or rotates queries and keys. A bias is a function
        of distances to earlier keys.
        """
        return not any(cls.overrides_hook(hook) for hook in HOOKS if hook not in ORDER_FREE_HOOKS)

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        """Return the implemented hooks, and whether the encoding is Toeplitz and relative."""
        hooks = [hook for hook in HOOKS if cls.overrides_hook(hook)]
        toeplitz = cls.overrides_hook("table")
        return (*hooks, *(("toeplitz",) if toeplitz else ()), *(("relative",) if cls.relative else ()))

    @property
    def qk_head_dim(self) -> int:
        """Elements of a rotated query or key: d, unless `cost` declares more."""
        cost = self.cost
        return self.dims.head_dim * (cost.count_qk_numbers(self.option_values) if isinstance(cost, EncodingCost) else 1)

    def describe_unsupported_length(self, num_positions: int) -> str | None:
        """Explain why the encoding does not support positions 0 … num_positions − 1, or return None.

        The limit of `max_length` is checked elsewhere.
        """
        return None

    def bias_tails(self) -> list[SeriesTail]:
        """Return the tail of the series Σ_t exp(bias at distance t) of each head.

        An encoding with a bias overrides this.
        """
        if self.overrides_hook("gate"):
            tail = unknown_tail("the layer's input determines how the bias falls")
        else:
            tail = unknown_tail() if self.adds_bias else constant_tail(1.0, "it adds no bias")
        return [tail] * self.dims.num_heads

    # Hooks.

    def embed(self, tokens: TokenRange, like: Tensor) -> Tensor | None:
        """Return vectors to add to the token embeddings: [T, D] in the type and on the device of `like`."""
        return None

    def rotate(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        """Rotate queries or keys [B, H, T, d] by their positions, to [B, H, T, e] of the same type.

        e is `qk_head_dim`. Scores are products of rotated vectors divided by the root of *their* length, √e, or √(e/2)
        with two rotations (`far_distance`). An encoding with more elements than d compensates for this.

        Args:
            x: queries or keys.
            tokens: their tokens.
            heads: indices of the H heads of x among the encoding's heads, if they are not all rotated alike.
        """
        return x

    def rotate_keys(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        """Rotate keys [B, g, T, d] if `rotates_alike` is False.

        `heads` are then the first of the heads that share each key.
        """
        return self.rotate(x, tokens) if self.rotates_alike else self.rotate(x, tokens, heads)

    def get_cos_sin(self, like: Tensor, tokens: TokenRange) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin [T, r] of `rotate`, or None.

        They exist if `rotate` computes x·cos + swap(x)·sin for queries and keys, where swap exchanges the halves of the
        first r dimensions.

        like: tensor with the type and device of the queries.
        """
        return None

    def table(self, distances: Tensor) -> ScoreTerms:
        """Return bias and weight [H, N] at distances n = i − j ≥ 0, given as float32 [N].

        Distances are not integers if positions are continuous.
        """
        return ScoreTerms()

    # A tensor-parallel rank has some of the heads: `heads` selects the h heads of the result.

    def dense(self, query: TokenRange, key: TokenRange, like: Tensor, heads: slice) -> ScoreTerms:
        """Return bias and weight [h, R, C] for rows and columns.

        Entries with j > i are never used but must be finite.
        """
        return ScoreTerms()

    def contextual(
        self, q: Tensor, k: Tensor, scores: Tensor, query: TokenRange, key: TokenRange, heads: slice
    ) -> Tensor | None:
        """Return terms [B, h, R, C] to add to the scores.

        Inputs are q [B, h, R, d], k [B, h, C, d] and q·k/√d [B, h, R, C].
        """
        return None

    def gate(self, x: Tensor, heads: slice) -> Tensor | None:
        """Return the bias contribution of each token, float32 [B, h, T].

        It applies to all rows from the token on and all earlier keys: the bias of row i and key j is the sum over
        tokens j + 1 … i, which is 0 for the row's own key. If contributions are logarithms of gates in [0, 1], the bias
        is the logarithm of the remaining fraction of the key. The result does not depend on where the sums begin.

        Args:
            x: input of the layer's query, key and value projections, [B, T, D] in the compute type.
            heads: the h heads of the result.
        """
        return None

    def product_flops(self, num_keys: float) -> float:
        """Return the forward FLOPs per token of the matrix products in contextual terms and gates, over all heads.

        Args:
            num_keys: mean number of keys that a token sees.
        """
        if not isinstance(self.cost, EncodingCost):
            return 0.0
        terms = self.dims.num_heads * self.dims.head_dim * self.cost.num_products(self.option_values, num_keys)
        return 2.0 * (terms + self.cost.num_input_products(self.dims, self.option_values))


def join_heads(encodings: Sequence[Encoding]) -> Encoding:
    """Return an encoding whose heads are those of several encodings of one class, concatenated.

    It shares their parameters and may only be used to compute its table, in a few operations instead of a few per
    encoding.

    Args:
        encodings: encodings with independent heads.
    """
    joined = copy(encodings[0])
    parameters = {name: [encoding._modules[name] for encoding in encodings] for name in joined._modules}
    joined.__dict__["_modules"] = {
        name: JoinedParameter(each)  # type: ignore[arg-type]
        for name, each in parameters.items()
    }
    return joined

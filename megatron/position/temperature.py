"""The interface of an attention temperature: a factor on each query, which all of its scores share.

    q_i ← scale_h(i) · q_i

The factor multiplies the query before anything reads it. So a temperature goes with every encoding, score processor and
backend: a soft cap, an encoding's weight and contextual terms, and a processor take the scaled scores, while a bias and
what an encoding adds to keys by themselves (Transformer-XL's u and v) stay as they are. Keys are not touched, and so
neither is the cache of decoding.

H heads, S any shape of query rows.
"""

from torch import Tensor

from megatron.position.base import PositionModule


class Temperature(PositionModule):
    """Base of all attention temperatures. Every layer has its own.

    Rows are independent of each other: a row's factor depends on what is said of that row alone.
    """

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        return ("rows independent",)

    def forward(self, positions: Tensor, num_keys: Tensor) -> Tensor:
        """The factors on the queries, by which their scores are multiplied.

        Args:
            positions: float32 S, of the rows from 0, as an encoding is told them: within the own document, and the
                drawn ones where positions are randomized.
            num_keys: float32 S, how many keys each row sees, its own included: what the window, documents and padding
                leave of them. They are counted, so randomized positions change nothing of it. 1 for a row of padding.

        Returns:
            float32 [H, *S], or [1, *S] where all heads have the same.
        """
        raise NotImplementedError

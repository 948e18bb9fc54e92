"""Interface of an attention temperature: a factor per query that multiplies all of its scores.

    q_i ← scale_h(i) · q_i

The factor is applied to the query first. So a temperature works with every encoding, score processor and backend. A
soft cap, an encoding's weight and contextual terms, and a processor use the scaled scores. A bias and terms that an
encoding adds to the keys alone (Transformer-XL's u and v) are not scaled. Keys and the decoding cache are unchanged.

H heads, S any shape of query rows.
"""

from torch import Tensor

from megatron.position.base import PositionModule


class Temperature(PositionModule):
    """Base class of all attention temperatures. Every layer has its own.

    Rows are independent: the factor of a row depends only on that row's position and number of keys.
    """

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        return ("rows independent",)

    def forward(self, positions: Tensor, num_keys: Tensor) -> Tensor:
        """Compute the factors of the queries.

        Args:
            positions: float32 S, positions of the rows from 0, as an encoding receives them: within the document, and
                the sampled ones if positions are randomized.
            num_keys: float32 S, the number of keys each row sees, including its own, after window, documents and
                padding. It does not depend on randomized positions. 1 for a row of padding.

        Returns:
            float32 [H, *S], or [1, *S] if all heads have the same factor.
        """
        raise NotImplementedError

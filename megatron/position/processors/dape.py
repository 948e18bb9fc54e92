"""DAPE: a two-layer perceptron over the scores and biases of all heads, applied to each entry.

It equals CDAPE with kernel size 1.
"""

from megatron.position.facts import AttentionDims, ProcessorCost
from megatron.position.processors.cdape import Cdape


class Dape(Cdape):
    formula = "S + B + MLP([S, B]) over heads, LeakyReLU"
    parameters_summary = "[W, 2H] + [W], [H, W] + [H], initialized like torch.nn.Conv2d"
    source = "DAPE: Zheng et al. 2024; DAPE V2 equations 2 and 3"
    advice = (
        "A cheaper cdape for encodings with a bias (alibi, kerple_log, fire) and for pos_emb none. It makes rotary "
        "worse (DAPE V2, sections 3.2 and 4.4). A narrower cdape is better at about the same cost (DAPE V2, section "
        "4.5)."
    )
    other_names = ("cape", "dapev1")
    cost = ProcessorCost(
        num_parameters=lambda dims, options, has_bias: (
            options["width"] * (dims.num_heads * (3 if has_bias else 2) + 1) + dims.num_heads
        ),
        num_products=lambda dims, options: 2.0 * dims.num_heads * options["width"],
        width=lambda options: options["width"],
    )

    def __init__(
        self,
        dims: AttentionDims,
        *,
        has_bias: bool,
        width: int = 32,
        residual_bias: bool = True,
        zero_init: bool = False,
    ) -> None:
        """
        Args:
            width: hidden units W (DAPE's D_DAPE).
            residual_bias: also add the bias to the result (equation 5 of DAPE V2); if false, the bias enters only
                through the network (equation 2).
            zero_init: start exactly as S + B, so that a processor can be added to a trained model without changing its
                loss (`finetune: true`).
        """
        super().__init__(
            dims,
            has_bias=has_bias,
            width=width,
            kernel_size=1,
            residual_bias=residual_bias,
            zero_init=zero_init,
        )

"""No position encoding; only the causal mask distinguishes positions."""

from megatron.position.encoding import Encoding
from megatron.position.facts import EncodingCost


class NoPositions(Encoding):
    formula = "q·k/√d"
    takes_positions = False
    source = "NoPE: Kazemnejad et al. 2023; Haviv et al. 2022"
    advice = (
        "A baseline: perplexity explodes beyond the training length of 1,024 tokens (4.16 there, 17,167 at 8,192; DAPE "
        "V2, table 2). With dape or cdape it is far lower (DAPE V2, section 3.2 and figure 1)."
    )
    other_names = ("nope", "no_positional_encoding")
    cost = EncodingCost()

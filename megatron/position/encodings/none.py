"""No position information at all; the causal mask alone tells positions apart."""

from ..encoding import Encoding


class NoPositions(Encoding):
    formula = "q·k/√d"
    takes_positions = False
    source = "NoPE: Kazemnejad et al. 2023; Haviv et al. 2022"

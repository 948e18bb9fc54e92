"""Rotary position embedding for layers with a window in a pattern with `rotary`: a separate base, and no scaling."""

from megatron.position.encodings.rotary import Rotary
from megatron.position.facts import AttentionDims, EncodingCost, OptionError


class RotaryLocal(Rotary):
    formula = "(R_i q_i)·(R_j k_j)/√d, R_i turns the pair (m, m + r/2) by i/local_base^(2m/r), r = fraction·d"
    source = (
        "Gemma 3: Team Gemma 2025 (arXiv:2503.19786, section 2.1), base 10,000 in layers with a window, and 1,000,000 "
        "in the others; only the latter are scaled for longer texts, as in OLMo 3"
    )
    advice = (
        "For the layers with a window in a pattern with rotary, as in the overlay gemma3 (arXiv:2503.19786). Distances "
        "in such a layer never exceed its window, so longer texts need no scaling there: evaluate --rope changes only "
        "the layers with rotary. If all layers have it, it equals rotary."
    )
    other_names = ("local_rotary", "rope_local")
    cost = EncodingCost(has_cos_sin=lambda options: True)

    def __init__(self, dims: AttentionDims, *, fraction: float = 1.0, local_base: float = 10000.0) -> None:
        """
        Args:
            fraction: share of each head's dimensions that are rotated; layers with rotary have the same.
            local_base: frequencies are local_base^(−2m/r) of the pairs m.
        """
        if local_base <= 1:
            raise OptionError("local_base", f"is {local_base}; it must be greater than 1")
        super().__init__(dims, fraction=fraction, base=local_base)

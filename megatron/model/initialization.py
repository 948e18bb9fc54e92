"""Start values of weights, by GPT-NeoX's names."""

import math
from collections.abc import Callable

from torch import Tensor, nn

from megatron.options.model import InitMethod

Init = Callable[[Tensor], Tensor]


def init_method(name: InitMethod, *, std: float, num_layers: int, hidden_size: int) -> Init:
    """The function that fills a weight in place.

    normal: N(0, std²). scaled_normal: N(0, std²/2L) (Radford et al. 2019). small_init: N(0, 2/5D) (Nguyen & Salazar
    2019). wang_init: N(0, (2/L√D)²) (Wang & Komatsuzaki 2021). xavier_*: Glorot & Bengio 2010.
    """
    deviations = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2 * num_layers),
        "small_init": math.sqrt(2 / (5 * hidden_size)),
        "wang_init": 2 / num_layers / math.sqrt(hidden_size),
    }
    if name in deviations:
        return lambda weight: nn.init.normal_(weight, 0.0, deviations[name])
    return {"xavier_uniform": nn.init.xavier_uniform_, "xavier_normal": nn.init.xavier_normal_}[name]

"""Scaling of rotary positions, by other frequencies or by other positions of far keys.

The `scaling` option of rotary selects one. Published models stretch their frequencies to read sequences longer than in
training, either during training or when a trained model is loaded (`config/position_overrides.py`). p_rope and hope are
for training only: pairs with low frequencies carry no position, θ'_m = 0. selfextend and rerope keep the frequencies
and change the distance between far tokens.

θ_m = base^(−m/half) are the frequencies, m = 0 … half − 1. λ_m = 2π/θ_m are their wavelengths in tokens, s is the
factor, and L is the original training length.

| scaling  | θ'_m                                                                                   | cos, sin ×       |
|----------|----------------------------------------------------------------------------------------|------------------|
| p_rope   | θ_m for the first ⌊share·half⌋ pairs, which are the fastest, else 0                    | 1                |
| hope     | θ_m if λ_m ≤ L, so that the pair completes a period in training, else 0                | 1                |
| linear   | θ_m / s                                                                                | 1                |
| ntk      | θ_m·s^(−m/(half − 1)), as with the base base·s^(half/(half − 1)): the last is θ_m / s  | 1                |
| dynamic  | ntk with s·N/L − (s − 1) instead of s, for N ≥ L tokens of a sequence; θ_m up to L     | 1                |
| llama3   | θ_m·(g + (1 − g)/s), g = (L/λ_m − low)/(high − low) within [0, 1]                      | 1                |
| yarn     | θ_m·(g + (1 − g)/s), g = 1 − (m − b(fast))/(b(slow) − b(fast)) within [0, 1]           | 1 + 0.1·ln s     |
| longrope | θ_m / short_m, and θ_m / long_m if N > L                                               | √(1 + ln s/ln L) |

low and high are `low_freq_factor` and `high_freq_factor`; fast and slow are `beta_fast` and `beta_slow`, periods within
L. b(r) = half·ln(L/(2π·r))/ln(base) is the pair that completes r periods within L, rounded outwards to whole pairs and
clamped to [0, 2·half − 1]. short_m and long_m are `short_factor` and `long_factor`, lists found by search.
`attention_factor` replaces the last column of yarn and longrope, which is 1 for s ≤ 1.

In dynamic and longrope, N is the final length of a sequence (`TokenRange.known_length`). Cached keys are rotated once,
so generation uses the frequencies of its longest possible text from the beginning. transformers rotates new tokens by
other frequencies than the cached ones as a text grows.

Far keys are n = i − j ≥ w tokens back, where w is `neighbors`:

| scaling    | distance of a query at i and a key at j          | positions of query and key   |
|------------|--------------------------------------------------|------------------------------|
| selfextend | ⌊i/G⌋ − ⌊j/G⌋ + w − ⌊w/G⌋, G is `group`          | ⌊i/G⌋ + w − ⌊w/G⌋ and ⌊j/G⌋  |
| rerope     | w                                                | w and 0                      |

Sources: p_rope, Barbero et al. 2024 (2410.06205, section 6); hope, Chen et al. 2024 (2410.21216); linear, Chen et al.
2023; ntk and dynamic, bloc97 and emozilla 2023, as transformers computes them; llama3, the released code of Llama 3.1;
yarn, Peng et al. 2023, section 3.2 and appendix A, with the rounding of its released code; longrope, Ding et al. 2024
(2402.13753), as transformers computes it; selfextend, Jin et al. 2024 (2401.01325, equations 3 and 4); rerope, Su 2023.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.position.facts import OptionError

SCALINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    "p_rope": ("share",),
    "hope": ("original_length",),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("short_factor", "long_factor", "original_length", "factor", "attention_factor"),
    "selfextend": ("group", "neighbors"),
    "rerope": ("neighbors",),
}
"""Options of each scaling."""
TWO_ROTATIONS = ("selfextend", "rerope")
"""Scalings that rotate queries and keys a second time for far keys."""
_OPTIONAL = ("attention_factor",)
_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class RotaryScaling:
    """A rotary scaling with its options. Options that are None have the default of the publication.

    Raises ValueError if an option is missing, not supported by this scaling, or invalid. The message names the option.
    """

    kind: str = "none"
    factor: float | None = None
    original_length: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    share: float | None = None
    short_factor: Sequence[float] | None = None
    long_factor: Sequence[float] | None = None
    group: int | None = None
    neighbors: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise OptionError("scaling", f"is {self.kind!r}; choose from {', '.join(SCALINGS)}")
        allowed = SCALINGS[self.kind]
        values = {name: value for name, value in vars(self).items() if name != "kind" and value is not None}
        for name, value in values.items():
            if name not in allowed:
                says = f"takes {', '.join(allowed)}" if allowed else "takes no options"
                raise OptionError(name, f"is {value}, but scaling {self.kind} {says}")
            if isinstance(value, Sequence):
                _check_factors(name, value)
            elif not 0 < value < math.inf:
                raise OptionError(name, f"is {value}; it must be a positive number")
        for name in allowed:
            is_set = name == "factor" and self.kind == "longrope" and self.attention_factor is not None
            if name not in values and name not in _DEFAULTS and name not in _OPTIONAL and not is_set:
                raise OptionError(name, f"is missing; scaling {self.kind} needs it")
        if self.kind == "selfextend" and self.group > self.neighbors:  # type: ignore[operator]
            raise OptionError("group", f"is {self.group}; it must be at most neighbors {self.neighbors}")
        if self.factor is not None and self.factor < 1:
            raise OptionError("factor", f"is {self.factor}; it must be at least 1")
        if self.share is not None and self.share > 1:
            raise OptionError("share", f"is {self.share}; it must be at most 1")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if low in allowed and not self._get_value(low) < self._get_value(high):
                raise OptionError(
                    low, f"is {self._get_value(low):g}; it must be less than {high} {self._get_value(high):g}"
                )

    def _get_value(self, name: str) -> float:
        value = getattr(self, name)
        return float(_DEFAULTS[name] if value is None else value)

    def check_pairs(self, half: int, base: float) -> None:
        """Check the number of pairs of dimensions.

        Raises ValueError if it is too small or does not match the factors.
        """
        if self.kind in ("ntk", "dynamic") and half < 2:
            raise ValueError(f"scaling {self.kind} needs at least two rotated pairs of dimensions")
        for name in ("short_factor", "long_factor"):
            if (factors := getattr(self, name)) is not None and len(factors) != half:
                raise OptionError(
                    name, f"has {len(factors)} number{'s' * (len(factors) != 1)}; expected {half}, one per rotated pair"
                )
        if self.kind in ("p_rope", "hope") and not self._count_kept_pairs(half, base):
            name = "share" if self.kind == "p_rope" else "original_length"
            raise OptionError(name, f"is {getattr(self, name)}; none of {half} pairs would rotate; use pos_emb none")

    def _count_kept_pairs(self, half: int, base: float) -> int:
        if self.kind == "p_rope":
            # 0.29 · 100 is 28.999999999999996 in float64.
            return math.floor(self._get_value("share") * half + 1e-9)
        return sum(base ** (-m / half) * self._get_value("original_length") >= 2 * math.pi for m in range(half))

    def compute_frequencies(self, plain: Tensor, base: float, length: int = 0) -> Tensor:
        """Return the scaled frequencies, float64 [half].

        Args:
            plain: θ, float64 [half].
            base: base of the frequencies.
            length: length of the sequence, in tokens (dynamic, longrope).
        """
        match self.kind:
            case "none" | "selfextend" | "rerope":
                return plain
            case "longrope":
                factors = self.long_factor if length > self._get_value("original_length") else self.short_factor
                return plain / torch.tensor(factors, dtype=plain.dtype, device=plain.device)
            case "p_rope" | "hope":
                pairs = torch.arange(len(plain), device=plain.device)
                return torch.where(pairs < self._count_kept_pairs(len(plain), base), plain, 0.0)
            case "linear":
                return plain / self._get_value("factor")
            case "ntk" | "dynamic":
                stretch = self._get_value("factor")
                if self.kind == "dynamic":
                    stretch = stretch * max(length / self._get_value("original_length"), 1.0) - (stretch - 1)
                pairs = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
                return plain * stretch ** (-pairs / (len(plain) - 1))
            case "llama3":
                turns = self._get_value("original_length") * plain / (2 * math.pi)
                low, high = self._get_value("low_freq_factor"), self._get_value("high_freq_factor")
                unscaled = ((turns - low) / (high - low)).clamp(0, 1)
            case _:
                unscaled = 1 - self._compute_ramp(plain, base)
        return plain * (unscaled + (1 - unscaled) / self._get_value("factor"))

    def _compute_ramp(self, plain: Tensor, base: float) -> Tensor:
        """Return a ramp from 0 to 1 over the pairs, float64 [half].

        It is 0 for pairs with many periods in the original length, and 1 for those with few.
        """
        half = plain.shape[0]

        def find_pair(turns: float) -> float:
            return half * math.log(self._get_value("original_length") / (turns * 2 * math.pi)) / math.log(base)

        first_pair = max(math.floor(find_pair(self._get_value("beta_fast"))), 0)
        last_pair = min(math.ceil(find_pair(self._get_value("beta_slow"))), 2 * half - 1)
        width = last_pair - first_pair or 0.001
        return ((torch.arange(half, dtype=plain.dtype, device=plain.device) - first_pair) / width).clamp(0, 1)

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies depend on the final length of a sequence."""
        return self.kind in ("dynamic", "longrope")

    @property
    def amplitude(self) -> float:
        """Factor that multiplies cosines and sines."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        log_factor = math.log(self._get_value("factor"))
        if self.kind == "yarn":
            return 0.1 * log_factor + 1.0
        return math.sqrt(1 + log_factor / math.log(self._get_value("original_length")))

    @property
    def far_distance(self) -> int | None:
        """Distance from which `map_far_positions` applies to keys; None if the scaling has no far keys."""
        return self.neighbors if self.kind in TWO_ROTATIONS else None

    def map_far_positions(self, positions: Tensor, *, are_queries: bool) -> Tensor:
        """Return the positions that queries or keys at positions [T] have with respect to far tokens."""
        assert self.neighbors is not None
        if self.kind == "rerope":
            return torch.full_like(positions, self.neighbors if are_queries else 0)
        assert self.group is not None
        groups = (positions / self.group).floor()
        return groups + self.neighbors - self.neighbors // self.group if are_queries else groups


def _check_factors(name: str, factors: Sequence[float]) -> None:
    for number in factors:
        if not isinstance(number, int | float) or isinstance(number, bool) or not 0 < number < math.inf:
            raise OptionError(name, f"has {number!r}; all must be positive numbers")

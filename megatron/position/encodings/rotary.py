"""Rotary position embedding: queries and keys are rotated by angles proportional to their positions.

The option scaling changes the frequencies. Published models stretch them to read further than they were trained at, in
training or when a trained model is read (`config/position_overrides.py`); p_rope and hope are for training alone and
give pairs that turn slowly no position at all, θ'_m = 0.

θ_m = base^(−m/half) are the frequencies, m = 0 … half − 1; λ_m = 2π/θ_m their wavelengths in tokens, s the factor and L
the length of the original training.

| scaling | θ'_m                                                                                        | cos, sin ×   |
|---------|---------------------------------------------------------------------------------------------|--------------|
| p_rope  | θ_m for the first ⌊share·half⌋ pairs, which are the fastest, else 0                         | 1            |
| hope    | θ_m where λ_m ≤ L, so that training sees the pair turn once at least, else 0                | 1            |
| linear  | θ_m / s                                                                                     | 1            |
| ntk     | θ_m·s^(−m/(half − 1)), as of the base base·s^(half/(half − 1)): the last is θ_m / s         | 1            |
| dynamic | of ntk with s·N/L − (s − 1) in the place of s, N ≥ L tokens in the sequence; θ_m up to L    | 1            |
| llama3  | θ_m·(g + (1 − g)/s), g = (L/λ_m − low)/(high − low) within [0, 1]                           | 1            |
| yarn    | θ_m·(g + (1 − g)/s), g = 1 − (m − b(fast))/(b(slow) − b(fast)) within [0, 1]                | 1 + 0.1·ln s |

low, high are `low_freq_factor` and `high_freq_factor`; fast, slow are `beta_fast` and `beta_slow`, turns within L; and
b(r) = half·ln(L/(2π·r))/ln(base) is the pair that turns r times within L, rounded outwards to whole pairs and kept
within [0, 2·half − 1].

N of dynamic is the length that a sequence reaches (`TokenRange.known_length`): keys that are cached were turned once,
so a text that is generated has the frequencies of its longest possible end from its beginning. transformers turns new
tokens by other frequencies than the cached ones as a text grows.

Sources: p_rope, Barbero et al. 2024 (2410.06205, section 6); hope, Chen et al. 2024 (2410.21216); linear, Chen et al.
2023; ntk and dynamic, bloc97 and emozilla 2023, as transformers computes them; llama3, the released code of Llama 3.1;
yarn, Peng et al. 2023, section 3.2 and appendix A, with the rounding of its released code.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import rotary_frequencies
from megatron.position.token_range import TokenRange

SCALINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    "p_rope": ("share",),
    "hope": ("original_length",),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
}
"""The options that each of them takes."""
TURNS_KEPT = 4
"""Ranges of tokens of which an encoding keeps cosines and sines: training's and evaluation's, and a rank's two."""
_OPTIONAL = ("attention_factor",)
_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class RotaryScaling:
    """One of them with its numbers; what is None has the default of the publication.

    Raises ValueError: an option that is missing, that this one does not take, or that makes no sense, naming it.
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

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise OptionError("scaling", f"is {self.kind!r}; choose from {', '.join(SCALINGS)}")
        allowed = SCALINGS[self.kind]
        values = {name: value for name, value in vars(self).items() if name != "kind" and value is not None}
        for name, value in values.items():
            if name not in allowed:
                says = f"takes {', '.join(allowed)}" if allowed else "takes no options"
                raise OptionError(name, f"is {value}, but scaling {self.kind} {says}")
            if not 0 < value < math.inf:
                raise OptionError(name, f"is {value}; it must be a positive number")
        for name in allowed:
            if name not in values and name not in _DEFAULTS and name not in _OPTIONAL:
                raise OptionError(name, f"is missing; scaling {self.kind} needs it")
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
        """Raises ValueError if there are too few pairs of dimensions, of which there are `half`."""
        if self.kind in ("ntk", "dynamic") and half < 2:
            raise ValueError(f"scaling {self.kind} needs two pairs of dimensions that turn")
        if self.kind in ("p_rope", "hope") and not self._count_kept_pairs(half, base):
            name = "share" if self.kind == "p_rope" else "original_length"
            raise OptionError(name, f"is {getattr(self, name)}; none of {half} pairs would turn: that is pos_emb none")

    def _count_kept_pairs(self, half: int, base: float) -> int:
        if self.kind == "p_rope":
            # 0.29 · 100 is 28.999999999999996 in float64.
            return math.floor(self._get_value("share") * half + 1e-9)
        return sum(base ** (-m / half) * self._get_value("original_length") >= 2 * math.pi for m in range(half))

    def frequencies(self, plain: Tensor, base: float, length: int = 0) -> Tensor:
        """The frequencies that are made of the plain ones, float64 [half].

        Args:
            plain: θ, float64 [half].
            base: of these.
            length: of the sequence, in tokens (dynamic).
        """
        match self.kind:
            case "none":
                return plain
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
                unscaled = 1 - self._ramp(plain, base)
        return plain * (unscaled + (1 - unscaled) / self._get_value("factor"))

    def _ramp(self, plain: Tensor, base: float) -> Tensor:
        """0 for pairs that turn often within the original length, 1 for those that hardly do: float64 [half]."""
        half = plain.shape[0]

        def find_pair(turns: float) -> float:
            return half * math.log(self._get_value("original_length") / (turns * 2 * math.pi)) / math.log(base)

        first_pair = max(math.floor(find_pair(self._get_value("beta_fast"))), 0)
        last_pair = min(math.ceil(find_pair(self._get_value("beta_slow"))), 2 * half - 1)
        width = last_pair - first_pair or 0.001
        return ((torch.arange(half, dtype=plain.dtype, device=plain.device) - first_pair) / width).clamp(0, 1)

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return 0.1 * math.log(self._get_value("factor")) + 1.0


class Rotary(Encoding):
    formula = "(R_i q_i)·(R_j k_j)/√d, R_i turns the pair (m, m + r/2) by i/base^(2m/r), r = fraction·d"
    source = (
        "RoFormer: Su et al. 2021, equation 15 (pairs in two halves, as GPT-NeoX lays them out). The option scaling "
        "stretches the frequencies as published models do: linear (Chen et al. 2023), ntk and dynamic (bloc97 and "
        "emozilla 2023), llama3 (Llama 3.1), yarn (Peng et al. 2023); or takes positions from slow pairs: p_rope "
        "(Barbero et al. 2024) keeps the share of the fastest, hope (Chen et al. 2024) those that turn once within "
        "original_length, the training length if absent"
    )
    advice = (
        "The usual choice within the training length, a baseline past it: perplexity rises from 4.07 to 86 at twice "
        "that length (DAPE V2, table 2). cdape improves it, dape makes it worse (DAPE V2, section 4.4)."
    )
    other_names = ("rope", "roformer", "rotary_embedding", "rotary_embeddings")
    cost = EncodingCost()

    def __init__(
        self,
        dims: AttentionDims,
        *,
        fraction: float = 1.0,
        base: float = 10000.0,
        scaling: str = "none",
        factor: float | None = None,
        original_length: int | None = None,
        low_freq_factor: float | None = None,
        high_freq_factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        attention_factor: float | None = None,
        share: float | None = None,
    ) -> None:
        super().__init__(dims)
        if not 0 < fraction <= 1:
            raise OptionError("fraction", f"is {fraction}; it must be in (0, 1]")
        if base <= 1:
            raise OptionError("base", f"is {base}; it must be greater than 1")
        self.base = base
        self.rotated = int(dims.head_dim * fraction)
        if self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"rotary turns {self.rotated} of {dims.head_dim} dimensions (fraction {fraction}); "
                "that must be an even number"
            )

        if scaling in ("hope", "dynamic") and original_length is None:
            original_length = dims.train_length
        self.scaling = RotaryScaling(
            scaling, factor, original_length, low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor,
            share,
        )  # fmt: skip
        self.scaling.check_pairs(self.rotated // 2, base)
        self.depends_on_length = scaling == "dynamic"
        self._turns: dict[tuple[TokenRange, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def frequencies(self, device: torch.device | str | None = None, length: int = 0) -> Tensor:
        """Radians per token of each pair, in a sequence that reaches a length (scaling dynamic): float64 [r/2]."""
        return self.scaling.frequencies(rotary_frequencies(self.rotated // 2, self.base, device), self.base, length)

    def rotate(self, x: Tensor, tokens: TokenRange) -> Tensor:
        cos, sin = self._compute_turns(tokens, x.device, torch.promote_types(x.dtype, torch.float32))
        return _Rotation.apply(x, cos, sin)

    def _compute_turns(self, tokens: TokenRange, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, r] of each dimension's angle, the sines of the first half negative. The layers of a step and
        the steps of a run ask for the same ones: the last few are kept."""
        key = (tokens, device, dtype)
        turns = self._turns.get(key)
        if turns is None:
            # What is kept may be asked for by training later: tensors of inference mode could not be.
            with torch.inference_mode(False), torch.no_grad():
                # In float64, because at position 65,536 a float32 angle is already off by 0.004 rad.
                angle = tokens.positions(device).double()[:, None] * self.frequencies(device, tokens.known_length)
                cos, sin = ((self.scaling.amplitude * turn).to(dtype) for turn in (angle.cos(), angle.sin()))
                turns = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
            if len(self._turns) >= TURNS_KEPT:
                del self._turns[next(iter(self._turns))]
            self._turns[key] = turns
        return turns

    def __getstate__(self) -> dict[str, Any]:
        """Copies, and what is stored of the module, compute their own."""
        return {**super().__getstate__(), "_turns": {}}


class _Rotation(torch.autograd.Function):
    """x·cos + swap(x)·sin, swap exchanging the halves of the dimensions that are turned; the others stay.

    Written by hand, since autograd would cut and join the halves in each direction, and fill what it cuts with zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., T, d], cos and sin [T, r]; computed in their type."""
        ctx.save_for_backward(cos, sin)
        result, turned, swapped = _allocate_turned(x, cos.shape[-1])
        torch.addcmul(x[..., : cos.shape[-1]] * cos, swapped, sin, out=turned)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The turn back: swap(sin) is −sin."""
        cos, sin = ctx.saved_tensors
        result, turned, swapped = _allocate_turned(grad, cos.shape[-1])
        # Not addcmul, which may round once where the sum of two terms rounds each.
        torch.sub(grad[..., : cos.shape[-1]] * cos, swapped * sin, out=turned)
        return result, None, None


def _allocate_turned(x: Tensor, rotated: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the result, in which what is not turned stands already; what of it will be turned; and x with the halves
    of that exchanged."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = result
    if rotated < x.shape[-1]:
        result[..., rotated:] = x[..., rotated:]
        turned = result[..., :rotated]
    return result, turned, x[..., :rotated].roll(rotated // 2, -1)

"""Size of rounding errors of a result by its type and number of terms, independent of a machine.

A result cannot be judged by the error of another implementation: that error depends on one machine, and a library that
sums in another order on another processor is not wrong. A model of rounding can be derived. A rounded operation gives
fl(x) = x·(1 + δ) with |δ| ≤ u, half the spacing of its type at 1 (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, section 2.2). A sum of n terms has an error of about √n · u · Σ|terms| in any order (Higham and Mary,
A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019, theorem 2.4 with λ = 1; the
certain bound has n·u instead of √n·u). The propagation of these errors depends on the formula. So the formula itself is
evaluated in float64 with every operation perturbed by random δ of that size, forward and backward (Monte Carlo
arithmetic: Parker, UCLA CSD-970002, 1997). A seeded generator draws the perturbations in float64, so their size is the
same on every machine. Correlations, such as the common denominator of a row, are included.

A result must be within SAFETY_FACTOR times that size, in the norm of its errors and in the largest.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

Results = Mapping[str, Tensor]
SAFETY_FACTOR = 4.0
"""Accepted ratio to the error of the perturbed results: one random error in 16,000 exceeds four deviations."""
NUM_DRAWS = 12
"""Maximum number of perturbed evaluations for the root mean square of their errors."""
ELEMENTARY_UNITS = 4.0
"""Error of an exponential or logarithm in units of roundoff: 2 ulp in PyTorch, NumPy and CUDA's approximate
instructions."""


def suspend_rounding() -> AbstractContextManager[object]:
    """Leave the operations inside the context exact under a `RoundingMode`.

    For code that computes in float64 in every compute type. Its backward pass is perturbed.
    """
    return _disable_current_modes()


class RoundingMode(TorchDispatchMode):
    """Mode that perturbs every float64 operation as rounding in `dtype` would, including autograd's backward pass.

    Half types multiply as in kernels: the factors of a product are rounded to the type, and everything else is float32,
    including sums of products. An operation without a rule raises an error, so that no operation is silently treated as
    exact.

    Args:
        dtype: the compute type.
        seed: seed of the perturbations.
        stored: True if matrix products (not convolutions) are stored in memory, and rounded to the type again.
        rounds_every_op: True if every result is rounded to the type, as in unfused code.
    """

    def __init__(self, dtype: torch.dtype, seed: int, *, stored: bool = False, rounds_every_op: bool = False) -> None:
        super().__init__()
        self.dtype, self.stored, self.rounds_every_op = dtype, stored, rounds_every_op
        self.unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def draw_noise(self, like: Tensor) -> Tensor:
        """Return uniform noise in ±u, with the shape and device of a tensor."""
        generator = self._get_generator(like.device)
        drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device)
        return (2 * drawn - 1) * self.unit

    def _get_generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]

    def perturb(self, x: Tensor, units: float | Tensor = 1.0) -> Tensor:
        """Return x·(1 + δ), |δ| ≤ units · u."""
        return x + torch.nan_to_num(x, posinf=0.0, neginf=0.0) * units * self.draw_noise(x)

    def perturb_sum(self, x: Tensor, terms: float | Tensor, sizes: Tensor) -> Tensor:
        """Return a perturbed sum x of a number of terms, the sum of whose magnitudes is `sizes`."""
        return x + torch.sqrt(torch.as_tensor(terms, device=x.device)) * sizes * self.draw_noise(x)

    def round_factor(self, x: Tensor) -> Tensor:
        """Return x with a random error as large as the rounding of a product's factor to a half type.

        The error is uniform within half the spacing of the type at x, as if the grid of the type were shifted at
        random. Rounding to nearest would repeat the same error in every draw, and a result that depends on few
        elements would be judged by a sample of size one. Values that the type represents exactly, such as inputs, are
        unchanged.
        """
        if self.dtype.itemsize >= 4:
            return x
        info = torch.finfo(self.dtype)
        smallest = math.frexp(info.smallest_normal)[1]
        spacing = torch.ldexp(torch.full_like(x, info.eps / 2), x.frexp().exponent.clamp(min=smallest))
        noise = torch.rand(x.shape, generator=self._get_generator(x.device), dtype=x.dtype, device=x.device)
        return torch.where(self.store(x) == x, x, x + (noise - 0.5) * spacing)

    def store(self, x: Tensor) -> Tensor:
        """Round a result to the nearest value of a half type, in which it is stored."""
        return x.to(self.dtype).to(x.dtype) if self.dtype.itemsize < 4 else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in EXACT_OPS or not any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args):
            return func(*args, **kwargs)
        if packet in RULES_BY_OP:
            found = RULES_BY_OP[packet](self, func, args, kwargs)
            return tree_map_only(Tensor, self.store, found) if self.rounds_every_op else found
        out = func(*args, **kwargs)
        if not out.is_floating_point():
            return out
        if packet not in UNITS_BY_OP:
            raise NotImplementedError(f"{func} has no rounding rule; add it to the rules of {__file__}")
        disturbed = self.perturb(out, UNITS_BY_OP[packet])
        if self.rounds_every_op:
            disturbed = self.store(disturbed)
        return out.copy_(disturbed) if func._schema.is_mutable else disturbed


aten = torch.ops.aten
EXACT_OPS = {
    *(aten.view, aten._unsafe_view, aten.expand, aten.permute, aten.transpose, aten.t, aten.slice, aten.select),
    *(aten.unsqueeze, aten.squeeze, aten.clone, aten.detach, aten.alias, aten._to_copy, aten.copy_, aten.where),
    *(aten.masked_fill, aten.index, aten.cat, aten.constant_pad_nd, aten.neg, aten.abs, aten.relu, aten.clamp),
    *(aten.threshold_backward, aten.maximum, aten.minimum, aten.zeros_like, aten.ones_like, aten.zeros, aten.full),
    *(aten.arange, aten.new_zeros, aten.new_empty, aten.slice_backward, aten.select_backward, aten.scalar_tensor),
    *(aten.empty_like, aten.full_like, aten.ones, aten.empty, aten.fill_, aten.zero_, aten.stack, aten.lift_fresh),
    *(aten.masked_fill_, aten.clamp_min, aten.sgn, aten.split, aten.unbind, aten.new_full, aten.new_empty_strided),
    *(aten.flip, aten.unfold, aten.gather, aten.floor, aten.index_select, aten.split_with_sizes, aten.as_strided),
    *(aten.max, aten.min, aten.amax, aten.amin, aten.sort, aten.topk, aten.tril, aten.triu, aten.roll, aten.repeat),
    *(aten.clamp_max, aten.ceil, aten.round, aten.trunc, aten.sign, aten.scatter, aten.diagonal, aten.new_ones),
}
ARITHMETIC_OPS = (
    *(aten.add, aten.add_, aten.sub, aten.mul, aten.mul_, aten.div, aten.div_, aten.reciprocal, aten.rsub),
    *(aten.leaky_relu, aten.leaky_relu_, aten.leaky_relu_backward, aten.sqrt, aten.rsqrt),
)
ELEMENTARY_OPS = (
    *(aten.exp, aten.log, aten.log1p, aten.pow, aten.cos, aten.sin, aten.sigmoid, aten.tanh),
    *(aten.softplus, aten.softplus_backward, aten.exp2, aten.expm1, aten.log2, aten.silu),
)
UNITS_BY_OP = dict.fromkeys(ARITHMETIC_OPS, 1.0) | dict.fromkeys(ELEMENTARY_OPS, ELEMENTARY_UNITS)
"""Error of elementwise operations in units of roundoff."""


def _sum(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    x, *rest = args
    out = func(x, *rest, **kwargs)
    return mode.perturb_sum(out, x.numel() / out.numel(), func(x.abs(), *rest, **kwargs))


def _mean(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    return mode.perturb(_sum(mode, func, args, kwargs))


def _vector_norm(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Perturb a norm: its terms have one sign, so that its error is relative."""
    out = func(*args, **kwargs)
    return mode.perturb(out, math.sqrt(args[0].numel() / out.numel()) + ELEMENTARY_UNITS)


def _cumsum(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    x, *rest = args
    return mode.perturb_sum(func(*args, **kwargs), func(torch.ones_like(x), *rest), func(x.abs(), *rest))


def _product(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    a, b = (mode.round_factor(x) for x in args)
    out = mode.perturb_sum(func(a, b), a.shape[-1], func(a.abs(), b.abs()))
    return mode.store(out) if mode.stored else out


def _addmm(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    c, a, b = args
    a, b = mode.round_factor(a), mode.round_factor(b)
    return mode.perturb_sum(func(c, a, b), a.shape[-1] + 1, func(c.abs(), a.abs(), b.abs()))


def _convolution(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    x, weight, bias, *rest = args
    x, weight = mode.round_factor(x), mode.round_factor(weight)
    sizes = func(x.abs(), weight.abs(), None if bias is None else bias.abs(), *rest)
    return mode.perturb_sum(func(x, weight, bias, *rest), weight[0].numel() + 1, sizes)


def _convolution_backward(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Tensor | None, ...]:
    gradient, x, weight, *rest = args
    narrow, x, weight = mode.round_factor(gradient), mode.round_factor(x), mode.round_factor(weight)
    found = list(func(narrow, x, weight, *rest))
    if found[2] is not None:  # the gradient of the constant is a sum, not a product
        found[2] = gradient.sum((0, *range(2, gradient.dim())))
    sizes = func(gradient.abs(), x.abs(), weight.abs(), *rest)
    pixels = gradient.numel() / gradient.shape[1]
    counts = (weight.numel() / weight.shape[1], pixels, pixels)
    return tuple(
        None if out is None else mode.perturb_sum(out, count, size)
        for out, count, size in zip(found, counts, sizes, strict=True)
    )


def _index_put(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Perturb the sums of values with the same index."""
    x, indices, values, *accumulate = args
    if not (accumulate and accumulate[0]):
        return func(*args, **kwargs)
    zero = torch.zeros_like(x)
    counts = func(zero, indices, torch.ones_like(values), True)
    return mode.perturb_sum(func(x, indices, values, True), counts, func(zero, indices, values.abs(), True))


def _softmax(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Perturb the exponent by its own size, and the common denominator of each row.

    The exponent includes base 2 and the subtraction.
    """
    x, dim, *rest = args
    exact = func(x, dim, *rest)
    out = func(mode.perturb(x, 2), dim, *rest)
    common = torch.logsumexp(x, dim, keepdim=True).abs() + math.sqrt(x.shape[dim])
    return mode.perturb(out * (1 + common * mode.draw_noise(common)), ELEMENTARY_UNITS).where(exact > 0, 0)


def _softmax_backward(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    gradient, p, dim, *_ = args
    terms = gradient * p
    mean = mode.perturb_sum(terms.sum(dim, keepdim=True), p.shape[dim], terms.abs().sum(dim, keepdim=True))
    return mode.perturb(p * mode.perturb(gradient - mean))


def _tanh_backward(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Perturb tanh's backward pass: 1 − tanh² cancels if the tangent is near ±1."""
    gradient, tangent = args
    return mode.perturb(gradient * mode.perturb(1 - mode.perturb(tangent.square())))


def _sigmoid_backward(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Perturb the sigmoid's backward pass: 1 − σ cancels if σ is near 1."""
    gradient, gate = args
    return mode.perturb(gradient * mode.perturb(gate * mode.perturb(1 - gate)))


def _silu_backward(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Perturb the two terms of the derivative σ + x·σ·(1 − σ), which cancel near x = −1.28."""
    gradient, x = args
    gate = mode.perturb(torch.sigmoid(x), ELEMENTARY_UNITS)
    return mode.perturb(gradient * (gate + mode.perturb(x * gate * mode.perturb(1 - gate), 2)))


def _log_softmax(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Perturb the common logarithm of each row, and the subtraction."""
    x, dim, *_ = args
    total = torch.logsumexp(x, dim, keepdim=True)
    units = math.sqrt(x.shape[dim]) + ELEMENTARY_UNITS + total.abs()
    return mode.perturb(func(*args, **kwargs) + units * mode.draw_noise(total))


def _log_softmax_backward(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    gradient, logarithm, dim, *_ = args
    total = mode.perturb_sum(
        gradient.sum(dim, keepdim=True), logarithm.shape[dim], gradient.abs().sum(dim, keepdim=True)
    )
    return mode.perturb(gradient - mode.perturb(logarithm.exp() * total, ELEMENTARY_UNITS))


def _logsumexp(mode: RoundingMode, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    x, dim, *rest = args
    out = func(mode.perturb(x, 2), dim, *rest)
    return mode.perturb(out, ELEMENTARY_UNITS) + (math.sqrt(x.shape[dim[0]]) + ELEMENTARY_UNITS) * mode.draw_noise(out)


RULES_BY_OP: dict[Any, Callable[[RoundingMode, Any, Sequence[Any], Any], Any]] = {
    aten.sum: _sum,
    aten.mean: _mean,
    aten.linalg_vector_norm: _vector_norm,
    aten.cumsum: _cumsum,
    aten.mm: _product,
    aten.bmm: _product,
    aten.addmm: _addmm,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.index_put: _index_put,
    aten._unsafe_index_put: _index_put,
    aten._softmax: _softmax,
    aten._softmax_backward_data: _softmax_backward,
    aten._log_softmax: _log_softmax,
    aten._log_softmax_backward_data: _log_softmax_backward,
    aten.logsumexp: _logsumexp,
    aten.sigmoid_backward: _sigmoid_backward,
    aten.silu_backward: _silu_backward,
    aten.tanh_backward: _tanh_backward,
}


def compute_error_sizes(error: Tensor) -> Tensor:
    """Return the two judged sizes of an error: its norm and its largest element."""
    if not error.numel():
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack([torch.linalg.vector_norm(error), error.abs().max()]).double().cpu()


def _iter_squared_sizes(
    result_dtypes: Mapping[str, torch.dtype],
    truth: Results,
    compute: Callable[[], Results],
    dtype: torch.dtype,
    **model: bool,
) -> Iterator[dict[str, Tensor]]:
    """Yield the squared error sizes of each result for one perturbed evaluation after another.

    The sizes are those of `compute_error_sizes`.
    """
    for seed in range(NUM_DRAWS):
        with RoundingMode(dtype, seed, **model):
            drawn = compute()
        yield {
            name: compute_error_sizes(drawn[name].detach().to(result_dtypes[name]).double() - exact).square()
            for name, exact in truth.items()
        }


def estimate_rounding_sizes(
    result_dtypes: Mapping[str, torch.dtype],
    truth: Results,
    compute: Callable[[], Results],
    dtype: torch.dtype,
    **model: bool,
) -> dict[str, Tensor]:
    """Estimate the sizes (`compute_error_sizes`) of rounding errors: root mean squares over perturbed evaluations.

    Args:
        result_dtypes: data type of each result, to which it is rounded once more.
        truth: `compute()`, without gradients.
        compute: computes the results in float64.
        dtype, model: as in `RoundingMode`: stored, rounds_every_op.
    """
    squares = list(_iter_squared_sizes(result_dtypes, truth, compute, dtype, **model))
    return {name: torch.stack([each[name] for each in squares]).mean(0).sqrt() for name in truth}


def compute_size_ratio(error: Tensor, size: Tensor) -> float:
    """Return the ratio of an error to a size: the larger one of norm and maximum; ∞ for NaN."""
    ratios = [
        0.0 if mine == 0 else (mine / theirs).item()
        for mine, theirs in zip(compute_error_sizes(error), size, strict=True)
    ]
    return math.inf if any(math.isnan(ratio) for ratio in ratios) else max(ratios)


def compute_error_ratio(
    found: Results, compute: Callable[[], Results], dtype: torch.dtype, **model: bool
) -> dict[str, float]:
    """Return the ratio of each result's error to the size of rounding errors.

    The ratio is the larger of norm and maximum, and ∞ for NaN.

    The function stops drawing as soon as no result can exceed SAFETY_FACTOR any more. The mean square over all N draws
    is at least k/N times that over the first k, so a ratio can grow by at most √(N/k). A ratio above SAFETY_FACTOR
    always includes all draws; a smaller one may include fewer. A NaN draw is only detected if it is made.

    Args:
        found: results in any type, on any device. One more rounding to their own type is allowed.
        compute: computes the same results in float64, from the same inputs.
        dtype, model: as in `RoundingMode`.
    """
    truth = {name: x.detach() for name, x in compute().items()}
    assert found.keys() == truth.keys(), f"{sorted(found)} against {sorted(truth)}"
    for name, exact in truth.items():
        assert found[name].shape == exact.shape, name
    errors = {name: found[name].detach().to(exact.device).double() - exact for name, exact in truth.items()}
    result_dtypes = {name: x.dtype for name, x in found.items()}
    totals, ratios = {name: torch.zeros(2, dtype=torch.float64) for name in truth}, {}
    for count, squares in enumerate(_iter_squared_sizes(result_dtypes, truth, compute, dtype, **model), start=1):
        totals = {name: total + squares[name] for name, total in totals.items()}
        ratios = {name: compute_size_ratio(errors[name], (totals[name] / count).sqrt()) for name in truth}
        if max(ratios.values(), default=0.0) <= SAFETY_FACTOR * math.sqrt(count / NUM_DRAWS):
            break
    return ratios

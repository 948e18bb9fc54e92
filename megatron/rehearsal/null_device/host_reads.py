"""Values that the host reads from the null device instead of results.

Kernels do not run, so their results are meaningless: they read as zeros (`native/memory.c`). Only buffers written
entirely by the host read back unchanged. The host also makes decisions based on values: a loss that is not finite ends
a run, and a gradient that is not finite skips a step. To keep a job on its normal path:

    a number read from the device      0, or the host's value if plausible (0 … 10⁴), else 1
    isfinite                           True
    isinf, isnan                       False
    gradient overflow                  none; the collectives that check all ranks still run
    the first rank's list of numbers   equal to this rank's, including its length; the broadcasts still run
    a checkpoint's copy of the states  the stored bytes, with 0 for values that are not finite
    the pipeline stages' vote          this stage's own vote; the messages are still sent
    self-check of an attention backend passes if the backend runs; the result is not stored

A rehearsal therefore never covers the branches of a diverging run: a skipped step, a rollback, an early end. cuDNN's
attention is disabled because its planning needs more of a GPU than the null device provides.
"""

import functools
from collections.abc import Callable
from typing import Any

LARGEST = 1e4
"""Largest value returned unchanged. A reused buffer may contain anything; losses and norms are not negative."""


def _change_torch(torch: Any) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    tensor = torch.Tensor

    def replace_predicate(name: str, value: bool) -> None:
        real = getattr(torch, name)

        @functools.wraps(real)
        def ask(input: Any, *args: Any, **kwargs: Any) -> Any:
            if not input.is_cuda:
                return real(input, *args, **kwargs)
            result = torch.full(input.shape, value, dtype=torch.bool).to(input.device)
            result.null_device_answer = value
            return result

        setattr(torch, name, ask)
        setattr(tensor, name, ask)

    replace_predicate("isfinite", True)
    replace_predicate("isnan", False)
    replace_predicate("isinf", False)

    def replace_reduction(name: str) -> None:
        real = getattr(tensor, name)

        @functools.wraps(real)
        def reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
            value = getattr(self, "null_device_answer", None)
            if value is None or args or kwargs:
                return real(self, *args, **kwargs)
            real(self)  # still launch the kernel
            return torch.tensor(value).to(self.device)

        setattr(tensor, name, reduce)

    replace_reduction("all")
    replace_reduction("any")

    def replace_reader(name: str) -> None:
        real = getattr(tensor, name)

        @functools.wraps(real)
        def read(self: Any) -> Any:
            value = real(self)
            return _replace_implausible(value) if self.is_cuda else value

        setattr(tensor, name, read)

    for name in ("item", "tolist", "__float__"):
        replace_reader(name)

    # The text of a tensor is built by loops over its values, which do not exist.
    describe = tensor.__repr__

    def represent(self: Any, *, tensor_contents: Any = None) -> str:
        if not self.is_cuda:
            return str(describe(self, tensor_contents=tensor_contents))
        return f"tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    tensor.__repr__ = represent


def _change_parameter(parameter: Any) -> None:
    describe = parameter.Parameter.__repr__

    def represent(self: Any) -> str:
        return f"Parameter containing:\n{self.data!r}" if self.is_cuda else str(describe(self))

    parameter.Parameter.__repr__ = represent


def _replace_implausible(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_implausible(part) for part in value]
    if isinstance(value, float) and not 0.0 <= value <= LARGEST:
        return 1.0
    return value


def _run_and_answer(owner: Any, name: str, answer: Callable[..., Any]) -> None:
    """Patch a function to run unchanged but return the given answer.

    Raises:
        RuntimeError: if the function does not exist, because this version of DeepSpeed is unsupported.
    """
    real = getattr(owner, name, None)
    if real is None:
        raise RuntimeError(f"{getattr(owner, '__name__', owner)} has no {name}: unsupported version of DeepSpeed")

    @functools.wraps(real)
    def run(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        return answer(*args, **kwargs)

    setattr(owner, name, run)


def _change_deepspeed_utils(utils: Any) -> None:
    _run_and_answer(utils, "is_invalid_grad_norm", lambda norm: False)
    _run_and_answer(utils.CheckOverflow, "has_overflow", lambda *args, **kwargs: False)


def _change_stages_1_and_2(module: Any) -> None:
    _run_and_answer(module.DeepSpeedZeroOptimizer, "has_overflow", lambda *args, **kwargs: False)


def _change_stage_3(module: Any) -> None:
    _run_and_answer(module.DeepSpeedZeroOptimizer_Stage3, "has_overflow", lambda *args, **kwargs: False)


def _change_zero_utils(utils: Any) -> None:
    _run_and_answer(utils, "get_lst_from_rank0", lambda lst: lst)
    real = utils.assert_lst_len_same_as_other_ranks

    @functools.wraps(real)
    def compare_lengths(lst: list[int]) -> None:
        try:
            real(lst)
        except RuntimeError as error:
            if "disagreement" not in str(error):
                raise

    utils.assert_lst_len_same_as_other_ranks = compare_lengths


def _change_sharded_state(module: Any) -> None:
    real = module.PinnedStagingBuffers.copy_to_host

    @functools.wraps(real)
    def copy_to_host(self: Any, tensors: Any) -> Any:
        copies = real(self, tensors)
        for copy in copies.values():
            copy.nan_to_num_(0.0, 0.0, 0.0)
        return copies

    module.PinnedStagingBuffers.copy_to_host = copy_to_host


def _change_pipeline_stage(module: Any) -> None:
    """Patch the vote of the stages on whether shapes are static. The votes pass through the device."""

    def vote(stage: Any, has_backward: bool) -> Any:
        import torch

        is_static = not module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        return torch.tensor([int(is_static)], dtype=torch.int32).to(stage.device)

    stage = module.PipelineStage
    if not hasattr(stage, "_warmup_forward_vote"):  # torch 2.11: stages do not vote
        return
    _run_and_answer(stage, "_warmup_forward_vote", lambda self, has_backward, **_: vote(self, has_backward))
    _run_and_answer(stage, "_warmup_backward_result", lambda self, **_: vote(self, self.has_backward))


def _change_attention_trials(trials: Any) -> None:
    """Patch the self-check: every backend that runs passes, with an unknown error.

    There are no results to compare.
    """
    trials.ReferenceResults.exact = {"output": None}
    trials.ReferenceResults.compute_error_ratio = lambda self, found, is_zero_elsewhere, rounds_every_op: {}


def _change_attention_registry(registry: Any) -> None:
    """Patch the registry: FlexAttention runs on request but is not checked.

    It takes half a minute to compile.
    """
    registry.CHECKED_BACKENDS = tuple(name for name in registry.CHECKED_BACKENDS if name != "flex")


def _change_attention_check_result(check_result: Any) -> None:
    """Patch the self-check's evidence: results of the null device are never stored."""
    check_result.read_cache = lambda key: None
    check_result.write_cache = lambda found: None


IMPORT_PATCHES: dict[str, Callable[[Any], None]] = {
    "torch": _change_torch,
    "megatron.attention.backends.registry": _change_attention_registry,
    "megatron.attention.check.trials": _change_attention_trials,
    "megatron.attention.check.check_result": _change_attention_check_result,
    "torch.nn.parameter": _change_parameter,
    "torch.distributed.pipelining.stage": _change_pipeline_stage,
    "deepspeed.runtime.utils": _change_deepspeed_utils,
    "deepspeed.runtime.zero.stage_1_and_2": _change_stages_1_and_2,
    "deepspeed.runtime.zero.stage3": _change_stage_3,
    "deepspeed.runtime.zero.utils": _change_zero_utils,
    "megatron.checkpoint.sharded_state": _change_sharded_state,
}
"""Patches by module name, applied once the module is imported."""

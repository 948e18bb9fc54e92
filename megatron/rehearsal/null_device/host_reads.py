"""What values that the host reads from the null device mean: the one place that decides it.

Kernels do not run, so their results have no meaning, and nothing may be concluded from them: they read as zeros
(`native/memory.c`). Only what the host wrote into the device as a whole is read back as it is. But the host also
decides by what it reads: a loss that is not finite ends a run, a gradient that is not finite skips a step. So that a
job goes its ordinary way,

    a number read from the device      is 0, or what the host wrote there if that is ordinary (0 … 10⁴), else 1
    is it finite?                      yes
    is it infinite, is it no number?   no
    did a gradient overflow?           no; the collectives that ask all ranks take place
    the first rank's list of numbers   equal to this rank's, its length too; the broadcasts take place
    a checkpoint's copy of the states  what lies there, 0 where it is no finite number
    the pipeline stages' vote          this stage's own; the messages take place
    is a backend of attention right?   yes, if it runs; what the check finds is kept nowhere

A rehearsal therefore never takes the branches of a run whose numbers go wrong: a skipped step, a rollback, an early
end. cuDNN's attention is switched off, whose planning asks more of the card than there is.
"""

import functools
from collections.abc import Callable
from typing import Any

LARGEST = 1e4
"""The largest number that is taken as it is; what an old tensor left may be anything. Losses and norms are not
negative."""


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
            real(self)  # the launch takes place
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

    # A tensor's text is made of its values, by loops over values that are not there.
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
    """Have a function run as it is, and return something else.

    Raises:
        RuntimeError: there is no such function; this DeepSpeed is another than this file knows.
    """
    real = getattr(owner, name, None)
    if real is None:
        raise RuntimeError(f"{getattr(owner, '__name__', owner)} has no {name}: the installed DeepSpeed is not known")

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
    """Stages vote on whether shapes are known beforehand, in numbers that pass through the device."""

    def vote(stage: Any, has_backward: bool) -> Any:
        import torch

        is_static = not module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        return torch.tensor([int(is_static)], dtype=torch.int32).to(stage.device)

    stage = module.PipelineStage
    _run_and_answer(stage, "_warmup_forward_vote", lambda self, has_backward, **_: vote(self, has_backward))
    _run_and_answer(stage, "_warmup_backward_result", lambda self, **_: vote(self, self.has_backward))


def _change_attention_trials(trials: Any) -> None:
    """There is nothing to compare: every backend that runs counts as right, and its error is not known."""
    trials.Judge.exact = {"output": None}
    trials.Judge.compute_excess = lambda self, found, others_are_zero, throughout: {}


def _change_attention_registry(registry: Any) -> None:
    """FlexAttention is computed where it is asked for, but not tried: it takes the compiler half a minute."""
    registry.CHECKED_BACKENDS = tuple(name for name in registry.CHECKED_BACKENDS if name != "flex")


def _change_attention_evidence(evidence: Any) -> None:
    """What is found here holds nowhere else."""
    evidence.read_cache = lambda key: None
    evidence.write_cache = lambda found: None


IMPORT_PATCHES: dict[str, Callable[[Any], None]] = {
    "torch": _change_torch,
    "megatron.attention.backends.registry": _change_attention_registry,
    "megatron.attention.check.trials": _change_attention_trials,
    "megatron.attention.check.evidence": _change_attention_evidence,
    "torch.nn.parameter": _change_parameter,
    "torch.distributed.pipelining.stage": _change_pipeline_stage,
    "deepspeed.runtime.utils": _change_deepspeed_utils,
    "deepspeed.runtime.zero.stage_1_and_2": _change_stages_1_and_2,
    "deepspeed.runtime.zero.stage3": _change_stage_3,
    "deepspeed.runtime.zero.utils": _change_zero_utils,
    "megatron.checkpoint.sharded_state": _change_sharded_state,
}
"""What is changed in which module, once it is imported."""

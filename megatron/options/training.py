"""Keys that decide how the model is trained: batch, precision, sharding, evaluation during training."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from megatron.options.section import MAX_STEPS, CommaSeparated, ConfigSection, config_field

Precision = Literal["fp32", "bf16", "fp16"]

MICRO_BATCH_KEY, ACCUMULATION_KEY, GLOBAL_BATCH_KEY = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
BATCH_SIZES = (MICRO_BATCH_KEY, ACCUMULATION_KEY, GLOBAL_BATCH_KEY)
"""Keys of the three batch sizes. Any two determine the third, given the number of processes."""
MAX_BATCH_SIZE = 10**6
"""Upper bound of sequences per optimizer step, above every published batch, so that a typo is reported at once."""

MAX_SEED = 2**32 - 1
"""Largest seed that numpy accepts."""


class OffloadOptions(ConfigSection):
    device: Literal["none", "cpu"] = config_field(
        "none", "none: the device that trains; cpu: host memory", policy="machine"
    )
    pin_memory: bool = config_field(
        True, "page-locked host memory, which GPUs copy from and to faster", policy="machine"
    )


class ZeroOptions(ConfigSection):
    """DeepSpeed's ZeRO. Keys have no effect at stages that do not read them (`ZERO_STAGES`)."""

    stage: Literal[0, 1, 2, 3] = config_field(
        0, "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters", policy="machine"
    )
    offload_optimizer: OffloadOptions = config_field(
        OffloadOptions, "stages 1–3: location of masters, optimizer states and the optimizer step"
    )
    offload_param: OffloadOptions = config_field(
        OffloadOptions, "stage 3: location of parameters while they are not used"
    )
    overlap_comm: bool = config_field(
        False, "stages 1–3: reduce gradients on a separate GPU stream during the backward pass", policy="machine"
    )
    reduce_scatter: bool = config_field(
        True, "stages 1–3: each rank receives only its shard of the reduced gradients", policy="machine"
    )
    reduce_bucket_size: int = config_field(
        500_000_000, "stages 1–3: gradient elements reduced at a time", ge=1, le=10**12, policy="machine"
    )
    allgather_bucket_size: int = config_field(
        500_000_000,
        "stages 1 and 2: parameter elements gathered at a time after a step; even",
        ge=1,
        le=10**12,
        policy="machine",
    )
    allgather_partitions: bool = config_field(
        True, "no effect: DeepSpeed always gathers updated parameters", policy="machine"
    )
    contiguous_gradients: bool = config_field(
        True, "stages 1–3: copy gradients into one buffer as they are produced", policy="machine"
    )
    sub_group_size: int = config_field(
        1_000_000_000,
        "stage 3: parameter elements that the optimizer steps at a time",
        ge=1,
        le=10**12,
        policy="machine",
    )
    stage3_param_persistence_threshold: int = config_field(
        100_000, "stage 3: parameters of fewer elements stay on every rank", ge=0, le=10**12, policy="machine"
    )
    stage3_max_live_parameters: int = config_field(
        1_000_000_000,
        "stage 3: maximum number of parameter elements that a rank gathers at a time",
        ge=0,
        le=10**12,
        policy="machine",
    )
    stage3_max_reuse_distance: int = config_field(
        1_000_000_000,
        "stage 3: keep a gathered parameter that is reused within this many elements",
        ge=0,
        le=10**12,
        policy="machine",
    )
    stage3_prefetch_bucket_size: int = config_field(
        50_000_000, "stage 3: parameter elements gathered ahead of their use", ge=0, le=10**12, policy="machine"
    )

    def list_unused_keys(self) -> list[str]:
        """List the keys that differ from their default although this stage does not read them."""
        return [
            name
            for name, stages in ZERO_STAGES.items()
            if self.stage not in stages and getattr(self, name) != type(self).model_fields[name].default
        ]


ZERO_STAGES: dict[str, tuple[int, ...]] = {
    "overlap_comm": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "allgather_partitions": (),
    "contiguous_gradients": (1, 2, 3),
    "sub_group_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_prefetch_bucket_size": (3,),
}
"""Stages that read a key of `ZeroOptions`. Offloading is not listed: unsupported combinations are rejected."""


class Fp16Options(ConfigSection):
    enabled: bool = config_field(False, "train in float16 with loss scaling (GPU)", policy="numerics")
    loss_scale: float = config_field(0, "fixed loss scale; 0 is dynamic", ge=0, policy="numerics")
    initial_scale_power: int = config_field(
        12, "exponent of the initial dynamic loss scale, a power of 2", ge=0, le=127, policy="numerics"
    )
    loss_scale_window: int = config_field(
        1000, "steps without an overflow before the loss scale doubles", ge=1, le=MAX_STEPS, policy="numerics"
    )
    hysteresis: int = config_field(2, "overflows before the loss scale halves", ge=1, le=MAX_STEPS, policy="numerics")
    min_loss_scale: float = config_field(1, "smallest dynamic loss scale", gt=0, policy="numerics")


class Bf16Options(ConfigSection):
    enabled: bool = config_field(False, "train in bfloat16 with float32 master weights", policy="numerics")


def _check_lengths(values: Any) -> Any:
    """Check that lengths are numbers of tokens or multiples such as 4x."""
    for number, value in enumerate(values if isinstance(values, list) else (), start=1):
        is_multiple = isinstance(value, str) and re.fullmatch(r"[1-9]\d{0,3}x", value) is not None and value != "1x"
        if not is_multiple and not (type(value) is int and value >= 1):
            rule = (
                f"item {number} must be a multiple of the training length, greater than 1, such as 4x, or a number "
                "of tokens (1x is always included)"
            )
            raise PydanticCustomError("eval_length", "{rule}", {"rule": rule})
    return values


def count_eval_multiple(length: int | str, seq_length: int) -> int:
    """Return an entry of `eval_lengths` as a multiple of the training length; 0 for tokens that are not a multiple."""
    if isinstance(length, str):
        return int(length.removesuffix("x"))
    return 0 if length % seq_length else length // seq_length


def find_eval_length_conflicts(training: "TrainingOptions", seq_length: int) -> Iterator[tuple[str, str]]:
    """Yield validation lengths that are not whole multiples of the training length, or are given twice."""
    multiples = []
    for length in training.eval_lengths:
        multiple = count_eval_multiple(length, seq_length)
        if multiple < 2:
            yield (
                "eval_lengths",
                f"eval_lengths: {length} tokens are not a multiple of seq_length {seq_length}, greater than 1; write "
                f"multiples as 2x, or tokens as {2 * seq_length} (1x is always included)",
            )
        elif multiple in multiples:
            yield "eval_lengths", f"eval_lengths: {multiple}x is listed more than once"
        multiples.append(multiple)


def _read_switch(value: Any) -> Any:
    """Convert true and false to `on` and `off`, which YAML 1.1 reads as booleans."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class TrainingOptions(ConfigSection):
    """Batches, steps, precision, seeds."""

    @property
    def compute_dtype(self) -> Precision:
        """Data type of the computation."""
        return self.precision or ("bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32")

    train_iters: int = config_field(
        0,
        "optimizer steps; training requires it or train_epochs",
        le=MAX_STEPS,
        policy="schedule",
    )
    train_epochs: float | None = config_field(
        None,
        "epochs over the training text; train_iters is then computed from the corpus",
        gt=0,
        le=10**6,
        policy="schedule",
    )
    stages: list[dict[str, Any]] = config_field(
        list,
        "training stages: the end of each (until: a step, or until_tokens) and the keys that it changes, such "
        "as seq_length or train_data_weights (docs/schedules.md)",
        policy="schedule",
    )
    train_micro_batch_size_per_gpu: int = config_field(
        4, "sequences per rank and micro-step", ge=1, le=MAX_BATCH_SIZE, policy="machine"
    )
    gradient_accumulation_steps: int = config_field(
        1, "micro-steps per optimizer step", ge=1, le=MAX_BATCH_SIZE, policy="machine"
    )
    train_batch_size: int | None = config_field(
        None,
        "sequences per optimizer step: micro-batch size × accumulation steps × data-parallel ranks",
        ge=1,
        le=MAX_BATCH_SIZE,
        policy="schedule",
    )
    z_loss: float = config_field(
        0.0,
        "coefficient of the mean of log² Z over scored tokens, which keeps the softmax's sum Z near 1 (PaLM: 1e-4); "
        "reported separately, and not part of losses and perplexities",
        ge=0,
        policy="numerics",
    )
    zero_optimization: ZeroOptions = config_field(ZeroOptions, "DeepSpeed ZeRO")
    precision: Precision | None = config_field(
        None, "sets fp16.enabled and bf16.enabled; bfloat16, float16 and float32 are accepted too", policy="numerics"
    )
    fp16: Fp16Options = config_field(Fp16Options, "float16 training")
    bf16: Bf16Options = config_field(Bf16Options, "bfloat16 training")
    seed: int = config_field(
        1234, "seed of initialization, dropout and data order", ge=0, le=MAX_SEED, policy="numerics"
    )
    deterministic: bool = config_field(False, "use deterministic algorithms only", policy="machine")
    cuda_graph: Annotated[Literal["off", "on", "auto"], BeforeValidator(_read_switch)] = config_field(
        "auto",
        "launch a micro-batch's forward and backward pass as CUDA graphs instead of kernel by kernel; auto: if graphs "
        "give the same gradients, are faster and fit (docs/gpu.md); on: always, or raise an error",
        policy="machine",
    )
    eval_interval: int = config_field(
        1000, "steps between validations; 0 turns them off", ge=0, le=MAX_STEPS, policy="output"
    )
    eval_iters: int | None = config_field(
        None,
        "batches per validation, spread evenly over its text; if absent, the whole text once (100 batches of a task)",
        ge=0,
        le=MAX_STEPS,
        policy="output",
    )
    eval_lengths: Annotated[list[int | str], BeforeValidator(_check_lengths), CommaSeparated] = config_field(
        list,
        "additional validation lengths, in training lengths (2x,4x,16x) or tokens, on the same tokens",
        policy="output",
    )
    eval_at_start: bool = config_field(False, "also validate before the first step", policy="output")
    max_bad_steps: int = config_field(
        3,
        "consecutive steps with non-finite gradients, which are skipped, after which the run stops or rolls back",
        ge=1,
        le=MAX_STEPS,
        policy="output",
    )
    on_bad_loss: Literal["skip", "rollback", "stop"] = config_field(
        "skip",
        "reaction to steps with non-finite gradients, which never update weights; skip: end the run after "
        "max_bad_steps in a row; stop: end it after the first; rollback: after max_bad_steps in a row, or a spike, "
        "resume from the last complete checkpoint and skip the data read since",
        policy="numerics",
    )
    loss_spike: float | None = config_field(
        None,
        "a loss above this multiple of its running mean counts as bad immediately; normal noise stays below 2; needs "
        "on_bad_loss rollback or stop",
        gt=1,
        policy="numerics",
    )


def find_training_conflicts(training: TrainingOptions) -> Iterator[tuple[str, str]]:
    """Yield conflicts between these keys: the key to blame, and a sentence."""
    zero = training.zero_optimization
    if training.loss_spike is not None and training.on_bad_loss == "skip":
        reason = "a step has changed the weights when its loss is found to be a spike, so it cannot be skipped"
        yield "loss_spike", f"loss_spike {training.loss_spike:g} needs on_bad_loss: rollback or stop; {reason}"
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        name = "zero_optimization.offload_optimizer.device"
        problem = f"{name} {zero.offload_optimizer.device}: only sharded states can be offloaded; use stage 1, 2 or 3"
        yield name, problem
    if zero.offload_param.device != "none" and zero.stage != 3:
        name = "zero_optimization.offload_param.device"
        yield (
            name,
            f"{name} {zero.offload_param.device}: stage {zero.stage} keeps all parameters on every device; use stage 3"
            + (", or offload_optimizer" if zero.offload_optimizer.device == "none" else ""),
        )
    if zero.stage in (1, 2) and zero.allgather_bucket_size % 2:
        yield (
            "zero_optimization.allgather_bucket_size",
            f"zero_optimization.allgather_bucket_size is {zero.allgather_bucket_size}; it must be even",
        )

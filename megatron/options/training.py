"""Keys that decide how the model is trained: optimizer, schedule, batch, precision, evaluation during training."""

from collections.abc import Iterator
from typing import Literal

from megatron.options.section import MOST_STEPS, Section, key

Precision = Literal["fp32", "bf16", "fp16"]

MICRO, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
BATCH_SIZES = (MICRO, STEPS, BATCH)
"""Of any two of them the third follows, once the number of processes is known."""

LARGEST_BATCH = 10**6
"""Sequences per optimizer step: beyond every published batch, so that a mistyped one is told at once."""

LARGEST_SEED = 2**32 - 1
"""numpy's limit."""


class AdamParams(Section):
    lr: float = key(6e-4, "peak learning rate", gt=0, role="schedule")
    betas: list[float] = key(lambda: [0.9, 0.95], "Adam's decay rates", min_length=2, max_length=2, role="numerics")
    eps: float = key(1e-8, "Adam's epsilon", gt=0, role="numerics")


class OptimizerChoice(Section):
    type: Literal["Adam", "AdamW"] = key(
        "Adam", "both mean AdamW (decoupled weight decay), as in GPT-NeoX", role="numerics"
    )
    params: AdamParams = key(AdamParams, "learning rate, betas, epsilon")


class OptimizerOptions(Section):
    """AdamW and its learning-rate schedule."""

    optimizer: OptimizerChoice = key(OptimizerChoice, "type and its params")
    weight_decay: float = key(
        0.1, "decoupled weight decay; not on biases, norms and position parameters", ge=0, role="numerics"
    )
    gradient_clipping: float = key(1.0, "largest global gradient norm; 0 turns clipping off", ge=0, role="numerics")
    min_lr: float = key(0.0, "learning rate at the end of the decay", ge=0, role="schedule")
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse_sqrt"] = key(
        "linear", "shape of the decay after warm-up", role="schedule"
    )
    lr_decay_iters: int | None = key(
        None, "step at which min_lr is reached; train_iters if absent", ge=1, le=MOST_STEPS, role="schedule"
    )
    warmup: float = key(0.01, "share of lr_decay_iters spent in linear warm-up", ge=0, le=1, role="schedule")


class OffloadOptions(Section):
    device: Literal["none", "cpu"] = key("none", "none: the device that trains; cpu: host memory", role="machine")
    pin_memory: bool = key(True, "page-locked host memory, which GPUs copy from and to faster", role="machine")


class ZeroOptions(Section):
    """DeepSpeed's ZeRO. At a stage that does not read them, keys have no effect (`ZERO_STAGES`)."""

    stage: Literal[0, 1, 2, 3] = key(
        0, "what is sharded: nothing, optimizer states, + gradients, + parameters", role="machine"
    )
    offload_optimizer: OffloadOptions = key(
        OffloadOptions, "stages 1–3: where masters and optimizer states are, and the optimizer steps"
    )
    offload_param: OffloadOptions = key(OffloadOptions, "stage 3: where parameters are while they are not used")
    overlap_comm: bool = key(
        False, "stages 1–3: reduce gradients on a GPU stream of their own during the backward pass", role="machine"
    )
    reduce_scatter: bool = key(
        True, "stages 1–3: a rank gets its part of the reduced gradients, not all of them", role="machine"
    )
    reduce_bucket_size: int = key(
        500_000_000, "stages 1–3: gradient elements reduced at a time", ge=1, le=10**12, role="machine"
    )
    allgather_bucket_size: int = key(
        500_000_000,
        "stages 1 and 2: parameter elements gathered at a time after a step; even",
        ge=1,
        le=10**12,
        role="machine",
    )
    allgather_partitions: bool = key(True, "no effect: DeepSpeed gathers them in any case", role="machine")
    contiguous_gradients: bool = key(
        True, "stages 1–3: copy gradients into one buffer as they are produced", role="machine"
    )
    sub_group_size: int = key(
        1_000_000_000, "stage 3: parameter elements that the optimizer steps at a time", ge=1, le=10**12, role="machine"
    )
    stage3_param_persistence_threshold: int = key(
        100_000, "stage 3: parameters of fewer elements stay on every rank", ge=0, le=10**12, role="machine"
    )
    stage3_max_live_parameters: int = key(
        1_000_000_000, "stage 3: most parameter elements that a rank gathers at a time", ge=0, le=10**12, role="machine"
    )
    stage3_max_reuse_distance: int = key(
        1_000_000_000,
        "stage 3: keep a gathered parameter that is used again within so many elements",
        ge=0,
        le=10**12,
        role="machine",
    )
    stage3_prefetch_bucket_size: int = key(
        50_000_000, "stage 3: parameter elements gathered ahead of their use", ge=0, le=10**12, role="machine"
    )

    def unread(self) -> list[str]:
        """Keys that are not at their default and that this stage does not read."""
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
"""The stages that read a key of `ZeroOptions`. Offloading is not here: where it cannot be, it is refused."""


class Fp16Options(Section):
    enabled: bool = key(False, "train in float16 with loss scaling (GPU)", role="numerics")
    loss_scale: float = key(0, "a fixed loss scale; 0 is dynamic", ge=0, role="numerics")
    initial_scale_power: int = key(
        12, "the dynamic loss scale starts at 2 to this power", ge=0, le=127, role="numerics"
    )
    loss_scale_window: int = key(1000, "good steps before the loss scale doubles", ge=1, le=MOST_STEPS, role="numerics")
    hysteresis: int = key(2, "overflows before the loss scale halves", ge=1, le=MOST_STEPS, role="numerics")
    min_loss_scale: float = key(1, "the loss scale never falls below", gt=0, role="numerics")


class Bf16Options(Section):
    enabled: bool = key(False, "train in bfloat16 with float32 master weights", role="numerics")


class TrainingOptions(Section):
    """Batches, steps, precision, seeds."""

    @property
    def compute_type(self) -> Precision:
        """The type that the model computes in."""
        return self.precision or ("bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32")

    train_iters: int = key(
        0, "optimizer steps; a training needs it, an imported model has none", ge=0, le=MOST_STEPS, role="schedule"
    )
    train_micro_batch_size_per_gpu: int = key(
        4, "sequences per rank and micro-step", ge=1, le=LARGEST_BATCH, role="machine"
    )
    gradient_accumulation_steps: int = key(1, "micro-steps per optimizer step", ge=1, le=LARGEST_BATCH, role="machine")
    train_batch_size: int | None = key(
        None,
        "sequences per optimizer step; the product of the other two and the ranks",
        ge=1,
        le=LARGEST_BATCH,
        role="schedule",
    )
    zero_optimization: ZeroOptions = key(ZeroOptions, "DeepSpeed ZeRO")
    precision: Precision | None = key(None, "short for fp16/bf16 `enabled`; bfloat16 is accepted", role="numerics")
    fp16: Fp16Options = key(Fp16Options, "float16 training")
    bf16: Bf16Options = key(Bf16Options, "bfloat16 training")
    seed: int = key(1234, "seeds initialisation, dropout and data order", ge=0, le=LARGEST_SEED, role="numerics")
    deterministic: bool = key(False, "use deterministic algorithms only", role="machine")
    eval_interval: int = key(1000, "steps between validations; 0 turns them off", ge=0, le=MOST_STEPS, role="output")
    eval_iters: int = key(100, "validation batches each time", ge=0, le=MOST_STEPS, role="output")
    max_bad_steps: int = key(
        3,
        "stop, or go back, after this many consecutive steps whose loss is not finite; until then they are skipped",
        ge=1,
        le=MOST_STEPS,
        role="output",
    )
    on_bad_loss: Literal["skip", "rollback", "stop"] = key(
        "skip",
        "a step whose loss is not finite changes no weight; skip: max_bad_steps of them in a row end the run; stop: "
        "the first one does; rollback: max_bad_steps in a row, or a spike, send it back to its last whole checkpoint, "
        "to go on behind the data that did it",
        role="numerics",
    )
    loss_spike: float | None = key(
        None,
        "a loss that is more than this many times the usual one is bad too, at once: 2 is a factor that no noise "
        "reaches; needs on_bad_loss rollback or stop",
        gt=1,
        role="numerics",
    )


def conflicts(training: TrainingOptions) -> Iterator[tuple[str, str]]:
    """What contradicts each other within these keys: the key to blame, and a sentence."""
    zero = training.zero_optimization
    if training.loss_spike is not None and training.on_bad_loss == "skip":
        spike = f"loss_spike {training.loss_spike:g}: a step of finite gradients is taken before its loss is judged"
        yield "loss_spike", f"{spike}; set on_bad_loss to rollback or stop"
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        name = "zero_optimization.offload_optimizer.device"
        yield name, f"{name} {zero.offload_optimizer.device}: only what ZeRO shards can be moved; use stage 1, 2 or 3"
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


class LoggingOptions(Section):
    """What is reported while training, and where."""

    log_interval: int = key(100, "steps between reports", ge=1, le=MOST_STEPS, role="output")
    tensorboard_dir: str | None = key(
        None, "TensorBoard folder; `tensorboard` in the run's folder if absent", role="output"
    )
    use_tensorboard: bool = key(True, "write TensorBoard events", role="output")
    use_wandb: bool = key(False, "report to Weights & Biases", role="output")
    wandb_mode: Literal["online", "offline"] = key(
        "offline", "online sends to the network; offline writes files", role="output"
    )
    wandb_project: str = key("farfield", "Weights & Biases project", role="output")
    wandb_group: str | None = key(None, "Weights & Biases group", role="output")
    wandb_team: str | None = key(None, "Weights & Biases entity", role="output")
    peak_tflops: float | None = key(
        None, "the device's peak TFLOP/s, for MFU; known GPUs are looked up", gt=0, role="output"
    )

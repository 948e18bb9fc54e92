"""Keys that decide what a run writes and what it starts from: checkpoints, logs, profiles."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from megatron.options.model import MAX_LENGTH
from megatron.options.section import MAX_STEPS, CommaSeparated, ConfigSection, config_field, require_pattern

SpaceName = Annotated[str, require_pattern(r"([\w.-]+/)?[\w.-]+", "it must be the name of a Space, as OWNER/NAME")]


class CheckpointOptions(ConfigSection):
    """Folder and checkpoints of a run."""

    save: str | None = config_field(
        None,
        "folder of the run for its configuration, logs and checkpoints; if absent, nothing is written",
        policy="output",
    )
    load: str | None = config_field(
        None, "checkpoint to resume from, or the folder of a run (its newest complete checkpoint)", policy="output"
    )
    checkpoint_factor: int | None = config_field(
        None, "steps between checkpoints; the last step is always saved", ge=1, le=MAX_STEPS, policy="output"
    )
    extra_save_iters: list[Annotated[int, Field(ge=0, le=MAX_STEPS)]] = config_field(
        list,
        "additional steps to save a checkpoint at, which are never deleted; 0 saves the initial weights",
        policy="output",
    )
    keep_last_n_checkpoints: int | None = config_field(
        None, "number of newest checkpoints to keep; all if absent", ge=1, le=MAX_STEPS, policy="output"
    )
    rollback: bool = config_field(
        False,
        "roll back to the checkpoint `load` in this run's folder; later checkpoints are moved aside",
        policy="output",
    )
    finetune: bool = config_field(
        False,
        "load only weights and start at step 0 with a new optimizer; pos_emb may change and a score processor be added",
        policy="output",
    )


_ProfiledSteps = create_model(  # type: ignore[call-overload]  # `from` is no name that a class can give a field
    "_ProfiledSteps",
    __base__=ConfigSection,
    **{
        "from": (int | None, config_field(
            None, "first step to profile, as numbered in the log; null for none", ge=1, le=MAX_STEPS, policy="output"
        )),
        "to": (int | None, config_field(
            None, "last step to profile; a trace grows by several MB per step", ge=1, le=MAX_STEPS, policy="output"
        )),
    },
)  # fmt: skip


class ProfileOptions(_ProfiledSteps):  # type: ignore[valid-type,misc]
    """Steps for which torch's profiler writes a trace and a table of kernels to the run's folder."""

    ranks: Annotated[list[int], CommaSeparated] = config_field(
        lambda: [0], "ranks for profile and memory_snapshot", min_length=1, policy="output"
    )
    with_stack: bool = config_field(
        False, "record Python call stacks, which makes traces slower and larger", policy="output"
    )

    @property
    def steps(self) -> range:
        """Profiled steps, counted from 1."""
        first, last = getattr(self, "from"), self.to
        return range(0) if first is None or last is None else range(first, last + 1)


class HarnessOptions(ConfigSection):
    """Tasks of lm-evaluation-harness that are evaluated during training, on a small number of documents."""

    tasks: Annotated[list[str], CommaSeparated] = config_field(
        list, "names of tasks, groups or tags, with * as a wildcard; none if empty", policy="output"
    )
    interval: int = config_field(
        1000, "steps between evaluations; the last step is always evaluated", ge=1, le=MAX_STEPS, policy="output"
    )
    at_start: bool = config_field(False, "also evaluate before the first step", policy="output")
    limit: int | None = config_field(
        100,
        "use only the first documents of each task, up to this number; null for all",
        ge=1,
        le=MAX_STEPS,
        policy="output",
    )
    num_fewshot: int | None = config_field(
        None,
        "solved examples before each question; the task's own number if absent",
        ge=0,
        le=MAX_STEPS,
        policy="output",
    )
    length: int | None = config_field(
        None, "maximum number of tokens in the model's context; the training length if absent", ge=1, le=MAX_LENGTH,
        policy="output",
    )  # fmt: skip
    include_path: str | None = config_field(None, "folder with tasks of your own (YAML files)", policy="output")
    metadata: dict[str, Any] | str | None = config_field(
        None,
        "metadata for tasks that generate their texts, as a mapping or its text: {max_seq_lengths: [4096]}",
        policy="output",
    )
    download: bool = config_field(
        False,
        "download data of tasks that are not on this machine, instead of raising an error; a dry run never does",
        policy="output",
    )


class LoggingOptions(ConfigSection):
    """Logging during training."""

    log_interval: int = config_field(100, "steps between reports of the loss", ge=1, le=MAX_STEPS, policy="output")
    tensorboard_dir: str | None = config_field(
        None, "TensorBoard folder; `tensorboard` in the run's folder if absent", policy="output"
    )
    use_tensorboard: bool = config_field(True, "write TensorBoard events", policy="output")
    use_wandb: bool = config_field(False, "report to Weights & Biases", policy="output")
    wandb_mode: Literal["online", "offline"] = config_field(
        "offline", "online sends to the network; offline writes files", policy="output"
    )
    wandb_project: str = config_field("farfield", "Weights & Biases project", policy="output")
    wandb_group: str | None = config_field(None, "Weights & Biases group", policy="output")
    wandb_team: str | None = config_field(None, "Weights & Biases entity", policy="output")
    use_trackio: bool = config_field(False, "report to Trackio", policy="output")
    trackio_project: str = config_field("farfield", "Trackio project", policy="output")
    trackio_space: SpaceName | None = config_field(
        None, "Hugging Face Space (owner/name) that Trackio sends records to; local files only if absent",
        policy="output",
    )  # fmt: skip
    peak_tflops: float | None = config_field(
        None, "the device's peak TFLOP/s, for MFU; known GPUs are looked up", gt=0, policy="output"
    )
    log_param_norm: bool = config_field(
        False,
        "report the norms of parameters and of their last update, by optimizer group and part of the model",
        policy="output",
    )
    profile: ProfileOptions = config_field(ProfileOptions, "steps to profile (docs/monitoring.md)")
    harness: HarnessOptions = config_field(
        HarnessOptions, "tasks of lm-evaluation-harness during training (docs/monitoring.md)"
    )
    memory_snapshot: int | None = config_field(
        None,
        "step after which a snapshot of GPU memory is written, with the allocation history from the start; an earlier "
        "out-of-memory error also writes one",
        ge=1,
        le=MAX_STEPS,
        policy="output",
    )


def find_logging_conflicts(logging: LoggingOptions) -> Iterator[tuple[str, str]]:
    """Yield conflicts between these keys: the key to blame, and a sentence."""
    first, last = getattr(logging.profile, "from"), logging.profile.to
    if (first is None) != (last is None):
        given, missing = ("from", "to") if last is None else ("to", "from")
        yield (
            f"profile.{given}",
            f"profile.{given} needs profile.{missing}: both delimit the profiled steps",
        )
    elif first is not None and last is not None and first > last:
        yield "profile.to", f"profile.to {last} is before profile.from {first}"
    if any(rank < 0 for rank in logging.profile.ranks):
        yield "profile.ranks", f"profile.ranks are {logging.profile.ranks}; ranks are counted from 0"

"""Keys that decide what is saved, where, and what a run starts from."""

from typing import Annotated

from pydantic import Field

from megatron.options.section import MAX_STEPS, ConfigSection, config_field


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

"""Keys that decide what is saved, where, and what a run starts from."""

from typing import Annotated

from pydantic import Field

from megatron.options.section import MAX_STEPS, ConfigSection, config_field


class CheckpointOptions(ConfigSection):
    """A run's folder and its checkpoints."""

    save: str | None = config_field(
        None, "the run's folder: configuration, logs, checkpoints; nothing is written if absent", policy="output"
    )
    load: str | None = config_field(
        None, "what to resume from: a run's folder (its newest whole checkpoint) or one checkpoint", policy="output"
    )
    checkpoint_factor: int | None = config_field(
        None, "steps between checkpoints; the last step is always saved", ge=1, le=MAX_STEPS, policy="output"
    )
    extra_save_iters: list[Annotated[int, Field(ge=0, le=MAX_STEPS)]] = config_field(
        list,
        "further steps after which a checkpoint is saved, 0 for the weights that training begins with; these are never "
        "deleted",
        policy="output",
    )
    keep_last_n_checkpoints: int | None = config_field(
        None, "delete older checkpoints; all are kept if absent", ge=1, le=MAX_STEPS, policy="output"
    )
    rollback: bool = config_field(
        False,
        "go back to the checkpoint that `load` names in this run's folder; later ones are moved aside",
        policy="output",
    )
    finetune: bool = config_field(
        False,
        "load weights only: step 0, fresh optimizer; pos_emb may be another one, and a score processor may be added",
        policy="output",
    )

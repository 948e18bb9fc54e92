"""Keys that decide what is saved, where, and what a run starts from."""

from typing import Annotated

from pydantic import Field

from megatron.options.section import MOST_STEPS, Section, key


class CheckpointOptions(Section):
    """A run's folder and its checkpoints."""

    save: str | None = key(
        None, "the run's folder: configuration, logs, checkpoints; nothing is written if absent", role="output"
    )
    load: str | None = key(
        None, "what to resume from: a run's folder (its newest whole checkpoint) or one checkpoint", role="output"
    )
    checkpoint_factor: int | None = key(
        None, "steps between checkpoints; the last step is always saved", ge=1, le=MOST_STEPS, role="output"
    )
    extra_save_iters: list[Annotated[int, Field(ge=0, le=MOST_STEPS)]] = key(
        list,
        "further steps after which a checkpoint is saved, 0 for the weights that training begins with; these are never "
        "deleted",
        role="output",
    )
    keep_last_n_checkpoints: int | None = key(
        None, "delete older checkpoints; all are kept if absent", ge=1, le=MOST_STEPS, role="output"
    )
    rollback: bool = key(
        False,
        "go back to the checkpoint that `load` names in this run's folder; later ones are moved aside",
        role="output",
    )
    finetune: bool = key(
        False,
        "load weights only: step 0, fresh optimizer; pos_emb may be another one, and a score processor may be added",
        role="output",
    )

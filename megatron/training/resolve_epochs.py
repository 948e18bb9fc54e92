"""`train_epochs`: how many steps read the training text that many times.

An epoch is as many sequences as the training datasets hold together. Steps are rounded down, so that nothing is read
once more than was asked for. A run keeps the steps that it began with (`megatron.checkpoint.resume`).
"""

from megatron.config.schema import Config
from megatron.config.stages import build_stages, find_longest_length
from megatron.data.indexed_dataset import list_dataset_slices
from megatron.options.section import MAX_STEPS
from megatron.utils.errors import UserError

MAX_DIFFERENCE = 0.01
"""Of how often a dataset is read from train_epochs: beyond it a line says so."""


def resolve_epochs(config: Config) -> tuple[Config, tuple[str, ...]]:
    """The configuration with the `train_iters` that its `train_epochs` make, and lines worth telling.

    Args:
        config: resolved (`resolve_run`). Without train_epochs nothing changes.

    Raises:
        UserError: datasets that are missing or cut short, too few tokens for one step, or train_iters says otherwise.
    """
    training, epochs = config.training, config.training.train_epochs
    if epochs is None:
        return config, ()
    block, slices = find_longest_length(config), list_dataset_slices(config.data, "train")
    sizes = [dataset_slice.num_tokens() for dataset_slice in slices]
    num_tokens = sum(max(0, int(size * epochs) - 1) // block for size in sizes) * block
    steps = _count_steps(config, num_tokens)
    if steps < 1:
        raise UserError(
            f"train_epochs {epochs:g}: the training text has {sum(sizes):,} tokens, which are less than one step",
            "train_epochs",
        )
    if training.train_iters and training.train_iters != steps and config.checkpoint.load is None:
        raise UserError(
            f"train_iters is {training.train_iters}, but train_epochs {epochs:g} makes {steps} steps; leave one out",
            "train_iters",
        )
    line = f"train_epochs {epochs:g}: {sum(sizes):,} tokens of text make {steps:,} steps"
    weights = [dataset_slice.weight for dataset_slice in slices]
    times = [
        epochs * sum(sizes) * weight / sum(weights) / size for weight, size in zip(weights, sizes, strict=True) if size
    ]
    if any(abs(time / epochs - 1) > MAX_DIFFERENCE for time in times):
        counts = ", ".join(f"{s.dataset.prefix.name} {time:.2f} times" for s, time in zip(slices, times, strict=True))
        line += f"; by train_data_weights that is {counts}"
    return config.replace(train_iters=training.train_iters or steps), (line,)


def _count_steps(config: Config, num_tokens: int) -> int:
    """Whole steps that so many tokens are enough for, over all stages."""
    steps = 0
    for stage in build_stages(config.replace(train_iters=MAX_STEPS)):
        possible = num_tokens // stage.tokens_per_step
        taken = min(possible, stage.end_step - stage.first_step)
        steps, num_tokens = steps + taken, num_tokens - taken * stage.tokens_per_step
        if taken < stage.end_step - stage.first_step:
            break
    return steps

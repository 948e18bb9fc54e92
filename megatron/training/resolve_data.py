"""Values of a configuration that the data determine: the datasets of a folder, and the steps of `train_epochs`.

The stored configuration of a run names the datasets that a folder held at the start, so that a dataset added later is
noticed when the run resumes.

An epoch has as many sequences as all training datasets together. Steps are rounded down, so that nothing is read more
often than requested. A run keeps the number of steps with which it started (`megatron.checkpoint.resume`).
"""

from collections.abc import Sequence
from pathlib import Path

from megatron.config.schema import Config
from megatron.config.stages import build_stages, find_longest_length
from megatron.config.yaml_files import format_value
from megatron.data.blend import MAX_SHOWN, list_corpora, list_dataset_slices
from megatron.options.data import SPLITS, CorpusName, DataOptions, Split, list_corpus_names
from megatron.options.section import MAX_STEPS
from megatron.training.schedule import describe_late_warmup
from megatron.utils.errors import UserError

MAX_DIFFERENCE = 0.01
"""Relative difference between the reads of a dataset and train_epochs above which a line reports it."""


def resolve_data(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with the datasets of its folders and the `train_iters` of its `train_epochs`, and notes.

    Args:
        config: resolved configuration (`resolve_run`). Without folders and train_epochs nothing changes.

    Raises:
        UserError: if datasets are missing or truncated, the tokens are fewer than one step, or train_iters disagrees.
    """
    config, notes = _resolve_folders(config)
    config, more = _resolve_epochs(config)
    return config, (*notes, *more)


def _resolve_folders(config: Config) -> tuple[Config, list[str]]:
    """Replace folders by the datasets in them, also in stages."""
    notes: list[str] = []
    changes: dict[str, object] = {}
    for split in SPLITS:
        key = f"{split}_data_paths"
        if (names := getattr(config.data, key)) and _names_folder(names):
            changes[key] = _list_datasets(key, names, split, notes)
    if config.data.data_path is not None and _names_folder([config.data.data_path]):
        changes["data_path"] = _list_datasets("data_path", [config.data.data_path], "train", notes)[0]
    if _names_folder([*config.data.valid_data_sets.values()]):
        changes["valid_data_sets"] = {
            name: _list_datasets(f"valid_data_sets.{name}", [corpus], "valid", notes)[0]
            for name, corpus in config.data.valid_data_sets.items()
        }
    key, stages = "train_data_paths", config.training.stages
    if any(_names_folder(stage.get(key, [])) for stage in stages):
        changes["stages"] = [
            {**stage, key: _list_datasets(key, stage[key], "train", notes)} if key in stage else stage
            for stage in stages
        ]
    return config.replace(**changes) if changes else config, notes


def _names_folder(corpora: Sequence[CorpusName]) -> bool:
    names = [name for corpus in corpora for name in list_corpus_names(corpus)]
    return any(Path(name).is_dir() and not Path(f"{name}.idx").is_file() for name in names)


def _list_datasets(key: str, names: Sequence[CorpusName], split: Split, notes: list[str]) -> list[CorpusName]:
    """Return the datasets of each corpus of a key."""
    data = DataOptions.model_validate({"data_path": names[0]} if key == "data_path" else {f"{split}_data_paths": names})
    corpora = [[str(prefix) for prefix in corpus] for corpus in list_corpora(data, split, key)]
    for name, prefixes in zip(names, corpora, strict=True):
        if _names_folder([name]):
            shown = ", ".join(prefixes[:MAX_SHOWN])
            more = f" and {len(prefixes) - MAX_SHOWN} more" if len(prefixes) > MAX_SHOWN else ""
            notes.append(f"{key}: {format_value(name)} is {shown}{more}")
    return [prefixes[0] if len(prefixes) == 1 else prefixes for prefixes in corpora]


def _resolve_epochs(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with the `train_iters` of its `train_epochs`, and a line about them."""
    training, epochs = config.training, config.training.train_epochs
    if epochs is None:
        return config, ()
    block, slices = find_longest_length(config), list_dataset_slices(config.data, "train")
    sizes = [dataset_slice.num_tokens() for dataset_slice in slices]
    num_tokens = sum(max(0, int(size * epochs) - 1) // block for size in sizes) * block
    steps = _count_steps(config, num_tokens)
    if steps < 1:
        raise UserError(
            f"train_epochs {epochs:g}: the training text has {sum(sizes):,} tokens, less than one step",
            "train_epochs",
        )
    if training.train_iters and training.train_iters != steps and config.checkpoint.load is None:
        raise UserError(
            f"train_iters is {training.train_iters}, but train_epochs {epochs:g} gives {steps} steps; set only one",
            "train_iters",
        )
    line = f"train_epochs {epochs:g}: {sum(sizes):,} tokens of text give {steps:,} steps"
    weights = [dataset_slice.weight for dataset_slice in slices]
    times = [
        epochs * sum(sizes) * weight / sum(weights) / size for weight, size in zip(weights, sizes, strict=True) if size
    ]
    if any(abs(time / epochs - 1) > MAX_DIFFERENCE for time in times):
        counts = ", ".join(f"{s.dataset.prefix.name} {time:.2f} times" for s, time in zip(slices, times, strict=True))
        line += f"; reads by weight: {counts}"
    config = config.replace(train_iters=training.train_iters or steps)
    return config, (line, *(() if training.train_iters else describe_late_warmup(config)))


def _count_steps(config: Config, num_tokens: int) -> int:
    """Return the number of whole steps, over all stages, for which a number of tokens is enough."""
    steps = 0
    for stage in build_stages(config.replace(train_iters=MAX_STEPS)):
        possible = num_tokens // stage.tokens_per_step
        taken = min(possible, stage.end_step - stage.first_step)
        steps, num_tokens = steps + taken, num_tokens - taken * stage.tokens_per_step
        if taken < stage.end_step - stage.first_step:
            break
    return steps

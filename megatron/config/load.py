"""Loading of configurations from files and overrides.

    loaded = load_config(["125M", "kerple_log", "local_setup"], ["train_iters=1000"])
    loaded.config    the frozen, validated configuration
    loaded.notes     one line each: keys without effect, inferred values
    loaded.layers    where each key was set; its `replacements` list which value replaced which

All problems of a load are reported together, one line each, with file and line.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import lcm
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config import method_names
from megatron.config.config_layers import COMMAND_LINE, PRECISION_SWITCHES, ConfigLayers, SourcedValue
from megatron.config.neox_keys import POSITION_ALIASES, RULES, VALUE_RULES
from megatron.config.schema import (
    CONFIG_FILE,
    SECTIONS,
    Config,
    KeyPath,
    describe_validation_error,
    list_config_keys,
    map_key_owners,
)
from megatron.config.stages import ENDS, list_stage_configs
from megatron.config.validation import describe_unknown_method, validate_config
from megatron.config.yaml_files import YamlDocument, format_value, parse_scalar, quote_value, read_yaml
from megatron.options.data import DataOptions
from megatron.options.model import GATED_ACTIVATIONS, MAX_SIZE, ModelOptions, get_ffn_hidden_size
from megatron.options.optimizer import SCHEDULE_KEYS
from megatron.position.catalog import list_encodings
from megatron.utils.atomic_io import LOCK, is_lock_held
from megatron.utils.errors import UserError, check_reachable, join_problems, quote_text, shorten_text
from megatron.utils.formatting import suggest_names
from megatron.utils.project import SHIPPED_CONFIGS

CONFIG_SUFFIXES = ("", ".yml", ".yaml")
_DEFAULT = "default"
"""Origin of a key that no layer sets."""


@dataclass(frozen=True)
class LoadedConfig:
    """Loaded configuration with its notes, files and layers."""

    config: Config
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    layers: ConfigLayers
    arguments: str = "CONFIG…"
    """Files and overrides as words of a shell command."""


def load_config(
    files: Iterable[str | os.PathLike[str]],
    overrides: Iterable[str] = (),
    search: Sequence[str | os.PathLike[str]] | None = None,
) -> LoadedConfig:
    """Merge files left to right, then `key=value` overrides; later ones win.

    Args:
        files: paths, or names with or without .yml that are looked up in `search` and its subfolders.
        overrides: `key=value` with values as in YAML and dotted nested keys: `optimizer.params.lr=1e-3`.
        search: folders to search first. Afterwards, and without them, a path comes first, then `configs` here and the
            `configs` folder of this project.

    Raises:
        UserError: one line for each problem, with file and line.
    """
    names, overrides = [os.fspath(name) for name in files], list(overrides)
    paths = [find_config(name, search) for name in names]
    loaded = merge_documents([read_yaml(path) for path in paths], overrides, paths)
    words = [*(names if search is None else map(str, paths)), *overrides]
    return replace(loaded, notes=(*loaded.notes, *_describe_published_keys(loaded)), arguments=shlex.join(words))


def _describe_published_keys(loaded: LoadedConfig) -> Iterator[str]:
    """Yield a note for each method that lacks keys of its file, such as FoX with parameters shared by all layers."""
    for method, keys in method_names.find_missing_published_keys(loaded.config, loaded.layers.values).items():
        pairs = ", ".join(f"{key}: {format_value(value)}" for key, value in keys.items())
        yield (
            f"configs/position/{method}.yml, which defines {method} as published, also sets {pairs}; add that file, or "
            "set other values to omit this note"
        )


def read_config(path: str | os.PathLike[str]) -> Config:
    """Read one configuration file by its path, for example one that `Config.save` wrote.

    Raises UserError as `load_config`.
    """
    return merge_documents([read_yaml(Path(path))]).config


def merge_documents(
    documents: Iterable[YamlDocument], overrides: Iterable[str] = (), files: Iterable[Path] = ()
) -> LoadedConfig:
    """Merge documents that were already read, as `load_config` does (for a sweep's variants).

    `files` are passed through.
    """
    layers, documents = ConfigLayers(RULES, VALUE_RULES), list(documents)
    for document in documents:
        layers.add_file(document)
    layers.add_overrides([split_override(text) for text in overrides])
    sources = ", ".join(dict.fromkeys(document.source for document in documents))
    if not layers.values and not layers.problems:
        raise UserError(
            f"{sources}: contains no keys" if sources else "no configuration given; name a file, such as model/125M"
        )
    return LoadedConfig(_build_config(layers, sources or COMMAND_LINE), tuple(layers.notes), tuple(files), layers)


def split_override(text: str) -> tuple[str, Any]:
    """Split `key=value` into the key and the parsed value. Raises UserError for any other form."""
    name, equals, value = text.partition("=")
    name = name.strip().removeprefix("--")
    if not equals or not name:
        raise UserError(f"command line: {quote_text(text)} is not key=value")
    shown = shorten_text(name)
    if not value.strip():
        raise UserError(f"command line: {shown} is empty; write {shown}=VALUE, or {shown}=null to unset it")
    return name, parse_scalar(value, f"command line: {shown}")


def find_config(name: str | os.PathLike[str], search: Sequence[str | os.PathLike[str]] | None = None) -> Path:
    """Find the configuration file with a given name or path.

    Raises:
        UserError: no file has the name (the message suggests similar ones), or files in several subfolders have it.
    """
    text = os.fspath(name)
    shown = shorten_text(text, 500)
    first_folders = [_resolve_config_folder(folder) for folder in search or ()]
    folders = list(dict.fromkeys([*first_folders, *_list_config_folders()]))
    for folder in (*first_folders, Path(), *folders):
        for path in (folder / (text + suffix) for suffix in CONFIG_SUFFIXES):
            if path.is_file():
                return path
    for folder in folders:
        matches = sorted(path for path in folder.rglob("*") if path.is_file() and _has_name(path, text))
        if len(matches) > 1:
            raise UserError(f"{shown}: several files have this name: {', '.join(map(str, matches))}; give the path")
        if matches:
            return matches[0]
    if Path(text).exists() and not Path(text).is_dir():
        raise UserError(f"{shown}: is a pipe or a device; it must be a file")
    if Path(text).is_dir():
        raise UserError(f"{shown}: is a folder; give a configuration file in it, or search it with -d {shown}")
    check_reachable(text)
    run = Path(text).parent
    if Path(text).name == CONFIG_FILE and is_lock_held(run / LOCK):
        raise UserError(
            f"{shown}: not written yet: a run is starting in {run}; wait until it has started, or choose another folder"
        )
    hint = _suggest_config(Path(text).stem, {path.stem for folder in folders for path in folder.rglob("*.y*ml")})
    raise UserError(f"{shown}: no such configuration file, here or in {', '.join(map(str, folders))}{hint}")


def _suggest_config(stem: str, config_names: set[str]) -> str:
    """Suggest what a missing configuration file may have meant."""
    method = method_names.find_method(stem)
    if method is not None and method[1] != stem:
        key, own_name = method
        return f"; the method {stem} is called {own_name}" + ("" if own_name in config_names else f": {key}={own_name}")
    if stem in POSITION_ALIASES:
        return f"; it is a value: pos_emb={stem}"
    if method is not None:
        return f"; it is a method without an overlay: {method[0]}={stem}"
    hint = suggest_names(stem, sorted(config_names), max_suggestions=3)
    return f"; {hint}" if hint else ""


def _resolve_config_folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir() and path.name == SHIPPED_CONFIGS.name:
        path = SHIPPED_CONFIGS  # `-d configs` from any directory
    if not path.is_dir():
        check_reachable(path)
        raise UserError(f"{path}: no such configuration folder")
    return path


def _list_config_folders() -> list[Path]:
    local = Path(SHIPPED_CONFIGS.name)
    is_shipped = local.is_dir() and local.resolve() == SHIPPED_CONFIGS
    return [local] if is_shipped else [*([local] if local.is_dir() else []), SHIPPED_CONFIGS]


def _has_name(path: Path, text: str) -> bool:
    """Return True if a file matches a name: `125M`, `125M.yml` and `model/125M` all match model/125M.yml."""
    *folders, name = Path(text).parts
    return any(path.parts[-len(folders) - 1 :] == (*folders, name + suffix) for suffix in CONFIG_SUFFIXES)


def _locate_conflict(layers: ConfigLayers, key: str, message: str) -> str | None:
    """Return where the latest of the conflicting values was set.

    Candidates are the key to blame and the keys that the message names before its advice.
    """
    if key == "stages":  # its messages contain values of a stage
        return layers.locate((key,))
    named = [tuple(word.split(".")) for word in re.findall(r"[\w.]+\w", message.partition(";")[0])]
    paths = [path for path in named if path in layers.values and layers.values[path].where != _DEFAULT]
    blamed = tuple(key.split("."))
    last = max((blamed, *paths), key=lambda path: layers.values[path].layer if path in layers.values else 0)
    return layers.locate(last)


def _build_config(layers: ConfigLayers, sources: str) -> Config:
    """Build the validated configuration. `sources` is the location reported for missing keys."""
    layers.drop_alternatives()
    layers.resolve_deferred()
    _resolve_stages(layers)
    _resolve_vocabulary_rows(layers)
    _resolve_tokenizer(layers)
    _resolve_task(layers)
    if ("precision",) not in layers.values:
        layers.values[("precision",)] = SourcedValue("fp32", _DEFAULT)
    precision = layers.values[("precision",)]
    for half_type in ("fp16", "bf16"):
        layers.values[(half_type, "enabled")] = SourcedValue(precision.value == half_type, precision.where)
    try:
        config = Config.model_validate(_group_by_section(layers))
    except ValidationError as error:
        layers.problems += describe_validation_error(error, lambda path: layers.locate(path) or sources)
        layers.problems += _find_unknown_methods(layers)
        raise UserError(join_problems(layers.problems)) from error
    for key, message in validate_config(config):
        where = _locate_conflict(layers, key, message)
        layers.problems.append(f"{where}: {message}" if where else message)
    if layers.problems:
        raise UserError(join_problems(layers.problems))
    _note_gated_width(config.model, layers)
    _note_linear_decay(config, layers)
    _note_unread(config, layers)
    return config


def _note_linear_decay(config: Config, layers: ConfigLayers) -> None:
    """Note how `linear` differs from GPT-NeoX's, if a file has keys of another project."""
    optimizer = config.optimizer
    if layers.has_foreign_keys and optimizer.lr_decay_style == "linear" and optimizer.min_lr > 0:
        where = layers.locate(("lr_decay_style",)) or layers.locate(("min_lr",))
        layers.notes.append(
            f"{where}: lr_decay_style linear decays to min_lr {optimizer.min_lr:g}, as in Megatron-LM; "
            "GPT-NeoX decays toward 0 and stops at min_lr"
        )


DYNAMIC_SCALE_KEYS = ("fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale")

READ_ONLY_WITH: dict[str, tuple[str, Callable[..., bool]]] = {
    "split": ("train_data_paths", lambda paths: not paths),
    "weight_by_num_documents": ("data_path", lambda path: path is None),
    "weighted_sampler_alpha": ("weight_by_num_documents", bool),
    "layernorm_epsilon": ("norm, qk_norm", lambda *norms: "layernorm" in norms),
    "rms_norm_epsilon": ("norm, qk_norm", lambda *norms: "rmsnorm" in norms),
    "init_method_std": (
        "init_method, output_layer_init_method",
        lambda *methods: not {"normal", "scaled_normal"}.isdisjoint(methods),
    ),
    "mup_depth_alpha": ("mup_base_num_layers", bool),
    "attention_check": ("attention_backend", lambda backend: backend == "auto"),
    "checkpoint_num_layers": ("checkpoint_activations", lambda value: value is True),
    "max_bad_steps": ("on_bad_loss", lambda action: action != "stop"),
    "decay_positions": ("weight_decay", bool),
    "min_lr": ("lr_decay_style", lambda style: style != "constant"),
    **dict.fromkeys(("wandb_project", "wandb_group", "wandb_team", "wandb_mode"), ("use_wandb", bool)),
    **dict.fromkeys(("trackio_project", "trackio_space"), ("use_trackio", bool)),
    "tensorboard_dir": ("use_tensorboard", bool),
    **dict.fromkeys(("eval_at_start", "eval_lengths", "valid_data_sets"), ("eval_interval", bool)),
    "profile.ranks": ("profile.from, memory_snapshot", lambda *steps: steps != (None, None)),
    "profile.with_stack": ("profile.from", lambda step: step is not None),
    "harness": ("harness.tasks", bool),
    "warmup": ("lr_warmup_iters", lambda steps: steps is None),
    "slurm": ("launcher", lambda launcher: launcher == "slurm"),
    "fp16": ("precision", lambda precision: precision == "fp16"),
    **dict.fromkeys(DYNAMIC_SCALE_KEYS, ("fp16.loss_scale", lambda scale: scale == 0)),
    **{key: ("lr_decay_style", lambda chosen, style=style: chosen == style) for key, style in SCHEDULE_KEYS.items()},
}
"""Keys that are read only with some values of others: these keys, and a function that is true for such values.
Nested keys are included."""


def _note_unread(config: Config, layers: ConfigLayers) -> None:
    """Note keys that have no effect with the other keys in any stage, unless they have their default.

    Keys of one layer share a note.
    """
    values_by_stage = [each.to_flat() for each in (config, *list_stage_configs(config))]
    unread: dict[tuple[int, str], list[KeyPath]] = {}
    for key, (names, is_read_with) in READ_ONLY_WITH.items():
        others, *later = (
            {name: reduce(getitem, name.split("."), values) for name in names.split(", ")} for values in values_by_stage
        )
        if any(is_read_with(*each.values()) for each in (others, *later)):
            continue
        reason = ", ".join(f"{name} is {format_value(value)}" for name, value in others.items())
        prefix = tuple(key.split("."))
        for path, setting in layers.values.items():
            if path[: len(prefix)] != prefix or path in PRECISION_SWITCHES:  # `precision` reports the switches
                continue
            key_info = list_config_keys().get(path)  # None inside a mapping whose names are the user's
            if key_info is None or setting.value != key_info.field.get_default(call_default_factory=True):
                unread.setdefault((setting.layer, reason), []).append(path)
    for (_, reason), paths in unread.items():
        names = ", ".join(map(".".join, paths))
        layers.notes.append(
            f"{layers.values[paths[0]].where}: {names} {'has' if len(paths) == 1 else 'have'} no effect: {reason}"
        )


def _note_gated_width(model: ModelOptions, layers: ConfigLayers) -> None:
    """Note the width of a gated feed-forward layer, which follows from its key by a little-known rule."""
    if model.activation in GATED_ACTIVATIONS:
        size = "4 × hidden_size" if model.intermediate_size is None else f"intermediate_size {model.intermediate_size}"
        where = layers.locate(("intermediate_size",)) or layers.locate(("activation",))
        layers.notes.append(
            f"{where}: with activation {model.activation}, {size} gives a feed-forward width of "
            f"{get_ffn_hidden_size(model)} (a third), as in GPT-NeoX"
        )


def _find_unknown_methods(layers: ConfigLayers) -> Iterator[str]:
    """Yield problems with the names of methods.

    pydantic accepts any text, and `validate_config` needs a whole configuration.
    """
    for key, methods in (
        ("pos_emb", list_encodings()),
        ("score_processor", method_names.list_processor_values()),
        ("attention_temperature", method_names.list_temperature_values()),
    ):
        setting = layers.values.get((key,))
        if setting is not None and isinstance(setting.value, str):
            for _, problem in describe_unknown_method(key, setting.value, methods):
                yield f"{setting.where}: {problem}"


def _group_by_section(layers: ConfigLayers) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for path, setting in layers.values.items():
        target = sections[map_key_owners()[path[0]]]
        for name in path[:-1]:
            target = target.setdefault(name, {})
        target[path[-1]] = setting.value
    return sections


def _resolve_stages(layers: ConfigLayers) -> None:
    """Resolve each stage as a layer on top of all others; the list keeps what it sets, under our names."""
    setting = layers.values.get(("stages",))
    if setting is None:
        return
    if not isinstance(setting.value, list) or not all(isinstance(entry, dict) for entry in setting.value):
        layers.problems.append(
            f"{setting.where}: stages is {quote_value(setting.value)}; it must be a list of mappings"
        )
        layers.values[("stages",)] = SourcedValue([], setting.where)
        return
    entries = []
    for number, entry in enumerate(setting.value, start=1):
        changes = {name: value for name, value in entry.items() if name not in ENDS}
        document = YamlDocument(f"{setting.where}, stage {number}", changes, {})
        stage = ConfigLayers(RULES, VALUE_RULES, dict(layers.values), num_layers=layers.num_layers)
        stage.add_file(document)
        stage.resolve_deferred()
        layers.problems += stage.problems
        layers.notes += stage.notes
        own = {
            ".".join(path): value.value for path, value in stage.values.items() if layers.values.get(path) is not value
        }
        # In the order of the entry, so that a saved configuration is read and written again without a change.
        given = {name: own[name] for name in changes if name in own}
        entries.append({name: value for name, value in entry.items() if name in ENDS} | given | own)
    layers.values[("stages",)] = SourcedValue(entries, setting.where, setting.layer)


def _resolve_vocabulary_rows(layers: ConfigLayers) -> None:
    """Round the rows of the embedding up to a multiple of the tensor-parallel ranks.

    GPT-NeoX multiplies make_vocab_size_divisible_by by the number of these ranks. Here it applies to all ranks
    together,
    so that every layout has the same rows, and it is raised only if the ranks do not divide it.
    """
    path: KeyPath = ("make_vocab_size_divisible_by",)
    ranks, multiple = layers.get_value("model_parallel_size"), layers.get_value(path[0])
    if type(ranks) is not int or type(multiple) is not int or ranks < 1 or multiple < 1 or multiple % ranks == 0:
        return
    if lcm(multiple, ranks) > MAX_SIZE:
        return  # one of them is rejected for its size
    where = layers.locate(path) or layers.locate(("model_parallel_size",)) or COMMAND_LINE
    layers.values[path] = SourcedValue(lcm(multiple, ranks), where)
    layers.notes.append(
        f"{where}: {path[0]} {multiple} becomes {lcm(multiple, ranks)}, a multiple of model_parallel_size {ranks}"
    )


def _resolve_task(layers: ConfigLayers) -> None:
    """Set seq_length for a task: the longest sequence of its training."""
    task = layers.values.get(("task",))
    if task is None or task.value is None or ("seq_length",) in layers.values:
        return
    from megatron.data.tasks.task_config import read_task_config  # imports numpy, and most configurations have no task

    paths = [path for path in layers.values if path[0].startswith("task")]
    flat: dict[str, Any] = {"task_options": {path[1]: layers.values[path].value for path in paths if path[1:]}}
    flat |= {path[0]: layers.values[path].value for path in paths if not path[1:]}
    try:
        task_config = read_task_config(DataOptions(**flat))
        longest, limit = max(task_config.sequence_lengths), task_config.task.position_limit
    except (UserError, ValidationError, ValueError):
        layers.values[("seq_length",)] = SourcedValue(2, task.where)  # reported with the other problems
        return
    layers.values[("seq_length",)] = SourcedValue(longest, task.where)
    layers.notes.append(f"{task.where}: task {task.value} sets seq_length to {longest}")
    if limit is not None and ("max_position_embeddings",) not in layers.values:
        layers.values[("max_position_embeddings",)] = SourcedValue(max(longest, limit), task.where)


def _resolve_tokenizer(layers: ConfigLayers) -> None:
    """Infer GPT-NeoX's default: a vocabulary and merges without a tokenizer_type are GPT-2's."""
    keys = ("tokenizer_type", "vocab_file", "merge_file")
    set_keys = {key for key in keys if (key,) in layers.values and layers.values[(key,)].value is not None}
    if set_keys == {"vocab_file", "merge_file"}:
        where = layers.values[("merge_file",)].where
        layers.values[("tokenizer_type",)] = SourcedValue("GPT2BPETokenizer", where)
        layers.notes.append(f"{where}: vocab_file and merge_file imply tokenizer_type GPT2BPETokenizer")

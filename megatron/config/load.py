"""Files and overrides in, a checked `Config` out.

    loaded = load_config(["125M", "kerple_log", "local_setup"], ["train_iters=1000"])
    loaded.config    the frozen configuration
    loaded.notes     one line each: what has no effect, what was inferred
    loaded.layers    who set what; its `replacements` say which value replaced which

All problems of a load are reported together, one line each, with file and line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config import method_names
from megatron.config.config_layers import COMMAND_LINE, PRECISION_SWITCHES, ConfigLayers, SourcedValue
from megatron.config.neox_keys import POSITION_ALIASES, RULES, VALUE_RULES
from megatron.config.schema import SECTIONS, Config, KeyPath, list_config_keys, map_key_owners
from megatron.config.stages import ENDS
from megatron.config.validation import describe_unknown_method, validate_config
from megatron.config.validation_errors import describe_validation_error
from megatron.config.yaml_files import SHIPPED_CONFIGS, YamlDocument, format_value, parse_scalar, read_yaml
from megatron.options.data import DataOptions
from megatron.options.model import GATED_ACTIVATIONS, MAX_SIZE, ModelOptions, ffn_hidden_size
from megatron.options.training import SCHEDULE_KEYS
from megatron.position.catalog import list_encodings
from megatron.utils.errors import UserError
from megatron.utils.suggestions import suggest_names

CONFIG_SUFFIXES = ("", ".yml", ".yaml")
_DEFAULT = "default"
"""Who sets what nobody sets."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, what there is to say about it, and the files it was read from."""

    config: Config
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    layers: ConfigLayers

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Inside it, errors that blame a key begin with the file and line that set it."""
        try:
            yield
        except UserError as error:
            where = self.layers.locate(tuple(error.key.split("."))) if error.key else None
            raise (UserError(f"{where}: {error}") if where else error) from None


def load_config(
    files: Iterable[str | os.PathLike[str]],
    overrides: Iterable[str] = (),
    search: Sequence[str | os.PathLike[str]] | None = None,
) -> LoadedConfig:
    """Merge files left to right, then `key=value` overrides; later wins.

    Args:
        files: paths, or names with or without .yml that are looked up in `search` and its subfolders.
        overrides: `key=value`, values as in YAML, nested keys dotted: `optimizer.params.lr=1e-3`.
        search: folders to find names in, tried before the name as a path; when absent a path comes first, then
            `configs` here and the `configs` folder of this project.

    Raises:
        UserError: one line for each problem, with file and line.
    """
    paths = [find_config(name, search) for name in files]
    return merge_documents([read_yaml(path) for path in paths], overrides, paths)


def read_config(path: str | os.PathLike[str]) -> Config:
    """Read one configuration file by its path, such as one that `Config.save` wrote.

    Raises UserError as `load_config` does.
    """
    return merge_documents([read_yaml(Path(path))]).config


def merge_documents(
    documents: Iterable[YamlDocument], overrides: Iterable[str] = (), files: Iterable[Path] = ()
) -> LoadedConfig:
    """`load_config` for documents that were read already (a sweep's variants); `files` are only passed on."""
    layers, documents = ConfigLayers(RULES, VALUE_RULES), list(documents)
    for document in documents:
        layers.add_file(document)
    layers.add_overrides([split_override(text) for text in overrides])
    sources = ", ".join(document.source for document in documents)
    if not layers.values and not layers.problems:
        raise UserError(
            f"{sources}: holds no keys" if sources else "no configuration given; name a file, such as model/125M"
        )
    return LoadedConfig(_build_config(layers, sources or COMMAND_LINE), tuple(layers.notes), tuple(files), layers)


def split_override(text: str) -> tuple[str, Any]:
    """`key=value` as key and parsed value. Raises UserError if it is not of that form."""
    name, equals, value = text.partition("=")
    name = name.strip().removeprefix("--")
    if not equals or not name:
        raise UserError(f"command line: {text!r} is not key=value")
    return name, parse_scalar(value, f"command line: {name}")


def find_config(name: str | os.PathLike[str], search: Sequence[str | os.PathLike[str]] | None = None) -> Path:
    """The file that a name means.

    Raises:
        UserError: if there is none (naming the nearest), or several in different subfolders.
    """
    text = os.fspath(name)
    direct_paths = [Path(text + suffix) for suffix in CONFIG_SUFFIXES]
    folders = [_config_folder(folder) for folder in search] if search is not None else _list_config_folders()
    in_folders = [path for folder in folders for path in (folder / (text + suffix) for suffix in CONFIG_SUFFIXES)]
    for path in [*in_folders, *direct_paths] if search is not None else [*direct_paths, *in_folders]:
        if path.is_file():
            return path
    for folder in folders:
        matches = sorted(path for path in folder.rglob("*") if path.is_file() and _has_name(path, text))
        if len(matches) > 1:
            raise UserError(f"{text}: several files have this name: {', '.join(map(str, matches))}; give the path")
        if matches:
            return matches[0]
    if Path(text).exists() and not Path(text).is_dir():
        raise UserError(f"{text}: is a pipe or a device, and only files are read; write it to a file")
    if Path(text).is_dir():
        raise UserError(f"{text}: is a folder; name a configuration file in it, or look names up there with -d {text}")
    hint = _suggest_config(Path(text).stem, {path.stem for folder in folders for path in folder.rglob("*.y*ml")})
    raise UserError(f"{text}: no such configuration file, here or in {', '.join(map(str, folders))}{hint}")


def _suggest_config(stem: str, config_names: set[str]) -> str:
    """What somebody may have meant who names a file that is not there."""
    method = method_names.find_method(stem)
    if method is not None and method[1] != stem:
        key, own_name = method
        return f"; {stem!r} is {own_name!r} here" + ("" if own_name in config_names else f": {key}={own_name}")
    if stem in POSITION_ALIASES:
        return f"; it is a value: pos_emb={stem}"
    if method is not None:
        return f"; it is a method without an overlay: {method[0]}={stem}"
    hint = suggest_names(stem, sorted(config_names), max_suggestions=3, cutoff=0.7)
    return f"; {hint}" if hint else ""


def _config_folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir() and path.name == SHIPPED_CONFIGS.name:
        path = SHIPPED_CONFIGS  # `-d configs` from anywhere
    if not path.is_dir():
        raise UserError(f"{path}: no such folder of configurations")
    return path


def _list_config_folders() -> list[Path]:
    local = Path(SHIPPED_CONFIGS.name)
    is_shipped = local.is_dir() and local.resolve() == SHIPPED_CONFIGS
    return [local] if is_shipped else [*([local] if local.is_dir() else []), SHIPPED_CONFIGS]


def _has_name(path: Path, text: str) -> bool:
    """Does a file in a subfolder answer to this name? `125M`, `125M.yml` and `model/125M` all mean model/125M.yml."""
    *folders, name = Path(text).parts
    return any(path.parts[-len(folders) - 1 :] == (*folders, name + suffix) for suffix in CONFIG_SUFFIXES)


def _locate_conflict(layers: ConfigLayers, key: str, message: str) -> str | None:
    """Who set last what contradicts other values: of the key to blame and those that the sentence names before it
    gives advice."""
    if key == "stages":  # whose sentences have values of a stage
        return layers.locate((key,))
    named = [tuple(word.split(".")) for word in re.findall(r"[\w.]+\w", message.partition(";")[0])]
    paths = [path for path in named if path in layers.values and layers.values[path].where != _DEFAULT]
    blamed = tuple(key.split("."))
    last = max((blamed, *paths), key=lambda path: layers.values[path].layer if path in layers.values else 0)
    return layers.locate(last)


def _build_config(layers: ConfigLayers, sources: str) -> Config:
    """The checked configuration; `sources` are where a key that is missing was looked for."""
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
        raise UserError("\n".join(layers.problems)) from error
    for key, message in validate_config(config):
        where = _locate_conflict(layers, key, message)
        layers.problems.append(f"{where}: {message}" if where else message)
    if layers.problems:
        raise UserError("\n".join(layers.problems))
    _note_gated_width(config.model, layers)
    _note_linear_decay(config, layers)
    _note_unread(config, layers)
    return config


def _note_linear_decay(config: Config, layers: ConfigLayers) -> None:
    """Say how `linear` differs from GPT-NeoX's, to who brings a file with keys of its own."""
    optimizer = config.optimizer
    if layers.has_foreign_keys and optimizer.lr_decay_style == "linear" and optimizer.min_lr > 0:
        where = layers.locate(("lr_decay_style",)) or layers.locate(("min_lr",))
        layers.notes.append(
            f"{where}: lr_decay_style linear reaches min_lr {optimizer.min_lr:g} at its last step, as Megatron-LM's; "
            "GPT-NeoX's falls towards 0 and stays at min_lr once it is there"
        )


READ_ONLY_WITH: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "split": ("train_data_paths", lambda paths: not paths),
    "weight_by_num_documents": ("data_path", lambda path: path is None),
    "weighted_sampler_alpha": ("weight_by_num_documents", bool),
    "checkpoint_num_layers": ("checkpoint_activations", lambda value: value is True),
    "max_bad_steps": ("on_bad_loss", lambda action: action != "stop"),
    **dict.fromkeys(("wandb_project", "wandb_group", "wandb_team", "wandb_mode"), ("use_wandb", bool)),
    "tensorboard_dir": ("use_tensorboard", bool),
    **dict.fromkeys(("eval_at_start", "eval_lengths", "valid_data_sets"), ("eval_interval", bool)),
    "warmup": ("lr_warmup_iters", lambda steps: steps is None),
    "slurm": ("launcher", lambda launcher: launcher == "slurm"),
    "fp16": ("precision", lambda precision: precision == "fp16"),
    **{
        key: ("lr_decay_style", lambda chosen, style=style: chosen == style)  # type: ignore[misc]
        for key, style in SCHEDULE_KEYS.items()
    },
}
"""Keys, with all that they hold, that are read with some values of another key alone: that key, and whether a value is
one of those."""


def _note_unread(config: Config, layers: ConfigLayers) -> None:
    """Keys that say nothing beside the others of a configuration, unless they say no more than their default. Those of
    one layer that a key holds are told together."""
    values = config.to_flat()
    for key, (other_key, is_read_with) in READ_ONLY_WITH.items():
        if is_read_with(values[other_key]):
            continue
        unread: dict[int, list[KeyPath]] = {}
        for path, setting in layers.values.items():
            if path[0] != key or path in PRECISION_SWITCHES:  # `precision` says what a switch does
                continue
            key_info = list_config_keys().get(path)  # none inside a mapping whose names are the user's
            if key_info is None or setting.value != key_info.field.get_default(call_default_factory=True):
                unread.setdefault(setting.layer, []).append(path)
        for paths in unread.values():
            names = ", ".join(map(".".join, paths))
            layers.notes.append(
                f"{layers.values[paths[0]].where}: {names} {'has' if len(paths) == 1 else 'have'} no effect: "
                f"{other_key} is {format_value(values[other_key])}"
            )


def _note_gated_width(model: ModelOptions, layers: ConfigLayers) -> None:
    """The width of a gated layer follows from its key by a rule that not everybody has in mind."""
    if model.activation in GATED_ACTIVATIONS:
        size = "4 × hidden_size" if model.intermediate_size is None else f"intermediate_size {model.intermediate_size}"
        where = layers.locate(("intermediate_size",)) or layers.locate(("activation",))
        layers.notes.append(
            f"{where}: with activation {model.activation}, {size} is a feed-forward width of "
            f"{ffn_hidden_size(model)}, as in GPT-NeoX (a third)"
        )


def _find_unknown_methods(layers: ConfigLayers) -> Iterator[str]:
    """The problems of the methods' names: pydantic knows them as text, and `validate_config` needs a whole
    configuration."""
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
    """Each stage is a layer on top of all others: what it sets, under our names, is what remains in the list."""
    setting = layers.values.get(("stages",))
    if setting is None:
        return
    if not isinstance(setting.value, list) or not all(isinstance(entry, dict) for entry in setting.value):
        layers.problems.append(
            f"{setting.where}: stages is {format_value(setting.value)}; it must be a list of mappings"
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
        own = {path: value.value for path, value in stage.values.items() if layers.values.get(path) is not value}
        ends = {name: value for name, value in entry.items() if name in ENDS}
        entries.append(ends | {".".join(path): value for path, value in own.items()})
    layers.values[("stages",)] = SourcedValue(entries, setting.where, setting.layer)


def _resolve_vocabulary_rows(layers: ConfigLayers) -> None:
    """Rows of the embedding that the tensor-parallel ranks can divide.

    GPT-NeoX multiplies make_vocab_size_divisible_by by the number of these ranks. Here it counts for all of them, so
    that every layout has the same rows, and only what they cannot divide is raised.
    """
    path: KeyPath = ("make_vocab_size_divisible_by",)
    ranks, multiple = layers.get_value("model_parallel_size"), layers.get_value(path[0])
    if type(ranks) is not int or type(multiple) is not int or ranks < 1 or multiple < 1 or multiple % ranks == 0:
        return
    if lcm(multiple, ranks) > MAX_SIZE:
        return  # one of them is refused for its size
    where = layers.locate(path) or layers.locate(("model_parallel_size",)) or COMMAND_LINE
    layers.values[path] = SourcedValue(lcm(multiple, ranks), where)
    layers.notes.append(
        f"{where}: {path[0]} {multiple} becomes {lcm(multiple, ranks)}, which model_parallel_size {ranks} divides"
    )


def _resolve_task(layers: ConfigLayers) -> None:
    """seq_length of a task: the longest sequence of its training."""
    task = layers.values.get(("task",))
    if task is None or task.value is None or ("seq_length",) in layers.values:
        return
    from megatron.tasks.task_config import read_task_config  # needs numpy, and most configurations have no task

    paths = [path for path in layers.values if path[0].startswith("task")]
    flat: dict[str, Any] = {"task_options": {path[1]: layers.values[path].value for path in paths if path[1:]}}
    flat |= {path[0]: layers.values[path].value for path in paths if not path[1:]}
    try:
        task_config = read_task_config(DataOptions(**flat))
        longest, limit = max(task_config.sequence_lengths), task_config.task.position_limit
    except (UserError, ValidationError, ValueError):
        layers.values[("seq_length",)] = SourcedValue(2, task.where)  # what is wrong is told with the other problems
        return
    layers.values[("seq_length",)] = SourcedValue(longest, task.where)
    layers.notes.append(f"{task.where}: task {task.value} makes seq_length {longest}")
    if limit is not None and ("max_position_embeddings",) not in layers.values:
        layers.values[("max_position_embeddings",)] = SourcedValue(max(longest, limit), task.where)


def _resolve_tokenizer(layers: ConfigLayers) -> None:
    """GPT-NeoX's default: a vocabulary and merges without a tokenizer_type are GPT-2's."""
    keys = ("tokenizer_type", "vocab_file", "merge_file")
    set_keys = {key for key in keys if (key,) in layers.values and layers.values[(key,)].value is not None}
    if set_keys == {"vocab_file", "merge_file"}:
        where = layers.values[("merge_file",)].where
        layers.values[("tokenizer_type",)] = SourcedValue("GPT2BPETokenizer", where)
        layers.notes.append(f"{where}: vocab_file and merge_file mean tokenizer_type GPT2BPETokenizer")

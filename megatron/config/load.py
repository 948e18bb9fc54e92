"""Files and overrides in, a checked `Config` out.

    loaded = load(["125M", "kerple_log", "local_setup"], ["train_iters=1000"])
    loaded.config    the frozen configuration
    loaded.notes     one line each: what replaced what, what has no effect, what was inferred

All problems of a load are reported together, one line each, with file and line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config import method_names, neox
from megatron.config.checks import describe_unknown_method, validate_config
from megatron.config.problems import describe_validation_error
from megatron.config.schema import SECTIONS, Config, Path_, map_key_owners
from megatron.config.settings import COMMAND_LINE, ConfigLayers, SourcedValue, format_value
from megatron.config.yaml_files import YamlDocument, parse_scalar, read_yaml
from megatron.options.data import DataOptions
from megatron.options.model import GATED, MAX_SIZE, ModelOptions, ffn_hidden_size
from megatron.position.catalog import list_encodings
from megatron.utils.errors import UserError
from megatron.utils.suggestions import suggest_names

SHIPPED_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONFIG_SUFFIXES = ("", ".yml", ".yaml")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, what there is to say about it, and the files it was read from."""

    config: Config
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    settings: ConfigLayers

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Inside it, errors that blame a key begin with the file and line that set it."""
        try:
            yield
        except UserError as error:
            place = self.settings.locate(tuple(error.key.split("."))) if error.key else None
            raise (UserError(f"{place}: {error}") if place else error) from None


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
    """Read one configuration file by its path, such as one that `Config.save` wrote. Raises UserError as `load`."""
    return merge_documents([read_yaml(Path(path))]).config


def merge_documents(
    documents: Iterable[YamlDocument], overrides: Iterable[str] = (), files: Iterable[Path] = ()
) -> LoadedConfig:
    """`load` for documents that were read already (a sweep's variants); `files` are only passed on."""
    settings, documents = ConfigLayers(), list(documents)
    for document in documents:
        settings.add_file(document)
    settings.add_overrides([split_override(text) for text in overrides])
    sources = ", ".join(document.source for document in documents)
    if not settings.values and not settings.problems:
        raise UserError(
            f"{sources}: holds no keys" if sources else "no configuration given; name a file, such as model/125M"
        )
    return LoadedConfig(_build(settings, sources or COMMAND_LINE), tuple(settings.notes), tuple(files), settings)


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
    here = [Path(text + suffix) for suffix in CONFIG_SUFFIXES]
    folders = [_config_folder(folder) for folder in search] if search is not None else _list_config_folders()
    in_folders = [path for folder in folders for path in (folder / (text + suffix) for suffix in CONFIG_SUFFIXES)]
    for path in [*in_folders, *here] if search is not None else [*here, *in_folders]:
        if path.is_file():
            return path
    for folder in folders:
        found = sorted(path for path in folder.rglob("*") if path.is_file() and _load_dotted_overrides(path, text))
        if len(found) > 1:
            raise UserError(f"{text}: several files have this name: {', '.join(map(str, found))}; give the path")
        if found:
            return found[0]
    if Path(text).exists() and not Path(text).is_dir():
        raise UserError(f"{text}: is a pipe or a device, and only files are read; write it to a file")
    if Path(text).is_dir():
        raise UserError(f"{text}: is a folder; name a configuration file in it, or look names up there with -d {text}")
    hint = _suggest_config(Path(text).stem, {path.stem for folder in folders for path in folder.rglob("*.y*ml")})
    raise UserError(f"{text}: no such configuration file, here or in {', '.join(map(str, folders))}{hint}")


def _suggest_config(stem: str, known: set[str]) -> str:
    """What somebody may have meant who names a file that is not there."""
    found = method_names.find_method(stem)
    if found is not None and found[1] != stem:
        key, ours = found
        return f"; {stem!r} is {ours!r} here" + ("" if ours in known else f": {key}={ours}")
    if stem in neox.POSITION_ALIASES:
        return f"; it is a value: pos_emb={stem}"
    hint = suggest_names(stem, sorted(known), max_suggestions=3)
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
    same = local.is_dir() and local.resolve() == SHIPPED_CONFIGS
    return [local] if same else [*([local] if local.is_dir() else []), SHIPPED_CONFIGS]


def _load_dotted_overrides(path: Path, text: str) -> bool:
    """Does a file in a subfolder answer to this name? `125M`, `125M.yml` and `model/125M` all mean model/125M.yml."""
    wanted = Path(text).parts
    return any(
        path.with_name(path.name).parts[-len(wanted) :] == (*wanted[:-1], wanted[-1] + s) for s in CONFIG_SUFFIXES
    )


def _build(settings: ConfigLayers, sources: str) -> Config:
    """The checked configuration; `sources` are where a key that is missing was looked for."""
    _resolve_options(settings)
    _resolve_fractions(settings)
    _resolve_variants(settings)
    _resolve_checked(settings)
    _resolve_vocabulary_rows(settings)
    _resolve_tokenizer(settings)
    _resolve_task(settings)
    if ("precision",) not in settings.values:
        settings.values[("precision",)] = SourcedValue("fp32", "default")
    precision = settings.values[("precision",)]
    for kind in ("fp16", "bf16"):
        settings.values[(kind, "enabled")] = SourcedValue(precision.value == kind, precision.where)
    try:
        config = Config.model_validate(_sections(settings))
    except ValidationError as error:
        settings.problems += describe_validation_error(error, lambda path: settings.locate(path) or sources)
        settings.problems += _find_unknown_methods(settings)
        raise UserError("\n".join(settings.problems)) from error
    for key, message in validate_config(config):
        where = settings.locate(tuple(key.split(".")))
        settings.problems.append(f"{where}: {message}" if where else message)
    if settings.problems:
        raise UserError("\n".join(settings.problems))
    _note_gated_width(config.model, settings)
    _note_unread(config, settings)
    return config


READ_ONLY_WITH: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "split": ("train_data_paths", lambda paths: not paths),
    "checkpoint_num_layers": ("checkpoint_activations", bool),
    "max_bad_steps": ("on_bad_loss", lambda what: what != "stop"),
    **dict.fromkeys(("wandb_project", "wandb_group", "wandb_team", "wandb_mode"), ("use_wandb", bool)),
    "tensorboard_dir": ("use_tensorboard", bool),
}
"""Keys that are read with some values of another key alone: that key, and whether a value is one of those."""


def _note_unread(config: Config, settings: ConfigLayers) -> None:
    """Keys that say nothing beside the others of a configuration, unless they say no more than their default."""
    values = config.to_flat()
    for key, (other, reads) in READ_ONLY_WITH.items():
        setting = settings.values.get((key,))
        if setting is not None and setting.value != _default_value(key) and not reads(values[other]):
            settings.notes.append(f"{setting.where}: {key} has no effect: {other} is {format_value(values[other])}")


def _note_gated_width(model: ModelOptions, settings: ConfigLayers) -> None:
    """The width of a gated layer follows from its key by a rule that not everybody has in mind."""
    if model.activation in GATED:
        size = "4 × hidden_size" if model.intermediate_size is None else f"intermediate_size {model.intermediate_size}"
        where = settings.locate(("intermediate_size",)) or settings.locate(("activation",))
        settings.notes.append(
            f"{where}: with activation {model.activation}, {size} is a feed-forward width of "
            f"{ffn_hidden_size(model)}, as in GPT-NeoX (a third)"
        )


def _find_unknown_methods(settings: ConfigLayers) -> Iterator[str]:
    """The problems of the methods' names: pydantic knows them as text, and `check` needs a whole configuration."""
    for key, valid in (("pos_emb", list_encodings()), ("score_processor", method_names.list_processor_values())):
        setting = settings.values.get((key,))
        if setting is not None and isinstance(setting.value, str):
            for _, problem in describe_unknown_method(key, setting.value, valid):
                yield f"{setting.where}: {problem}"


def _sections(settings: ConfigLayers) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for path, setting in settings.values.items():
        target = sections[map_key_owners()[path[0]]]
        for name in path[:-1]:
            target = target.setdefault(name, {})
        target[path[-1]] = setting.value
    return sections


def _get_method(settings: ConfigLayers, key: str) -> Any:
    """The value of a key that names a method, in the end."""
    setting = settings.values.get((key,))
    return setting.value if setting else _default_value(key)


def _resolve_options(settings: ConfigLayers) -> None:
    """Hand options such as `rotary_pct` to the methods that were chosen in the end, if they take them."""
    for name, setting in settings.options.items():
        rule = neox.RULES[name]
        if not isinstance(rule, neox.MethodOptionAlias) or setting.value is None:
            continue
        uses = [use for use in rule.uses if _get_method(settings, use.chooser) in use.methods]
        for use in uses:
            _resolve_option(settings, name, setting, use)
        if not uses:
            others = [
                f"{use.chooser} is {_get_method(settings, use.chooser)}, not {' or '.join(use.methods)}"
                for use in rule.uses
            ]
            settings.notes.append(f"{setting.where}: {name} has no effect: {'; '.join(others)}")


def _resolve_option(settings: ConfigLayers, name: str, setting: SourcedValue, use: neox.MethodOption) -> None:
    path: Path_ = (f"{use.chooser}_options", use.option)
    meaning = ".".join(path)
    if use.per is not None:
        divisor = settings.values.get((use.per,))
        numbers = [each for each in (setting.value, divisor.value if divisor else None) if type(each) in (int, float)]
        if len(numbers) < 2 or not numbers[1]:
            settings.problems.append(
                f"{setting.where}: {name} is {format_value(setting.value)}; it needs a number, and {use.per}"
            )
            return
        setting = SourcedValue(numbers[0] / numbers[1], setting.where, setting.layer)
        meaning = f"{meaning} × {use.per}"
    old = settings.values.get(path)
    newer = old is None or setting.layer >= old.layer
    if old is not None and old.value != setting.value:
        lost, won = (old, setting) if newer else (setting, old)
        settings.notes.append(
            f"{'.'.join(path)} {format_value(lost.value)} ({lost.where}) replaced by {format_value(won.value)} "
            f"({won.where})"
        )
    if newer:
        settings.values[path] = setting
        settings.notes.append(f"{setting.where}: {name} is {meaning} here")


def _resolve_vocabulary_rows(settings: ConfigLayers) -> None:
    """Rows of the embedding that the tensor-parallel ranks can divide.

    GPT-NeoX multiplies make_vocab_size_divisible_by by the number of these ranks. Here it counts for all of them, so
    that every layout has the same rows, and only what they cannot divide is raised.
    """
    path: Path_ = ("make_vocab_size_divisible_by",)
    ranks, multiple = _get_method(settings, "model_parallel_size"), _get_method(settings, path[0])
    if type(ranks) is not int or type(multiple) is not int or ranks < 1 or multiple < 1 or multiple % ranks == 0:
        return
    if lcm(multiple, ranks) > MAX_SIZE:
        return  # one of them is refused for its size
    where = settings.locate(path) or settings.locate(("model_parallel_size",)) or COMMAND_LINE
    settings.values[path] = SourcedValue(lcm(multiple, ranks), where)
    settings.notes.append(
        f"{where}: {path[0]} {multiple} becomes {lcm(multiple, ranks)}, which model_parallel_size {ranks} divides"
    )


def _resolve_checked(settings: ConfigLayers) -> None:
    """Keys without effect, but for values or methods with which they would have one."""
    methods = neox.Methods(str(_get_method(settings, "pos_emb")), str(_get_method(settings, "score_processor")))
    for name, setting in settings.options.items():
        rule = neox.RULES[name]
        if not isinstance(rule, neox.ValidatedNoop):
            continue
        if problem := rule.problem(setting.value, methods):
            settings.problems.append(f"{setting.where}: {name}: {problem}")
        else:
            settings.notes.append(f"{setting.where}: {name} has no effect: {rule.reason}")


def _resolve_task(settings: ConfigLayers) -> None:
    """seq_length of a task: the longest sequence of its training."""
    given = settings.values.get(("task",))
    if given is None or given.value is None or ("seq_length",) in settings.values:
        return
    from megatron.tasks.task_config import read_task_config  # needs numpy, and most configurations have no task

    names = [path for path in settings.values if path[0].startswith("task")]
    flat: dict[str, Any] = {"task_options": {path[1]: settings.values[path].value for path in names if path[1:]}}
    flat |= {path[0]: settings.values[path].value for path in names if not path[1:]}
    try:
        longest = max(read_task_config(DataOptions(**flat)).sequence_lengths)
    except (UserError, ValidationError, ValueError):
        settings.values[("seq_length",)] = SourcedValue(2, given.where)  # what is wrong is told with the other problems
        return
    settings.values[("seq_length",)] = SourcedValue(longest, given.where)
    settings.notes.append(f"{given.where}: task {given.value} makes seq_length {longest}")


def _resolve_fractions(settings: ConfigLayers) -> None:
    """`expansion_factor` and its like: a share of a key that another file may hold."""
    for name, setting in settings.options.items():
        rule = neox.RULES[name]
        if not isinstance(rule, neox.FractionOf) or setting.value is None:
            continue
        base = settings.values.get((rule.of,))
        share = setting.value
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < float("inf"):
            settings.problems.append(
                f"{setting.where}: {name} is {format_value(share)}; it must be a finite positive number"
            )
        elif (rule.to,) in settings.values:
            other = settings.values[(rule.to,)]
            settings.problems.append(f"{setting.where}: {name} contradicts {rule.to} ({other.where}); give one of them")
        elif base is not None and isinstance(base.value, int):
            try:
                value = int(float(share) * base.value)  # as GPT-NeoX has it
            except OverflowError:
                settings.problems.append(f"{setting.where}: {name} × {rule.of} is too large for {rule.to}")
                continue
            settings.values[(rule.to,)] = SourcedValue(value, setting.where, setting.layer)
            settings.notes.append(f"{setting.where}: {name} {format_value(share)} makes {rule.to} {value}")


def _resolve_variants(settings: ConfigLayers) -> None:
    """`bias_gelu_fusion` and its like: a switch that changes what a value of another key means."""
    for name, setting in settings.options.items():
        rule = neox.RULES[name]
        if not isinstance(rule, neox.ValueSwitch):
            continue
        base = settings.values.get((rule.of,))
        value = base.value if base is not None else _default_value(rule.of)
        if setting.value not in (None, True, False):
            settings.problems.append(
                f"{setting.where}: {name} is {format_value(setting.value)}; it must be true or false"
            )
        elif setting.value and value in rule.values:
            settings.values[(rule.of,)] = SourcedValue(rule.values[value], setting.where, setting.layer)
            settings.notes.append(f"{setting.where}: {name} makes {rule.of} {value} {rule.values[value]}")
        else:
            settings.notes.append(f"{setting.where}: {name} {format_value(setting.value)} leaves {rule.of} {value}")


def _resolve_tokenizer(settings: ConfigLayers) -> None:
    """GPT-NeoX's default: a vocabulary and merges without a tokenizer_type are GPT-2's."""
    tokenizer = ("tokenizer_type", "vocab_file", "merge_file")
    has = {name for name in tokenizer if (name,) in settings.values and settings.values[(name,)].value is not None}
    if has == {"vocab_file", "merge_file"}:
        where = settings.values[("merge_file",)].where
        settings.values[("tokenizer_type",)] = SourcedValue("GPT2BPETokenizer", where)
        settings.notes.append(f"{where}: vocab_file and merge_file mean tokenizer_type GPT2BPETokenizer")


def _default_value(key: str) -> Any:
    """The default of a flat key."""
    return SECTIONS[map_key_owners()[key]].model_fields[key].default

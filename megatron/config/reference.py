"""The reference of all keys, made from the schema and the tables: `docs/configuration.md` and `./deepy.py keys`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron.config import method_names, neox_keys
from megatron.config.neox_rules import NeoxRule, format_code
from megatron.config.schema import SECTIONS, ConfigKey, list_config_keys
from megatron.config.yaml_files import format_value
from megatron.options.commands import (
    AnalysisOptions,
    ExportOptions,
    GenerationOptions,
    ImportOptions,
    PlanOptions,
    RehearseOptions,
    ReportOptions,
)
from megatron.options.evaluation import EvaluationOptions, TaskOptions
from megatron.options.section import ConfigSection, read_docstring
from megatron.options.sweep import (
    BenchmarkOptions,
    BranchOptions,
    LeaderboardOptions,
    PublishedOptions,
    SweepCorpusOptions,
    SweepOptions,
)
from megatron.position.catalog import list_encodings, list_processors, list_temperatures
from megatron.utils.suggestions import suggest_names

REFERENCE_PAGE = Path("docs/configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Made by `make docs`; a test keeps it current. -->

A run is described by YAML files, merged left to right, and `key=value` pairs after them. The later wins, and a dry
run shows what was replaced:

    ./deepy.py train 125M cdape_kerple_log local_setup train_iters=1000 optimizer.params.lr=3e-4

- `./deepy.py keys TEXT` explains the keys that have this text in their name or meaning.
- A file is given by its path, or by its name with or without `.yml`: names are looked up in `configs/` and its
  subfolders. With `-d FOLDER` they are looked up there first. Paths inside files are relative to the current directory.
- Files are YAML 1.2: `6e-4` is a number, `true` and `True` are the same, JSON with trailing commas is fine. Keys may be
  written with dashes or underscores. A key given twice in a file is an error, and so is an unknown one.
- A file has at most 10,000 values, aliases (`*name`) counted as what they stand for, and 1 MiB.
- Keys are flat. `optimizer`, `zero_optimization`, `fp16`, `bf16`, `slurm` and the `…_options` of methods hold keys of
  their own; they merge key by key, on the command line with dots. A later file that chooses another `pos_emb`,
  `score_processor` or `attention_temperature` drops the options given for the one before.
- Of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` any two give the third.
- `precision` is short for `fp16` and `bf16` `enabled`; a file that switches one on switches the other off.
- Every run saves its resolved configuration as `config.yml`, which loads to the same thing; where a `config.yml` of
  yours lies already, as `config.resolved.yml`.

Every key has a policy, which says what it decides and what becomes of a change when a run is resumed:

| policy | decides | a resumed run |
| --- | --- | --- |
| architecture | which function the trained weights compute | must agree |
| context | the same, but no weight's shape depends on it | must agree; finetuning may change it |
| initialization | the weights at step 0 | does not read it, and says so if it changed |
| data | which tokens are read, in which order, and which are scored | says what changed |
| numerics | what one step does to the weights | says what changed |
| schedule | how many steps of how many sequences there are, and their learning rates | says what changed |
| machine | where and how fast it runs; results are the same but for rounding | may change it |
| output | what is reported, saved and loaded, and where | may change it |
"""

SWEEP_INTRODUCTION = """\
## sweep

The `sweep:` mapping of a sweep file, beside ordinary keys ([evaluation.md](evaluation.md#sweeps)).
"""

SWEEP: dict[str, type[ConfigSection]] = {
    "sweep": SweepOptions,
    "sweep.corpus": SweepCorpusOptions,
    "sweep.variants.NAME.branch": BranchOptions,
    "sweep.evaluate": EvaluationOptions,
    "sweep.benchmarks.NAME": BenchmarkOptions,
    "sweep.leaderboard": LeaderboardOptions,
    "sweep.published": PublishedOptions,
}
"""The mappings of a sweep file."""

COMMANDS_INTRODUCTION = """\
## Options of commands

What no configuration file holds: `evaluate.limit` is `--limit` of `./deepy.py evaluate`. The other options of
`evaluate` are those of a sweep.
"""

COMMAND_SECTIONS: dict[str, type[ConfigSection]] = {
    "analyze": AnalysisOptions,
    "evaluate": TaskOptions,
    "export": ExportOptions,
    "generate": GenerationOptions,
    "import": ImportOptions,
    "plan": PlanOptions,
    "rehearse": RehearseOptions,
    "report": ReportOptions,
}
"""Commands and their options."""

NEOX_INTRODUCTION = """\
## GPT-NeoX, KERPLE and DAPE

Their configuration files load as they are, but for those of models that are not offered here:
[results/stock_configs.md](results/stock_configs.md) lists them with the reasons.
Keys that have the same name and meaning here are in the tables above; all others are below.
What is without effect is said in one line when a run starts; nothing is dropped in silence.
"""

METHODS = {
    "pos_emb": list_encodings,
    "score_processor": list_processors,
    "attention_temperature": list_temperatures,
}
"""The methods that there are, by the key that names one."""


def describe_type(annotation: Any) -> str:
    """A type as a person writes it: `whole number`, `text or null`, `a · b · c`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else describe_type(part) for part in inner)
    if origin is Literal:
        return " · ".join(format_value(value) for value in inner)
    if origin is Annotated:
        return describe_type(inner[0])
    if origin is list:
        kind = describe_type(inner[0])
        return f"list of ({kind})" if " or " in kind else f"list of {kind if '·' in kind else f'{kind}s'}"
    if origin is dict:
        return "mapping"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", list: "list"}.get(
        annotation, "mapping"
    )


def describe_default(key: ConfigKey) -> str:
    """The default as written in YAML; `required` where there is none."""
    return "" if key.opens else _default(key.field)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        default = field.default_factory()  # type: ignore[call-arg]
        return "" if isinstance(default, ConfigSection) else format_value(default)
    return "required" if field.is_required() else format_value(field.default)


def format_table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _format_section(name: str) -> str:
    title = read_docstring(SECTIONS[name]).partition("\n")[0]
    rows = [
        [f"`{key.name}`", describe_default(key), describe_type(key.field.annotation), key.policy or "", key.doc]
        for key in list_config_keys().values()
        if key.section == name
    ]
    return f"## {name}\n\n{title}\n\n{format_table(['key', 'default', 'values', 'policy', 'meaning'], rows)}"


def _format_options(introduction: str, sections: dict[str, type[ConfigSection]]) -> str:
    rows = [
        [f"`{path}.{name}`", _default(field), describe_type(field.annotation), field.description or ""]
        for path, section in sections.items()
        for name, field in section.model_fields.items()
    ]
    return f"{introduction}\n{format_table(['key', 'default', 'values', 'meaning'], rows)}"


def _format_position_names() -> str:
    rows = [[f"`{name}`", alias.describe(code="`")] for name, alias in neox_keys.POSITION_ALIASES.items()]
    return f"### Their names of position encodings\n\n{format_table(['pos_emb', 'means'], rows)}"


def _format_method_names() -> str:
    rows = [
        [format_code(others), f"`{key}: {method}`"]
        for key, list_methods in METHODS.items()
        for method in list_methods()
        if (others := method_names.list_other_names(method))
    ]
    keys = ", in ".join(f"`{key}`" for key in METHODS)
    text = f"Refused with our name, in {keys} and where a file is named.\n"
    return f"### Other names of methods\n\n{text}\n{format_table(['also called', 'here'], rows)}"


def _format_understood() -> str:
    rows = _list_rule_rows(neox_keys.UNDERSTOOD)
    rows.append(["`fp16: {type: bfloat16}`", "`precision: bf16`"])
    for key, values in neox_keys.VALUE_ALIASES.items():
        rows += [[f"`{key}: {value}`", f"`{key}: {format_value(own)}`"] for value, own in values.items()]
    return f"### Understood under our name\n\n{format_table(['theirs', 'here'], rows)}"


def _format_ignored() -> str:
    rows = _list_rule_rows((*neox_keys.IGNORED, *neox_keys.VALIDATED_NOOPS))
    return f"### Accepted without effect\n\n{format_table(['keys', 'why'], rows)}"


def _format_unsupported() -> str:
    rows = _list_rule_rows(neox_keys.UNSUPPORTED)
    for key, advice in neox_keys.UNSUPPORTED_VALUES.items():
        rows += [[f"`{key}: {value}`", text, ""] for value, text in advice.items()]
    text = "Refused with an error, except with a value that asks for nothing.\n"
    return f"### Refused\n\n{text}\n{format_table(['keys', 'instead', 'fine'], rows)}"


def _list_rule_rows(rules: Iterable[NeoxRule]) -> list[list[str]]:
    return [row for rule in rules for row in rule.reference_rows()]


def build_reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *(_format_section(name) for name in SECTIONS), _format_options(SWEEP_INTRODUCTION, SWEEP)]
    parts += [_format_options(COMMANDS_INTRODUCTION, COMMAND_SECTIONS), NEOX_INTRODUCTION]
    return "\n".join(
        [
            *parts,
            _format_position_names(),
            _format_method_names(),
            _format_understood(),
            _format_ignored(),
            _format_unsupported(),
        ]
    )


def lookup_keys(pattern: str) -> list[tuple[str, str, str, str]]:
    """Keys whose name or meaning contains a text: (key, default, values, meaning).

    Ours, then position encodings and score processors by all their names, their options, then other projects' keys.
    """
    text = pattern.replace("-", "_").lower()
    rows = [
        (key.name, describe_default(key), describe_type(key.field.annotation), key.doc)
        for key in list_config_keys().values()
        if text in key.name.lower() or pattern.lower() in key.doc.lower()
    ]
    if not text:
        return rows
    rows += _lookup_methods(text)
    rows += [row for row in _lookup_method_options() if text in row[0]]
    return rows + [(name, "", "", rule.describe(name)) for name, rule in neox_keys.RULES.items() if text in name]


def find_nearest_key(pattern: str) -> str:
    """`did you mean seq_length?` for a text that no key contains; nothing if none is near."""
    own_names = (key.name.rpartition(".")[2] for key in list_config_keys().values())
    return suggest_names(pattern.replace("-", "_"), [*own_names, *neox_keys.RULES], max_suggestions=3)


def _lookup_methods(text: str) -> list[tuple[str, str, str, str]]:
    """Methods one of whose names contains a text: `rope` finds `pos_emb: rotary`."""
    rows = []
    for key, list_methods in METHODS.items():
        for method in list_methods():
            others = method_names.list_other_names(method)
            if any(text in name for name in (method, *others)):
                also = f"also called {', '.join(others)}; " if others else ""
                rows.append((f"{key}: {method}", "", "", f"{also}./deepy.py positions tells more"))
    aliases = [(name, alias) for name, alias in neox_keys.POSITION_ALIASES.items() if text in name]
    return rows + [(f"pos_emb: {name}", "", "", alias.describe()) for name, alias in aliases]


def _lookup_method_options() -> list[tuple[str, str, str, str]]:
    methods_by_option: dict[str, list[str]] = {}
    for key, list_methods in METHODS.items():
        for method in list_methods():
            for option in method_names.list_readable_options(method):
                methods_by_option.setdefault(f"{key}_options.{option}", []).append(method)
    return [
        (key, "", "", f"an option of {' and '.join(methods)}; ./deepy.py positions tells more")
        for key, methods in methods_by_option.items()
    ]

"""Generate docs/positions.md: every position encoding, score processor and attention temperature in the registry.

The page prints each method's own description (formula, source, advice), counts its parameters, and derives its traits
from the code. The constructor's docstring describes the options. A new file in `megatron/position/` gets its section
and pictures without changes to this file. The prose is in `positions_template.md`.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from string import Template
from textwrap import TextWrapper
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatron.attention import softmax
from megatron.config import method_names, neox_keys
from megatron.config.method_names import describe_compositions
from megatron.config.reference import describe_default, describe_type, format_table
from megatron.config.schema import list_config_keys
from megatron.config.yaml_files import format_value
from megatron.options.section import read_docstring
from megatron.position import registry, rotary_scaling
from megatron.position.base import PositionModule
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS, TokenRange
from tools.docs.position_panels import (
    BASE_ENCODING,
    MAX_DISTANCE,
    PROCESSOR_MAP_SIZE,
    SEED,
    SHAPE,
    build_drawn_processor,
    build_encoding,
    build_encoding_panels,
    build_processor,
    build_processor_panels,
    build_temperature_panels,
    measure_context,
)
from tools.docs.position_plots import MIN_BIAS, get_picture_path

PAGE = Path("docs/positions.md")
TEMPLATE = Path(__file__).with_name("positions_template.md")
"""Prose of the page, with the names of the generated parts in `${…}`."""
LAYERS = 12
WRAPPER = TextWrapper(120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
NESTED_WRAPPER = TextWrapper(
    120, initial_indent="    ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
)
"""Four spaces of indentation; the site's Markdown does not nest with fewer."""
HOOKS = {
    "embed": "adds to the embeddings",
    "rotate": "rotates queries and keys",
    "table": "a function of n alone (Toeplitz)",
    "dense": "a function of (i, j)",
    "contextual": "terms from queries and keys",
    "gate": "a bias from the layer's input",
}


def render_page() -> str:
    """Return the page, with its generated parts in place of the template's names."""
    records, _ = registry.describe_methods(
        [*registry.list_encodings(), *registry.list_processors(), *registry.list_temperatures()]
    )
    encodings = [record for record in records if record["kind"] == "encoding"]
    processors = [record for record in records if record["kind"] == "processor"]
    temperatures = [record for record in records if record["kind"] == "temperature"]
    frequency_table, distance_table = _list_tables(rotary_scaling)
    return Template(TEMPLATE.read_text(encoding="utf-8").rstrip("\n")).substitute(
        num_encodings=len(encodings),
        num_processors=len(processors),
        num_temperatures=len(temperatures),
        encoding_table=_format_encoding_table(encodings),
        processor_table=_format_cost_table("score_processor", processors, build_processor),
        temperature_table=_format_cost_table(
            "attention_temperature", temperatures, lambda name: registry.build_temperature(name, SHAPE)
        ),
        num_heads=SHAPE.num_heads,
        head_dim=SHAPE.head_dim,
        num_layers=LAYERS,
        train_length=SHAPE.train_length,
        softmax_table=_list_tables(softmax)[0],
        frequency_table=frequency_table,
        distance_table=distance_table,
        exceptions=_list_methods_without_positions(encodings),
        window_keys=_format_key_table("attention_window", "randomized_positions", "continuous_positions"),
        overlay_table=_format_overlay_table(),
        name_table=_format_name_table(),
        option_table=_format_option_table(),
        seed=SEED,
        max_distance=f"{MAX_DISTANCE:,}",
        min_bias=f"{-MIN_BIAS:g}",
        min_factor=f"{math.exp(MIN_BIAS):.0e}",
        map_row=PROCESSOR_MAP_SIZE - 1,
        base_encoding=BASE_ENCODING,
        encodings="\n".join(map(_render_encoding, encodings)),
        processors="\n".join(map(_render_processor, processors)),
        temperatures="\n".join(map(_render_temperature, temperatures)),
    )


def _list_tables(module: ModuleType) -> list[str]:
    """Return the tables in a module's docstring."""
    lines = groupby(read_docstring(module).splitlines(), key=lambda line: line.startswith("|"))
    return ["\n".join(group) for is_table, group in lines if is_table]


def _format_link(name: str) -> str:
    return f"[`{name}`](#{name})"


def _format_yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _list_hooks(encoding: Encoding) -> list[str]:
    return [hook for hook in type(encoding).traits() if hook in HOOKS]


def _format_encoding_table(records: list[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        encoding = build_encoding(record["name"])
        rows.append(
            [
                _format_link(record["name"]),
                f"`{record['formula']}`",
                ", ".join(f"`{hook}`" for hook in _list_hooks(encoding)) or "none",
                f"{_count_parameters(encoding):,}",
                _format_yes_no(encoding.relative),
                "any" if encoding.max_length is None else "`max_position_embeddings`",
            ]
        )
    return format_table(["`pos_emb`", "formula", "hooks", "parameters", "relative", "length"], rows)


def _format_cost_table(key: str, records: list[dict[str, Any]], build: Callable[[str], nn.Module]) -> str:
    rows = [
        [_format_link(each["name"]), f"`{each['formula']}`", f"{_count_parameters(build(each['name'])):,}"]
        for each in records
    ]
    return format_table([f"`{key}`", "formula", "parameters per layer"], rows)


def _format_key_table(*names: str) -> str:
    known = list_config_keys()
    keys = [known[(name,)] for name in names]
    rows = [[f"`{key.name}`", describe_default(key), describe_type(key.field.annotation), key.doc] for key in keys]
    return format_table(["key", "default", "values", "meaning"], rows)


def _list_methods_without_positions(encodings: list[dict[str, Any]]) -> str:
    names = [record["name"] for record in encodings]
    listed = [f"`{name}`" for name in names if not registry.load_encoding_class(name).takes_positions]
    return " and ".join(filter(None, [", ".join(listed[:-1]), *listed[-1:]]))


def _format_overlay_table() -> str:
    rows = [[f"`{name}`", f"{sentence}."] for name, sentence in describe_compositions().items()]
    return format_table(["overlay", "keys"], rows)


def _format_name_table() -> str:
    """Format the values of `pos_emb` in GPT-NeoX, KERPLE and DAPE with the keys that they set here."""
    rows = []
    for name, alias in neox_keys.POSITION_ALIASES.items():
        options = ", ".join(f"`{key}: {value}`" for key, value in alias.options.items())
        rows.append(
            [
                f"`{name}`",
                _format_link(alias.encoding) + (f" with {options}" if options else ""),
                _format_link(alias.processor) if alias.processor else "",
                "" if alias.per_layer is None else format_value(alias.per_layer),
            ]
        )
    return format_table(["their `pos_emb`", "`pos_emb`", "`score_processor`", "`pos_emb_per_layer`"], rows)


def _format_option_table() -> str:
    """Format the keys of GPT-NeoX, KERPLE and DAPE that are options of methods here."""
    rows = [
        [
            f"`{rule.key}`",
            ", and ".join(
                f"`{option.option}`{f' × `{option.divisor_key}`' if option.divisor_key else ''} of "
                f"{', '.join(map(_format_link, option.methods))}"
                for option in rule.options
            ),
        ]
        for rule in neox_keys.METHOD_OPTION_ALIASES
    ]
    return format_table(["their key", "option"], rows)


def _read_summary(method: type[Any]) -> str:
    """Return the first paragraph of the docstring of a method's file."""
    text = inspect.getdoc(sys.modules[method.__module__]) or ""
    return " ".join(text.split("\n\n")[0].split())


def _escape(text: str) -> str:
    return text.replace("*", "\\*")


def _describe_parameters(record: dict[str, Any], encoding: Encoding) -> str:
    number = _count_parameters(encoding)
    if not number:
        return "none"
    parameters = _escape(record["parameters"])
    if type(encoding).overrides_hook("embed"):  # not per layer
        return f"{parameters}: {number:,}"
    return f"{parameters}: {number:,} for all layers, {LAYERS * number:,} with a set per layer"


@torch.no_grad()
def _describe_traits(encoding: Encoding) -> str:
    said = [f"`{hook}`, {HOOKS[hook]}" for hook in _list_hooks(encoding)] or ["adds nothing to attention"]
    if type(encoding).overrides_hook("table"):
        terms = encoding.table(torch.zeros(1))
    else:
        terms = encoding.dense(TokenRange(0, 1), TokenRange(0, 1), torch.zeros(()), ALL_HEADS)
    given = [which for which, value in terms._asdict().items() if value is not None]
    said += [f"gives a {' and a '.join(given)}"] if given else []
    said.append(
        "relative: shifting all positions changes nothing"
        if encoding.relative
        else "not relative: shifting all positions changes the result"
    )
    if not encoding.takes_positions:
        said.append("reads no positions")
    said.append("any length" if encoding.max_length is None else "at most `max_position_embeddings` positions")
    return "; ".join(said)


def _render_facts(facts: dict[str, str | list[str]]) -> str:
    """Render a list of facts; a fact that is a list has its entries below its name."""
    lines = []
    for name, text in facts.items():
        if isinstance(text, list):
            lines.append(f"- **{name}:**")
            lines += [NESTED_WRAPPER.fill(f"- {entry}") for entry in text]
        elif text:
            lines.append(WRAPPER.fill(f"- **{name}:** {text}"))
    return "".join(f"{line}\n" for line in lines)


def _describe_other_names(name: str) -> str:
    return ", ".join(f"`{other}`" for other in method_names.list_other_names(name))


def read_option_meanings(method: type[PositionModule]) -> dict[str, str]:
    """Return the options that the constructor's docstring describes under `Args:`."""
    _, _, arguments = (inspect.getdoc(method.__init__) or "").partition("Args:\n")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", arguments, re.MULTILINE)
    return {name: " ".join(meaning.split()).removesuffix(".") for name, meaning in entries}


def _describe_options(method: type[PositionModule], defaults: dict[str, Any]) -> str | list[str]:
    """Describe each option with its default, type and meaning."""
    if not defaults:
        return "none"
    found, meanings = method.options(), read_option_meanings(method)
    return [
        f"`{option}` = {format_value(default)} ({describe_type(found[option].annotation)})"
        + (f": {meanings[option]}" if option in meanings else "")
        for option, default in defaults.items()
    ]


def _describe_encoding_cost(encoding: Encoding) -> str:
    """Describe the extra products per score and per query, compared with plain attention."""
    plain = 4 * SHAPE.num_heads * SHAPE.head_dim
    cost = 2 * SHAPE.num_heads * (encoding.qk_head_dim + SHAPE.head_dim)
    text = f"{cost:,} FLOPs forward per query, key and layer for the products with k and v"
    text += ", as with rotary" if cost == plain else f"; rotary has {plain:,}"
    if more := encoding.product_flops(float(SHAPE.train_length)):
        text += f"; {more:,.0f} more per query and layer if it sees {SHAPE.train_length} keys"
    if type(encoding).overrides_hook("table") or type(encoding).overrides_hook("dense"):
        text += "; its bias or weight is computed once for all sequences of a batch"
    return text


def _render_picture(name: str, titles: list[str], note: str) -> str:
    # relative to the page's folder
    paths = [get_picture_path(name, number).relative_to(PAGE.parent) for number in range(1, len(titles) + 1)]
    images = [f"![{name}: {title}]({path.as_posix()})\n" for title, path in zip(titles, paths, strict=True)]
    return f"{''.join(images)}\n{note}\n" if note else "".join(images)


def _render_encoding(record: dict[str, Any]) -> str:
    name = record["name"]
    encoding = build_encoding(name)
    facts = {
        "Also called": _describe_other_names(name),
        "Parameters": _describe_parameters(record, encoding),
        "Options": _describe_options(type(encoding), record["options"]),
        "Traits": _describe_traits(encoding),
        "Cost": _describe_encoding_cost(encoding),
        "When": record["advice"],
        "Source": record["source"],
    }
    panels, note = build_encoding_panels(encoding)
    image = _render_picture(name, [panel.title for panel in panels], note)
    return (
        f"### {name}\n\n{_read_summary(type(encoding))}\n\n    {record['formula']}\n\n{_render_facts(facts)}\n{image}"
    )


def _render_processor(record: dict[str, Any]) -> str:
    name = record["name"]
    processor, alone = (build_processor(name, has_bias=has_bias) for has_bias in (True, False))
    number, fewer = _count_parameters(processor), _count_parameters(alone)
    facts = {
        "Also called": _describe_other_names(name),
        "Parameters": "none"
        if not number
        else f"{_escape(record['parameters'])}: {number:,} in each layer ({LAYERS * number:,} in {LAYERS})"
        + (f"; with an encoding that has no bias, {fewer:,} ({LAYERS * fewer:,})" if fewer < number else ""),
        "Options": _describe_options(type(processor), record["options"]),
        "Traits": _describe_processor_traits(name, processor),
        "Cost": f"{processor.flops_per_score():,.0f} FLOPs forward per query, key and layer for all heads; "
        f"the products with k and v take {4 * SHAPE.num_heads * SHAPE.head_dim:,}"
        + (
            ". The bias half of the first convolution is not included: for a Toeplitz bias it is computed once for all "
            "rows and sequences"
            if processor.overrides("bias_contribution")
            else ""
        ),
        "When": record["advice"],
        "Source": record["source"],
    }
    panels, note = build_processor_panels(name)
    image = _render_picture(name, [panel.title for panel in panels], note)
    return (
        f"### {name}\n\n{_read_summary(type(processor))}\n\n    {record['formula']}\n\n{_render_facts(facts)}\n{image}"
    )


def _describe_processor_traits(name: str, processor: Processor) -> str:
    """Describe the dimensions that a processor mixes before the softmax, and its other effects."""
    reach, mixes_heads = measure_context(build_drawn_processor(name, has_bias=False)[0])
    traits = [f"mixes {'the heads of a row, and ' * mixes_heads}keys up to {reach} apart"]
    if not reach:
        traits = ["mixes heads, each key separately" if mixes_heads else "mixes neither heads nor keys"]
    if processor.overrides("row_terms"):
        traits = ["sums over all earlier rows"]
    elif processor.preceding_rows:
        traits.append(f"reads the {processor.preceding_rows} previous rows")
    if processor.overrides("process_weights"):
        traits.append("also modifies the attention weights")
    if processor.kernel_parameters() is None:
        traits.append("not supported by kernels: row blocks compute it")
    return "; ".join(traits)


@torch.no_grad()
def _render_temperature(record: dict[str, Any]) -> str:
    name = record["name"]
    temperature = registry.build_temperature(name, SHAPE)
    number, lengths = _count_parameters(temperature), [1, *(SHAPE.train_length * times for times in (1, 4, 32))]
    num_keys = torch.tensor(lengths, dtype=torch.float32)
    factors = temperature(num_keys - 1, num_keys)[0].tolist()
    facts = {
        "Also called": _describe_other_names(name),
        "Parameters": "none" if not number else f"{_escape(record['parameters'])}: {number:,} in each layer",
        "Options": _describe_options(type(temperature), record["options"]),
        "Factors": ", ".join(f"{factor:.3g} in row {n:,}" for n, factor in zip(lengths, factors, strict=True))
        + ", at the initial values",
        "Cost": f"{SHAPE.num_heads * SHAPE.head_dim:,} FLOPs forward per query and layer, to scale the query",
        "When": record["advice"],
        "Source": record["source"],
    }
    image = _render_picture(name, [panel.title for panel in build_temperature_panels(temperature)], "")
    summary = _read_summary(type(temperature))
    return f"### {name}\n\n{summary}\n\n    {record['formula']}\n\n{_render_facts(facts)}\n{image}"

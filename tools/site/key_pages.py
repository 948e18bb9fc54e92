"""Page for each section of configuration keys, and a shortened docs/configuration.md that links to them."""

import re
from functools import cache

from megatron.config.reference import INTRODUCTION, SWEEP, describe_default, describe_type
from megatron.config.schema import SECTIONS, list_config_keys
from megatron.config.yaml_files import format_value
from megatron.options.section import ConfigSection, read_docstring
from tools.site.markdown import escape, link_docs

FOLDER = "keys"
PAGE = "configuration.md"

NEOX_HEADING = "GPT-NeoX, KERPLE and DAPE"
OTHER_PAGES = {"sweep": f"{FOLDER}/sweep.md", NEOX_HEADING: f"{FOLDER}/gpt-neox.md"}
"""Pages for parts of docs/configuration.md that are not sections of a run's configuration, by heading."""

POLICIES = "policies"
"""Anchor of the explanation of policies in docs/configuration.md."""

COMMANDS_HEADING = "Options of commands"


def write_key_pages(configuration: str) -> dict[str, str]:
    """Return the pages by path in the site's docs/.

    Args:
        configuration: text of docs/configuration.md.
    """
    pages = {f"{FOLDER}/{name}.md": _render_section(name) for name in SECTIONS}
    pages[OTHER_PAGES["sweep"]] = _render_sweep()
    neox = next(part for heading, part in _split(configuration) if heading == NEOX_HEADING)
    path = OTHER_PAGES[NEOX_HEADING]
    text = neox.replace("\n### ", "\n## ").replace("](results/", "](../results/").replace("tables above", "other pages")
    pages[path] = f"# {NEOX_HEADING}\n{text}"
    return {path: link_docs(text, path) for path, text in pages.items()}


def shorten_configuration(configuration: str) -> str:
    """Return docs/configuration.md with links to the pages of keys instead of their tables."""
    introduction = configuration.partition("\n## ")[0]
    parts = [re.sub(r"(^Every key has a policy(?:.+\n)+)", rf"\1{{ #{POLICIES} }}\n", introduction, flags=re.MULTILINE)]
    for heading, text in _split(configuration):
        introduction = text.partition("\n|")[0].partition("\n### ")[0].strip()
        if heading == COMMANDS_HEADING:
            link = "[Commands](commands/index.md) have a page each, with their options."
        else:
            link = f"[All keys and what they mean]({OTHER_PAGES.get(heading, f'{FOLDER}/{heading}.md')})"
        parts.append(f"## {heading}\n\n{introduction}\n\n{link}")
    return "\n\n".join(parts) + "\n"


def _split(configuration: str) -> list[tuple[str, str]]:
    """Return the headings and texts of docs/configuration.md after its introduction."""
    parts = re.split(r"^## (.+)$", configuration, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def _render_section(name: str) -> str:
    title = read_docstring(SECTIONS[name])
    entries = [
        _format_key(key.name, describe_default(key), describe_type(key.field.annotation), key.policy or "", key.doc)
        for key in list_config_keys().values()
        if key.section == name
    ]
    return "\n\n".join([f"# {name}", escape(title), *entries]) + "\n"


def _render_sweep() -> str:
    parts = [
        "# sweep",
        "The `sweep:` mapping of a sweep file, beside ordinary keys ([sweeps](../evaluation.md#sweeps)).",
    ]
    for path, section in SWEEP.items():
        parts += [f"## {path}", escape(read_docstring(section)), *_list_fields(path, section)]
    return "\n\n".join(parts) + "\n"


def _list_fields(path: str, section: type[ConfigSection]) -> list[str]:
    fields = section.model_fields.items()
    return [
        _format_key(
            f"{path}.{name}",
            "required" if field.is_required() else _format_default(field.get_default(call_default_factory=True)),
            describe_type(field.annotation),
            "",
            field.description or "",
            level=3,
        )
        for name, field in fields
    ]


def _format_default(value: object) -> str:
    return "" if isinstance(value, ConfigSection) else format_value(value)


def _format_key(name: str, default: str, values: str, policy: str, meaning: str, level: int = 2) -> str:
    """Format a key: name as heading, description, and a line with type, default and policy for changes."""
    facts = [f"type: {escape(values.replace(' · ', ', '))}"]
    if default:
        facts.append(default if default == "required" else f"default: `{default}`")
    if policy:
        facts.append(f"[{policy}](../{PAGE}#{POLICIES}): a resumed run {read_policies()[policy]}")
    return f"{'#' * level} `{name}` {{ #{name} }}\n\n{escape(meaning)}\n\n{' · '.join(facts)}\n{{ .facts }}"


@cache
def read_policies() -> dict[str, str]:
    """Return the effect of a changed key on a resumed run by policy, from the table in docs/configuration.md."""
    rows = re.findall(r"^\| (\w+) \| .+ \| (.+) \|$", INTRODUCTION.partition("| --- |")[2], flags=re.MULTILINE)
    return dict(rows)

"""Page for each position method, and a shortened docs/positions.md that links to them.

A page starts with the method's entry in docs/positions.md (formula, parameters, options, advice, source, picture). The
overlays that select the method, the kernels that compute it, and its results in the leaderboard's record
(`method_results.py`) follow.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from megatron.attention.backends.backend import (
    BACKEND_CAPABILITIES,
    find_unsupported_feature,
    list_method_features,
)
from megatron.config.method_names import list_other_names
from megatron.config.yaml_files import parse_yaml, read_text
from megatron.position.catalog import (
    list_encodings,
    list_processors,
    list_temperatures,
    read_encoding_facts,
    read_processor_facts,
)
from tools.site.formulas import METHOD_FORMULAS
from tools.site.markdown import link_docs
from tools.site.method_results import LeaderboardResults

FOLDER = "methods"
PAGE = "positions.md"
KINDS = {
    "Encodings": (list_encodings, "pos_emb"),
    "Processors": (list_processors, "score_processor"),
    "Temperatures": (list_temperatures, "attention_temperature"),
}
"""Parts of docs/positions.md with method pages: the function that lists the methods, and the key that selects one."""
MODEL = Path("configs/model/125M.yml")
"""Model trained by the commands on the pages."""
FUSED_PROCESSOR, PLAIN_BIAS = "cdape", "kerple_log"
"""Processor that the table of backends combines with an encoding, and the encoding for a processor."""
PUBLISHED_ON = {"cdape": "kerple_log", "dape": "kerple_log"}
"""Encodings of the processors' publications, if the model file sets another."""

PAPERS = {
    "Barbero et al. 2024": "2410.06205",
    "Bianchessi et al. 2025": "2505.22842",
    "Chen et al. 2023": "2306.15595",
    "Chen et al. 2024": "2410.21216",
    "Chi et al. 2022": "2205.09921",
    "Chi et al. 2023": "2212.10356",
    "Dai et al. 2019": "1901.02860",
    "DAPE V2": "2410.04798",
    "Golovneva et al. 2024": "2405.18719",
    "Haviv et al. 2022": "2203.16634",
    "Jin et al. 2024": "2401.01325",
    "Kazemnejad et al. 2023": "2305.19466",
    "Li et al. 2023": "2310.04418",
    "Peng et al. 2023": "2309.00071",
    "Press et al. 2022": "2108.12409",
    "Qin et al. 2023": "2307.10156",
    "Raffel et al. 2020": "1910.10683",
    "Su et al. 2021": "2104.09864",
    "Vaswani et al. 2017": "1706.03762",
    "Zheng et al. 2024": "2405.14722",
}
"""arXiv numbers of papers that the methods' sources cite without one."""
_NUMBER = r"(?:arXiv:)?\b(?P<number>\d{4}\.\d{5})\b"
_NAME = rf"\b(?P<name>{'|'.join(name.replace(' ', '.') for name in PAPERS)})\b"
NUMBER = re.compile(_NUMBER)
NAME_OR_NUMBER = re.compile(rf"{_NAME}|{_NUMBER}", flags=re.DOTALL)
"""Pattern of papers in a text whose lines may break within a name."""


def write_method_pages(root: Path) -> dict[str, str | bytes]:
    """Return the pages by path in the site's docs/.

    Args:
        root: repository folder.
    """
    results = LeaderboardResults(root)
    overlays = find_overlays(root)
    pages: dict[str, str | bytes] = {}
    for kind, entries in split_entries((root / "docs" / PAGE).read_text(encoding="utf-8")).items():
        for name, entry in entries.items():
            parts = [
                f"# {name}",
                _link_entry(entry, name),
                "## Train with it",
                _describe_use(root, kind, name, overlays.get(name, [])),
                "## Backends",
                _describe_backends(kind, name),
                "## In the leaderboard",
                results.describe(name, entry if kind == "Encodings" else ""),
                f"[All methods](../{PAGE}) · [the code](../../megatron/position/{kind.lower()}/{name}.py)",
            ]
            pages[f"{FOLDER}/{name}.md"] = "\n\n".join(parts) + "\n"
    return pages


def list_pages_by_kind(pages: Iterable[str]) -> dict[str, list[str]]:
    """Return the methods' pages by part of docs/positions.md, in the same order."""
    return {
        kind: [page for page in pages if Path(page).stem in list_methods()] for kind, (list_methods, _) in KINDS.items()
    }


def split_entries(positions: str) -> dict[str, dict[str, str]]:
    """Return each kind's entries of docs/positions.md by method, without headings."""
    found: dict[str, dict[str, str]] = {}
    for kind in KINDS:
        part = re.split(rf"^## {kind}$", positions, flags=re.MULTILINE)[1]
        part = re.split(r"^## ", part, flags=re.MULTILINE)[0]
        pieces = re.split(r"^### (\w+)$", part, flags=re.MULTILINE)[1:]
        found[kind] = dict(zip(pieces[::2], map(str.strip, pieces[1::2]), strict=True))
    return found


def describe_for_search(root: Path, method: str) -> dict[str, Any]:
    """Return the search metadata of a method's page: its names, and a boost over pages that mention it.

    Methods selected by more overlays rank higher.
    """
    return {
        "tags": [method, *list_other_names(method)],
        "search": {"boost": 2 + len(find_overlays(root).get(method, []))},
    }


def shorten_positions(positions: str) -> str:
    """Return docs/positions.md with only the first sentence of each entry and a link to its page; headings stay.

    In its tables the formula moves below the name, which links to the method's page, because formulas are long.
    """
    for entries in split_entries(positions).values():
        for name, entry in entries.items():
            summary = entry.partition("\n\n")[0]
            positions = positions.replace(entry, f"{summary}\n\n[More]({FOLDER}/{name}.md)")
    cell = r"\| (`(?:\\.|[^|\\])+?`) "
    positions = re.sub(
        rf"^\| \[`(\w+)`\]\(#\1\) {cell}", rf"| [`\1`]({FOLDER}/\1.md)<br>\2 ", positions, flags=re.MULTILINE
    )
    return re.sub(r"^(\| `\w+`) \| formula (.*\n\| ---) \| ---", r"\1 and formula \2", positions, flags=re.MULTILINE)


def _link_entry(entry: str, name: str) -> str:
    """Adapt an entry for a page in a folder next to docs/positions.md.

    The changes are a typeset formula and links for papers and pages.

    Args:
        entry: text of the entry.
        name: name of the method.
    """
    summary, formula, rest = entry.split("\n\n", 2)
    rest = rest.replace("](images/", "](../images/").replace("](#", f"](../{PAGE}#")
    facts, mark, source = rest.partition("- **Source:**")
    linked = NUMBER.sub(_link_paper, facts) + mark + NAME_OR_NUMBER.sub(_link_paper, source)
    plain = f"``` {{ .text .formula }}\n{formula.strip()}\n```"
    shown = METHOD_FORMULAS[name].to_markdown() if name in METHOD_FORMULAS else plain
    return f"{summary}\n\n{shown}\n\n{link_docs(linked, FOLDER + '/')}"


def _link_paper(match: re.Match[str]) -> str:
    found = match.groupdict()
    number = found["number"] or PAPERS[" ".join(found["name"].split())]
    return f"[{match[0]}](https://arxiv.org/abs/{number})"


@cache
def find_overlays(root: Path) -> dict[str, list[str]]:
    """Return the names of the overlays in configs/position/ by the method they select.

    The one of the same name comes first.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((root / "configs/position").glob("*.yml")):
        values = parse_yaml(read_text(path), str(path)).values
        for list_methods, key in KINDS.values():
            chosen = values.get(key, [])
            for name in dict.fromkeys(chosen if isinstance(chosen, list) else [chosen]):
                if name in list_methods():  # "none" is an encoding, and the absence of a method for other kinds
                    found.setdefault(str(name), []).append(path.stem)
    return {name: sorted(overlays, key=lambda overlay: overlay != name) for name, overlays in found.items()}


def _describe_use(root: Path, kind: str, name: str, overlays: list[str]) -> str:
    """Return the command that trains with a method, and the encoding it uses if it is not one itself."""
    if not overlays:
        return "No overlay selects it; set the key to its name."
    links = ", ".join(f"[`{overlay}`](../../configs/position/{overlay}.yml)" for overlay in overlays)
    own, sentence = overlays[0], ""
    base = PUBLISHED_ON.get(name)
    if kind != "Encodings":
        model = f"the model's file ([`{MODEL.stem}`](../../{MODEL}))"
        given = parse_yaml(read_text(root / MODEL), str(MODEL)).values[KINDS["Encodings"][1]]
        if base is None:
            sentence = f"It uses `{given}`, which {model} sets; for another encoding, put its overlay before `{own}`."
        else:
            both = f"{name}_{base}"
            own = both if both in overlays else f"{base} {own}"
            sentence = f"It uses `{base}`, with which it was published; {model} alone would select `{given}`."
    block = f"``` console\n./deepy.py train {MODEL.stem} {own} local_setup\n```"
    return "\n\n".join(filter(None, [block, sentence, f"Overlays that select it: {links}."]))


def _describe_backends(kind: str, name: str) -> str:
    """Describe which fast backends compute the method, and why the others do not."""
    if kind == "Temperatures":
        return "It multiplies queries before attention, so every `attention_backend` computes it."
    if kind == "Processors":
        cases: dict[str, tuple[str, str | None]] = {f"on `{PLAIN_BIAS}`": (PLAIN_BIAS, name)}
    else:
        cases = {"alone": (name, None), f"under `{FUSED_PROCESSOR}`": (name, FUSED_PROCESSOR)}
    lines = [f"| `attention_backend` | {' | '.join(cases)} |", "| --- " * (1 + len(cases)) + "|"]
    features = [
        list_method_features(
            read_encoding_facts(encoding),
            processor_facts=None if processor is None else read_processor_facts(processor),
        )
        for encoding, processor in cases.values()
    ]
    for backend in BACKEND_CAPABILITIES:
        reasons = [find_unsupported_feature(backend, own) for own in features]
        cells = ["yes" if reason is None else f"no: {reason}" for reason in reasons]
        lines.append(f"| `{backend}` | {' | '.join(cells)} |")
    return "\n".join(lines) + (
        "\n\n`triton` and `flex` need a GPU, `native` is a kernel for CPUs. "
        "`chunked` and `eager`, in plain PyTorch, compute every combination of methods. "
        "[`auto`](../configuration.md) times the backends that support a model on a GPU, and selects the fastest. "
        "Tensor, context, data and pipeline parallelism support every method ([parallel](../parallel.md))."
    )

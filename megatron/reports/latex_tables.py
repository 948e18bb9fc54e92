r"""Tables of a report in LaTeX, which needs the package booktabs.

Each table has a label, and its caption and notes are commands of their own. A document that defines such a command
before it includes the file keeps its own words when the file is written again:

    \newcommand{\captionPaperPerplexityPerToken}{Perplexity of our models beyond the training length.}
    \newcommand{\notesPaperPerplexityPerToken}{}
    \input{paper}
    Table~\ref{tab:paper-perplexity-per-token} compares the methods.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.table_formats import TextTable, format_change, is_best

LATEX_MARKER = "% Written by ./deepy.py report: change the records, not this file. It needs \\usepackage{booktabs}.\n"
KEEP_NOTE = "% Define a caption or notes command before \\input to replace its text.\n"

_LATEX_SIGNS = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{"×": r"$\times$", "÷": r"$\div$", "±": r"$\pm$", "−": "$-$", "–": "--", "τ": r"$\tau$", "Δ": r"$\Delta$"},
    **{"∞": r"$\infty$", "≤": r"$\le$", "≥": r"$\ge$", "√": r"$\surd$", "…": r"\dots{}", "·": r"$\cdot$"},
    **{"“": "``", "”": "''", "’": "'"},
}
_DIGIT_WORDS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def escape_latex(text: str) -> str:
    """Escape all special characters for LaTeX."""
    return "".join(_LATEX_SIGNS.get(sign, sign) for sign in text)


@dataclass(frozen=True)
class LatexTable:
    """Contents of a LaTeX table. All texts are LaTeX, except the title and the notes."""

    title: str
    columns: str
    """Column types of the tabular environment."""
    headers: Sequence[Sequence[str]]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def render(self, label: str) -> str:
        """Render a table environment with booktabs rules.

        Args:
            label: words separated by hyphens; also the source of the command names.
        """
        command = "".join(word.capitalize() for word in re.sub(r"\d", _spell_digit, label).split("-"))
        lines = [rf"\providecommand{{\caption{command}}}{{{escape_latex(self.title)}.}}"]
        if self.notes:
            lines.append(rf"\providecommand{{\notes{command}}}{{{escape_latex(' '.join(self.notes))}}}")
        lines += [
            r"\begin{table}", r"\centering", rf"\caption{{\caption{command}}}", rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{{self.columns}}}", r"\toprule", *_format_lines(self.headers), r"\midrule",
            *_format_lines(self.rows), r"\bottomrule", r"\end{tabular}",
        ]  # fmt: skip
        if self.notes:
            lines.append(rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize\notes{command}}}")
        return "\n".join([*lines, r"\end{table}"]) + "\n"


def render_latex_file(tables: Iterable[ComparisonTable | TextTable], name: str) -> str:
    """Render a file of tables.

    Args:
        tables: tables in order.
        name: first word of all labels, which distinguishes the files of a document.
    """
    parts = [LATEX_MARKER + KEEP_NOTE]
    labels: set[str] = set()
    for table in tables:
        content = _convert_comparison(table) if isinstance(table, ComparisonTable) else _convert_text_table(table)
        base = label = _build_label(f"{name} {content.title.partition(',')[0]}")
        for number in range(2, len(labels) + 2):
            if label not in labels:
                break
            label = f"{base}-{number}"
        labels.add(label)
        parts.append(content.render(label))
    return "\n".join(parts)


def _build_label(text: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", text.lower())) or "results"


def _spell_digit(match: re.Match[str]) -> str:
    """Spell a digit, because names of LaTeX commands have letters only."""
    return f"-{_DIGIT_WORDS[int(match[0])]}-"


def _convert_text_table(table: TextTable) -> LatexTable:
    return LatexTable(
        table.title,
        "l" * (1 + len(table.column_headers)),
        [[escape_latex(header) for header in (table.corner_header, *table.column_headers)]],
        [[escape_latex(cell) for cell in (name, *cells)] for name, cells in table.rows],
        table.notes,
    )


def _convert_comparison(table: ComparisonTable) -> LatexTable:
    """Convert a comparison table. The best value of each column is bold."""
    multiples, texts = zip(*table.get_column_headers(), strict=True)
    headers = [["method", *map(escape_latex, multiples)], ["", *map(escape_latex, texts)]]
    rows = []
    for method in table.methods:
        cells = []
        for x in table.x_values:
            cell = table.cells.get((method, x))
            text = escape_latex(table.get_missing_text(method, x) if cell is None else str(cell).rstrip("*"))
            cells.append(rf"\textbf{{{text}}}" if is_best(cell) else text)
        rows.append([escape_latex(method), *cells])
    if table.changes:
        for line, header in zip(headers, table.get_change_header(), strict=True):
            line.append(escape_latex(header))
        for row, method in zip(rows, table.methods, strict=True):
            row.append(escape_latex(format_change(table, method)))
    notes = [note.replace("* best", "Bold: best") for note in table.notes]
    columns = "l" + "r" * len(table.x_values) + "l" * bool(table.changes)
    return LatexTable(table.title, columns, headers, rows, notes)


def _format_lines(lines: Sequence[Sequence[str]]) -> list[str]:
    return [" & ".join(line).rstrip() + r" \\" for line in lines]

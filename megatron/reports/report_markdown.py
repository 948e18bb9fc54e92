"""Report as a Markdown page with image files, for results in a repository.

zoo.md          contents of `report.html`, except configurations
zoo.png         plots; zoo_2.png and so on for further sections
zoo_cost.png    costs of a leaderboard
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from megatron.reports import plots
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables, select_curve_tables
from megatron.reports.context_gain import build_gain_tables
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.leaderboard_summary import build_answers, list_cost_points, render_cost_png
from megatron.reports.report import (
    ReportSection,
    describe_pending_runs,
    get_section_title,
)
from megatron.reports.report_sentences import (
    describe_environment,
    describe_measurements,
    describe_methods,
    describe_plots,
    join_words,
)
from megatron.reports.results_output import build_missing_table
from megatron.reports.table_formats import TextTable, render_comparison_markdown
from megatron.utils.atomic_io import check_no_foreign_files, folder_lock, write_bytes_atomically, write_page_atomically

MARKER = "<!-- Written by ./deepy.py report: change the records, not this page. -->\n"
"""First line of every page."""
MAX_METHODS_IN_ALT_TEXT = 10
"""Maximum number of methods named in the alternative text of several panels; more are counted."""
LINE_LENGTH = 118
"""Maximum line length of prose; tables may be wider."""


def is_generated_markdown(path: Path) -> bool:
    """Return True if a file is a page of ours."""
    return path.is_file() and path.read_bytes().startswith(MARKER.encode())


def check_pictures(key: str, path: Path, sections: Sequence[ReportSection]) -> None:
    """Check that the page's images do not overwrite files that are not images of an earlier page of this name.

    Args:
        key: option that names the page.

    Raises:
        UserError: an image would overwrite another file.
    """
    shown = path.read_text(encoding="utf-8") if is_generated_markdown(path) else ""
    _, *pictures = list_markdown_files(path, sections)
    check_no_foreign_files(key, pictures, lambda picture: f"]({picture.name})" in shown)


def list_markdown_files(path: Path, sections: Sequence[ReportSection]) -> list[Path]:
    pictures = [_get_picture_path(path, index) for index in range(len(sections))]
    costs = [_get_cost_path(path, i) for i, section in enumerate(sections) if section.leaderboard is not None]
    return [path, *pictures, *costs]


def write_markdown_report(path: Path, sections: Sequence[ReportSection], title: str | None = None) -> Path:
    """Write a page and its images. A lock prevents two commands from mixing their files."""
    with folder_lock(path.parent):
        return _write_page(path, sections, title)


def _write_page(path: Path, sections: Sequence[ReportSection], title: str | None) -> Path:
    parts = [f"# {title or get_section_title(sections[0])}{describe_pending_runs(sections)}\n"]
    for index, section in enumerate(sections):
        if len(sections) > 1:
            parts.append(f"## {get_section_title(section)}\n")
        parts += _render_section(path, index, section)
    parts.append("## Measurements\n")
    tables = [table for section in sections for table in section.tables]
    parts += [f"{_break_sentences(text)}\n" for text in describe_measurements(tables)]
    facts = describe_environment([record for section in sections for record in section.records])
    parts.append("\n".join(f"- {name}: {text}" for name, text in facts.items()) + "\n")
    return write_page_atomically(path, MARKER + _wrap_lines("\n".join(parts)))


def _render_section(path: Path, index: int, section: ReportSection) -> list[str]:
    board = section.board
    parts = []
    if board is not None:
        tables_of_board = board.build_tables()
        parts += [f"## {table.title}\n\n{table.to_markdown()}" for table in tables_of_board[:1]]
        parts += [_render_sentences(table) for table in section.text_tables if not table.column_headers]
        for answer in build_answers(board):
            parts.append(f"## {answer.question}\n\n{_break_sentences(' '.join(answer.sentences))}\n")
        parts += [f"## {table.title}\n\n{table.to_markdown()}" for table in tables_of_board[1:]]
        if list_cost_points(board):
            picture = write_bytes_atomically(_get_cost_path(path, index), render_cost_png(board))
            parts.append(f"![Perplexity over the time of a training step]({picture.name})\n")
        parts.append("## All numbers\n")
    drawn_tables = section.tables
    if board is not None:
        drawn_tables = build_comparison_tables(section.shown_records)
    drawn_tables = [*drawn_tables, *build_gain_tables(drawn_tables)]
    picture = write_bytes_atomically(_get_picture_path(path, index), plots.render_plots_png(drawn_tables))
    whole_tables, depth_maps = split_depth_maps(section.tables)
    parts.append(f"![{_describe_picture(drawn_tables)}]({picture.name})\n")
    parts += [render_comparison_markdown(table) for table in whole_tables]
    parts += [depth_map.build_text_table().to_markdown() for depth_map in depth_maps]
    missing_table = build_missing_table(section.tables, own_seeds=section.own_seeds)
    text_tables = [*([] if missing_table is None else [missing_table]), *section.text_tables]
    if board is not None:
        text_tables = [table for table in text_tables if table.column_headers]
    return [*parts, *(table.to_markdown() for table in text_tables)]


def _render_sentences(table: TextTable) -> str:
    """Render a table of sentences, such as the differences from the papers, as a list under its title."""
    return "\n".join([f"## {table.title}\n", *(f"- {sentence}" for sentence, _ in table.rows)]) + "\n"


def _describe_picture(tables: Sequence[ComparisonTable]) -> str:
    """Describe a figure for screen readers: the curves of a single panel, or the contents of several."""
    others, depth_maps = split_depth_maps(tables)
    curves = select_curve_tables(others)
    if len(curves) == 1 and not depth_maps:
        return describe_plots(curves)
    kinds = []
    if curves:
        axes = dict.fromkeys(table.axis.inline_name for table in curves)
        names = dict.fromkeys(table.metric.axis_label for table in curves)
        kinds.append(f"curves of {join_words(list(names))} over {join_words(list(axes))}")
    if depth_maps:
        names = dict.fromkeys(depth_map.metric.axis_label for depth_map in depth_maps)
        kinds.append(f"maps of {join_words(list(names))} over depth and length")
    methods = list(dict.fromkeys(method for table in tables for method in table.methods))
    method_text = describe_methods(methods, MAX_METHODS_IN_ALT_TEXT)
    text = f"{', and '.join(kinds)}, of {method_text}. The tables below have every number."
    return f"{text[0].upper()}{text[1:]}"


def _get_picture_path(path: Path, index: int) -> Path:
    return path.with_name(f"{path.stem}{'' if index == 0 else f'_{index + 1}'}.png")


def _get_cost_path(path: Path, index: int) -> Path:
    return path.with_name(f"{path.stem}{'' if index == 0 else f'_{index + 1}'}_cost.png")


def _break_sentences(text: str) -> str:
    """Put each sentence on its own line."""
    return text.replace(". ", ".\n")


def _wrap_lines(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        if len(line) <= LINE_LENGTH or line.startswith(("|", "!", "#", "<")):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, LINE_LENGTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)

"""Preparation of corpora from a test's arguments: options by name, paths and tuples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.schema import parse_section
from megatron.data.corpus.documents import CorpusProgress
from megatron.data.corpus.prepare import prepare_corpus
from megatron.data.corpus_metadata import CorpusInfo
from megatron.options.data import CorpusOptions, DataOptions, find_data_conflicts
from megatron.utils.errors import UserError


def prepare(
    sources: Sequence[str],
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: CorpusProgress | None = None,
    **options: Any,
) -> CorpusInfo:
    """Call `prepare_corpus` with `options` for CorpusOptions.

    Raises the same errors, and UserError for invalid options.
    """
    plain = {name: _plain(value) for name, value in {"sources": sources, **options}.items()}
    return prepare_corpus(parse_section(CorpusOptions, plain), output, overwrite=overwrite, progress=progress)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def validate(data: DataOptions) -> DataOptions:
    """Return data options, or raise the first problem that the validation of a configuration would report."""
    for _, problem in find_data_conflicts(data):
        raise UserError(problem)
    return data

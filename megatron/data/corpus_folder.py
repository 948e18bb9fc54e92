"""What a corpus folder holds, and whether it is what is about to be prepared."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.description import (
    CORPUS_FILE,
    TOKENIZER_FILES,
    CorpusMetadata,
    SplitCounts,
    check_files,
    read_corpus_metadata,
)
from megatron.data.hub import PREFIX as HUB
from megatron.data.indexed import open_indexed
from megatron.data.paths import ALL_SPLITS, SPLITS, check_dataset, split_basename
from megatron.utils.errors import FarfieldError, UserError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes are done, of how many."""

_FILES = {CORPUS_FILE, *(name for names in TOKENIZER_FILES.values() for name in names)} | {
    f"{split_basename(split)}{ending}" for split in (*SPLITS, ALL_SPLITS) for ending in (".bin", ".idx")
}


@dataclass(frozen=True)
class CorpusInfo:
    """What a corpus folder holds."""

    folder: Path
    tokenizer: str  # its name, which tells tokenizers apart
    vocab_size: int
    eod: int
    splits: dict[str, SplitCounts]  # "train", "valid", "test", or "all" alone
    sources: list[str]
    notes: list[str]  # what a person should know: files left out, a vocabulary smaller than asked for
    reused: bool = False  # it was there already

    def prefix(self, split: str) -> Path:
        """The dataset of a split, as `train_data_paths` and the like name it."""
        return self.folder / split_basename(split)


def read_corpus(folder: str | Path) -> CorpusInfo:
    """The description of a corpus folder. UserError if it is none, RunError if its description is damaged."""
    folder = Path(folder)
    described = read_corpus_metadata(folder)
    return CorpusInfo(
        folder=folder,
        tokenizer=described.tokenizer.name,
        vocab_size=described.tokenizer.vocab_size,
        eod=described.tokenizer.eod,
        splits={str(name): size for name, size in described.splits.items()},
        sources=described.sources,
        notes=described.notes,
    )


def find_existing_corpus(
    output: Path, sources: Sequence[str], made_from: dict[str, Any], overwrite: bool, report: Progress
) -> CorpusInfo | None:
    """The corpus at `output` if it is the one asked for, and whole; None if there is nothing in the way.

    Raises UserError if there is something that must not be replaced.
    """
    if output.is_dir() and not any(output.iterdir()):
        return None
    if not output.exists():
        return None
    if not (output / CORPUS_FILE).is_file():
        raise UserError(f"{output}: exists and is not a corpus folder; choose another output")
    foreign = sorted({path.name for path in output.iterdir()} - _FILES)
    if foreign and overwrite:
        raise UserError(f"{output}: has files that are not a corpus's ({', '.join(foreign[:5])}); move them away first")
    try:
        described = read_corpus_metadata(output)
        corpus = read_corpus(output)
        for split in corpus.splits:
            check_dataset(corpus.prefix(split), content=False)
            open_indexed(corpus.prefix(split))
        before = described.made_from
        keys = {**made_from, **before}
        other = {key: before.get(key) for key in keys if before.get(key) != made_from.get(key)}
        if not other:  # reading it all is worth it only where it is to be used
            _verify_files(output, described, report)
            return CorpusInfo(**{**vars(corpus), "reused": True})
    except FarfieldError as damage:
        if not overwrite:
            raise UserError(f"{output}: holds a damaged corpus ({damage}); --overwrite makes it anew") from None
        return None
    if overwrite:
        return None
    differences = [f"{key} {value}, not {made_from.get(key)}" for key, value in other.items() if key != "files"]
    if "files" in other and _source_locations(corpus.sources) != _source_locations(sources):
        differences.insert(0, f"sources `{_list_sources(corpus.sources)}`, not `{_list_sources(sources)}`")
        held = "of other sources" if len(differences) == 1 else "of other sources, made differently"
    elif differences:
        held = "made differently"
    else:
        held = "of the same sources with other files"
        differences = ["they changed since, or --suffixes or --packages was another"]
    raise UserError(
        f"{output}: holds a corpus {held} ({'; '.join(differences)}); "
        "another --output keeps it, --overwrite replaces it"
    )


def _verify_files(folder: Path, described: CorpusMetadata, report: Progress) -> None:
    """Compare every file of a corpus with its checksum."""
    files = described.files or {}
    done, total = 0, sum(file.size for file in files.values())
    for name, file in files.items():
        check_files(folder, described, [name], content=True)
        done += file.size
        report("checking", done, total)


def _source_locations(sources: Sequence[str]) -> list[str]:
    """Sources so that equal ones compare equal, however they are written: `books`, `./books/`, `/home/me/books`."""
    return [source if source == "python" or source.startswith(HUB) else os.path.abspath(source) for source in sources]


def _list_sources(sources: Sequence[str]) -> str:
    """The first few sources, as typed on a command line."""
    return " ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")

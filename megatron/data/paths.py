"""Where datasets lie, and which corpus.json describes them.

A dataset is named by its prefix, as in Megatron and GPT-NeoX: `corpora/python/train_text_document` stands for that
path with `.bin` (the tokens) and with `.idx` (where documents begin). If it was made by `./deepy.py prepare`, the
folder's `corpus.json` says by which tokenizer.
"""

from pathlib import Path
from typing import Literal

from megatron.data.description import CORPUS_FILE, CorpusMetadata, check_files, read_corpus_metadata
from megatron.options.data import SPLITS, DataOptions, Split, find_data_conflicts
from megatron.utils.errors import UserError

ALL_SPLITS: Literal["all"] = "all"  # the one split of a corpus that is not divided


def split_basename(split: str) -> str:
    """The file name, without ending, of a split of a corpus: `train_text_document`, or `text_document` for all."""
    return "text_document" if split == ALL_SPLITS else f"{split}_text_document"


def list_split_prefixes(data: DataOptions, split: Split) -> list[tuple[str, Path]]:
    """The datasets of a split as (configuration key, prefix). Empty if the configuration names none.

    A prefix may be written with `.bin` or `.idx`. UserError if the options contradict each other, if a dataset's files
    are missing, or if a folder is named instead of a dataset in it.
    """
    for _, problem in find_data_conflicts(data):
        raise UserError(problem)
    key = f"{split}_data_paths"
    named: list[str] = getattr(data, key)
    if data.data_path is not None:
        return [("data_path", _resolve_prefix("data_path", data.data_path))]
    return [(key, _resolve_prefix(key, name)) for name in named]


def list_all_prefixes(data: DataOptions) -> list[Path]:
    """The prefixes of all splits, each once. UserError if the configuration names no dataset."""
    prefixes = list(dict.fromkeys(prefix for split in SPLITS for _, prefix in list_split_prefixes(data, split)))
    if not prefixes:
        lists = ", ".join(f"{split}_data_paths" for split in SPLITS)
        raise UserError(f"data_path: no data are named; give data_path, or {lists}")
    return prefixes


def find_corpus_metadata(prefix: Path) -> CorpusMetadata | None:
    """The corpus.json that describes a dataset; None if it was not made by `prepare`."""
    if not (prefix.parent / CORPUS_FILE).is_file():
        return None
    described = read_corpus_metadata(prefix.parent)
    return described if prefix.name in {split_basename(split) for split in described.splits} else None


def check_dataset(prefix: Path, *, content: bool) -> None:
    """Compare a dataset with what was recorded of it when its corpus was made, if it was.

    The index always by its checksum; the tokens by their number, and with `content` by their checksum. RunError names
    the file that is not what it was.
    """
    described = find_corpus_metadata(prefix)
    if described is not None:
        check_files(prefix.parent, described, [f"{prefix.name}.idx"], content=True)
        check_files(prefix.parent, described, [f"{prefix.name}.bin"], content=content)


def _resolve_prefix(key: str, name: str) -> Path:
    prefix = Path(name.removesuffix(".bin").removesuffix(".idx"))
    bin_file, idx_file = (Path(f"{prefix}{ending}") for ending in (".bin", ".idx"))
    if bin_file.is_file() and idx_file.is_file():
        return prefix
    if prefix.is_dir():
        inside = sorted(str(path.with_suffix("")) for path in prefix.glob("*.idx"))
        raise UserError(
            f"{key}: {prefix} is a folder; name a dataset in it: {', '.join(inside) or 'it holds none'}", key
        )
    if bin_file.is_file() or idx_file.is_file():
        missing, there = (idx_file, bin_file) if bin_file.is_file() else (bin_file, idx_file)
        raise UserError(f"{key}: {missing} is missing (there is a {there.name})", key)
    inside = sorted(str(path.with_suffix("")) for path in prefix.parent.glob("*.idx"))
    hint = f"; datasets there: {', '.join(inside[:6])}" if inside else " (`./deepy.py prepare` makes datasets)"
    raise UserError(f"{key}: no dataset {prefix}: {bin_file.name} and {idx_file.name} are missing{hint}", key)

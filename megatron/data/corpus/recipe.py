"""Recipe of a corpus, which determines its content, and checks whether a folder contains this corpus."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.data.corpus.documents import CorpusProgress, check_fractions, is_single_text
from megatron.data.corpus.hub_dataset import HUB_PREFIX
from megatron.data.corpus.sources import BUILT_IN_SOURCES, SourceFile, scan_sources
from megatron.data.corpus_metadata import (
    ALL_SPLITS,
    CORPUS_FILE,
    TOKENIZER_FILES,
    CorpusInfo,
    CorpusMetadata,
    check_files,
    get_split_basename,
    read_corpus,
    read_corpus_metadata,
)
from megatron.data.indexed_dataset import check_dataset, open_indexed
from megatron.data.tokenizers import TOKENIZERS, Tokenizer, load_tokenizer_from_files
from megatron.options.data import SPLITS, CorpusOptions
from megatron.utils.errors import FarfieldError, UserError, check_reachable
from megatron.utils.formatting import format_choices

TRAINED_TOKENIZER = "bpe"
"""Choice of `tokenizer` that trains a BPE on the training documents; the result is an `HFTokenizer`."""

RECIPE_FORMAT = 1
"""Format of corpus.json and of document reading and splitting. A change of this number makes a different corpus."""

LARGE_FRACTION = 0.1
"""Fraction of all text above which a single document dominates a split."""

_FILE_NAMES = {CORPUS_FILE, *(name for names in TOKENIZER_FILES.values() for name in names)} | {
    f"{get_split_basename(split)}{suffix}" for split in (*SPLITS, ALL_SPLITS) for suffix in (".bin", ".idx")
}

_BYTES_PER_WORKER = {"bytes": 1 << 28}  # with fewer bytes, another process is slower than none
_BYTES_PER_WORKER_DEFAULT = 1 << 22


@dataclass(frozen=True)
class CorpusRecipe:
    """Everything that determines the content of a corpus."""

    options: CorpusOptions
    files: list[SourceFile]
    split_fractions: tuple[float, ...] | None
    """Fractions of train, valid and test, which sum to 1; None puts everything in one dataset."""
    tokenizer: Tokenizer | None
    """Tokenizer, or None if it is trained on this corpus."""

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """Settings that determine the corpus, as recorded in corpus.json."""
        options = self.options
        optional: dict[str, Any] = {}  # absent by default, so that older corpora still match
        if self.tokenizer is not None and self.tokenizer.bos is not None:
            optional["bos"] = self.tokenizer.bos
        if options.end_token is not None:
            optional["end_token"] = options.end_token
        return {
            "format": RECIPE_FORMAT,
            "files": _hash_value([[file.name, file.size, file.modified] for file in self.files]),
            "tokenizer": self.tokenizer.name if self.tokenizer else f"{TRAINED_TOKENIZER}, {options.vocab_size} tokens",
            "split": list(self.split_fractions) if self.split_fractions else None,
            "seed": options.seed,
            "jsonl_key": options.column,
            "documents": options.documents,
            "tokens": options.tokens,
            **optional,
        }

    def list_notes(self) -> list[str]:
        """Return notes to show before the work, about unexpected effects on the splits."""
        notes = []
        seed, default_seed = self.options.seed, CorpusOptions.model_fields["seed"].default
        undivided = self.split_fractions is None or self.split_fractions.count(0.0) == 2
        if seed != default_seed and (undivided or is_single_text(self.files)):
            reason = "there is one split" if undivided else "a single text file is cut into splits at line ends"
            notes.append(f"seed {seed} has no effect: {reason}")
        if self.split_fractions is None:
            return [*notes, "all documents become one dataset; training divides it by the key split"]
        total = sum(file.size for file in self.files)
        smallest = min(fraction for fraction in self.split_fractions if fraction > 0)
        if undivided or len(self.files) == 1:  # nothing to divide, or a single text, which is cut
            return notes
        if self.options.documents is not None or self.options.tokens is not None:
            return notes  # the sizes of the selected documents are unknown
        return [
            f"{file.path} is one document with {100 * file.size / total:.3g}% of the text; one split gets all of it; "
            "prepare it separately to divide it among the splits"
            for file in self.files
            if file.format == "text" and file.size > max(smallest, LARGE_FRACTION) * total
        ]

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that identify this corpus among others at the same path."""
        return _hash_value(self.made_from)[:8]

    @property
    def num_workers(self) -> int:
        """Number of tokenizing processes: as configured, or limited by the available cores and the amount of text."""
        if self.options.workers is not None:
            return self.options.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if any(file.hub is not None and file.size == 0 for file in self.files):
            return cores
        tokenizer_type = TRAINED_TOKENIZER if self.tokenizer is None else self.tokenizer.type
        bytes_per_worker = _BYTES_PER_WORKER.get(tokenizer_type, _BYTES_PER_WORKER_DEFAULT)
        return max(1, min(cores, sum(file.size for file in self.files) // bytes_per_worker))


def read_corpus_recipe(options: CorpusOptions) -> CorpusRecipe:
    """Scan the sources and open the tokenizer. Raises UserError for missing sources and conflicting options."""
    fractions = None if options.split is None else check_fractions(options.split)
    tokenizer = _resolve_tokenizer(options)
    if options.tokens is not None and tokenizer is None:
        raise UserError(
            f"tokens: tokenizer {TRAINED_TOKENIZER} is trained on the documents; limit them with --documents"
        )
    default_column = CorpusOptions.model_fields["column"].default
    files = scan_sources(
        options.sources,
        packages=options.packages,
        suffixes=options.suffixes,
        hf_split=options.hf_split,
        column=None if options.column == default_column else options.column,
    )
    if (options.documents or options.tokens) and fractions is not None and is_single_text(files):
        raise UserError(f"{files[0].path}: a single document cannot be limited; it is cut into splits")
    return CorpusRecipe(options, files, fractions, tokenizer)


def _resolve_tokenizer(options: CorpusOptions) -> Tokenizer | None:
    """Return the tokenizer named by the options, or None if it is to be trained."""
    type = options.tokenizer
    if type == TRAINED_TOKENIZER:
        for key, value in (("vocab_file", options.vocab_file), ("merge_file", options.merge_file)):
            if value is not None:
                raise UserError(
                    f"{key}: {value}: tokenizer {TRAINED_TOKENIZER} is trained on the corpus and takes no file"
                )
        if options.end_token is not None or options.add_bos:
            key = "add_bos" if options.add_bos else "end_token"
            raise UserError(f"{key}: tokenizer {TRAINED_TOKENIZER} is trained on the corpus and has only <|endoftext|>")
        if options.vocab_size is None:
            raise UserError(f"vocab_size: tokenizer {TRAINED_TOKENIZER} needs a number of tokens")
        return None
    if type not in TOKENIZERS:
        choices = (*TOKENIZERS, TRAINED_TOKENIZER)
        raise UserError(f"tokenizer: unknown value {type!r}; {format_choices(type, choices)}")
    if options.vocab_size is not None:
        raise UserError(f"vocab_size: only tokenizer {TRAINED_TOKENIZER} accepts it; {type} has a fixed vocabulary")
    files = options.vocab_file, options.merge_file
    return load_tokenizer_from_files(type, *files, end_token=options.end_token, bos=options.add_bos)


def _hash_value(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def find_existing_corpus(
    output: Path, recipe: CorpusRecipe, *, overwrite: bool, progress: CorpusProgress
) -> CorpusInfo | None:
    """Return the corpus at `output` if it matches the recipe and is undamaged, or None if one may be written there.

    Raises UserError if `output` contains something that must not be replaced.
    """
    if output.is_dir() and not any(output.iterdir()):
        return None
    if not output.exists():
        check_reachable(output)
        return None
    if not (output / CORPUS_FILE).is_file():
        raise UserError(f"{output}: exists but is not a corpus folder; choose another output")
    foreign = sorted({path.name for path in output.iterdir()} - _FILE_NAMES)
    if foreign and overwrite:
        raise UserError(
            f"{output}: contains files that do not belong to a corpus ({', '.join(foreign[:5])}); move them first"
        )
    for path in () if overwrite else output.iterdir():
        if path.name in _FILE_NAMES:
            path.open("rb").close()  # a file that may not be read is not damaged
    try:
        metadata = read_corpus_metadata(output)
        corpus = read_corpus(output)
        for split in corpus.splits:
            check_dataset(corpus.get_dataset_prefix(split), content=False)
            open_indexed(corpus.get_dataset_prefix(split))
        stored, made_from = metadata.made_from, recipe.made_from
        differing = {key: stored.get(key) for key in {**made_from, **stored} if stored.get(key) != made_from.get(key)}
        if list(corpus.sources) == list(recipe.options.sources) == ["shakespeare"]:
            differing.pop("files", None)  # earlier versions recorded when their copy of the same text was installed
        if not differing:  # read everything only if the corpus will be reused
            _verify_files(output, metadata, progress)
            return CorpusInfo(**{**vars(corpus), "reused": True})
    except FarfieldError as damage:
        if not overwrite:
            raise UserError(f"{output}: damaged corpus ({damage}); rebuild it with --overwrite") from None
        return None
    if overwrite:
        return None
    differences = [
        f"{key} {_format_setting(value)}, not {_format_setting(made_from.get(key))}"
        for key, value in differing.items()
        if key != "files"
    ]
    sources = recipe.options.sources
    if "files" in differing and _normalize_sources(corpus.sources) != _normalize_sources(sources):
        differences.insert(0, f"sources `{_format_sources(corpus.sources)}`, not `{_format_sources(sources)}`")
        description = (
            "made from other sources" if len(differences) == 1 else "made from other sources with other settings"
        )
    elif differences:
        description = "made with other settings"
    else:
        description = "made from the same sources with other files"
        differences = ["the files changed, or --suffixes or --packages differed"]
    raise UserError(
        f"{output}: contains a corpus {description} ({'; '.join(differences)}); "
        "choose another --output, or replace it with --overwrite"
    )


def _verify_files(folder: Path, metadata: CorpusMetadata, progress: CorpusProgress) -> None:
    """Compare every file of a corpus with its checksum."""
    files = metadata.files or {}
    done, total = 0, sum(file.size for file in files.values())
    for name, file in files.items():
        check_files(folder, metadata, [name], content=True)
        done += file.size
        progress("checking", done, total)


def _normalize_sources(sources: Sequence[str]) -> list[str]:
    """Normalize sources so that equal ones compare equal, for example `books`, `./books/` and `/home/me/books`."""
    return [
        source if source in BUILT_IN_SOURCES or source.startswith(HUB_PREFIX) else os.path.abspath(source)
        for source in sources
    ]


def _format_setting(value: Any) -> str:
    """Format a setting for a message, without the rounding errors of normalized fractions."""
    if isinstance(value, list) and all(isinstance(item, float) for item in value):
        return f"[{', '.join(f'{item:g}' for item in value)}]"
    return str(value)


def _format_sources(sources: Sequence[str]) -> str:
    """Format the first few sources as they appear on a command line."""
    return " ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")

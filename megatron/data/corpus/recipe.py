"""All that decides what a corpus will be, read from its sources and options; and whether a folder holds that corpus."""

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
    read_corpus,
    read_corpus_metadata,
    split_basename,
)
from megatron.data.indexed_dataset import check_dataset, open_indexed
from megatron.data.tokenizers import TOKENIZERS, Tokenizer, tokenizer_from_files
from megatron.options.data import SPLITS, CorpusOptions
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.suggestions import format_choices

TRAINED_TOKENIZER = "bpe"
"""The choice of `tokenizer` that trains one here, on the training documents; it becomes an `HFTokenizer`."""

RECIPE_FORMAT = 1
"""Of corpus.json and of the way documents are read and divided: another number makes another corpus."""

LARGE_FRACTION = 0.1
"""Of all text: a document that is larger determines the content of a split."""

_FILE_NAMES = {CORPUS_FILE, *(name for names in TOKENIZER_FILES.values() for name in names)} | {
    f"{split_basename(split)}{suffix}" for split in (*SPLITS, ALL_SPLITS) for suffix in (".bin", ".idx")
}

_BYTES_PER_WORKER = {"bytes": 1 << 28}  # less than this is done sooner than a further process has started
_BYTES_PER_WORKER_DEFAULT = 1 << 22


@dataclass(frozen=True)
class CorpusRecipe:
    """All that decides what a corpus will be."""

    options: CorpusOptions
    files: list[SourceFile]
    split_fractions: tuple[float, ...] | None
    """Of train, valid and test, of which one is all; None for one dataset of everything."""
    tokenizer: Tokenizer | None
    """None: trained here."""

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """What the corpus follows from, as its corpus.json records it."""
        options = self.options
        optional: dict[str, Any] = {}  # only where there is any, so that older corpora are found again
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
        """Lines to show before the work: what happens to the splits, where that is not what one would expect."""
        notes = []
        seed, default_seed = self.options.seed, CorpusOptions.model_fields["seed"].default
        undivided = self.split_fractions is None or self.split_fractions.count(0.0) == 2
        if seed != default_seed and (undivided or is_single_text(self.files)):
            reason = "there is one split" if undivided else "a lone text is cut into splits where its lines end"
            notes.append(f"seed {seed} has no effect: {reason}")
        if self.split_fractions is None:
            return [*notes, "all documents become one dataset, which a training divides by its key split"]
        total = sum(file.size for file in self.files)
        smallest = min(fraction for fraction in self.split_fractions if fraction > 0)
        if undivided or len(self.files) == 1:  # nothing is divided, or a lone text is cut
            return notes
        return [
            f"{file.path} is one document with {100 * file.size / total:.3g}% of the text, which one split gets; "
            "prepared by itself it is cut into all of them"
            for file in self.files
            if file.format == "text" and file.size > max(smallest, LARGE_FRACTION) * total
        ]

    @property
    def key(self) -> str:
        """Eight digits that identify this corpus among others that are made at the same path."""
        return _hash_value(self.made_from)[:8]

    @property
    def num_workers(self) -> int:
        """Processes that tokenize: as the options say, or as many as cores and text are worth."""
        if self.options.workers is not None:
            return self.options.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if any(file.hub is not None and file.size == 0 for file in self.files):
            return cores
        tokenizer_type = TRAINED_TOKENIZER if self.tokenizer is None else self.tokenizer.type
        bytes_per_worker = _BYTES_PER_WORKER.get(tokenizer_type, _BYTES_PER_WORKER_DEFAULT)
        return max(1, min(cores, sum(file.size for file in self.files) // bytes_per_worker))


def read_corpus_recipe(options: CorpusOptions) -> CorpusRecipe:
    """Look at the sources and open the tokenizer. Raises UserError for what is not there, or does not go together."""
    fractions = None if options.split is None else check_fractions(options.split)
    tokenizer = _resolve_tokenizer(options)
    if options.tokens is not None and tokenizer is None:
        raise UserError(
            f"tokens: tokenizer {TRAINED_TOKENIZER} is trained on the documents, so limit those; --documents does"
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
        raise UserError(f"{files[0].path}: is one document, which is cut into splits; there is nothing to limit")
    return CorpusRecipe(options, files, fractions, tokenizer)


def _resolve_tokenizer(options: CorpusOptions) -> Tokenizer | None:
    """The tokenizer that the options name; None if it is to be trained."""
    type = options.tokenizer
    if type == TRAINED_TOKENIZER:
        for key, value in (("vocab_file", options.vocab_file), ("merge_file", options.merge_file)):
            if value is not None:
                raise UserError(f"{key}: {value}: tokenizer {TRAINED_TOKENIZER} is trained here and takes no file")
        if options.end_token is not None or options.add_bos:
            key = "add_bos" if options.add_bos else "end_token"
            raise UserError(f"{key}: tokenizer {TRAINED_TOKENIZER} is trained here, and has <|endoftext|> alone")
        if options.vocab_size is None:
            raise UserError(f"vocab_size: tokenizer {TRAINED_TOKENIZER} needs it: how many tokens to train")
        return None
    if type not in TOKENIZERS:
        choices = (*TOKENIZERS, TRAINED_TOKENIZER)
        raise UserError(f"tokenizer: {type!r} is unknown; {format_choices(type, choices)}")
    if options.vocab_size is not None:
        raise UserError(f"vocab_size: only tokenizer {TRAINED_TOKENIZER} takes one; {type} has its own")
    files = options.vocab_file, options.merge_file
    return tokenizer_from_files(type, *files, end_token=options.end_token, bos=options.add_bos)


def _hash_value(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def find_existing_corpus(
    output: Path, recipe: CorpusRecipe, *, overwrite: bool, progress: CorpusProgress
) -> CorpusInfo | None:
    """The corpus at `output` if it is the recipe's, and undamaged; None if one may be written there.

    Raises UserError if something is there that must not be replaced.
    """
    if output.is_dir() and not any(output.iterdir()):
        return None
    if not output.exists():
        return None
    if not (output / CORPUS_FILE).is_file():
        raise UserError(f"{output}: exists and is not a corpus folder; choose another output")
    foreign = sorted({path.name for path in output.iterdir()} - _FILE_NAMES)
    if foreign and overwrite:
        raise UserError(f"{output}: has files that are not a corpus's ({', '.join(foreign[:5])}); move them away first")
    try:
        metadata = read_corpus_metadata(output)
        corpus = read_corpus(output)
        for split in corpus.splits:
            check_dataset(corpus.prefix(split), content=False)
            open_indexed(corpus.prefix(split))
        stored, made_from = metadata.made_from, recipe.made_from
        differing = {key: stored.get(key) for key in {**made_from, **stored} if stored.get(key) != made_from.get(key)}
        if not differing:  # reading it all is worth it only where it is to be used
            _verify_files(output, metadata, progress)
            return CorpusInfo(**{**vars(corpus), "reused": True})
    except FarfieldError as damage:
        if not overwrite:
            raise UserError(f"{output}: holds a damaged corpus ({damage}); --overwrite makes it anew") from None
        return None
    if overwrite:
        return None
    differences = [f"{key} {value}, not {made_from.get(key)}" for key, value in differing.items() if key != "files"]
    sources = recipe.options.sources
    if "files" in differing and _normalize_sources(corpus.sources) != _normalize_sources(sources):
        differences.insert(0, f"sources `{_format_sources(corpus.sources)}`, not `{_format_sources(sources)}`")
        description = "of other sources" if len(differences) == 1 else "of other sources, made differently"
    elif differences:
        description = "made differently"
    else:
        description = "of the same sources with other files"
        differences = ["they changed since, or --suffixes or --packages was another"]
    raise UserError(
        f"{output}: holds a corpus {description} ({'; '.join(differences)}); "
        "another --output keeps it, --overwrite replaces it"
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
    """Sources so that equal ones compare equal, however they are written: `books`, `./books/`, `/home/me/books`."""
    return [
        source if source in BUILT_IN_SOURCES or source.startswith(HUB_PREFIX) else os.path.abspath(source)
        for source in sources
    ]


def _format_sources(sources: Sequence[str]) -> str:
    """The first few sources, as they are written on a command line."""
    return " ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")

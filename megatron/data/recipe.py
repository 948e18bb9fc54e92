"""What a corpus is made from, once it has been looked at: the files, their tokenizer, how they are divided."""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.data.documents import is_single_text
from megatron.data.sources import SourceFile, scan_sources
from megatron.data.splits import check_fractions
from megatron.data.tokenizers import TOKENIZERS, Tokenizer, tokenizer_from_files
from megatron.options.data import CorpusOptions
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices

TRAINED_TOKENIZER = "bpe"
"""The choice of `tokenizer` that trains one here, on the training documents; it becomes an `HFTokenizer`."""

RECIPE_FORMAT = 1
"""Of corpus.json and of the way documents are read and divided: another number makes another corpus."""

LARGE_FRACTION = 0.1
"""Of all text: a document that is larger decides what a split holds."""

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
        asked = self.options
        special: dict[str, Any] = {}  # only where there is any, so that older corpora are found again
        if self.tokenizer is not None and self.tokenizer.bos is not None:
            special["bos"] = self.tokenizer.bos
        if asked.end_token is not None:
            special["end_token"] = asked.end_token
        return {
            "format": RECIPE_FORMAT,
            "files": _hash_value([[file.name, file.size, file.modified] for file in self.files]),
            "tokenizer": self.tokenizer.name if self.tokenizer else f"{TRAINED_TOKENIZER}, {asked.vocab_size} tokens",
            "split": list(self.split_fractions) if self.split_fractions else None,
            "seed": asked.seed,
            "jsonl_key": asked.column,
            "documents": asked.documents,
            "tokens": asked.tokens,
            **special,
        }

    def list_notes(self) -> list[str]:
        """What becomes of the splits, where that is not what one would expect: for before the work."""
        if self.split_fractions is None:
            return ["all documents become one dataset, which a training divides by its key split"]
        total, least = sum(file.size for file in self.files), min(share for share in self.split_fractions if share > 0)
        if self.split_fractions.count(0.0) == 2 or len(self.files) == 1:  # nothing is divided, or a lone text is cut
            return []
        return [
            f"{file.path} is one document with {100 * file.size / total:.3g}% of the text, which one split gets; "
            "prepared by itself it is cut into all of them"
            for file in self.files
            if file.format == "text" and file.size > max(least, LARGE_FRACTION) * total
        ]

    @property
    def key(self) -> str:
        """Eight digits that tell this work from other work in the same place."""
        return _hash_value(self.made_from)[:8]

    @property
    def choose_num_workers(self) -> int:
        """How many processes tokenize: as many as asked for, or as cores and text are worth."""
        if self.options.workers is not None:
            return self.options.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if any(file.hub is not None and file.size == 0 for file in self.files):
            return cores
        kind = TRAINED_TOKENIZER if self.tokenizer is None else self.tokenizer.type
        worth = sum(file.size for file in self.files) // _BYTES_PER_WORKER.get(kind, _BYTES_PER_WORKER_DEFAULT)
        return max(1, min(cores, worth))


def read_corpus_recipe(options: CorpusOptions) -> CorpusRecipe:
    """Look at the sources and open the tokenizer. Raises UserError for what is not there, or does not go together."""
    shares = None if options.split is None else check_fractions(options.split)
    tokenizer = _resolve_tokenizer(options)
    if options.tokens is not None and tokenizer is None:
        raise UserError(
            f"tokens: tokenizer {TRAINED_TOKENIZER} is trained on the documents, so limit those; --documents does"
        )
    files = scan_sources(
        options.sources, packages=options.packages, suffixes=options.suffixes, hf_split=options.hf_split
    )
    if (options.documents or options.tokens) and shares is not None and is_single_text(files):
        raise UserError(f"{files[0].path}: is one document, which is cut into splits; there is nothing to limit")
    return CorpusRecipe(options, files, shares, tokenizer)


def _resolve_tokenizer(options: CorpusOptions) -> Tokenizer | None:
    """The tokenizer asked for; None if it is to be trained."""
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

"""The vocabulary of a run's data: of the tokenizer that made them, or of the task that draws them."""

from dataclasses import dataclass, field
from pathlib import Path

from megatron.data.paths import find_corpus_metadata, list_all_prefixes
from megatron.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_config
from megatron.options.data import DataOptions
from megatron.tasks.task_config import read_task_config
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Vocabulary:
    """Token ids are in [0, size). `name` tells the tokenizer or the task, `eod` ends documents, if there are any, and
    `bos` begins them, if anything does."""

    size: int
    name: str
    eod: int | None
    bos: int | None = None
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)
    """What was loaded to know this; None of a task."""


def read_vocabulary(data: DataOptions) -> Vocabulary:
    """The vocabulary of a run's data: its task's, or from the corpus.json beside them, else from the tokenizer keys.

    Raises UserError if there is none of them, if datasets were made by different tokenizers, or if `tokenizer_type`
    and its files contradict corpus.json.
    """
    if data.task is not None:
        chosen = read_task_config(data)
        return Vocabulary(chosen.task.vocab_size, f"of task {chosen.name}", None)
    found: dict[Path, Vocabulary] = {}
    for prefix in list_all_prefixes(data):
        if find_corpus_metadata(prefix) is not None:
            same = next((other for other in found if other.parent == prefix.parent), None)
            found[prefix] = found[same] if same else vocabulary_from_tokenizer(load_tokenizer(prefix.parent))
    if found:
        (first, expected), *others = found.items()
        for prefix, other in others:
            if other.name == expected.name and other.bos != expected.bos:
                raise UserError(
                    f"{prefix}: its documents begin {_describe_bos(other)}, and those of {first} "
                    f"{_describe_bos(expected)}; "
                    "prepare both with the same add_bos"
                )
            if other != expected:
                raise UserError(f"{prefix}: made by tokenizer {other.name}, but {first} by {expected.name}")
    if data.tokenizer_type is None:
        if not found:
            raise UserError("tokenizer_type: the data have no corpus.json beside them; say which tokenizer made them")
        return expected
    named_only = data.vocab_file is None and data.merge_file is None
    if found and named_only and data.tokenizer_type == expected.name.split("-")[0]:
        return expected
    tokenizer = tokenizer_from_config(data)
    if found and tokenizer.name != expected.name:
        raise UserError(f"tokenizer_type: {tokenizer.name} does not fit the data: {first} was made by {expected.name}")
    if found and data.add_bos is not None and tokenizer.bos != expected.bos:
        raise UserError(f"add_bos: {data.add_bos} does not fit the data: {first} begins {_describe_bos(expected)}")
    return expected if found else vocabulary_from_tokenizer(tokenizer)


def _describe_bos(vocabulary: Vocabulary) -> str:
    return "with no token of their own" if vocabulary.bos is None else f"with token {vocabulary.bos}"


def vocabulary_from_tokenizer(tokenizer: Tokenizer) -> Vocabulary:
    """That of a tokenizer."""
    return Vocabulary(tokenizer.vocab_size, tokenizer.name, tokenizer.eod, tokenizer.bos, tokenizer)

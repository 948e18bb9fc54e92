"""The vocabulary of a run's data: of the tokenizer that made them, or of the task that draws them."""

from dataclasses import dataclass
from pathlib import Path

from megatron.data.paths import all_prefixes, description_of
from megatron.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_of_keys
from megatron.options.data import DataOptions
from megatron.tasks.chosen import exercise
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Vocabulary:
    """Token ids are in [0, size). `name` tells the tokenizer or the task, `eod` ends documents, if there are any, and
    `bos` begins them, if anything does."""

    size: int
    name: str
    eod: int | None
    bos: int | None = None


def vocabulary(data: DataOptions) -> Vocabulary:
    """The vocabulary of a run's data: its task's, or from the corpus.json beside them, else from the tokenizer keys.

    Raises UserError if there is none of them, if datasets were made by different tokenizers, or if `tokenizer_type`
    and its files contradict corpus.json.
    """
    if data.task is not None:
        chosen = exercise(data)
        return Vocabulary(chosen.task.size, f"of task {chosen.name}", None)
    found: dict[Path, Vocabulary] = {}
    for prefix in all_prefixes(data):
        if description_of(prefix) is not None:
            same = next((other for other in found if other.parent == prefix.parent), None)
            found[prefix] = found[same] if same else vocabulary_of(load_tokenizer(prefix.parent))
    if found:
        (first, expected), *others = found.items()
        for prefix, other in others:
            if other.name == expected.name and other.bos != expected.bos:
                raise UserError(
                    f"{prefix}: its documents begin {_beginning(other)}, and those of {first} {_beginning(expected)}; "
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
    tokenizer = tokenizer_of_keys(data)
    if found and tokenizer.name != expected.name:
        raise UserError(f"tokenizer_type: {tokenizer.name} does not fit the data: {first} was made by {expected.name}")
    if found and data.add_bos is not None and tokenizer.bos != expected.bos:
        raise UserError(f"add_bos: {data.add_bos} does not fit the data: {first} begins {_beginning(expected)}")
    return expected if found else vocabulary_of(tokenizer)


def _beginning(vocabulary: Vocabulary) -> str:
    return "with no token of their own" if vocabulary.bos is None else f"with token {vocabulary.bos}"


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """That of a tokenizer."""
    return Vocabulary(tokenizer.vocab_size, tokenizer.name, tokenizer.eod, tokenizer.bos)

"""The `sweep:` part of a sweep file: which variants to train, how to evaluate them, where to put it all.

num_layers: 4                     ordinary keys, shared by all variants
…
sweep:
  output: runs/quickstart
  corpus: {sources: [python], folder: data/python}
  seeds: [1234]
  variants:
    rotary: {pos_emb: rotary}     ordinary keys again, on top of the shared ones
    t5: {pos_emb: t5}
  evaluate: {multiples: [1, 2, 4, 8, 16, 32], protocol: last}
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from megatron.config.problems import describe
from megatron.config.schema import Path_
from megatron.errors import UserError
from megatron.model.options import ModelOptions
from megatron.options import Section, key
from megatron.training.options import LARGEST_SEED

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
"""Names of variants: they are folder names too."""

MINE = {"save": "output", "load": "output", "seed": "seeds"}
"""Keys of ordinary configurations that a sweep sets itself, and the key of the sweep that decides them."""


Backend = ModelOptions.model_fields["attention_backend"].annotation


class CorpusOptions(Section):
    """A corpus to prepare if it is not there yet; the meaning is `./deepy.py prepare`'s."""

    sources: list[str] = Field(description="files, folders, or python (the standard library)", min_length=1)
    folder: str = Field(description="the corpus folder", min_length=1)
    tokenizer: str = key("bytes", "bytes, HFTokenizer, GPT2BPETokenizer, SPMTokenizer, or bpe (trained on the corpus)")
    vocab_file: str | None = key(None, "tokenizer.json, vocab.json or .model file of the tokenizer")
    merge_file: str | None = key(None, "merges.txt of GPT2BPETokenizer")
    vocab_size: int | None = key(None, "tokens of a tokenizer trained here", ge=257)
    split: list[float] = key(lambda: [0.9, 0.05, 0.05], "train, valid and test shares", min_length=3, max_length=3)
    seed: int = key(1234, "seeds the division into splits", ge=0)
    workers: int | None = key(None, "processes; as many as cores and text are worth if absent", ge=1)


class EvaluateOptions(Section):
    """How every trained model is scored; see `megatron.evaluation.protocols`."""

    lengths: list[int] | None = key(None, "window lengths in tokens", min_length=1)
    multiples: list[float] | None = key(None, "lengths in training lengths; 1 to 32 if both are absent", min_length=1)
    protocol: Literal["last", "nonoverlapping"] = key("last", "which tokens are scored, with how much context")
    windows: int | None = key(None, "windows per length; 64 (last) or all (nonoverlapping) if absent", ge=1)
    targets: int | None = key(None, "tokens scored per window of last; the training length if absent", ge=1)
    data: str | None = key(None, "dataset prefix or corpus folder to score; the test data if absent")
    backend: Backend | None = key(  # type: ignore[valid-type]
        None, "attention backend for scoring; attention_backend if absent"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "fp32 on CPU, as in training on a GPU")


class SweepOptions(Section):
    """Variants × seeds, trained and evaluated alike."""

    output: str = Field(description="folder for runs and results", min_length=1)
    variants: dict[str, dict[str, Any]] = Field(description="name → keys that this variant changes", min_length=1)
    seeds: list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]] = key(
        lambda: [1234], "every variant is trained with each", min_length=1
    )
    corpus: CorpusOptions | None = key(None, "a corpus to prepare first")
    evaluate: EvaluateOptions = key(EvaluateOptions, "how trained models are scored")


class _Keys(Section):
    sweep: SweepOptions


class _File(Section):
    file: _Keys


def check(values: dict[str, Any], where: Callable[[Path_], str]) -> SweepOptions:
    """Validate the `sweep:` mapping.

    Args:
        values: the mapping.
        where: `file:line` of a path of keys that begins with `sweep`.

    Raises:
        UserError: one line per problem: place, key, value and what is valid.
    """
    problems = list(_unknown(values, where))
    if not problems:
        try:
            options = _File.model_validate({"file": {"sweep": values}}).file.sweep
        except ValidationError as error:
            problems += describe(error, where)
        else:
            problems += _inconsistent(options, where)
    if problems:
        raise UserError("\n".join(problems))
    return options


def _unknown(values: dict[str, Any], where: Callable[[Path_], str]) -> Iterator[str]:
    sections: tuple[tuple[Path_, type[Section]], ...] = (
        (("sweep",), SweepOptions),
        (("sweep", "corpus"), CorpusOptions),
        (("sweep", "evaluate"), EvaluateOptions),
    )
    for path, section in sections:
        inside = values if len(path) == 1 else values.get(path[-1])
        for name in inside if isinstance(inside, dict) else ():
            if name not in section.model_fields:
                full, hint = (*path, name), _hint(name, list(section.model_fields))
                yield f"{where(full)}: unknown key {'.'.join(full)!r}{hint}"


def _inconsistent(options: SweepOptions, where: Callable[[Path_], str]) -> Iterator[str]:
    for name, keys in options.variants.items():
        place = where(("sweep", "variants", name))
        if not NAME.fullmatch(name):
            yield f"{place}: variant {name!r} names a folder too: use letters, digits and _.+- only"
        for key_name in keys:
            if key_name.replace("-", "_") in MINE:
                inside = where(("sweep", "variants", name, key_name))
                yield f"{inside}: {key_name} is set by the sweep: use sweep.{MINE[key_name.replace('-', '_')]}"
    if len(set(options.seeds)) < len(options.seeds):
        yield f"{where(('sweep', 'seeds'))}: sweep.seeds repeats a seed: {', '.join(map(str, options.seeds))}"
    if options.evaluate.lengths is not None and options.evaluate.multiples is not None:
        yield f"{where(('sweep', 'evaluate', 'multiples'))}: give sweep.evaluate.lengths or multiples, not both"


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; keys are {', '.join(known)}"

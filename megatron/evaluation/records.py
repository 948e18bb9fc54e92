"""The one currency of results: a record says what one model scored at one length, and how that was measured.

`results.json` is a list of records. Whatever shows results (tables, plots, reports, a notebook of yours) reads records
and nothing else, so a file made by hand or by another codebase works as well as one made here: only `method`,
`train_length`, `length`, `protocol`, `perplexity`, `tokens` and `seed` are required.

    mean negative log-likelihood   nll = −1/N Σ log p(target | its context)      nats per token
    perplexity                     exp(nll)
    standard error                 of nll, over the windows (which are independent pieces of text; tokens are not)
    interval of the perplexity     95%, by bootstrap over the windows (`megatron.evaluation.bootstrap`)
    change                         ppl(length) / ppl(change_from), its interval by the same bootstrap, paired

Files that know a standard error and no bootstrap interval are shown with exp(nll ± 1.96 · stderr).
"""

import csv
import difflib
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.errors import UserError
from megatron.evaluation.files import write_text

RESULTS = "results.json"

NEGLIGIBLE = 0.005
"""A change of perplexity below half a percent is none, however sure it is."""


class Record(BaseModel):
    """What one model scored at one length. Frozen; unknown fields, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: str = Field(min_length=1, description="name of the row: position encoding or sweep variant")
    train_length: int = Field(ge=1, description="tokens per training sequence")
    length: int = Field(ge=1, description="tokens the model is given at once, the scored ones included")
    protocol: str = Field(min_length=1, description="how tokens were chosen and scored: last or nonoverlapping")
    perplexity: float = Field(gt=0, description="exp(nll)")
    tokens: int = Field(ge=1, description="tokens scored, each counted once")
    seed: int = Field(ge=0, description="seed of the training run")

    nll: float | None = Field(default=None, description="mean negative log-likelihood, nats per token")
    stderr: float | None = Field(default=None, ge=0, description="standard error of nll over windows")
    perplexity_low: float | None = Field(
        default=None, gt=0, description="95% bootstrap interval over blocks: lower end"
    )
    perplexity_high: float | None = Field(default=None, gt=0, description="its upper end")
    change: float | None = Field(default=None, gt=0, description="perplexity / that at the length change_from")
    change_low: float | None = Field(default=None, gt=0, description="its 95% paired bootstrap interval: lower end")
    change_high: float | None = Field(default=None, gt=0, description="its upper end")
    change_from: int | None = Field(default=None, ge=1, description="shortest length that was scored with this one")
    bits_per_byte: float | None = Field(
        default=None, ge=0, description="for the bytes tokenizer: bits per byte of text"
    )
    targets: int | None = Field(default=None, ge=1, description="tokens scored at the end of each window")
    windows: int | None = Field(default=None, ge=1, description="windows the model was given")
    blocks: int | None = Field(
        default=None, ge=1, description="independent pieces of text that stderr and intervals were taken over"
    )
    target_digest: str | None = Field(
        default=None, description="hash of the scored tokens: equal digests, equal targets"
    )
    dataset: str | None = Field(default=None, description="where the scored tokens come from")
    text_digest: str | None = Field(
        default=None, description="hash of the text that the tokens were taken from, wherever it lies"
    )
    tokenizer: str | None = Field(default=None, description="name of the tokenizer")
    position: str | None = Field(default=None, description="position encoding and processor with their options")
    max_length: int | None = Field(default=None, ge=1, description="positions that the model knows, if they end")
    parameters: int | None = Field(default=None, ge=0, description="parameters of the model")
    run: str | None = Field(default=None, description="run folder or checkpoint")
    step: int | None = Field(default=None, ge=0, description="optimizer steps trained")
    train_tokens: int | None = Field(default=None, ge=0, description="tokens trained on")
    backend: str | None = Field(default=None, description="attention backend used for scoring")
    dtype: str | None = Field(default=None, description="compute type used for scoring")
    device: str | None = Field(default=None, description="device used for scoring")
    machine: str | None = Field(default=None, description="operating system, processor, threads")
    software: str | None = Field(default=None, description="versions")
    seconds: float | None = Field(default=None, ge=0, description="seconds of scoring")
    date: str | None = Field(default=None, description="when, ISO 8601, UTC")

    @property
    def multiple(self) -> float:
        """Length in training lengths."""
        return self.length / self.train_length

    @property
    def bootstrapped(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the perplexity over blocks, if known."""
        if self.perplexity_low is None or self.perplexity_high is None:
            return None
        return self.perplexity_low, self.perplexity_high

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the perplexity over windows: by bootstrap, else from stderr, else None."""
        if self.bootstrapped is not None:
            return self.bootstrapped
        if self.stderr is None:
            return None
        nll = math.log(self.perplexity) if self.nll is None else self.nll
        return math.exp(nll - 1.96 * self.stderr), math.exp(nll + 1.96 * self.stderr)

    @property
    def verdict(self) -> str | None:
        """What the change's interval says: rises (above 1), falls (below 1), holds (1 is inside, or the change is
        smaller than `NEGLIGIBLE`), None: not known."""
        if self.change is None or self.change_low is None or self.change_high is None:
            return None
        if abs(self.change - 1) < NEGLIGIBLE:
            return "holds"
        return "rises" if self.change_low > 1 else "falls" if self.change_high < 1 else "holds"


def replaced(old: Sequence[Record], new: Sequence[Record], *, one_run: bool) -> list[Record]:
    """Old records but for those that the new ones measure again, then the new ones.

    The same is measured again if run, position method (with the window of the evaluation), protocol and text agree,
    whatever the lengths: an evaluation is kept or replaced as a whole.

    Args:
        old, new: in the order in which they are to stand.
        one_run: all are of the same run, whatever they call it; else `run` tells.
    """

    def identity(record: Record) -> tuple[str | None, ...]:
        run = None if one_run or record.run is None else os.path.realpath(record.run)
        method = record.method if record.position is None else record.position
        return run, method, record.protocol, record.text_digest or record.dataset

    again = {identity(record) for record in new}
    return [*(record for record in old if identity(record) not in again), *new]


def write(path: str | Path, records: Sequence[Record]) -> Path:
    """Write records as a JSON list, one object per record, without the fields that are unknown."""
    rows = [json.dumps(record.model_dump(exclude_none=True), ensure_ascii=False) for record in records]
    return write_text(path, "[\n " + ",\n ".join(rows) + "\n]\n" if rows else "[]\n")


def read(path: str | Path) -> list[Record]:
    """Read a JSON list of records.

    Raises:
        UserError: no such file, no JSON, or a record that is not one; the line names the record and the field.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, list):
        raise UserError(f"{path}: should be a list of records, is {_kind(content)}")
    return [_record(path, number, item) for number, item in enumerate(content, start=1)]


def write_csv(path: str | Path, records: Sequence[Record]) -> Path:
    """Write records as CSV: one column per field of `Record`, empty where unknown."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(Record.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(record.model_dump() for record in records)
    return write_text(path, text.getvalue())


def _record(path: Path, number: int, item: Any) -> Record:
    if not isinstance(item, dict):
        raise UserError(f"{path}: record {number} should be an object, is {_kind(item)}")
    try:
        return Record.model_validate(item)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, Record.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; fields are {', '.join(Record.model_fields)}"
            raise UserError(f"{path}: record {number} has an unknown field {field}{hint}") from error
        if first["type"] == "missing":
            raise UserError(f"{path}: record {number} lacks {field}") from error
        raise UserError(f"{path}: record {number}: {field} = {item.get(field)!r}: {first['msg'].lower()}") from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a truth value"}
    return names.get(type(value), "a number")

"""The one currency of results: a record says what one model scored at one length, and how that was measured.

`results.json` is a list of records. Whatever shows results (tables, plots, pages, a notebook of yours) reads records
and nothing else, so a file made by hand or by another codebase works as well as one made here. In the file the value
stands under its metric's name, and its interval under that name with `_low` and `_high`:

    {"method": "rotary", "train_length": 64, "length": 128, "protocol": "last", "perplexity": 5.5, "tokens": 4096,
     "seed": 1234, "perplexity_low": 5.1, "perplexity_high": 6.0}

Only the fields of the first two lines and `seed` are required. What two values of a metric are compared by, a ratio or
a difference, is the metric's (`megatron.reports.metrics`):

    change                         of the value at `length` from that at `change_from`
    standard error                 of the mean that the value is made of, over independent pieces of text: for
                                   perplexity that of nll, in nats
    interval                       95%; by bootstrap (`megatron.reports.bootstrap`), else from the standard error
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron.errors import UserError
from megatron.files import parse_json, write_text
from megatron.reports import axes, metrics
from megatron.reports.metrics import METRICS, Metric
from megatron.suggest import did_you_mean

RESULTS = "results.json"
LENGTH = ("axis", "length")
"""What files leave out."""

FLOOR = "floor: "
"""How the names of methods begin that learned nothing: what a constant answer, or a guess, reaches."""

APART = ("block_sums", "block_tokens", "remark")
"""Fields that are lists or sentences, which tables of fields leave out."""


class Record(BaseModel):
    """What one model scored at one length. Frozen; unknown fields, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: str = Field(min_length=1, description="name of the row: position encoding or sweep variant")
    train_length: int = Field(ge=1, description="tokens per training sequence")
    length: int = Field(ge=1, description="tokens the model is given at once, the scored ones included")
    protocol: str = Field(
        min_length=1, description="how tokens were chosen and scored: last, nonoverlapping, strided, a probe, a task"
    )
    metric: str = Field(description="what was measured; in files this is the name that the value stands under")
    value: float = Field(description="the measured value")
    tokens: int = Field(ge=1, description="tokens scored, each counted once")
    seed: int = Field(ge=0, description="seed of the training run")

    axis: str = Field(default="length", description="what the value stands over: length, or a place inside windows")
    place: float | None = Field(default=None, description="where on that axis; the length is its own place")
    nll: float | None = Field(default=None, description="mean negative log-likelihood, nats per token")
    stderr: float | None = Field(default=None, ge=0, description="standard error of the mean, over windows")
    low: float | None = Field(default=None, description="95% bootstrap interval over blocks: lower end")
    high: float | None = Field(default=None, description="its upper end")
    change: float | None = Field(default=None, description="of the value from that at the length change_from")
    change_low: float | None = Field(default=None, description="its 95% bootstrap interval: lower end")
    change_high: float | None = Field(default=None, description="its upper end")
    change_from: int | None = Field(default=None, ge=1, description="shortest length that was scored with this one")
    bits_per_byte: float | None = Field(
        default=None, ge=0, description="for the bytes tokenizer: bits per byte of text"
    )
    targets: int | None = Field(default=None, ge=1, description="tokens scored at the end of each window")
    windows: int | None = Field(default=None, ge=1, description="windows the model was given")
    blocks: int | None = Field(
        default=None, ge=1, description="independent pieces of text that stderr and intervals were taken over"
    )
    block_sums: list[float] | None = Field(
        default=None, description="summed nll of each block, to compare methods by that scored the same targets"
    )
    block_tokens: list[int] | None = Field(default=None, description="tokens of each block, where they differ")
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
    remark: str | None = Field(default=None, description="sentences that belong under every table with this record")
    parameters: int | None = Field(default=None, ge=0, description="parameters of the model")
    run: str | None = Field(default=None, description="run folder or checkpoint")
    step: int | None = Field(default=None, ge=0, description="optimizer steps trained")
    train_tokens: int | None = Field(default=None, ge=0, description="tokens trained on")
    backend: str | None = Field(default=None, description="attention backend used for scoring")
    dtype: str | None = Field(default=None, description="compute type used for scoring")
    device: str | None = Field(default=None, description="device used for scoring")
    machine: str | None = Field(default=None, description="operating system, processor, threads")
    software: str | None = Field(default=None, description="versions")
    flops: float | None = Field(default=None, ge=0, description="floating-point operations of scoring")
    seconds: float | None = Field(default=None, ge=0, description="seconds of scoring")
    date: str | None = Field(default=None, description="when, ISO 8601, UTC")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """The values are such that the metric has."""
        metric, axis = metrics.find(self.metric), axes.find(self.axis)
        if (self.place is None) != (self.axis == "length"):
            raise ValueError(f"axis {self.axis} has {'a' if self.axis != 'length' else 'no'} place")
        if not axis.lowest <= self.at <= axis.highest:
            raise ValueError(f"place must be between {axis.lowest:g} and {axis.highest:g}, not {self.at:g}")
        for value in (self.value, self.low, self.high):
            if value is not None and (reason := metric.refusal(value)) is not None:
                raise ValueError(f"{reason}, not {value:g}")
        for name in ("change", "change_low", "change_high"):
            change = getattr(self, name)
            if change is not None and metric.compared == "ratio" and change <= 0:
                raise ValueError(f"{name} is a ratio and must be greater than 0, not {change:g}")
        if self.block_tokens is not None and len(self.block_tokens) != len(self.block_sums or ()):
            raise ValueError("block_tokens must be as many as block_sums")
        return self

    def replace(self, **fields: Any) -> "Record":
        """A copy with some fields changed, validated again."""
        return Record.model_validate(self.model_dump(exclude_unset=True) | fields)

    @property
    def chosen_targets(self) -> int | None:
        """Tokens scored in each window, where that is a choice and not the window's length."""
        return None if self.protocol == "nonoverlapping" else self.targets

    @property
    def is_floor(self) -> bool:
        """Is it of no model, but of a predictor that learned nothing?"""
        return self.run is None and self.method.startswith(FLOOR)

    @property
    def measure(self) -> Metric:
        """The metric, with its unit and its better direction."""
        return metrics.find(self.metric)

    @property
    def at(self) -> float:
        """Where the value stands on its axis."""
        return self.length if self.place is None else self.place

    @property
    def block_counts(self) -> list[int] | None:
        """Tokens of each block whose sum is kept, or None if none is."""
        if not self.block_sums:
            return None
        blocks = len(self.block_sums)
        return self.block_tokens or [self.tokens // blocks] * blocks

    @property
    def bootstrapped(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the value over blocks, if known."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the value over windows: by bootstrap, else from stderr, else None."""
        if self.bootstrapped is not None or self.stderr is None:
            return self.bootstrapped
        return self.measure.interval(self.value, self.stderr)

    @property
    def change_interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the change, if known."""
        return None if self.change_low is None or self.change_high is None else (self.change_low, self.change_high)

    @property
    def verdict(self) -> str | None:
        """What the change's interval says (`Metric.verdict`), or None if it is not known."""
        if self.change is None or self.change_interval is None:
            return None
        return self.measure.verdict(self.change, *self.change_interval)

    def row(self) -> dict[str, Any]:
        """The record as it stands in files: named by its metric, without the fields that are unknown."""
        names = _names(self.metric)
        fields = self.model_dump(exclude_none=True, exclude={"metric"})
        return {names.get(field, field): value for field, value in fields.items() if (field, value) != LENGTH}


def of_row(row: dict[str, Any]) -> Record:
    """The record of an object in a file.

    Raises:
        UserError: it has no value or several, or a field is unknown, missing or of the wrong kind.
    """
    given = [name for name in METRICS if name in row]
    if len(given) > 1:
        raise UserError(f"values of {' and '.join(given)}; a record holds one metric")
    names = _names(given[0]) if given else {}
    fields = {file: field for field, file in names.items()}
    known = _columns(given or METRICS)
    for name in row:
        if name not in known:
            hint = did_you_mean(name, known) or f"fields are {', '.join(known)}"
            raise UserError(f"unknown field {name}; {hint}")
    if not given:
        raise UserError(f"no value; give one of {', '.join(METRICS)}")
    try:
        return Record.model_validate({"metric": given[0]} | {fields.get(name, name): row[name] for name in row})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"{field} is missing") from error
        reason = first["msg"].removeprefix("Value error, ")
        if not field:
            raise UserError(reason) from error
        name = names.get(field, field)
        raise UserError(f"{name} = {row.get(name)!r}: {reason.lower()}") from error


def _names(metric: str) -> dict[str, str]:
    """What the fields that hold the value and its interval are called in files."""
    return {"value": metric, "low": f"{metric}_low", "high": f"{metric}_high"}


def _columns(given: Iterable[str]) -> list[str]:
    """The names of all fields in files that hold these metrics."""
    columns: list[str] = []
    for field in Record.model_fields:
        if field != "metric":
            columns += dict.fromkeys(_names(metric).get(field, field) for metric in given)
    return columns


def replaced(old: Sequence[Record], new: Sequence[Record], *, one_run: bool) -> list[Record]:
    """Old records but for those that the new ones measure again, then the new ones.

    The same is measured again if metric, axis, run, position method (with the window of the evaluation), protocol, text
    and the number of targets in a window agree, whatever the lengths: an evaluation is kept or replaced as a whole.

    Args:
        old, new: in the order in which they are to stand.
        one_run: all are of the same run, whatever they call it; else `run` tells.
    """

    def identity(record: Record) -> tuple[str | int | None, ...]:
        run = None if one_run or record.run is None else os.path.realpath(record.run)
        method = record.method if record.position is None else record.position
        text = record.text_digest or record.dataset
        return record.metric, record.axis, run, method, record.protocol, text, record.chosen_targets

    again = {identity(record) for record in new}
    return [*(record for record in old if identity(record) not in again), *new]


def write(path: str | Path, records: Sequence[Record]) -> Path:
    """Write records as a JSON list, one object per record, without the fields that are unknown."""
    rows = [json.dumps(record.row(), ensure_ascii=False) for record in records]
    return write_text(path, "[\n " + ",\n ".join(rows) + "\n]\n" if rows else "[]\n")


def read(path: str | Path) -> list[Record]:
    """Read a JSON list of records.

    Raises:
        UserError: no such file, no JSON, or a record that is not one; the line names the record and the field.
    """
    path = Path(path)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, list):
        raise UserError(f"{path}: should be a list of records, is {_kind(content)}")
    return [_record(path, number, item) for number, item in enumerate(content, start=1)]


def write_csv(path: str | Path, records: Sequence[Record]) -> Path:
    """Write records as CSV, a column per field, empty where unknown; values stand under their metrics' names."""
    text = io.StringIO()
    columns = [
        name for name in _columns(dict.fromkeys(record.metric for record in records) or METRICS) if name not in APART
    ]
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(record.row() for record in records)
    return write_text(path, text.getvalue())


def _record(path: Path, number: int, item: Any) -> Record:
    if not isinstance(item, dict):
        raise UserError(f"{path}: record {number}: should be an object, is {_kind(item)}")
    try:
        return of_row(item)
    except UserError as error:
        raise UserError(f"{path}: record {number}: {error}") from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a truth value"}
    return names.get(type(value), "a number")

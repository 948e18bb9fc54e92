"""Records: the common format of all results. A record is the score of one model at one length, with its provenance.

`results.json` is a list of records. Tables, plots, pages, and notebooks read only records, so files made by hand or by
another codebase also work. In the file, the key of the value is its metric's name; its interval has the same key with
`_low` and `_high`:

    {"method": "rotary", "train_length": 64, "length": 128, "protocol": "last", "perplexity": 5.5, "tokens": 4096,
     "seed": 1234, "perplexity_low": 5.1, "perplexity_high": 6.0}

Only the fields of the first line and `seed` are required. The metric determines whether two values are compared by
ratio or by difference (`megatron.reports.metrics`):

    change                         change of the value at `length` from that at `change_from`
    standard error                 error of the mean behind the value, over independent blocks of text; for
                                   perplexity that of nll, in nats
    interval                       95%; by bootstrap (`megatron.reports.significance`), else from the standard error

A method whose run diverged has no record, because records contain numbers. Its failure is saved next to results.json,
in results.failures.json, so that tables, pages, and lists of missing results can mention it:

    [{"method": "rotary", "seed": 1235, "reason": "the loss is not finite", "step": 120}]
"""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron.reports import axes, metrics
from megatron.reports.metrics import METRICS, Metric
from megatron.utils.atomic_io import parse_json, write_text_atomically
from megatron.utils.errors import UserError
from megatron.utils.field_errors import describe_field_error
from megatron.utils.formatting import suggest_names, suggest_path

RESULTS_FILE = "results.json"
DEFAULT_AXIS_FIELD = ("axis", "length")
"""Field and default value that files omit."""

TRIVIAL_BASELINE_PREFIX = "floor: "
"""Prefix of the names of trivial baselines, such as a constant answer or a guess."""

MAX_COUNT = 2**53
"""Maximum length, token, or step count in a record. Larger numbers are not exact in floating point."""
MAX_SEED = 2**64 - 1
MAX_AMOUNT = 1e12
"""Maximum number of seconds or GiB in a record."""

NON_TABULAR_FIELDS = ("block_sums", "block_tokens", "remark")
"""Fields with lists or sentences, which CSV files omit."""


class Record(BaseModel):
    """Score of one model at one length. Records are frozen, and reject unknown fields, NaN, and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: str = Field(min_length=1, description="name of the row: position encoding or sweep variant")
    train_length: int = Field(ge=1, le=MAX_COUNT, description="tokens per training sequence")
    length: int = Field(ge=1, le=MAX_COUNT, description="tokens in the model's input, including the scored ones")
    protocol: str = Field(
        min_length=1,
        description="protocol of the scoring: last, nonoverlapping, overlapping, strided, a probe, or a task",
    )
    metric: str = Field(description="measured metric; in files it is the key of the value")
    value: float = Field(description="the measured value")
    tokens: int = Field(ge=1, le=MAX_COUNT, description="tokens scored, each counted once")
    seed: int = Field(ge=0, le=MAX_SEED, description="seed of the training run")

    axis: str = Field(default="length", description="axis of the value: length, or a position inside windows")
    place: float | None = Field(default=None, description="position on that axis; absent for length")
    nll: float | None = Field(default=None, description="mean negative log-likelihood, nats per token")
    stderr: float | None = Field(default=None, ge=0, description="standard error of the mean, over windows")
    low: float | None = Field(default=None, description="95% bootstrap interval over blocks: lower end")
    high: float | None = Field(default=None, description="its upper end")
    change: float | None = Field(default=None, description="change from the value at the length change_from")
    change_low: float | None = Field(default=None, description="its 95% bootstrap interval: lower end")
    change_high: float | None = Field(default=None, description="its upper end")
    change_from: int | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="shortest length scored together with this one"
    )
    bits_per_byte: float | None = Field(
        default=None, ge=0, description="for the bytes tokenizer: bits per byte of text"
    )
    targets: int | None = Field(default=None, ge=1, le=MAX_COUNT, description="tokens scored at the end of each window")
    windows: int | None = Field(default=None, ge=1, le=MAX_COUNT, description="number of scored windows")
    smoothing: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="number of adjacent positions averaged, fewer near the ends",
    )
    blocks: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="independent blocks of text behind stderr and intervals",
    )
    block_sums: list[float] | None = Field(
        default=None, description="summed nll of each block, to compare methods scored on the same targets"
    )
    block_tokens: list[Annotated[int, Field(ge=0, le=MAX_COUNT)]] | None = Field(
        default=None, description="tokens of each block, if they differ"
    )
    target_digest: str | None = Field(
        default=None, description="hash of the scored tokens: equal digests, equal targets"
    )
    dataset: str | None = Field(default=None, description="source of the scored tokens")
    text_digest: str | None = Field(
        default=None, description="hash of the text that contains the tokens, independent of its path"
    )
    tokenizer: str | None = Field(default=None, description="name of the tokenizer")
    position: str | None = Field(default=None, description="position encoding and processor with their options")
    max_length: int | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="maximum length of the model, if limited"
    )
    remark: str | None = Field(default=None, description="notes for every table with this record")
    parameters: int | None = Field(default=None, ge=0, le=MAX_COUNT, description="parameters of the model")
    run: str | None = Field(default=None, description="run folder or checkpoint")
    step: int | None = Field(default=None, ge=0, le=MAX_COUNT, description="optimizer steps trained")
    training_digest: str | None = Field(
        default=None, description="hash of the training without its seed: seeds of one method have equal hashes"
    )
    train_tokens: int | None = Field(default=None, ge=0, le=MAX_COUNT, description="tokens trained on")
    backend: str | None = Field(default=None, description="attention backend used for scoring")
    dtype: str | None = Field(default=None, description="compute type used for scoring")
    device: str | None = Field(default=None, description="device used for scoring")
    machine: str | None = Field(default=None, description="operating system, processor, threads")
    software: str | None = Field(default=None, description="versions")
    flops: float | None = Field(default=None, ge=0, description="floating-point operations of scoring")
    seconds: float | None = Field(default=None, ge=0, le=MAX_AMOUNT, description="seconds of scoring")
    cpu_seconds: float | None = Field(default=None, ge=0, le=MAX_AMOUNT, description="CPU seconds of scoring")
    memory_gib: float | None = Field(default=None, ge=0, le=MAX_AMOUNT, description="peak memory of scoring, GiB")
    step_seconds: float | None = Field(
        default=None, ge=0, le=MAX_AMOUNT, description="median seconds of a training step"
    )
    step_cpu_seconds: float | None = Field(
        default=None,
        ge=0,
        le=MAX_AMOUNT,
        description="median CPU seconds of a training step, in the first process",
    )
    train_memory_gib: float | None = Field(
        default=None, ge=0, le=MAX_AMOUNT, description="peak memory of training, GiB"
    )
    date: str | None = Field(default=None, description="date and time of scoring, ISO 8601, UTC")

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        """Check that the values are in the range of the metric and of the axis."""
        metric, axis = metrics.get_metric(self.metric), axes.get_record_axis(self.axis)
        if (self.place is None) != (self.axis == "length"):
            raise ValueError(f"axis {self.axis} has {'a' if self.axis != 'length' else 'no'} place")
        if not axis.min_value <= self.x_value <= axis.max_value:
            raise ValueError(f"place must be between {axis.min_value:g} and {axis.max_value:g}, not {self.x_value:g}")
        for value in (self.value, self.low, self.high):
            if value is not None and (reason := metric.describe_invalid(value)) is not None:
                raise ValueError(f"{reason}, not {value:g}")
        for name in ("change", "change_low", "change_high"):
            change = getattr(self, name)
            if change is not None and metric.comparison == "ratio" and change <= 0:
                raise ValueError(f"{name} is a ratio and must be greater than 0, not {change:g}")
        if self.block_tokens is not None and len(self.block_tokens) != len(self.block_sums or ()):
            raise ValueError("block_tokens must be as many as block_sums")
        return self

    def replace(self, **fields: Any) -> "Record":
        """Return a validated copy with some fields changed."""
        return Record.model_validate(self.model_dump(exclude_unset=True) | fields)

    @property
    def targets_per_window(self) -> int | None:
        """Scored tokens per window, or None if the window's length determines them."""
        return None if self.protocol in ("nonoverlapping", "overlapping") else self.targets

    @property
    def is_trivial_baseline(self) -> bool:
        """True if the record is of a trivial baseline, not of a model."""
        return self.run is None and self.method.startswith(TRIVIAL_BASELINE_PREFIX)

    @property
    def metric_info(self) -> Metric:
        return metrics.get_metric(self.metric)

    @property
    def x_value(self) -> float:
        """Position of the value on its axis."""
        return self.length if self.place is None else self.place

    @property
    def tokens_per_block(self) -> list[int] | None:
        """Tokens of each block, or None if the sums of blocks are not recorded."""
        if not self.block_sums:
            return None
        num_blocks = len(self.block_sums)
        return self.block_tokens or [self.tokens // num_blocks] * num_blocks

    @property
    def bootstrap_interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the value over blocks, if known."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the value over windows: by bootstrap, else from stderr, else None."""
        if self.bootstrap_interval is not None or self.stderr is None:
            return self.bootstrap_interval
        return self.metric_info.compute_interval(self.value, self.stderr)

    @property
    def change_interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the change, if known."""
        return None if self.change_low is None or self.change_high is None else (self.change_low, self.change_high)

    @property
    def verdict(self) -> str | None:
        """Verdict on the change (`Metric.classify_change`), or None if its interval is unknown."""
        if self.change is None or self.change_interval is None:
            return None
        return self.metric_info.classify_change(self.change, *self.change_interval)

    def to_row(self) -> dict[str, Any]:
        """Return the record as a dictionary for files, keyed by metric name and without unknown fields."""
        file_names = _map_file_field_names(self.metric)
        fields = self.model_dump(exclude_none=True, exclude={"metric"})
        return {
            file_names.get(field, field): value
            for field, value in fields.items()
            if (field, value) != DEFAULT_AXIS_FIELD
        }


def record_from_row(row: dict[str, Any]) -> Record:
    """Build a record from a file's JSON object.

    Raises:
        UserError: it has no value or several, or a field is unknown, missing, or of the wrong type.
    """
    metric_names = [name for name in METRICS if name in row]
    if len(metric_names) > 1:
        raise UserError(f"values of {' and '.join(metric_names)}; a record must have one metric")
    columns = _map_file_columns(tuple(metric_names or METRICS))
    for name in row:
        if name not in columns:
            hint = suggest_names(name, columns) or f"fields are {', '.join(columns)}"
            raise UserError(f"unknown field {name}; {hint}")
    if not metric_names:
        raise UserError(f"no value; give one of {', '.join(METRICS)}")
    try:
        return Record.model_validate({"metric": metric_names[0]} | {columns[name]: row[name] for name in row})
    except ValidationError as error:
        raise UserError(describe_field_error(error, _map_file_field_names(metric_names[0]))) from error


# Cached, because they are called for each of thousands of records. The results must not be changed.
@cache
def _map_file_field_names(metric: str) -> Mapping[str, str]:
    """Map the fields of the value and its interval to their names in files."""
    return {"value": metric, "low": f"{metric}_low", "high": f"{metric}_high"}


@cache
def _map_file_columns(metric_names: tuple[str, ...]) -> Mapping[str, str]:
    """Map the names of all fields in files that contain these metrics to the fields of records, in order."""
    return {
        _map_file_field_names(metric).get(field, field): field
        for field in Record.model_fields
        if field != "metric"
        for metric in metric_names
    }


def merge_records(old: Sequence[Record], new: Sequence[Record], *, same_run: bool) -> list[Record]:
    """Append new records to the old ones, which are first filtered by `drop_remeasured`."""
    return [*drop_remeasured(old, new, same_run=same_run), *new]


def drop_remeasured(old: Sequence[Record], new: Sequence[Record], *, same_run: bool) -> list[Record]:
    """Return the old records that the new ones do not measure again.

    A measurement is repeated if metric, axis, run, position method (with the window of the evaluation), protocol, text,
    and number of targets per window agree, regardless of lengths. So all lengths of an evaluation are kept or replaced.
    A trivial baseline belongs to no run. It is kept as long as a model has a record with the same targets and length.

    Args:
        old, new: existing and new records.
        same_run: True if all records are of the same run, whatever its name; otherwise compare `run`.
    """

    def identity(record: Record) -> tuple[str | int | None, ...]:
        run = None if same_run or record.run is None else os.path.realpath(record.run)
        method = record.method if record.position is None else record.position
        text = record.text_digest or record.dataset
        return record.metric, record.axis, run, method, record.protocol, text, record.targets_per_window

    def cell(record: Record) -> tuple[str | float | None, ...]:
        return record.metric, record.axis, record.length, record.place, record.protocol, record.target_digest

    remeasured = {identity(record) for record in new if not record.is_trivial_baseline}
    models = [record for record in old if not record.is_trivial_baseline and identity(record) not in remeasured]
    scored = {cell(record) for record in (*models, *new) if not record.is_trivial_baseline}
    new_baselines = {(record.method, cell(record)) for record in new if record.is_trivial_baseline}

    def is_kept(record: Record) -> bool:
        if record.is_trivial_baseline:
            return cell(record) in scored and (record.method, cell(record)) not in new_baselines
        return identity(record) not in remeasured

    return list(filter(is_kept, old))


def write_records(path: str | Path, records: Sequence[Record]) -> Path:
    """Write records as a JSON list, one object per record, without unknown fields."""
    rows = [json.dumps(record.to_row(), ensure_ascii=False) for record in records]
    return write_text_atomically(path, "[\n " + ",\n ".join(rows) + "\n]\n" if rows else "[]\n")


DAMAGE_ADVICE = "correct or restore the file, or move it away and repeat the evaluation"
"""Advice for a results file that cannot be read."""
NO_RESULTS_ADVICE = "name a file of results, such as RUN/results.json"
"""Advice for a file of another kind."""


def read_records(path: str | Path) -> list[Record]:
    """Read a JSON list of records.

    Raises:
        UserError: the file is missing or not JSON, or a record is invalid; the message names the record and the field.
    """
    path = Path(path)
    is_results_file = path.name.startswith("results.") and path.suffix == ".json"
    advice = DAMAGE_ADVICE if is_results_file else NO_RESULTS_ADVICE
    try:
        text = path.read_text(encoding="utf-8")
        content = parse_json(text)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; {suggest_path(path)}".rstrip("; ")) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); {advice}") from error
    except ValueError as error:
        if not text.strip():
            raise UserError(f"{path}: the file is empty; it must contain a list of records; {advice}") from error
        raise UserError(f"{path}: not JSON ({error}); {advice}") from error
    if not isinstance(content, list):
        kind = _get_json_type_name(content)
        raise UserError(f"{path}: it must contain a list of records, not {kind}; {advice}")
    return [_parse_record(path, index, item) for index, item in enumerate(content, start=1)]


def write_records_csv(path: str | Path, records: Sequence[Record]) -> Path:
    return write_text_atomically(path, format_records_csv(records))


def format_records_csv(records: Sequence[Record]) -> str:
    """Format records as CSV with a column for each field, empty if unknown. Value columns are named by metric."""
    text = io.StringIO()
    columns = [
        name
        for name in _map_file_columns(tuple(dict.fromkeys(record.metric for record in records) or METRICS))
        if name not in NON_TABULAR_FIELDS
    ]
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(record.to_row() for record in records)
    return text.getvalue()


def _parse_record(path: Path, index: int, item: Any) -> Record:
    if not isinstance(item, dict):
        kind = _get_json_type_name(item)
        raise UserError(f"{path}: record {index}: it must be an object, not {kind}; {DAMAGE_ADVICE}")
    try:
        return record_from_row(item)
    except UserError as error:
        raise UserError(f"{path}: record {index}: {error}; {DAMAGE_ADVICE}") from error


def _get_json_type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")

"""Options of evaluation, for `./deepy.py evaluate` and, except for `TaskOptions`, for `evaluate:` in a sweep."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megatron.options.model import MAX_LENGTH, AttentionBackend
from megatron.options.section import CommaSeparated, ConfigSection, config_field, get_default
from megatron.utils.errors import UserError

Protocol = Literal["last", "nonoverlapping", "overlapping", "strided", "repeated", "passkey"]
PROBE_PROTOCOLS = ("repeated", "passkey")
"""Protocols that generate the text they score."""

Measure = Literal["perplexity", "delta_perplexity", "position", "long_perplexity", "token_loss"]


MAX_EVALUATION_LENGTH = 2**40
Length = Annotated[int, Field(ge=1, lt=MAX_EVALUATION_LENGTH)]
"""Window length, in tokens."""
Multiple = Annotated[float, Field(gt=0, lt=MAX_EVALUATION_LENGTH)]
"""Window length, in training lengths."""


def parse_lengths(text: str) -> dict[str, list[int] | list[float]]:
    """Parse lengths of the command line: `128,256` in tokens, `1x,1.5x` in training lengths, or both.

    Returns:
        `lengths` and `multiples`, if given.

    Raises:
        UserError: a value is not a length.
    """
    tokens: list[int] = []
    multiples: list[float] = []
    for part in (part.strip() for part in text.split(",")):
        bare = part.replace("_", "")
        number = bare.removesuffix("x").removesuffix("×")
        try:
            value = float(number) if number != bare else int(number)
        except ValueError:
            value = 0  # rejected below
        if not 0 < value < MAX_EVALUATION_LENGTH:
            raise UserError(f"lengths: {part!r} is not a length; write tokens (128,256) or training lengths (1x,2x)")
        if isinstance(value, int):
            tokens.append(value)
        else:
            multiples.append(value)
    return ({"lengths": tokens} if tokens else {}) | ({"multiples": multiples} if multiples else {})


def _join_lengths(value: Any) -> str | None:
    """Return lengths in the notation of the command line if they are a string, or a list with strings, else None."""
    if isinstance(value, list) and any(isinstance(item, str) for item in value):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else None


class LengthOptions(ConfigSection):
    """Keys `lengths` and `multiples`, which may be written as one: `128,256,1x`, or in files [128, 256, 1x]."""

    @model_validator(mode="before")
    @classmethod
    def _parse_lengths(cls, values: Any) -> Any:
        if not isinstance(values, dict) or (text := _join_lengths(values.get("lengths"))) is None:
            return values
        try:
            parsed = parse_lengths(text)
        except UserError:
            return values  # rejected by `_reject_text`, whose error names the key and where it was set
        if isinstance(given := values.get("multiples"), list) and "multiples" in parsed:
            parsed["multiples"] = [*given, *parsed["multiples"]]
        return {name: value for name, value in values.items() if name != "lengths"} | parsed

    @field_validator("lengths", mode="before", check_fields=False)
    @classmethod
    def _reject_text(cls, value: Any) -> Any:
        if text := _join_lengths(value):
            try:
                parse_lengths(text)
            except UserError as error:
                raise PydanticCustomError("lengths", str(error).removeprefix("lengths: ")) from None
        return value


LENGTHS_METAVAR = "128,256,… | 1x,2x,…"


class TaskOptions(ConfigSection):
    """Tasks of lm-evaluation-harness to evaluate, and how much of them."""

    tasks: Annotated[list[str], CommaSeparated] = config_field(
        ...,
        "tasks of lm-evaluation-harness instead of perplexity: names of tasks, groups or tags, with * as a wildcard",
        min_length=1,
        metavar="TASK,…",
    )
    include_path: str | None = config_field(None, "with --tasks: folder with tasks of your own (YAML files)")
    limit: int | None = config_field(
        None, "with --tasks: use only the first documents of each task, up to this number; all if absent", ge=1
    )
    num_fewshot: int | None = config_field(
        None, "with --tasks: solved examples before each question; the task's own number if absent", ge=0
    )
    metadata: dict[str, Any] | str | None = config_field(
        None,
        "with --tasks: metadata for tasks that generate their texts, as the harness's option of this name: "
        "'{max_seq_lengths: [4096], tokenizer: FOLDER}'",
        metavar="MAPPING",
    )


MAX_DEPTHS = 1001


def _parse_depths(parts: Any) -> Any:
    """Parse depths in ascending order: fractions, or an integer above 1 of evenly spaced depths from 0 to 1."""
    if not isinstance(parts, list):
        return parts
    if len(parts) == 1 and isinstance(parts[0], int) and parts[0] > 1:
        if parts[0] > MAX_DEPTHS:
            raise PydanticCustomError("depths", f"{parts[0]:,} depths are too many; use at most {MAX_DEPTHS:,}")
        return [index / (parts[0] - 1) for index in range(parts[0])]
    try:
        return sorted({float(part) for part in parts})
    except (TypeError, ValueError):
        raise PydanticCustomError(
            "depths", "it must be fractions from 0 to 1 (0,0.5,1) or a number of depths (11)"
        ) from None


Depths = Annotated[list[Annotated[float, Field(ge=0, le=1)]], BeforeValidator(_parse_depths)]
"""Ascending fractions of the possible positions before an answer."""


WINDOW_FIELD = config_field(
    None,
    "attention window: number of last keys, including the token's own; the run's own if absent",
    ge=1,
    le=MAX_LENGTH,
)
TEMPERATURE_FIELD = config_field(
    None,
    "attention temperature without learned parameters, as NAME or NAME:OPTION=VALUE: logn, "
    "llama4:floor_scale=512; the run's own if absent",
)
ROPE_FIELD = config_field(
    None,
    "scaling of rotary for a run trained without one: pi:8, ntk:8, dynamic, yarn:8, "
    "longrope:FILE, selfextend:GROUP,NEIGHBORS or rerope:NEIGHBORS",
)
Precision = Literal["auto", "fp32", "bf16", "fp16"]
PRECISION_FIELD = config_field(
    "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
)
"""Options shared by all commands that read a trained model: evaluation, analysis and generation."""


class EvaluationOptions(LengthOptions):
    """Options of evaluation, shared by the command line, sweep files and Python."""

    lengths: Annotated[list[Length] | None, CommaSeparated] = config_field(
        None,
        "context lengths, in tokens (512) or training lengths (4x); 1x to 32x if absent",
        min_length=1,
        metavar=LENGTHS_METAVAR,
    )
    multiples: list[Multiple] | None = config_field(
        None, "context lengths in training lengths, added to `lengths`: [1, 4] is `lengths: [1x, 4x]`", min_length=1
    )
    protocol: Protocol = config_field(
        "last",
        "which tokens are scored: last (the last tokens of windows that end at the same positions), nonoverlapping "
        "(all, as in KERPLE), overlapping (all with at least min_context tokens before them, as in LongPPL), "
        "strided (the last tokens of consecutive windows); or a probe: repeated (random tokens, copied) or passkey",
    )
    num_windows: int | None = config_field(
        None,
        "windows per length; if absent, 64 (last, probes), 512 (trained tasks) or all (other protocols)",
        ge=1,
        old_name="windows",
    )
    targets: Annotated[list[Annotated[int, Field(ge=1)]] | None, CommaSeparated] = config_field(
        None,
        "with protocol last: tokens scored per window, one or several numbers; the training length if absent (16 for "
        "repeated)",
        min_length=1,
    )
    depths: Annotated[Depths | None, CommaSeparated] = config_field(
        None,
        "depths in a needle map, of the passkey (5 if absent) or of a task's answer: fractions from 0 to 1, or a "
        "number of evenly spaced ones",
        min_length=1,
        metavar="11 | 0,0.5,1",
    )
    score_threshold: float | None = config_field(
        None,
        "with a needle map: a length is effective if its score is at least this; 0.85 if absent",
        old_name="effective_score",
        gt=0,
        le=1,
    )
    stride: int | None = config_field(
        None, "with protocol strided: tokens from one window to the next, all of which are scored", ge=1
    )
    min_context: int | None = config_field(
        None,
        "with protocol overlapping: minimum number of tokens before each scored token; windows overlap by this many",
        ge=1,
    )
    measures: Annotated[list[Measure] | None, CommaSeparated] = config_field(
        None,
        "measures to report: perplexity, delta_perplexity (gain from context beyond the scored tokens), "
        "position (perplexity by position in the window, in bins), token_loss (loss at every position, smoothed), "
        "long_perplexity (LongPPL, of key tokens); perplexity if absent",
        min_length=1,
    )
    smoothing: int | None = config_field(
        None,
        "with the measure token_loss: width of the moving average, an odd number; 101 positions if absent, fewer in "
        "short windows",
        ge=1,
    )
    key_tokens: str | None = config_field(
        None,
        "with the measure long_perplexity: file with the key tokens of a reference run, which find_key_tokens writes",
    )
    find_key_tokens: bool = config_field(
        False,
        "use the first run as the reference of long_perplexity, and write its key tokens to the file of key_tokens",
    )
    key_alpha: float | None = config_field(
        None,
        "for find_key_tokens: a key token gains at least this log-probability from the long context, in nats; "
        "2 if absent",
        ge=0,
    )
    key_beta: float | None = config_field(
        None,
        "for find_key_tokens: a key token has at least this log-probability in the long context, in nats; -2 if absent",
        le=0,
    )
    data: str | None = config_field(
        None, "text to score: .txt or .jsonl file, corpus folder or dataset; each run's test split if absent"
    )
    window: int | None = WINDOW_FIELD
    attention_mask: Literal["causal", "document"] | None = config_field(
        None,
        "attention to all earlier tokens (causal), or only within a document, with positions from 0 (document); as "
        "in training if absent",
    )
    attention_temperature: str | None = TEMPERATURE_FIELD
    rope: str | None = ROPE_FIELD
    task_options: str | None = config_field(
        None,
        "for runs trained on a task: task options that differ from training, for example ignore=0.98",
        metavar="OPTION=VALUE,…",
    )
    device: str = config_field(
        "auto", "device of the models: auto, cpu or cuda; in a sweep, that of the training if absent"
    )
    precision: Precision = PRECISION_FIELD
    backend: AttentionBackend | None = config_field(None, "attention backend; the run's own if absent")
    batch_tokens: int | None = config_field(
        None, "input tokens per forward pass; 4,096 on a CPU and 65,536 on a GPU if absent", ge=1
    )

    @property
    def named_paths(self) -> dict[str, str]:
        """Paths of files and folders that options name, by option. Their content decides the results, not the path."""
        paths = {"data": self.data, "key_tokens": self.key_tokens}
        if self.rope is not None and self.rope.startswith("longrope:"):
            paths["rope"] = self.rope.partition(":")[2]
        return {name: path for name, path in paths.items() if path is not None}


LOSS_OPTIONS = ("smoothing", "key_tokens", "find_key_tokens", "key_alpha", "key_beta")
"""Options of loss measurements on text."""


def reject_text_options(options: EvaluationOptions, names: Iterable[str], why: str) -> None:
    """Reject options that select which tokens of which text are scored, if something else determines that.

    Args:
        options: requested options.
        names: names of the options that have no meaning.
        why: reason why they do not apply, as in "the runs were trained on a task".

    Raises:
        UserError: one of the options is not at its default.
    """
    for name in names:
        if getattr(options, name) != get_default(EvaluationOptions, name):
            raise UserError(f"{name} applies to texts only, but {why}; remove it", name)


def reject_task_options(options: EvaluationOptions) -> None:
    """Reject options of a task if no run was trained on one. Raises UserError."""
    if options.task_options is not None:
        raise UserError("task_options applies to runs trained on a task, but these were not; remove it")

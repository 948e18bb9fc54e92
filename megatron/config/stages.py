"""Stages of a training run: a file can change some keys from a given step on.

    seq_length: 512
    train_batch_size: 64
    stages:
      - {until: 8000}
      - {until_tokens: 2e9, seq_length: 2048, pos_emb_options.base: 500000}
      - {seq_length: 8192, train_data_weights: [1, 3], lr_decay_style: linear}

A stage changes the keys that it sets, and they stay changed in later stages. It ends at the step `until`, or at the
first step after which the run has read `until_tokens` tokens in total. The last stage ends with the run. A run without
`stages` has one stage.

The number of tokens per batch stays the same: a stage that sets seq_length but no batch size reduces the sequences per
batch in proportion. A stage that sets lr_decay_style starts a new schedule (`Stage.schedule_first`).

Each stage has a complete configuration, `Stage.config`, from which everything in it is built. All of them contain the
list itself, and thus the later stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatron.config.schema import Config, KeyPath, describe_validation_error, list_config_keys
from megatron.config.yaml_files import format_value, quote_value
from megatron.options.model import get_attention_sizes
from megatron.options.section import ChangePolicy
from megatron.options.training import ACCUMULATION_KEY, MAX_STEPS, MICRO_BATCH_KEY
from megatron.position.catalog import MethodFileError, list_encodings, read_encoding_facts

UNTIL, UNTIL_TOKENS = "until", "until_tokens"
ENDS = (UNTIL, UNTIL_TOKENS)
"""Keys of a stage that are not configuration keys."""

_STAGE_POLICIES: tuple[ChangePolicy, ...] = ("context", "numerics", "schedule")
_STAGE_DATA_KEYS = (
    *("train_data_paths", "train_data_weights", "weight_by_num_documents", "weighted_sampler_alpha"),
    "eod_mask_loss",
)
_STAGE_MACHINE_KEYS = (
    *(MICRO_BATCH_KEY, ACCUMULATION_KEY, "checkpoint_activations", "checkpoint_num_layers"),
    *("attention_backend", "attention_check", "attention_chunk_rows", "compile_regions"),
)
_RUN_KEYS: dict[str, str] = {
    **dict.fromkeys(("train_iters", "train_epochs", "stages"), "belongs to the run, not to a stage"),
    "seed": "decides the order of the data, which continues across stages",
    "optimizer.type": "has its own states, which do not carry over",
    **dict.fromkeys(("precision", "fp16", "bf16"), "belongs to the run: masters and loss scale carry over unchanged"),
}
"""Keys that no stage may change although their policy allows it, with the reason."""


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of a run under one configuration."""

    index: int
    """Index of the stage, from 0."""
    first_step: int
    end_step: int
    """First step after the stage."""
    config: Config
    """Configuration of the stage; batch sizes are resolved if the run's are."""
    schedule_first: int
    """First step of the learning-rate schedule, possibly in an earlier stage."""
    schedule_end: int
    """End of the learning-rate schedule, possibly in a later stage."""
    previous: Config
    """Configuration of the previous stage, or of the run for the first stage."""

    def describe(self, num_stages: int, step: int | None = None, rate: float | None = None) -> str:
        """Describe the stage: its number, its steps and batch, and its changes.

        Args:
            num_stages: number of stages of the run.
            step: steps that the run has taken, if it is running.
            rate: learning rate of the next step.
        """
        batch, length = self.config.training.train_batch_size or 0, self.config.model.seq_length
        verb = f", from step {self.first_step:,}"
        if step is not None:
            verb = " begins," if step == self.first_step else f" continues at step {step:,},"
        lines = _list_changes(self.previous, self.config)
        changes = f"; {', '.join(lines)}" if lines else ""
        rates = "" if rate is None else f", learning rate {rate:.2e}"
        return (
            f"stage {self.index + 1} of {num_stages}{verb} until step {self.end_step:,}: "
            f"{batch:,} × {length:,} tokens per step{rates}{changes}"
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, once the batch is resolved."""
        return (self.config.training.train_batch_size or 0) * self.config.model.seq_length


def list_stage_keys() -> list[str]:
    """List the keys that a stage may change."""
    return [
        key.name
        for key in list_config_keys().values()
        if not key.opens and not key.allows_free_values and _is_stage_key(key.path)
    ] + ["pos_emb_options.OPTION"]


def flatten_changes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a stage changes, without its end; nested keys are dotted."""
    flat: dict[str, Any] = {}

    def add(prefix: KeyPath, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            path = (*prefix, *name.split("."))
            key = list_config_keys().get(path)
            if isinstance(value, Mapping) and key is not None and (key.opens or key.allows_free_values):
                add(path, value)
            else:
                flat[".".join(path)] = value

    add((), {name: value for name, value in entry.items() if name not in ENDS})
    return flat


def find_stage_problems(config: Config) -> Iterator[str]:
    """Yield problems with the list of stages before the batch is resolved, as sentences that begin with the stage."""
    entries = config.training.stages
    if not entries:
        return
    if len(entries) == 1:
        yield "stages: there is only one stage; move its keys out of the list, or add a second"
        return
    last_end: dict[str, float] = dict.fromkeys(ENDS, 0)
    current = config
    for number, entry in enumerate(entries, start=1):
        name, is_last = f"stages: stage {number}", number == len(entries)
        problems = [*_find_end_problems(entry, last_end, is_last=is_last), *_find_key_problems(config, entry)]
        if not problems:
            try:
                current = apply_changes(current, flatten_changes(entry))
            except ValidationError as error:
                problems = list(describe_validation_error(error, lambda _: None))
            else:
                problems = list(_find_length_problems(config, current, entries))
        yield from (f"{name}: {problem}" for problem in problems)
        if problems:
            return
    last = entries[-1].get(UNTIL)
    if problem := describe_steps_after_stages(config, None if last is None else int(last)):
        yield problem


def describe_steps_after_stages(config: Config, last: int | None) -> str | None:
    """Describe a `train_iters` after step `last`, at which the last stage ends, or return None."""
    if last is None or config.training.train_iters <= last:
        return None
    return f"stages: the last stage ends at step {last}, but train_iters is {config.training.train_iters}; remove one"


def _find_end_problems(entry: Mapping[str, Any], last_end: dict[str, float], *, is_last: bool) -> Iterator[str]:
    given = [key for key in ENDS if key in entry]
    if len(given) > 1:
        yield f"{UNTIL} and {UNTIL_TOKENS} exclude each other; give one"
    elif not given and not is_last:
        yield f"its end is missing; set {UNTIL} (a step) or {UNTIL_TOKENS}"
    for key in given:
        value = entry[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 1:
            yield f"{key} is {quote_value(value)}; it must be an integer, at least 1"
        elif key == UNTIL and value > MAX_STEPS:
            yield f"{key} is {format_value(value)}; it must be at most {MAX_STEPS}"
        elif value <= last_end[key]:
            yield f"{key} {format_value(value)} is not after the end of an earlier stage, {last_end[key]:g}"
        else:
            last_end[key] = value


def _is_stage_key(path: KeyPath) -> bool:
    if path[0] == "pos_emb_options":
        return True
    key = list_config_keys().get(path)
    if key is None or any(".".join(path[:end]) in _RUN_KEYS for end in range(1, len(path) + 1)):
        return False
    name = key.name
    return key.policy in _STAGE_POLICIES or name in _STAGE_DATA_KEYS or name in _STAGE_MACHINE_KEYS


def is_stage_key(name: str) -> bool:
    """Return True if a stage may change a key; nested keys are dotted."""
    return _is_stage_key(tuple(name.split(".")))


def _find_key_problems(config: Config, entry: Mapping[str, Any]) -> Iterator[str]:
    changes = flatten_changes(entry)
    for name in changes:
        path = tuple(name.split("."))
        reason = next((_RUN_KEYS[n] for n in (name, path[0]) if n in _RUN_KEYS), None)
        if reason is not None:
            yield f"{name}: {reason}"
        elif not _is_stage_key(path):
            yield f"{name}: a stage cannot change it; it can change {', '.join(list_stage_keys())}"
        elif config.data.task is not None and (path[0] in ("seq_length", *_STAGE_DATA_KEYS)):
            yield f"{name}: a stage cannot change the lengths and the data of a task (task {config.data.task})"
    if config.data.data_path is not None and {"train_data_paths", "train_data_weights"} & changes.keys():
        yield "train_data_paths: a run with data_path has one dataset; give train_data_paths instead"
    for encoding in config.position.encodings if any(name.startswith("pos_emb_options.") for name in changes) else ():
        if _has_parameters(config, encoding):
            yield (
                f"pos_emb_options: {encoding} has parameters that depend on its options; a stage can only change "
                "options of an encoding without parameters, such as rotary's base"
            )


def _has_parameters(config: Config, name: str) -> bool:
    """Return True if an encoding has parameters, as declared in its file."""
    sizes = get_attention_sizes(config.model)
    try:
        facts = read_encoding_facts(name) if name in list_encodings() else None
    except MethodFileError:
        return False  # rejected elsewhere
    return facts is not None and facts.has_parameters(config.position.pos_emb_options, **sizes)


def _find_length_problems(config: Config, current: Config, entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield problems with the length of a stage whose configuration is `current`."""
    length, longest = current.model.seq_length, find_longest_length(config)
    if longest % length:
        yield (
            f"seq_length {length} does not divide {longest}, the longest of the stages; texts are cut into samples of "
            f"{longest} tokens, which shorter stages divide further"
        )
    table = config.model.max_position_embeddings
    rows = table or config.model.seq_length
    for name in config.position.encodings if length > rows else ():
        try:
            has_table = name in list_encodings() and read_encoding_facts(name).has_position_table
        except MethodFileError:
            continue
        if has_table:
            says = f"max_position_embeddings {table}" if table else f"{rows}, the first stage's seq_length"
            yield (
                f"seq_length {length} is longer than the {name} table, {says}; set max_position_embeddings to {longest}"
            )


def find_longest_length(config: Config) -> int:
    """Return the longest seq_length of a configuration and its stages. Texts are cut into samples of this length."""
    lengths = [entry["seq_length"] for entry in config.training.stages if isinstance(entry.get("seq_length"), int)]
    return max([config.model.seq_length, *lengths])


def list_stage_configs(config: Config) -> list[Config]:
    """List the configuration of every stage, with batch sizes as given. The list of stages must be valid."""
    configs, current = [], config
    for entry in config.training.stages:
        current = apply_changes(current, flatten_changes(entry))
        configs.append(current)
    return configs


def apply_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration with some dotted keys changed."""
    values: dict[str, Any] = {}
    for name, value in changes.items():
        key, *inner = name.split(".")
        if not inner:
            values[key] = value
            continue
        if key not in values:
            section = list_config_keys()[(key,)].section
            values[key] = getattr(config, section).model_dump(exclude_unset=True).get(key, {})
        target = values[key]
        for part in inner[:-1]:
            target = target.setdefault(part, {})
        target[inner[-1]] = value
    return config.replace(**values)


def _list_changes(before: Config, after: Config) -> list[str]:
    """List the changed keys of two configurations as `key: old → new`."""
    policies: tuple[ChangePolicy, ...] = ("architecture", "context", "data", "numerics", "schedule", "machine")
    old, new = before.get_keys_by_policy(*policies), after.get_keys_by_policy(*policies)
    lines = []
    for key, value in new.items():
        if value == old.get(key) or key in (MICRO_BATCH_KEY, ACCUMULATION_KEY):
            continue
        if isinstance(value, dict):
            inner, was = value, old.get(key) or {}
            lines += [
                f"{key}.{k}: {format_value(was.get(k))} → {format_value(v)}"
                for k, v in inner.items()
                if was.get(k) != v
            ]
        else:
            lines.append(f"{key}: {format_value(old.get(key))} → {format_value(value)}")
    return lines


def find_stage(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage of the next step of a run that has taken `step` steps."""
    return next((stage for stage in stages if step < stage.end_step), stages[-1])


def find_writing_stage(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage that wrote the checkpoint of a step: the stage of its last step."""
    return find_stage(stages, max(0, step - 1))

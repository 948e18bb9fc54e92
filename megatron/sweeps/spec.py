"""Reading a sweep file: ordinary keys that all variants share, and one `sweep:` mapping.

    num_layers: 4                     ordinary keys, shared by all variants
    …
    sweep:
      output: runs/quickstart
      corpus: {sources: [python], folder: data/python}
      seeds: [1234]
      variants:
        rotary: {pos_emb: rotary}     ordinary keys again, on top of the shared ones
        t5: {pos_emb: t5}
        t5_decayed: {branch: {variant: t5, step: 800}, train_iters: 900, lr_decay_style: wsd}
      evaluate: {multiples: [1, 2, 4, 8, 16, 32], protocol: last}

A branch has the keys of the variant that it branches from, and its own on top; it goes on from that one's checkpoint
of the same seed, which is not copied. So one trunk may have several decays.

A benchmark is a further training of every variant, whose `keys` stand where the shared keys stand for the first:

      benchmarks:
        copy: {keys: {task: copy_string, task_length: 16, num_layers: 2, …}, evaluate: {lengths: [16, 64]}}

torch is not imported: a mistake in the file is reported at once.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from megatron.checkpoint.layout import get_checkpoint_path
from megatron.config.config_layers import COMMAND_LINE
from megatron.config.load import find_config, merge_documents, split_override
from megatron.config.method_names import list_processor_values
from megatron.config.position_overrides import list_overrides
from megatron.config.schema import Config, KeyPath
from megatron.config.stages import list_stage_configs
from megatron.config.yaml_files import YamlDocument, format_value, read_yaml
from megatron.distributed.hardware import LocalHardware
from megatron.launch.dispatch import uses_slurm
from megatron.options.evaluation import EvaluationOptions
from megatron.options.sweep import BRANCH, SEEDS, FurtherEvaluationOptions, SweepOptions
from megatron.sweeps.validation import find_sweep_problems, refuse_owned_keys
from megatron.training.resolve_data import resolve_data
from megatron.training.resolve_run import ResolvedRun, resolve_remote_run, resolve_run
from megatron.utils.errors import UserError

EvaluationType = TypeVar("EvaluationType", bound=EvaluationOptions)


@dataclass(frozen=True, eq=False)  # compared by identity: a configuration holds mappings, which have no hash
class SweepMember:
    """One run of the sweep."""

    variant: str
    seed: int
    config: Config
    folder: Path
    """Of the run."""
    evaluation: EvaluationOptions
    results: Path
    """For what this sweep measures of it: the run's own folder, unless sweeps share the run."""
    trunk: "SweepMember | None" = None
    """The member that it branches from."""
    first_step: int = 0
    """Of its own training: where it branches."""
    benchmark: str | None = None
    """The benchmark that its training belongs to; None for the sweep's own."""
    further_evaluations: Mapping[str, FurtherEvaluationOptions] = field(default_factory=dict)
    """By name, those that are of this variant."""

    @property
    def evaluations(self) -> dict[str | None, EvaluationOptions]:
        """All evaluations of it by name; that of None is the first."""
        evaluations: dict[str | None, EvaluationOptions] = {None: self.evaluation}
        evaluations.update(self.further_evaluations)
        return evaluations

    def get_method(self, evaluation: str | None) -> str:
        """Its name in the records of an evaluation: the variant, and the evaluation where that reads it otherwise."""
        is_read_otherwise = any(value is not None for value in list_overrides(self.evaluations[evaluation]).values())
        return f"{self.variant} ({evaluation})" if evaluation is not None and is_read_otherwise else self.variant

    @property
    def origin(self) -> Path | None:
        """The checkpoint that it branches from."""
        return None if self.trunk is None else get_checkpoint_path(self.trunk.folder, self.first_step)

    @property
    def trained_config(self) -> Config:
        """The configuration that its training ends with: of its last stage."""
        return next(reversed(list_stage_configs(self.config)), self.config)

    @property
    def name(self) -> str:
        return ", ".join(filter(None, [self.variant, self.benchmark, f"seed {self.seed}"]))

    @cached_property
    def resolved_run(self) -> ResolvedRun:
        """The run as its training will resolve it, its batch too, on this machine or on nodes of a job; without what
        its data decide.

        Raises what that would.
        """
        resolve = (
            resolve_remote_run
            if uses_slurm(self.config.launch)
            else lambda config: resolve_run(config, LocalHardware.detect())
        )
        return resolve(self.config)

    @property
    def machine_config(self) -> Config:
        """The configuration of `resolved_run`. Raises as that."""
        return self.resolved_run.config

    @cached_property
    def resolved_config(self) -> Config:
        """The same with what the data decide, which must be there. Raises what resolving does."""
        return resolve_data(self.machine_config)[0]

    @cached_property
    def text(self) -> str:
        """The configuration as YAML."""
        return self.config.to_yaml()

    def get_path_beside(self, ending: str) -> Path:
        """A file beside the run's folder, with its name."""
        return self.folder.with_name(self.folder.name + ending)


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked."""

    options: SweepOptions
    members: tuple[SweepMember, ...]
    notes: tuple[str, ...]
    texts: dict[str, str]  # the files it was read from, for the report

    @property
    def output_folder(self) -> Path:
        return get_output_folder(self.options)


def read_sweep(
    files: Sequence[str | Path], overrides: Sequence[str] = (), search: Sequence[str | Path] | None = None
) -> Sweep:
    """Read and check a sweep without running anything.

    Args:
        files: configuration files, merged left to right, at least one with a `sweep:` mapping; of these too the later
            wins, key by key (`sweep.variants` as a whole).
        overrides: `key=value` for all variants, or `sweep.key=value`.
        search: folders to look file names up in, as for `megatron.config.load.load_config`.

    Raises:
        UserError: a file that cannot be read, or something wrong in it, with its line.
    """
    documents = [read_yaml(find_config(name, search)) for name in files]
    sweep_keys, setters, notes = _collect_sweep_keys(documents)
    own = [text for text in overrides if text.removeprefix("--").startswith("sweep.")]
    common = [text for text in overrides if text not in own]
    settings = json.loads(json.dumps(sweep_keys))
    for text in own:
        _apply_override(settings, text)
    refuse_owned_keys([split_override(text)[0].replace("-", "_") for text in common], lambda _: COMMAND_LINE)
    locate = _build_locator(setters, own)
    options = find_sweep_problems(settings, locate)
    shared = [_select_part(document, ()) for document in documents]
    for document in shared:
        refuse_owned_keys(list(document.values), lambda name, document=document: document.locate((name,)))  # type: ignore[misc]

    trainings = [_Training(None, shared, common, options.evaluate, options.evaluations)]
    for name, benchmark in options.benchmarks.items():
        path = ("sweep", "benchmarks", name, "keys")
        overridden, in_file = _split_variant(benchmark.keys, path, locate)
        layers = [
            *([_select_part(setters["benchmarks"], path, in_file)] if in_file else []),
            YamlDocument(f"{COMMAND_LINE}, benchmark {name}", overridden, {}),
        ]
        trainings.append(
            _Training(name, layers, (), benchmark.evaluate, benchmark.evaluations, benchmark.variants, benchmark.seeds)
        )
    members: list[SweepMember] = []
    for training in trainings:
        members += _build_training(training, options, setters, locate, notes)
    texts = {document.source: Path(document.source).read_text(encoding="utf-8") for document in documents}
    return Sweep(options, tuple(members), tuple(dict.fromkeys(notes)), texts)


@dataclass(frozen=True)
class _Training:
    """What all variants train alike: the sweep's own keys, or a benchmark's."""

    benchmark: str | None
    shared: Sequence[YamlDocument]
    overrides: Sequence[str]
    evaluation: EvaluationOptions
    further_evaluations: Mapping[str, FurtherEvaluationOptions]
    variants: Sequence[str] | None = None
    seeds: Sequence[int] | None = None


def _build_training(
    training: _Training,
    options: SweepOptions,
    setters: dict[str, YamlDocument],
    locate: Callable[[KeyPath], str],
    notes: list[str],
) -> list[SweepMember]:
    """The members of one training, variant by variant. What merging their keys replaced is added to `notes`."""
    built: dict[str, list[SweepMember]] = {}
    layers_by_variant: dict[str, list[YamlDocument]] = {}
    for variant in options.sort_variants():
        if training.benchmark is not None and variant not in (training.variants or options.list_unbranched()):
            continue
        keys = {name: value for name, value in options.variants[variant].items() if name not in (BRANCH, SEEDS)}
        overridden, in_file = _split_variant(keys, ("sweep", "variants", variant), locate)
        branch = options.branches.get(variant)
        layers_by_variant[variant] = [
            *([] if branch is None else layers_by_variant[branch.variant]),
            _select_part(setters["variants"], ("sweep", "variants", variant), in_file),
            YamlDocument(f"{COMMAND_LINE}, variant {variant}", overridden, {}),
        ]
        trunks = [] if branch is None else built[branch.variant]
        steps = sorted({other.step for other in options.branches.values() if other.variant == variant})
        built[variant], replaced = _build_members(
            variant, training, options, layers_by_variant[variant], trunks, 0 if branch is None else branch.step
        )
        built[variant] = [_save_for_branches(member, steps) for member in built[variant]]
        notes += replaced
    members = [member for variant_members in built.values() for member in variant_members]
    _check_lengths(training, members)
    return members


def _check_lengths(training: _Training, members: Sequence[SweepMember]) -> None:
    """Refuse evaluations whose lengths or targets would differ between variants. Raises UserError."""
    lengths = {member.trained_config.model.seq_length for member in members}
    evaluation = training.evaluation
    if len(lengths) > 1 and (evaluation.lengths is None or evaluation.multiples is not None):
        raise UserError(
            f"seq_length: variants are trained at {', '.join(map(str, sorted(lengths)))} tokens, so "
            "sweep.evaluate.lengths has to say at which lengths all of them are scored"
        )
    if len(lengths) > 1 and evaluation.protocol == "last" and evaluation.targets is None:
        raise UserError(
            "seq_length: variants are trained at several lengths, so sweep.evaluate.targets has to say how many tokens "
            "of a window are scored: else each would have its own"
        )


def _save_for_branches(member: SweepMember, steps: Sequence[int]) -> SweepMember:
    """A member that saves the checkpoints that others branch from. Raises UserError: it has not so many steps."""
    train_iters = member.config.training.train_iters
    if steps and train_iters and steps[-1] > train_iters:
        raise UserError(
            f"sweep.variants: branch.step {steps[-1]} of {member.variant}, which ends at train_iters {train_iters}"
        )
    saved = sorted({*member.config.checkpoint.extra_save_iters, *steps})
    return replace(member, config=member.config.replace(extra_save_iters=saved)) if steps else member


def _build_members(
    variant: str,
    training: _Training,
    options: SweepOptions,
    own: Sequence[YamlDocument],
    trunks: Sequence[SweepMember],
    first_step: int,
) -> tuple[list[SweepMember], list[str]]:
    """A variant's members, one for each seed, and the notes of merging its keys, which are in `own`.

    trunks, first_step: the members that a branch's go on from, by seed, and where.
    """
    # What a branch loads follows below, of each seed; `finetune` asks that there is something.
    branched = [f"load={trunks[0].folder}"] if trunks else []
    loaded = merge_documents([*training.shared, *own], [*training.overrides, *branched])
    evaluation = _choose_device(training.evaluation, loaded.config)
    further_evaluations = {
        name: _choose_device(further, loaded.config)
        for name, further in training.further_evaluations.items()
        if variant in (further.variants or [variant])
    }
    members = []
    for seed in training.seeds or options.get_seeds(variant):
        trunk = next((trunk for trunk in trunks if trunk.seed == seed), None)
        if first_step and trunk is None:
            raise UserError(f"sweep.variants.{variant}: seed {seed} has no run of the variant that it branches from")
        origin = None if trunk is None else (trunk.folder.parent.name, first_step)
        results = get_output_folder(options).joinpath(
            variant, *([] if training.benchmark is None else [training.benchmark]), f"seed_{seed}"
        )
        folder = (
            results
            if options.runs is None
            else Path(options.runs) / compute_run_identity(loaded.config, origin) / f"seed_{seed}"
        )
        member = SweepMember(
            variant, seed, loaded.config, folder, evaluation, results, trunk, first_step, training.benchmark,
            further_evaluations,
        )  # fmt: skip
        load = None if member.origin is None else str(member.origin)
        config = loaded.config.replace(seed=seed, save=str(folder), load=load)
        members.append(replace(member, config=config))
    return members, list(loaded.notes)


def _choose_device(evaluation: EvaluationType, config: Config) -> EvaluationType:
    """That of the training, unless one is named."""
    return evaluation if "device" in evaluation.model_fields_set else evaluation.replace(device=config.launch.device)


def find_ablations(sweep: Sweep) -> list[tuple[str, str, str]]:
    """The pairs of variants that differ in one of the leaderboard's ablations alone: its name, the variant, and the one
    without it."""
    if sweep.options.leaderboard is None:
        return []
    configs = {
        member.variant: {**member.config.training_fingerprint(), "seed": None}
        for member in sweep.members
        if member.benchmark is None
    }
    found = []
    for name in sweep.options.leaderboard.ablations:
        key = "score_processor" if name in list_processor_values() else "attention_temperature"
        for variant, config in configs.items():
            value = config[key]
            if {name} != set(value if isinstance(value, list) else [value]) - {"none"}:
                continue
            without = {**config, key: "none", f"{key}_options": {}}
            found += [(name, variant, base) for base, other in configs.items() if other == without]
    return found


def get_output_folder(options: SweepOptions) -> Path:
    """Where a sweep writes."""
    return Path(options.output, *([] if options.name is None else [options.name]))


def compute_run_identity(config: Config, origin: tuple[str, int] | None = None) -> str:
    """A folder's name for all runs that train the same but for their seed: the method, and a hash of what decides.

    `origin` is the identity of the run that it branches from, and the step.
    """
    digest = config.compute_training_digest(origin=origin)[:8]
    position = config.position
    processors = "_".join(name for name in position.processors if name != "none")
    return f"{processors}{'+' if processors else ''}{'_'.join(position.encodings)}-{digest}"


def _collect_sweep_keys(documents: Sequence[YamlDocument]) -> tuple[dict[str, Any], dict[str, YamlDocument], list[str]]:
    """The keys of `sweep:` after merging, the file that set each (and `sweep` itself), and what replaced what."""
    values: dict[str, Any] = {}
    setters: dict[str, YamlDocument] = {}
    notes = []
    for document in documents:
        if "sweep" not in document.values:
            continue
        keys = document.values["sweep"]
        if not isinstance(keys, dict):
            raise UserError(
                f"{document.locate(('sweep',))}: sweep is {format_value(keys)}; it must be a mapping of keys"
            )
        for name in keys.keys() & values.keys():
            if values[name] != keys[name]:
                old, new = setters[name].locate(("sweep", name)), document.locate(("sweep", name))
                notes.append(f"sweep.{name} ({old}) replaced ({new})")
        values |= keys
        setters |= dict.fromkeys([*keys, "sweep"], document)
    if not setters:
        names = ", ".join(document.source for document in documents)
        raise UserError(f"{names}: there is no sweep: mapping; a sweep needs one")
    return values, setters, sorted(notes)


def _build_locator(setters: dict[str, YamlDocument], overrides: Sequence[str]) -> Callable[[KeyPath], str]:
    """Who set a key of `sweep:`: the command line, or `file:line`."""
    overridden = [tuple(split_override(text)[0].split(".")) for text in overrides]

    def locate(path: KeyPath) -> str:
        document = setters[path[1]] if path[1:] and path[1] in setters else setters["sweep"]
        is_set = any(path[: len(key)] == key for key in overridden)  # the command line set it, or what it is in
        is_opened = path not in document.lines and any(key[: len(path)] == path for key in overridden)
        return COMMAND_LINE if is_set or is_opened else document.locate(path)

    return locate


def _split_variant(
    values: dict[str, Any], path: KeyPath, locate: Callable[[KeyPath], str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A mapping's keys that the command line set, and those of a file."""
    from_command_line: dict[str, Any] = {}
    from_file: dict[str, Any] = {}
    for name, value in values.items():
        inner = (*path, name)
        if locate(inner) == COMMAND_LINE:
            from_command_line[name] = value
        elif isinstance(value, dict):
            overridden, from_file[name] = _split_variant(value, inner, locate)
            from_command_line |= {name: overridden} if overridden else {}
        else:
            from_file[name] = value
    return from_command_line, from_file


def _select_part(document: YamlDocument, path: KeyPath, values: dict[str, Any] | None = None) -> YamlDocument:
    """The mapping under a path as a document of its own with its lines. Without a path: all but `sweep`."""
    if not path:
        remaining = {name: value for name, value in document.values.items() if name != "sweep"}
        return replace(document, values=remaining, lines={p: n for p, n in document.lines.items() if p[0] != "sweep"})
    lines = {p[len(path) :]: n for p, n in document.lines.items() if p[: len(path)] == path and len(p) > len(path)}
    return YamlDocument(document.source, values or {}, lines)


def _apply_override(settings: dict[str, Any], text: str) -> None:
    """Put `sweep.a.b=value` into the mapping."""
    name, value = split_override(text)
    *outer, last = name.split(".")[1:]
    inside = settings
    for part in outer:
        if not isinstance(inside.setdefault(part, {}), dict):
            raise UserError(f"command line: {name}: sweep.{part} is {format_value(inside[part])}, not a mapping")
        inside = inside[part]
    inside[last] = value

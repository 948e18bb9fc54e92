"""Sweep files: ordinary keys shared by all variants, and a `sweep:` mapping.

    num_layers: 4                     ordinary keys, shared by all variants
    …
    sweep:
      output: runs/quickstart
      corpus: {sources: [python], folder: data/python}
      seeds: [1234]
      variants:
        rotary: {pos_emb: rotary}     ordinary keys, added to the shared ones
        t5: {pos_emb: t5}
        t5_decayed: {branch: {variant: t5, step: 800}, train_iters: 900, lr_decay_style: wsd}
      evaluate: {lengths: [1x, 2x, 4x, 8x, 16x, 32x], protocol: last}

A branch inherits the keys of the variant it branches from and adds its own. It continues from that variant's checkpoint
with the same seed, which is not copied. One trunk can therefore have several decay schedules.

A benchmark is another training of every variant, whose `keys` replace the shared keys:

      benchmarks:
        copy: {keys: {task: copy_string, task_length: 16, num_layers: 2, …}, evaluate: {lengths: [16, 64]}}

This module does not import torch, so mistakes in the file are reported immediately.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from megatron.checkpoint.layout import get_checkpoint_path
from megatron.config.config_layers import COMMAND_LINE, ConfigLayers
from megatron.config.execution import ResolvedRun
from megatron.config.load import find_config, merge_documents, split_override
from megatron.config.method_names import find_missing_published_keys, list_processor_values
from megatron.config.position_overrides import list_overrides
from megatron.config.schema import Config, KeyPath
from megatron.config.stages import list_stage_configs
from megatron.config.validation import check_config
from megatron.config.yaml_files import YamlDocument, read_yaml
from megatron.distributed.hardware import LocalHardware
from megatron.launch.dispatch import uses_slurm
from megatron.options.evaluation import EvaluationOptions
from megatron.options.sweep import BRANCH, SEEDS, FurtherEvaluationOptions, SweepOptions
from megatron.sweeps.sweep_keys import (
    apply_sweep_override,
    build_sweep_locator,
    check_no_owned_keys,
    collect_sweep_keys,
    find_sweep_problems,
    get_inside,
    list_other_spellings,
    select_part,
    split_by_source,
)
from megatron.training.check_start import resolve_data
from megatron.training.resolve_run import resolve_remote_run, resolve_run
from megatron.utils.errors import UserError

EvaluationType = TypeVar("EvaluationType", bound=EvaluationOptions)


@dataclass(frozen=True, eq=False)  # by identity: configurations contain mappings, which are not hashable
class SweepMember:
    """Run of a sweep: a variant with a seed, possibly of a benchmark."""

    variant: str
    seed: int
    config: Config
    folder: Path
    """Folder of the run."""
    evaluation: EvaluationOptions
    results: Path
    """Folder for this sweep's results of the run: the run's own folder, unless sweeps share the run."""
    trunk: "SweepMember | None" = None
    """Member that it branches from, or None."""
    branch_step: int = 0
    """Step of the trunk's checkpoint that it branches from."""
    benchmark: str | None = None
    """Benchmark of its training, or None for the sweep's own."""
    further_evaluations: Mapping[str, FurtherEvaluationOptions] = field(default_factory=dict)
    """Additional evaluations of this variant, by name."""
    layers: ConfigLayers = field(default_factory=lambda: ConfigLayers({}, {}), compare=False, repr=False)
    """Layers of the configuration, which know where each key was set."""

    @property
    def evaluations(self) -> dict[str | None, EvaluationOptions]:
        """All evaluations by name; the main one has the key None."""
        evaluations: dict[str | None, EvaluationOptions] = {None: self.evaluation}
        evaluations.update(self.further_evaluations)
        return evaluations

    def get_evaluation_path(self, evaluation: str | None) -> KeyPath:
        """Return the path of the keys of an evaluation in the sweep file."""
        training = ("sweep",) if self.benchmark is None else ("sweep", "benchmarks", self.benchmark)
        return (*training, "evaluate") if evaluation is None else (*training, "evaluations", evaluation)

    def get_method(self, evaluation: str | None) -> str:
        """Return the method name in an evaluation's records.

        It is the variant, plus the evaluation if it overrides positions.
        """
        is_read_otherwise = any(value is not None for value in list_overrides(self.evaluations[evaluation]).values())
        return f"{self.variant} ({evaluation})" if evaluation is not None and is_read_otherwise else self.variant

    @property
    def origin(self) -> Path | None:
        """Checkpoint that it branches from, or None."""
        return None if self.trunk is None else get_checkpoint_path(self.trunk.folder, self.branch_step)

    @property
    def first_step(self) -> int:
        """Step at which its own training starts: that of its origin, or 0 if it loads only the weights."""
        return 0 if self.config.checkpoint.finetune else self.branch_step

    @property
    def trained_config(self) -> Config:
        """Configuration at the end of training, that is, of the last stage."""
        return next(reversed(list_stage_configs(self.config)), self.config)

    @property
    def name(self) -> str:
        return ", ".join(filter(None, [self.variant, self.benchmark, f"seed {self.seed}"]))

    @cached_property
    def resolved_run(self) -> ResolvedRun:
        """Run as its training will resolve it, without values that depend on the data.

        It is resolved for this machine or a job's nodes.

        Raises the same errors as the training.
        """
        resolve = (
            resolve_remote_run
            if uses_slurm(self.config.launch)
            else lambda config: resolve_run(config, LocalHardware.detect())
        )
        check_config(self.config)
        with self.layers.locate_errors():
            return resolve(self.config)

    @property
    def machine_config(self) -> Config:
        """Configuration of `resolved_run`. Raises the same errors."""
        return self.resolved_run.config

    @cached_property
    def resolved_config(self) -> Config:
        """Configuration resolved with the data, which must exist. Raises the errors of resolving."""
        return resolve_data(self.machine_config)[0]

    @cached_property
    def text(self) -> str:
        return self.config.to_yaml()

    def get_sibling_path(self, suffix: str) -> Path:
        """Return the path of a file next to the run's folder: its name with a suffix."""
        return self.folder.with_name(self.folder.name + suffix)


@dataclass(frozen=True)
class Sweep:
    """Validated sweep file."""

    options: SweepOptions
    members: tuple[SweepMember, ...]
    notes: tuple[str, ...]
    texts: dict[str, str]  # the files it was read from, for the report
    locate: Callable[[KeyPath], str]
    """Function that returns where a key was set, as `file:line` or the command line."""
    settings: Mapping[str, Any]
    """Merged `sweep:` mapping as it was written."""

    def find_written_key(self, path: KeyPath) -> KeyPath:
        """Return the path of an evaluation's key with the name that was written: `windows` instead of `num_windows`."""
        written = get_inside(self.settings, path[1:-1]) or {}
        spellings = [path[-1], *list_other_spellings(path[-1])]
        return (*path[:-1], next((name for name in spellings if name in written), path[-1]))

    @property
    def output_folder(self) -> Path:
        return get_output_folder(self.options)


def read_sweep(
    files: Sequence[str | Path], overrides: Sequence[str] = (), search: Sequence[str | Path] | None = None
) -> Sweep:
    """Read and validate a sweep without running anything.

    Args:
        files: configuration files, merged left to right, at least one with a `sweep:` mapping. Later files override the
            keys of earlier ones, also within `sweep:` (`sweep.variants` as a whole).
        overrides: `key=value` for all variants, or `sweep.key=value`.
        search: folders to search for file names, as for `megatron.config.load.load_config`.

    Raises:
        UserError: a file cannot be read or contains errors, with line numbers.
    """
    documents = [read_yaml(find_config(name, search)) for name in files]
    sweep_keys, setters, notes = collect_sweep_keys(documents)
    own = [text for text in overrides if text.removeprefix("--").startswith("sweep.")]
    common = [text for text in overrides if text not in own]
    settings = json.loads(json.dumps(sweep_keys))
    for text in own:
        apply_sweep_override(settings, text)
    check_no_owned_keys([split_override(text)[0].replace("-", "_") for text in common], lambda _: COMMAND_LINE)
    locate = build_sweep_locator(setters, own)
    options = find_sweep_problems(settings, locate)
    shared = [select_part(document, ()) for document in documents]
    for document in shared:
        check_no_owned_keys(list(document.values), lambda name, document=document: document.locate((name,)))  # type: ignore[misc]

    trainings = [_Training(None, shared, common, options.evaluate, options.evaluations)]
    for name, benchmark in options.benchmarks.items():
        path = ("sweep", "benchmarks", name, "keys")
        overridden, in_file = split_by_source(benchmark.keys, path, locate)
        layers = [
            *([select_part(setters["benchmarks"], path, in_file)] if in_file else []),
            *([YamlDocument(f"{COMMAND_LINE}, benchmark {name!r}", overridden, {})] if overridden else []),
        ]
        trainings.append(
            _Training(name, layers, (), benchmark.evaluate, benchmark.evaluations, benchmark.variants, benchmark.seeds)
        )
    members: list[SweepMember] = []
    for training in trainings:
        members += _build_training(training, options, setters, locate, notes)
    _check_shared_runs(members)
    if not options.differences:
        notes += _describe_unpublished_methods(members)
    texts = {document.source: Path(document.source).read_text(encoding="utf-8") for document in documents}
    return Sweep(options, tuple(members), tuple(dict.fromkeys(notes)), texts, locate, settings)


def _describe_unpublished_methods(members: Sequence[SweepMember]) -> Iterator[str]:
    """Yield a note on the methods that lack keys of their files, unless there are none."""
    found: dict[str, dict[str, Any]] = {}
    for member in {member.variant: member for member in members}.values():
        found |= find_missing_published_keys(member.config, member.layers.values)
    if found:
        keys = ", ".join(dict.fromkeys(key for missing in found.values() for key in missing))
        yield (
            f"{', '.join(found)}: their files in configs/position, which define them as published, also set {keys}; "
            "set these keys, or state the difference in sweep.differences to omit this note"
        )


@dataclass(frozen=True)
class _Training:
    """Training settings shared by all variants: the sweep's own, or a benchmark's."""

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
    """Build the members of one training, variant by variant. Replaced keys are reported in `notes`."""
    built: dict[str, list[SweepMember]] = {}
    layers_by_variant: dict[str, list[YamlDocument]] = {}
    for variant in options.sort_variants():
        if training.benchmark is not None and variant not in (training.variants or options.list_root_variants()):
            continue
        keys = {name: value for name, value in options.variants[variant].items() if name not in (BRANCH, SEEDS)}
        overridden, in_file = split_by_source(keys, ("sweep", "variants", variant), locate)
        branch = options.branches.get(variant)
        layers_by_variant[variant] = [
            *([] if branch is None else layers_by_variant[branch.variant]),
            select_part(setters["variants"], ("sweep", "variants", variant), in_file),
            *([YamlDocument(f"{COMMAND_LINE}, variant {variant!r}", overridden, {})] if overridden else []),
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
    """Reject evaluations whose lengths or targets would differ between variants. Raises UserError."""
    lengths = {member.trained_config.model.seq_length for member in members}
    evaluation = training.evaluation
    if len(lengths) > 1 and (evaluation.lengths is None or evaluation.multiples is not None):
        raise UserError(
            f"seq_length: variants are trained at {', '.join(map(str, sorted(lengths)))} tokens, so "
            "sweep.evaluate.lengths must set the lengths at which all of them are evaluated"
        )
    if len(lengths) > 1 and evaluation.protocol == "last" and evaluation.targets is None:
        raise UserError(
            "seq_length: variants are trained at several lengths, so sweep.evaluate.targets must set the number of "
            "scored tokens per window; otherwise it would differ between variants"
        )


def _check_shared_runs(members: Sequence[SweepMember]) -> None:
    """Reject members that share a run but have other batch sizes, which depend on the machine and are not in its name.

    Raises UserError.
    """
    first_of_run: dict[Path, SweepMember] = {}
    for member in members:
        first = first_of_run.setdefault(member.folder, member)
        if first is member:
            continue
        batch, other_batch = (each.machine_config.training.train_batch_size for each in (member, first))
        if batch != other_batch:
            raise UserError(
                f"sweep.variants.{member.variant}: it differs from {first.variant} only in the keys that determine the "
                f"batch size, {batch} instead of {other_batch}; set train_batch_size, which is part of the name of a "
                "run in sweep.runs"
            )


def _save_for_branches(member: SweepMember, steps: Sequence[int]) -> SweepMember:
    """Add the checkpoints that other members branch from to a member. Raises UserError if it has fewer steps."""
    train_iters = member.config.training.train_iters
    if steps and train_iters and steps[-1] > train_iters:
        raise UserError(
            f"sweep.variants: branch.step {steps[-1]} of {member.variant} is beyond its train_iters {train_iters}"
        )
    saved = sorted({*member.config.checkpoint.extra_save_iters, *steps})
    return replace(member, config=member.config.replace(extra_save_iters=saved)) if steps else member


def _build_members(
    variant: str,
    training: _Training,
    options: SweepOptions,
    own: Sequence[YamlDocument],
    trunks: Sequence[SweepMember],
    branch_step: int,
) -> tuple[list[SweepMember], list[str]]:
    """Build the members of a variant, one per seed, and the notes on merging its keys in `own`.

    trunks, branch_step: members that a branch continues from, by seed, and the step.
    """
    # The path to load is set per seed below; here it satisfies the check of `finetune`.
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
        if branch_step and trunk is None:
            raise UserError(f"sweep.variants.{variant}: seed {seed} is missing in the variant that it branches from")
        origin = None if trunk is None else (trunk.folder.parent.name, branch_step)
        results = get_output_folder(options).joinpath(
            variant, *([] if training.benchmark is None else [training.benchmark]), f"seed_{seed}"
        )
        folder = (
            results
            if options.runs is None
            else Path(options.runs) / compute_run_identity(loaded.config, origin) / f"seed_{seed}"
        )
        member = SweepMember(
            variant, seed, loaded.config, folder, evaluation, results, trunk, branch_step, training.benchmark,
            further_evaluations, loaded.layers,
        )  # fmt: skip
        load = None if member.origin is None else str(member.origin)
        config = loaded.config.replace(seed=seed, save=str(folder), load=load)
        members.append(replace(member, config=config))
    return members, list(loaded.notes)


def _choose_device(evaluation: EvaluationType, config: Config) -> EvaluationType:
    """Return the evaluation with the device of the training, unless it sets its own."""
    return evaluation if "device" in evaluation.model_fields_set else evaluation.replace(device=config.launch.device)


def find_ablations(sweep: Sweep) -> list[tuple[str, str, str]]:
    """Return the pairs of variants that differ in one of the leaderboard's ablations only.

    Each entry has the ablation's name, the variant, and the variant without it.
    """
    if sweep.options.leaderboard is None:
        return []
    configs = {
        member.variant: {**member.config.get_training_fingerprint(), "seed": None}
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
    return Path(options.output, *([] if options.name is None else [options.name]))


def compute_run_identity(config: Config, origin: tuple[str, int] | None = None) -> str:
    """Return the folder name of all runs with the same training except for seed: method and hash.

    `origin` is the identity of the run that it branches from, and the step.
    """
    weights_only = config.checkpoint.finetune or None  # left out if false, so that other runs keep their names
    digest = config.compute_training_digest(origin=origin, weights_only=weights_only)[:8]
    position = config.position
    processors = "_".join(name for name in position.processors if name != "none")
    return f"{processors}{'+' if processors else ''}{'_'.join(position.encodings)}-{digest}"

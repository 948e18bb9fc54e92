"""Validators that compare several keys. Each yields the key to blame and one sentence with the values."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterator

from megatron.attention.backends.backend import find_unsupported_feature, list_method_features
from megatron.config import method_names
from megatron.config.execution import (
    check_divisible,
    find_graph_obstacle,
    resolve_batch_sizes,
    resolve_mesh_shape,
)
from megatron.config.schema import Config
from megatron.config.stages import find_stage_problems, list_stage_configs
from megatron.options.data import find_data_conflicts, parse_split_fractions
from megatron.options.launch import find_launch_conflicts
from megatron.options.optimizer import find_schedule_conflicts
from megatron.options.output import find_logging_conflicts
from megatron.options.position import PositionOptions, find_model_conflicts
from megatron.options.training import find_eval_length_conflicts, find_training_conflicts
from megatron.position.catalog import (
    METHODS_VARIABLE,
    MethodFileError,
    list_encodings,
    list_processors,
    list_temperatures,
    read_encoding_facts,
    read_processor_facts,
    read_temperature_facts,
)
from megatron.utils.errors import UserError, shorten_text
from megatron.utils.formatting import format_choices, suggest_names

ConfigProblem = tuple[str, str]


def validate_config(config: Config) -> Iterator[ConfigProblem]:
    """Yield every problem that can be found before torch is imported."""
    problems = [problem for validate in VALIDATORS for problem in validate(config)]
    yield from problems
    yield from _validate_stages(config, problems)


def check_config(config: Config) -> None:
    """Raise UserError with the first problem of a configuration that was not loaded from files as it is."""
    for _, problem in validate_config(config):
        raise UserError(problem)


def _validate_model(config: Config) -> Iterator[ConfigProblem]:
    yield from find_model_conflicts(config.model, config.position)
    yield from check_divisible(config)


def describe_unknown_method(key: str, name: str, methods: list[str]) -> Iterator[ConfigProblem]:
    """Yield the problem with an unknown method name.

    `key` is `pos_emb`, `score_processor` or `attention_temperature`.
    """
    if name in methods:
        return
    match method_names.find_method(name):
        case (other_key, own_name) if other_key == key:
            yield key, f"{key}: no method is called {name!r}; Farfield calls it {own_name}"
        case (other_key, own_name):
            yield key, f"{key}: {name!r} is a value of another key, {other_key}: {other_key}={own_name}"
        case None if (overlay := name.replace("-", "_")) in method_names.list_overlays():
            reason = f"is not a method but an overlay, configs/position/{overlay}.yml"
            yield key, f"{key} {name} {reason}; pass it with the other files: ./deepy.py train CONFIG {overlay}"
        case None:
            remedy = f"{format_choices(name, methods)}; list folders of other methods in {METHODS_VARIABLE}"
            yield key, f"{key} {shorten_text(name)} is not available; {remedy}"


def validate_methods(
    key: str,
    names: list[str],
    methods: list[str],
    options: dict[str, object],
    list_options: Callable[[str], tuple[str, ...] | None],
) -> Iterator[ConfigProblem]:
    """Yield unknown method names of all layers, and options that none of the methods has."""
    valid: list[str] = []
    is_known = True
    for name in names:
        yield from describe_unknown_method(key, name, methods)
        try:
            own_options = list_options(name) if name in methods else None
        except MethodFileError as error:
            own_options = None
            yield key, f"{key}: {error}"
        is_known &= own_options is not None
        valid += [option for option in own_options or () if option not in valid]
    for option in options if is_known else ():
        if option not in valid:
            has, takes = ("has", "it takes") if len(names) == 1 else ("have", "they take")
            takes = f"{takes} {', '.join(valid)}" if valid else f"{takes} no options"
            parts = [f"{key} {', '.join(names)} {has} no option {option!r}", takes, suggest_names(option, valid)]
            yield f"{key}_options.{option}", "; ".join(filter(None, parts))


def _validate_position(config: Config) -> Iterator[ConfigProblem]:
    position, model = config.position, config.model
    yield from validate_methods(
        "pos_emb", position.encodings, list_encodings(), position.pos_emb_options, method_names.list_encoding_options
    )
    yield from validate_methods(
        "score_processor",
        position.processors,
        method_names.list_processor_values(),
        position.score_processor_options,
        method_names.list_processor_options,
    )
    yield from validate_methods(
        "attention_temperature",
        position.temperatures,
        method_names.list_temperature_values(),
        position.attention_temperature_options,
        method_names.list_temperature_options,
    )
    yield from _validate_option_types(position)
    table_size = model.max_position_embeddings
    for name in position.encodings:
        if table_size is not None and table_size < model.seq_length and _has_position_table(name):
            yield (
                "max_position_embeddings",
                f"seq_length {model.seq_length} is longer than the {name} table, max_position_embeddings {table_size}",
            )
    yield from _validate_embeddings(position)


def _validate_option_types(position: PositionOptions) -> Iterator[ConfigProblem]:
    """Yield option values of a type that the method's file does not allow, before anything computes with them."""
    for key, names, methods, read_facts in (
        ("pos_emb", position.encodings, list_encodings(), read_encoding_facts),
        ("score_processor", position.processors, list_processors(), read_processor_facts),
        ("attention_temperature", position.temperatures, list_temperatures(), read_temperature_facts),
    ):
        for name in (name for name in names if name in methods):
            try:
                facts = read_facts(name)
            except MethodFileError:
                continue  # reported with the names
            for option, value in getattr(position, f"{key}_options").items():
                if reason := facts.describe_wrong_type(option, value):
                    yield f"{key}_options.{option}", f"{key}: option {option} of {name} {reason}"


def _validate_embeddings(position: PositionOptions) -> Iterator[ConfigProblem]:
    """Reject encodings that add to the token embeddings if layers have different encodings or parameters."""
    for name in position.encodings:
        if "embed" not in _read_hooks(name):
            continue
        if len(position.encodings) > 1:
            yield "pos_emb", f"pos_emb: {name} adds to the token embeddings and cannot be used in a pattern of layers"
        elif position.pos_emb_per_layer:
            reason = f"{name} adds to the token embeddings, which are not per layer"
            yield "pos_emb_per_layer", f"pos_emb_per_layer: true, but {reason}"


def _read_hooks(name: str) -> frozenset[str]:
    """Return the hooks of an encoding; empty for an unreadable file, which is rejected elsewhere."""
    try:
        return read_encoding_facts(name).hooks if name in list_encodings() else frozenset()
    except MethodFileError:
        return frozenset()


def _has_position_table(name: str) -> bool:
    """Return True if an encoding has a table of positions. Unreadable files are rejected elsewhere."""
    try:
        return name in list_encodings() and read_encoding_facts(name).has_position_table
    except MethodFileError:
        return False


def _validate_attention_backend(config: Config) -> Iterator[ConfigProblem]:
    """Reject an explicit backend that does not support the method, as declared in the method's file."""
    backend, found = config.model.attention_backend, dict[tuple[str, str, str], frozenset[str]]()
    for layer in range(min(config.position.period, config.model.num_layers)):
        own = config.position.get_layer_options(layer)
        names = (own.encoding, own.processor, own.softmax)
        known = own.encoding in list_encodings() and own.processor in ("none", *list_processors())
        if not known or names in found:
            continue
        try:
            facts = read_encoding_facts(own.encoding)
            processor_facts = None if own.processor == "none" else read_processor_facts(own.processor)
        except MethodFileError:  # rejected elsewhere
            continue
        found[names] = list_method_features(
            facts,
            processor_facts=processor_facts,
            has_softcap=config.model.attn_logit_softcapping is not None,
            options=own.pos_emb_options,
            softmax_type=own.softmax,
        )
    supports_sdpa = all(find_unsupported_feature("sdpa", features) is None for features in found.values())
    choices = "auto, sdpa, eager or chunked" if supports_sdpa else "auto, eager or chunked"
    for (encoding, processor, _), features in found.items():
        if (reason := find_unsupported_feature(backend, features)) is not None:
            method = f"pos_emb {encoding}" + ("" if processor == "none" else f" with score_processor {processor}")
            yield "attention_backend", f"attention_backend {backend!r}: {reason} ({method}); use {choices}"
            return


def _validate_batch(config: Config) -> Iterator[ConfigProblem]:
    training = config.training
    batch, micro = training.train_batch_size, training.train_micro_batch_size_per_gpu
    if batch is not None and "train_micro_batch_size_per_gpu" in training.model_fields_set and batch % micro:
        yield (
            "train_batch_size",
            f"train_batch_size {batch} is not divisible by train_micro_batch_size_per_gpu {micro}",
        )
    elif (world_size := config.launch.known_world_size) is not None:
        try:
            sizes = resolve_mesh_shape(config, world_size)
        except UserError as error:
            yield "num_gpus", str(error)
            return
        try:
            resolve_batch_sizes(config, sizes.data)
        except UserError as error:
            yield "train_batch_size", str(error)


def _validate_schedule(config: Config) -> Iterator[ConfigProblem]:
    params = config.optimizer.optimizer.params
    yield from find_schedule_conflicts(config.optimizer, config.training.train_iters)
    if any(not 0 <= beta < 1 for beta in params.betas):
        yield "optimizer.params.betas", f"optimizer.params.betas are {params.betas}; each must be in [0, 1)"


def _validate_optimizer(config: Config) -> Iterator[ConfigProblem]:
    """Reject optimizers that do not work with ZeRO's sharding or offloading, and constants that they do not read."""
    choice, zero = config.optimizer.optimizer, config.training.zero_optimization
    for name, types in (("eps", ("Adam", "AdamW", "Muon")), ("momentum", ("Muon",)), ("ns_steps", ("Muon",))):
        default = type(choice.params).model_fields[name].default
        if choice.type not in types and (value := getattr(choice.params, name)) != default:
            yield (
                f"optimizer.params.{name}",
                f"optimizer.params.{name} is {value}, which optimizer.type {choice.type} does not read",
            )
    if choice.type != "Muon":
        return
    if zero.stage == 3:
        yield (
            "zero_optimization.stage",
            "zero_optimization.stage 3: Muon orthogonalizes whole matrices, which no rank has at this stage "
            "when the optimizer steps; use stage 0, 1 or 2",
        )
    elif zero.offload_optimizer.device != "none":
        yield (
            "zero_optimization.offload_optimizer.device",
            f"zero_optimization.offload_optimizer.device {zero.offload_optimizer.device}: Muon's matrix products "
            "would run on the CPU, which takes longer than the rest of the step; use none",
        )


def _validate_cuda_graph(config: Config) -> Iterator[ConfigProblem]:
    """Yield the reason why `cuda_graph: on` is impossible, if there is one."""
    if config.training.cuda_graph != "on":
        return
    obstacle = find_graph_obstacle(config)
    if config.launch.device == "cpu":
        obstacle = "device cpu has no CUDA graphs"
    if obstacle is not None:
        yield "cuda_graph", f"cuda_graph on: {obstacle}; use cuda_graph auto or off"


def _validate_data(config: Config) -> Iterator[ConfigProblem]:
    problems = list(find_data_conflicts(config.data))
    yield from problems
    if not any(key == "split" for key, _ in problems) and parse_split_fractions(config.data.split)[0] == 0:
        yield "split", f"split is {config.data.split!r}, which leaves nothing to train on; use for example 969,30,1"


def _validate_task(config: Config) -> Iterator[ConfigProblem]:
    """Yield conflicts between a task and other keys."""
    data, launch = config.data, config.launch
    if data.task is None:
        return
    from megatron.data.tasks import task_config as tasks  # imports numpy, and most configurations have no task

    task_problems = list(tasks.find_task_problems(data))
    yield from task_problems
    for name, size in (
        ("context_parallel_size", launch.context_parallel_size),
        ("pipe_parallel_size", launch.pipe_parallel_size),
    ):
        if size > 1:
            yield name, f"{name} {size}: the sequences of a task differ in length from step to step; set it to 1"
    if not task_problems and not any(key == "task_shortest_length" for key, _ in find_data_conflicts(data)):
        longest = max(tasks.read_task_config(data).sequence_lengths)
        if config.model.seq_length != longest:
            yield (
                "seq_length",
                f"seq_length is {config.model.seq_length}, but the longest sequence of {data.task} with task_length "
                f"{data.task_length} has {longest} tokens; leave it out, or set it to {longest}",
            )
        yield from _validate_task_positions(config, tasks.read_task_config(data).task.position_limit)


def _validate_task_positions(config: Config, limit: int | None) -> Iterator[ConfigProblem]:
    """Yield conflicts with position ids that a task provides, all of them smaller than `limit`."""
    if limit is None:
        return
    position, table = config.position, config.model.max_position_embeddings or config.model.seq_length
    if not set(position.encodings) <= set(list_encodings()):
        return  # reported with the encodings
    facts = {name: read_encoding_facts(name) for name in position.encodings}
    if not any(each.takes_positions for each in facts.values()) or not all(
        each.takes_any_positions for each in facts.values()
    ):
        every = {name: read_encoding_facts(name) for name in list_encodings()}
        able = [name for name, each in every.items() if each.takes_positions and each.takes_any_positions]
        yield (
            "pos_emb",
            f"pos_emb {', '.join(facts)}: {config.data.task} provides its own positions, several tokens at one; "
            f"use an encoding that adds to embeddings or rotates queries and keys: {', '.join(able)}",
        )
    for name in (name for name, each in facts.items() if each.has_position_table and table < limit):
        yield (
            "max_position_embeddings",
            f"max_position_embeddings is {table}, but {config.data.task} needs {limit} rows of the {name} table",
        )
    for key, value in (("randomized_positions", None), ("attention_mask", "causal")):
        if (given := getattr(position, key)) != value:
            yield key, f"{key} is {given}, but {config.data.task} provides its own positions"


def _validate_training(config: Config) -> Iterator[ConfigProblem]:
    yield from find_training_conflicts(config.training)
    if config.data.task is None:
        yield from find_eval_length_conflicts(config.training, config.model.seq_length)


def _validate_logging(config: Config) -> Iterator[ConfigProblem]:
    yield from find_logging_conflicts(config.logging)


def _validate_harness(config: Config) -> Iterator[ConfigProblem]:
    """Yield conflicts between tasks of lm-evaluation-harness during training and other keys."""
    if not config.logging.harness.tasks:
        return
    key, remedy = "harness.tasks", "evaluate its checkpoints with ./deepy.py evaluate --tasks instead"
    if config.data.task is not None:
        yield key, f"{key}: a run on the task {config.data.task} has no tokenizer and cannot read these tasks"
    for name, reason in (
        ("pipe_parallel_size", "their texts differ in length, but pipeline stages exchange equal shapes"),
        ("context_parallel_size", "their texts are padded, but context parallelism divides rows without padding"),
    ):
        if (size := getattr(config.launch, name)) > 1:
            yield key, f"{key}: not supported with {name} {size}: {reason}; {remedy}"


def _validate_launch(config: Config) -> Iterator[ConfigProblem]:
    yield from find_launch_conflicts(config.launch)


def _validate_run(config: Config) -> Iterator[ConfigProblem]:
    options = config.checkpoint
    for key, folder in (("save", options.save), ("load", options.load)):
        if folder is not None and any(unicodedata.category(character) == "Cc" for character in folder):
            problem = "folder names cannot contain line breaks or other control characters"
            yield key, f"{key} is {folder!r}; {problem}"
    if options.finetune and options.load is None:
        yield "finetune", "finetune: true needs load, the run to load the weights from"
    if options.rollback and options.load is None:
        yield "rollback", "rollback: true needs load, the checkpoint of this run to roll back to"
    if options.rollback and options.finetune:
        yield (
            "rollback",
            "rollback: true rolls a run back, but finetune: true starts a new one; remove one of them",
        )


def _validate_stages(config: Config, problems_of_run: Collection[ConfigProblem]) -> Iterator[ConfigProblem]:
    """Yield problems with the list of stages, and problems in one of them that the run does not have."""
    if config.training.train_epochs is not None:
        if config.data.task is not None:
            yield "train_epochs", f"train_epochs: task {config.data.task} has unlimited data; set train_iters"
        if any("train_data_paths" in stage for stage in config.training.stages):
            yield (
                "train_epochs",
                "train_epochs: not supported if a stage changes train_data_paths; set train_iters",
            )
    if not config.training.stages:
        return
    problems = [("stages", problem) for problem in find_stage_problems(config)]
    yield from problems
    if problems:
        return
    validators = [v for v in VALIDATORS if v not in (_validate_batch, _validate_task)]
    known = set(problems_of_run)
    for number, stage_config in enumerate(list_stage_configs(config), start=1):
        for key, problem in (problem for validate in validators for problem in validate(stage_config)):
            if (key, problem) not in known:
                known.add((key, problem))
                yield "stages", f"stages: stage {number}: {problem}"


VALIDATORS: tuple[Callable[[Config], Iterator[ConfigProblem]], ...] = (
    _validate_model,
    _validate_position,
    _validate_attention_backend,
    _validate_batch,
    _validate_training,
    _validate_schedule,
    _validate_optimizer,
    _validate_cuda_graph,
    _validate_data,
    _validate_task,
    _validate_logging,
    _validate_harness,
    _validate_launch,
    _validate_run,
)

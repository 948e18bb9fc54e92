"""First and last lines of a run.

They show its description and expected duration, the saved checkpoint and the next command, and advice if memory runs
out.
"""

import re
import shlex
import signal
from pathlib import Path

import torch

from megatron.checkpoint.layout import parse_step
from megatron.checkpoint.resume import format_resume_arguments
from megatron.checkpoint.run_folder import get_config_path
from megatron.config.execution import build_stages, resolve_mesh_shape
from megatron.config.schema import Config
from megatron.config.stages import find_stage
from megatron.data.document_starts import describe_crossing_fraction
from megatron.data.load_tokenizer import read_vocabulary
from megatron.data.torch_data import ValidationDataset
from megatron.distributed.launcher_environment import describe_job
from megatron.distributed.mesh import Axis, ParallelSizes, get_pipeline_layer_range
from megatron.options.model import get_ffn_hidden_size
from megatron.planning.memory_estimate import estimate_memory
from megatron.planning.model_costs import plan_model
from megatron.training.check_resources import find_start_step
from megatron.training.metrics import measure_matmul_flops_per_second
from megatron.training.pipeline import compute_bubble
from megatron.training.training_run import TrainingRun
from megatron.utils.errors import FarfieldError
from megatron.utils.formatting import format_approximate_duration, format_bytes, format_count, format_quantity
from megatron.utils.project import PROGRAM


def estimate_seconds(run: TrainingRun, step: int) -> float:
    """Estimate the duration of the steps after `step`, in seconds, before any of them was timed.

    The estimate divides their FLOPs by the speed of one matrix product of the model's size. The rest of a step is
    slower, so the true time is longer: typically twice as long, and many times as long for a small model.
    """
    training, model = run.config.training, run.config.model
    speed = measure_matmul_flops_per_second(
        run.groups.device,
        training.compute_dtype,
        rows=training.train_micro_batch_size_per_gpu * model.seq_length,
        inner=model.hidden_size,
        columns=get_ffn_hidden_size(model),
    )
    lengths = run.datasets.lengths
    flops_per_sequence = sum(length * run.flops_per_token[length] for length in lengths) / len(lengths)
    sequences = (run.stage.end_step - step) * (training.train_batch_size or 0)
    flops = sequences * flops_per_sequence
    for stage in run.resume.stages[run.stage.index + 1 :]:
        steps = stage.end_step - stage.first_step
        flops += steps * stage.tokens_per_step * run.flops_per_token[stage.config.model.seq_length]
    return flops / run.groups.world_size / speed


def log_start(run: TrainingRun) -> None:
    """Print the description of the run and its expected duration, and start the clock."""
    step, seconds = run.data_position.step, None
    if run.console.console is not None and step < run.config.training.train_iters:
        seconds = estimate_seconds(run, step)
        run.console.log(describe_start(run, step, seconds))
        if len(run.resume.stages) > 1:
            run.console.log(run.stage.describe(len(run.resume.stages), step, run.schedule(step)))
        documents = describe_crossing_fraction(run.config.position.attention_mask, run.datasets.crossing_fraction)
        reading = [run.datasets.epochs] if run.datasets.epochs is not None else []
        reading += describe_validation(run)
        for line in (*documents, *reading, *describe_layout(run.config, run.groups.mesh.sizes)):
            run.console.log(line)
    run.console.begin(step, seconds)


MAX_VALIDATION_FRACTION = 0.2
"""Fraction of the training time above which the cost of validation is reported."""


def describe_validation(run: TrainingRun) -> list[str]:
    """Return a line about the tokens of a validation and its share of the training work, or nothing for a task."""
    datasets, training = run.datasets, run.config.training
    sets = {"valid": datasets.valid, **datasets.extra_valid_sets}
    texts = [(name, each) for name, each in sets.items() if each is not None]
    if run.config.data.task is not None or not texts:
        return []
    parts, targets = [], 0
    for name, each in texts:
        text = getattr(each, "dataset", each)  # a wrapper marks documents
        assert isinstance(text, ValidationDataset)
        scored = min(text.num_targets, len(text) * text.length)
        targets += scored
        amount = f"all {scored:,} tokens" if text.is_whole else f"{scored:,} of {text.num_targets:,} tokens"
        parts.append(f"{name} {amount}")
    line = f"validation every {format_quantity(training.eval_interval, 'step')}: {', '.join(parts)}"
    # A forward pass is a third of a training step's work.
    per_interval = training.eval_interval * (training.train_batch_size or 0) * run.config.model.seq_length
    if (share := targets / 3 / per_interval) > MAX_VALIDATION_FRACTION:
        line += f", about {share:.0%} of the training time; set eval_iters to limit it"
    return [line]


def describe_start(run: TrainingRun, step: int, seconds: float) -> str:
    """Describe a run: size, device, precision, steps, layout, time."""
    config, device = run.config, run.groups.device
    training, lengths = config.training, run.datasets.lengths
    length = f"{min(lengths):,} to {max(lengths):,}" if len(set(lengths)) > 1 else f"{lengths[0]:,}"
    threads = format_quantity(torch.get_num_threads(), "thread")
    hardware = f"CPU ({threads})" if device.type == "cpu" else torch.cuda.get_device_name(device)
    batch, world_size = training.train_batch_size or 0, run.groups.world_size
    parts = []
    if training.gradient_accumulation_steps > 1 or world_size > 1:
        parts.append(f"micro-batches of {training.train_micro_batch_size_per_gpu}")
    if training.gradient_accumulation_steps > 1:
        parts.append(f"{training.gradient_accumulation_steps} accumulated")
    if training.zero_optimization.stage and world_size == 1:
        parts.append(f"ZeRO {training.zero_optimization.stage}")
    layout = f" ({', '.join(parts)})" if parts else ""
    stages, steps = run.resume.stages, format_quantity(training.train_iters, "step")
    num_tokens = round(training.train_iters * batch * sum(lengths) / len(lengths))
    if len(stages) > 1:
        num_tokens = sum((stage.end_step - stage.first_step) * stage.tokens_per_step for stage in stages)
        steps += f" in {len(stages)} stages, now"
    else:
        steps += " of"
    tokens = format_count(num_tokens)
    progress = f"from step {step:,}, " if step else ""
    reason = run.engine.model.row_blocks_reason if device.type != "cpu" else None  # on a CPU row blocks are expected
    return (
        f"{format_count(run.parameters)} parameters on {hardware} in {training.compute_dtype}; "
        f"{steps} {batch:,} × {length} tokens{layout}{', in total' if len(stages) > 1 else ' ='} {tokens} tokens; "
        f"{progress}{format_approximate_duration(seconds)}"
        f"{f'; attention in {reason}' if reason else ''}"
    )


def describe_layout(config: Config, sizes: ParallelSizes) -> list[str]:
    """Describe how several processes divide the work, and the cost of a pipeline; nothing for one process."""
    if sizes.world_size == 1:
        return []
    stages, steps = sizes.pipeline, config.training.gradient_accumulation_steps
    lines = [f"{sizes.world_size} ranks: {sizes}, ZeRO {config.training.zero_optimization.stage}"]
    if stages > 1:
        layers = [
            len(get_pipeline_layer_range(config.model.num_layers, Axis(stage, stages))) for stage in range(stages)
        ]
        uneven = f"; layers per stage {', '.join(map(str, layers))}" if len(set(layers)) > 1 else ""
        lines.append(
            f"pipeline: {stages} stages, {steps} micro-batch{'es' * (steps > 1)}: a stage waits "
            f"{compute_bubble(stages, steps):.0%} of a step{uneven}"
        )
    return lines


def describe_end(config: Config, checkpoint: Path | None, *, now: bool) -> str:
    """Describe where a finished run was saved, now or before, and the next command."""
    if checkpoint is None or config.checkpoint.save is None:
        return "no checkpoint saved: save is not set"
    data = config.data
    has_held_out = data.data_path or data.test_data_paths or data.valid_data_paths or data.task
    option = "" if has_held_out else " --data TEXT"
    location = f"{'saved' if now else 'the last checkpoint is'} {checkpoint}"
    save = config.checkpoint.save
    is_own = checkpoint.resolve().is_relative_to(Path(save).resolve())  # else save contains no checkpoint to evaluate
    return f"{location}; next: {PROGRAM} evaluate {shlex.quote(save if is_own else str(checkpoint))}{option}"


def describe_finished(step: int, train_iters: int, *, is_tested: bool) -> str:
    """Describe what remains for a run that has already taken all its steps."""
    if is_tested:
        return f"nothing to do: the run is at step {step}, and train_iters is {train_iters}; increase it to continue"
    return f"nothing to train: the run is at step {step}, and train_iters is {train_iters}; evaluating the test text"


def describe_stop(config: Config, step: int, checkpoint: Path | None, signum: int) -> str:
    """Describe where a run that signal `signum` stopped was saved, and how to resume it."""
    saved = "no checkpoint saved; run the same command to start again"
    if checkpoint is not None:
        is_of_this_step = parse_step(checkpoint) == step  # none is saved after a bad step
        kept = f"saved {checkpoint}" if is_of_this_step else f"the last checkpoint is {checkpoint}"
        saved = f"{kept}; {describe_next_action(config, signum)}"
    return f"stopped by {signal.Signals(signum).name} at step {step} of {config.training.train_iters}; {saved}"


def describe_rollbacks(rollbacks: int, skipped_samples: int) -> str:
    """Describe the number of rollbacks and the sequences they skipped."""
    times = "once" if rollbacks == 1 else f"{rollbacks} times"
    return f"rolled back {times} because of its loss, skipping {format_quantity(skipped_samples, 'sequence')}"


def describe_next_action(config: Config, signum: int) -> str:
    """Describe how a run stopped by signal `signum` resumes: by itself if SLURM requeues the job, or by a command."""
    requeued = config.launch.launcher == "slurm" and config.launch.slurm.requeue and signum == signal.SIGTERM
    if requeued and describe_job() is not None:
        return f"SLURM requeues the job; if it was cancelled, resume with: {build_resume_command(config)}"
    return f"resume with: {build_resume_command(config)}"


def build_resume_command(config: Config) -> str:
    """Return the command that resumes a stopped run."""
    folder = str(config.checkpoint.save)
    # The user's own file may lack overrides from the command line.
    file = f"{shlex.quote(folder)}/{get_config_path(folder).name}"
    return f"{PROGRAM} train {file} {format_resume_arguments(config.checkpoint)}"


def describe_memory_error(config: Config, world_size: int, error: BaseException) -> str:
    """Describe an out-of-memory error: the last request, the planned memory of the current stage, and what helps.

    Args:
        config: configuration of this start of the run, which stays in one stage.
        world_size: number of its processes.
        error: exception that was raised.
    """
    requested = re.search(r"allocate ([\d.,]+ ?\w*)", str(error))
    line = f"out of memory{f' ({requested[1]} more requested)' if requested else ''}"
    try:
        sizes, stages = resolve_mesh_shape(config, world_size), build_stages(config)
        stage = find_stage(stages, find_start_step(config.checkpoint))
        planned = estimate_memory(plan_model(stage.config), sizes, read_vocabulary(config.data).size).total
        training, model = stage.config.training, stage.config.model
        name = f"stage {stage.index + 1} of {len(stages)} of this run" if len(stages) > 1 else "this run"
        line += (
            f"; the plan of {name}, train_micro_batch_size_per_gpu {training.train_micro_batch_size_per_gpu} × "
            f"seq_length {model.seq_length}, needs {format_bytes(planned)} on each rank ({PROGRAM} plan)"
        )
    except FarfieldError:  # the memory use of the encoding is unknown
        pass
    line += "".join(f"; {note}" for note in getattr(error, "__notes__", []))  # path of a snapshot (profiler.py)
    return (
        f"{line}; lower train_micro_batch_size_per_gpu or seq_length, or set checkpoint_activations to "
        "selective or true, or raise zero_optimization.stage"
    )

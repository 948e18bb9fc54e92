"""The first and the last line of a run: what it is and how long it may take, where it was saved and what comes next."""

import shlex
import signal
from pathlib import Path

import torch

from megatron.checkpoint.run_files import config_file
from megatron.config.schema import Config
from megatron.distributed.layers import layers_of
from megatron.distributed.mesh import Axis, Sizes
from megatron.distributed.surroundings import job_line
from megatron.options.model import ffn_hidden_size
from megatron.quantities import about, count
from megatron.training.hardware import matmul_speed
from megatron.training.pipeline import bubble
from megatron.training.setup import Run


def seconds_ahead(run: Run, step: int) -> float:
    """What the steps after `step` may take, before any of them was timed.

    Their FLOPs at the speed of one matrix product of the model's own size. The rest of a step is slower than that, so
    the true time is rather longer: twice is usual, and a small model may take many times as long.
    """
    training, model = run.config.training, run.config.model
    speed = matmul_speed(
        run.processes.device,
        training.compute_type,
        rows=training.train_micro_batch_size_per_gpu * model.seq_length,
        inner=model.hidden_size,
        columns=ffn_hidden_size(model),
    )
    lengths = run.datasets.lengths
    of_sequence = sum(length * run.flops_per_token[length] for length in lengths) / len(lengths)
    sequences = (training.train_iters - step) * (training.train_batch_size or 0)
    return sequences * of_sequence / run.processes.world / speed


def first_line(run: Run, step: int, seconds: float) -> str:
    """What a run is: size, device, precision, steps, layout, time."""
    config, device = run.config, run.processes.device
    training, lengths = config.training, run.datasets.lengths
    length = f"{min(lengths):,} to {max(lengths):,}" if len(set(lengths)) > 1 else f"{lengths[0]:,}"
    place = f"CPU ({torch.get_num_threads()} threads)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    batch, world = training.train_batch_size or 0, run.processes.world
    parts = []
    if training.gradient_accumulation_steps > 1 or world > 1:
        parts.append(f"micro-batches of {training.train_micro_batch_size_per_gpu}")
    if training.gradient_accumulation_steps > 1:
        parts.append(f"{training.gradient_accumulation_steps} accumulated")
    if training.zero_optimization.stage and world == 1:
        parts.append(f"ZeRO {training.zero_optimization.stage}")
    layout = f" ({', '.join(parts)})" if parts else ""
    tokens = count(round(training.train_iters * batch * sum(lengths) / len(lengths)))
    done = f"from step {step:,}, " if step else ""
    why = run.engine.model.row_blocks_reason if device.type != "cpu" else None  # on a CPU nothing else is expected
    return (
        f"{count(run.parameters)} parameters on {place} in {training.compute_type}; {training.train_iters:,} steps of "
        f"{batch:,} × {length} tokens{layout} are {tokens} tokens; {done}{about(seconds)}"
        f"{f'; attention in {why}' if why else ''}"
    )


def layout_lines(config: Config, sizes: Sizes) -> list[str]:
    """How several processes divide the work, and what a pipeline costs. Nothing for one process."""
    if sizes.world == 1:
        return []
    stages, steps = sizes.pipeline, config.training.gradient_accumulation_steps
    lines = [f"{sizes.world} ranks: {sizes}, ZeRO {config.training.zero_optimization.stage}"]
    if stages > 1:
        layers = [len(layers_of(config.model.num_layers, Axis(stage, stages))) for stage in range(stages)]
        uneven = f"; layers per stage {', '.join(map(str, layers))}" if len(set(layers)) > 1 else ""
        lines.append(
            f"pipeline: {stages} stages, {steps} micro-batches: a stage waits {bubble(stages, steps):.0%} of a step"
            f"{uneven}"
        )
    return lines


def last_line(config: Config, checkpoint: Path | None, *, now: bool) -> str:
    """Where a finished run was saved, now or before, and the command that comes next."""
    if checkpoint is None or config.checkpoint.save is None:
        return "nothing is saved: save names no folder"
    own = config.data
    held_out = own.data_path or own.test_data_paths or own.valid_data_paths or own.task
    data = "" if held_out else " --data TEXT"
    where = f"{'saved' if now else 'the last checkpoint is'} {checkpoint}"
    return f"{where}; next: ./deepy.py evaluate {shlex.quote(config.checkpoint.save)}{data}"


def what_next(config: Config, number: int) -> str:
    """How a run goes on that signal `number` stopped: by itself in a job that SLURM requeues, or by a command."""
    requeued = config.launch.launcher == "slurm" and config.launch.slurm.requeue and number == signal.SIGTERM
    if requeued and job_line() is not None:
        return f"SLURM puts the job back into the queue, or, if it was cancelled: {carry_on(config)}"
    return f"go on with: {carry_on(config)}"


def carry_on(config: Config) -> str:
    """The command that takes a stopped run up again."""
    folder = str(config.checkpoint.save)
    file = f"{shlex.quote(folder)}/{config_file(folder).name}"  # a person's own may lack what the command line added
    return f"./deepy.py train {file} load={shlex.quote(folder)}"

"""Commands that train: `./deepy.py train`, `plan`, `rehearse` and `sweep`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.cli.arguments import (
    Arguments,
    ConfigFolder,
    add_section_options,
    load_config_arguments,
    print_notes,
    print_to_stderr,
    split_arguments,
)
from megatron.options.commands import PlanOptions, RehearseOptions
from megatron.utils.signals import StoppedBySignal, clean_up_on_signal

if TYPE_CHECKING:
    from megatron.config.schema import Config


def train(
    arguments: Arguments,
    conf_dir: ConfigFolder = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved configuration or the batch script, and do not train."),
    ] = False,
) -> int:
    """Train a model.

    Files are merged from left to right, then KEY=VALUE pairs; later values override earlier ones, and --dry-run lists
    replaced values. A file is a path, or a name with or without .yml that is searched in configs/ and its subfolders:
    [bold]model[/] (architectures with their paper's settings), [bold]position[/] (one overlay per method),
    [bold]cluster[/] (where it runs).

    [bold]Examples[/]

      ./deepy.py train 162M kerple_log local_setup save=runs/kerple

      ./deepy.py train 125M rotary cdape local_setup precision=bf16 optimizer.params.lr=3e-4

      ./deepy.py train my.yml num_gpus=2 device=cpu

      ./deepy.py train runs/kerple/config.yml load=runs/kerple train_iters=60000

      ./deepy.py train.py -d configs 125M.yml local_setup.yml

    The third uses two processes on a CPU, the fourth resumes and extends a run, and the last uses GPT-NeoX's syntax.

    All keys: ./deepy.py keys, or docs/configuration.md.
    """
    from megatron.distributed.launcher_environment import read_launcher_environment
    from megatron.launch.dispatch import launch_training, report_errors_once

    launch_context = read_launcher_environment()
    with report_errors_once(launch_context):
        silent = launch_context is not None and launch_context.rank_info.rank > 0
        loaded = load_config_arguments(arguments, conf_dir, silent=silent)
        is_main = launch_context is None and not dry_run
        with advise_after_interrupt(loaded.config.checkpoint.save) if is_main else nullcontext():
            return launch_training(loaded, launch_context, print_notes, dry_run=dry_run)


@contextmanager
def advise_after_interrupt(save: str | None) -> Iterator[None]:
    """Print how to start again if a signal ends the run before it saved anything.

    A run that trains saves a checkpoint after a signal, says how to resume it, and ends without an exception.
    """
    from megatron.checkpoint.layout import list_checkpoints

    standard_error = os.dup(2)  # during a run, descriptor 2 is its log

    def advise() -> None:
        if save is None or not list_checkpoints(Path(save)):
            with suppress(OSError):  # the terminal may be closed
                os.write(standard_error, b"no checkpoint saved; run the same command to start again\n")

    try:
        with clean_up_on_signal(advise):
            yield
    except (KeyboardInterrupt, StoppedBySignal):
        advise()
        raise
    finally:
        os.close(standard_error)


GPT2_VOCAB_SIZE = 50257


@add_section_options(PlanOptions)
def plan(
    arguments: Arguments,
    conf_dir: ConfigFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    **options: Any,
) -> None:
    """Estimate memory and time on GPUs, and find parallel layouts that fit.

    Nothing is trained and no GPU is needed: the estimate is computed from formulas that docs/planning.md explains and
    compares with measurements. Batch size, length, steps and precision stay as configured; only the parallel layout
    varies.

    [bold]Examples[/]

      ./deepy.py plan 2-7B cdape_kerple_log a100_8k --gpus 64 --gpu a100-40gb

      ./deepy.py plan 350M rotary a100_2k --gpus 8 --gpu a100-80gb --mfu 0.35 --json
    """
    from dataclasses import replace

    from megatron.config.schema import parse_section
    from megatron.distributed.hardware import describe_assumed_size, get_gpu_spec, resolve_gpu_name
    from megatron.planning.plan import make_plan
    from megatron.planning.step_time import Cluster

    request = parse_section(PlanOptions, options)
    gpu = get_gpu_spec(request.gpu)
    print_notes(filter(None, [describe_assumed_size(request.gpu)]))
    loaded = load_config_arguments(arguments, conf_dir)
    gpu = gpu if request.gpu_memory is None else replace(gpu, gib=request.gpu_memory)
    given = request.model_dump(exclude_defaults=True, exclude={"gpus", "gpu", "layouts"})
    gpu_options = f"--gpu {resolve_gpu_name(request.gpu)}" + "".join(
        f" --{name.replace('_', '-')} {value:.15g}" for name, value in given.items()
    )
    num_gpus, gpus_per_node = loaded.config.launch.choose_gpus(request.gpus, request.gpus_per_node)
    cluster = Cluster(gpu, num_gpus, gpus_per_node, request.network, request.mfu, gpu_options)
    vocab_size = _find_vocab_size(loaded.config, request.vocabulary)
    result = replace(make_plan(loaded.config, vocab_size, cluster), arguments=loaded.arguments)
    if as_json:
        import json

        print(json.dumps(result.to_dict(request.layouts), indent=2))
        return
    from megatron.planning.print_plan import print_plan
    from megatron.utils.console import PlainConsole

    print_plan(result, PlainConsole(highlight=False), request.layouts)


def _find_vocab_size(config: Config, vocab_size: int | None) -> int:
    """Return the vocabulary size: as given, from the data, or GPT-2's."""
    from megatron.data.load_tokenizer import find_vocab_size

    if (size := vocab_size or find_vocab_size(config.data)) is not None:
        return size
    print_notes(
        (f"the data's tokenizer was not found; assuming a vocabulary of {GPT2_VOCAB_SIZE} tokens (--vocabulary)",)
    )
    return GPT2_VOCAB_SIZE


@add_section_options(RehearseOptions)
def rehearse(
    arguments: Arguments,
    conf_dir: ConfigFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    **options: Any,
) -> int:
    """Rehearse a GPU job without a GPU: check that it starts, fits, saves and resumes, and that its ranks agree.

    The real training code runs rank by rank on a null CUDA device, which allocates memory and reports errors like the
    GPU but computes nothing: three steps, a validation, a checkpoint, and a resume from it, in a temporary folder. It
    needs the CUDA build of torch and a C compiler, but neither the data nor the run's folder.

    [bold]Examples[/]

      ./deepy.py rehearse 2-7B cdape_kerple_log a100_8k --gpus 64 --gpu a100-80gb

      ./deepy.py rehearse 1-3B kerple_log a100_2k_slow_network --gpus 16 --ranks all --json

    Exit code 1 means that the run would fail, or that its ranks do not agree.
    """
    from dataclasses import replace

    from megatron.config.schema import parse_section
    from megatron.distributed.hardware import describe_assumed_size
    from megatron.rehearsal.null_device.environment import GIB, get_gpu_model
    from megatron.rehearsal.rehearse import rehearse as rehearse_run
    from megatron.rehearsal.rehearsed_run import plan_rehearsal
    from megatron.rehearsal.report import RehearsalReport
    from megatron.rehearsal.roles import parse_rank_selection

    request = parse_section(RehearseOptions, options)
    gpu, selection = get_gpu_model(request.gpu), parse_rank_selection(request.ranks)
    print_notes(filter(None, [describe_assumed_size(request.gpu)]))
    gpu = gpu if request.gpu_memory is None else replace(gpu, memory=int(request.gpu_memory * GIB))
    loaded = load_config_arguments(arguments, conf_dir)
    with loaded.layers.locate_errors():
        run = plan_rehearsal(loaded.config, request.gpus, request.gpus_per_node, request.vocabulary, gpu.memory)
        print_notes(run.notes)
        rehearsal = rehearse_run(run, gpu, selection, print_to_stderr)
    report = RehearsalReport(rehearsal, network_gb_per_s=request.network, mfu=request.mfu)
    if as_json:
        import json

        print(json.dumps(report.to_dict(), indent=2))
        return report.exit_code
    from megatron.rehearsal.print_report import print_report
    from megatron.utils.console import PlainConsole

    print_report(report, PlainConsole(highlight=False))
    return report.exit_code


def sweep(
    arguments: Arguments,
    conf_dir: ConfigFolder = None,
    member: Annotated[
        int | None,
        typer.Option(
            "--run-index",
            "--member",
            min=0,
            help="Train and evaluate one run, given by its index from 0, without a report. Used by job arrays.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the sweep and print its runs, or SLURM's batch script; start nothing."),
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retrain runs that diverged.")] = False,
) -> None:
    """Train and evaluate every variant of a sweep file, and report the results side by side.

    A sweep file is a configuration with a section `sweep`: variants with the keys that they change, seeds, and the
    evaluation. The same command resumes an interrupted sweep.

    [bold]Examples[/]

      ./deepy.py sweep quickstart

      ./deepy.py sweep mine.yml slurm_a100 num_gpus=1

    The second submits a job array with one task per run; after the tasks have ended, the same command writes the
    report.
    """
    from megatron.sweeps.run_sweep import run_sweep

    files, overrides = split_arguments(arguments)
    run_sweep(
        files,
        overrides,
        search=[conf_dir] if conf_dir else None,
        member=member,
        dry_run=dry_run,
        retry_failed=retry_failed,
    )

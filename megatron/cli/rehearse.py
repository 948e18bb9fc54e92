"""`./deepy.py rehearse`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from megatron.cli.arguments import Arguments, ConfigFolder, load_config_arguments, with_options
from megatron.cli.console import print_notes, print_to_stderr
from megatron.options.commands import RehearseOptions


@with_options(RehearseOptions)
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

    from megatron.config.validation_errors import parse_section
    from megatron.rehearsal.null_device.cards import GIB, get_card
    from megatron.rehearsal.rehearse import rehearse as rehearse_run
    from megatron.rehearsal.rehearsed_run import plan_rehearsal
    from megatron.rehearsal.report import RehearsalReport
    from megatron.rehearsal.roles import parse_rank_selection

    request = parse_section(RehearseOptions, options)
    card, selection = get_card(request.gpu), parse_rank_selection(request.ranks)
    card = card if request.gib is None else replace(card, memory=int(request.gib * GIB))
    loaded = load_config_arguments(arguments, conf_dir)
    with loaded.locate_errors():
        run = plan_rehearsal(loaded.config, request.gpus, request.gpus_per_node, request.vocabulary, card.memory)
        print_notes(run.notes)
        rehearsal = rehearse_run(run, card, selection, print_to_stderr)
    report = RehearsalReport(rehearsal, network_gb_per_s=request.network, mfu=request.mfu)
    if as_json:
        import json

        print(json.dumps(report.to_dict(), indent=2))
        return report.exit_code
    from megatron.launch.console import PlainConsole
    from megatron.rehearsal.print_report import print_report

    print_report(report, PlainConsole(highlight=False))
    return report.exit_code

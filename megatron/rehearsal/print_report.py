"""Terminal output of a rehearsal's report."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.rehearsal.rehearsed_run import STEPS
from megatron.rehearsal.report import CONTEXT_GIB, GIB, NCCL_GIB, NOT_COVERED, TIGHT_FRACTION, RehearsalReport
from megatron.utils.console import print_table
from megatron.utils.formatting import (
    format_approximate_duration,
    format_bytes,
    format_count,
    format_duration,
    format_quantity,
    format_ranks,
)

MAX_COLLECTIVES = 6
STYLES = {"fits": "green", "tight": "yellow", "out of memory": "red", "failed": "red"}


def print_report(report: RehearsalReport, console: Console) -> None:
    """Print the whole report: memory, ledger, kernels, disk, time and coverage."""
    rehearsal = report.rehearsal
    run, gpu = rehearsal.run, rehearsal.gpu
    parameters = next((t.result.parameters for t in rehearsal.train_traces.values() if t.result.parameters), None)
    size = "" if parameters is None else f"{format_count(parameters)} parameters, "
    style = STYLES[report.verdict]
    console.print(
        f"[bold {style}]{report.verdict}[/]  {size}{run.world_size} × {gpu.device_name} "
        f"({gpu.memory / GIB:.1f} GiB): {run.sizes}, ZeRO {run.config.training.zero_optimization.stage}"
    )
    console.print()
    print_table(console, _build_memory_table(report))
    _print_errors(report, console)
    communicators = max((report.count_communicators(rank) for rank in rehearsal.train_traces), default=0)
    buffers = f"; NCCL buffers about {NCCL_GIB} GiB × {communicators} communicator{'' if communicators == 1 else 's'}"
    console.print(
        f"  not modeled (published figures): CUDA context {CONTEXT_GIB[0]}–{CONTEXT_GIB[1]} GiB"
        f"{buffers if communicators else ''}; tight: above {TIGHT_FRACTION:.0%}, or no room for these",
        style="dim",
    )
    if any(trace.result.error is None for trace in rehearsal.train_traces.values()):
        console.print()
        _print_ledger(report, console)
    _print_kernels(report, console)
    _print_machine(report, console)
    _print_coverage(report, console)


def _build_memory_table(report: RehearsalReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("coordinates")
    table.add_column("represents", justify="right")
    for name in ("peak GiB", "reserved", "of GPU", "plan GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("peak in phase")
    table.add_column("verdict", no_wrap=True)
    rehearsal = report.rehearsal
    for role in rehearsal.roles:
        if role.rank not in rehearsal.train_traces:
            continue
        allocated, reserved, phase = report.find_peak(role.rank)
        planned, verdict = report.estimate_planned_memory(role.rank), report.judge_rank(role.rank)
        count = len(role.represented_ranks)
        table.add_row(
            str(role.rank),
            role.describe_coordinates(rehearsal.run.sizes),
            f"{count} rank{'' if count == 1 else 's'}",
            f"{allocated / GIB:.2f}",
            f"{reserved / GIB:.2f}",
            f"{reserved / rehearsal.gpu.memory:.0%}",
            "?" if planned is None else f"{planned / GIB:.2f}",
            phase,
            f"[{STYLES[verdict]}]{verdict}[/]",
        )
    return table


def _print_errors(report: RehearsalReport, console: Console) -> None:
    for action, rank, error in report.rehearsal.find_errors():
        place = f" in {error.phase}" if error.phase else ""
        console.print(f"  rank {rank}, {action}{place}: {escape(error.message)}")
        for line in error.where[:3]:
            console.print(f"    {escape(line)}", style="dim")


def _print_ledger(report: RehearsalReport, console: Console) -> None:
    rehearsal = report.rehearsal
    finished = [trace for trace in rehearsal.train_traces.values() if trace.result.error is None]
    calls = sum(len(trace.ledger.calls) for trace in finished)
    if rehearsal.mismatches:
        console.print(f"[bold red]ranks disagree[/] on their collectives ({calls:,} calls of ranks that ran)")
        for action, mismatch in rehearsal.mismatches:
            console.print(f"  {action}: {escape(mismatch.describe(rehearsal.run.sizes))}")
    elif len(finished) == 1:
        others = "" if rehearsal.world_size == 1 else " and represents the others, so nothing was compared"
        console.print(f"[bold]collectives[/] of the only rank that ran{others} ({calls:,} calls)")
    elif finished:
        matched = rehearsal.world_size - rehearsal.unmatched_ranks
        stages = rehearsal.run.sizes.pipeline
        sequences = f"{rehearsal.distinct_sequences} sequence{'' if rehearsal.distinct_sequences == 1 else 's'}"
        console.print(
            f"[bold]collectives agree[/] on {matched} of {rehearsal.world_size} ranks, in every group: operations, "
            f"sizes, types, order ({calls:,} calls of ranks that ran; {sequences} for "
            f"{stages} pipeline stage{'' if stages == 1 else 's'})"
        )
    first = finished[0].result.rank if 0 not in rehearsal.train_traces else 0
    rows = report.summarize_collectives(first)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (f"rank {first}: along", "operation", "type"):
        table.add_column(name)
    for name in ("ranks", "calls", "bytes"):
        table.add_column(name, justify="right")
    for row in rows[:MAX_COLLECTIVES]:
        table.add_row(row.along, row.operation, row.dtype, str(row.ranks), f"{row.calls:,}", format_bytes(row.bytes))
    print_table(console, table)
    run = rehearsal.run
    planned = run.config.training.gradient_accumulation_steps
    batches = f"{run.micro_batches} micro-batch{'' if run.micro_batches == 1 else 'es'}"
    cut = "" if planned == run.micro_batches else f" (the run has {planned} per step)"
    console.print(f"  executed: {STEPS} steps of {batches}{cut}, one validation, one checkpoint", style="dim")
    if len(rows) > MAX_COLLECTIVES:
        console.print(f"  … and {len(rows) - MAX_COLLECTIVES} more with fewer bytes (--json)", style="dim")


def _print_kernels(report: RehearsalReport, console: Console) -> None:
    if kernels := report.list_kernels():
        console.print(f"\n[bold]Triton kernels[/] compiled for {report.rehearsal.gpu.architecture}")
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("kernel")
        for name in ("registers", "spilled bytes", "shared KiB", "launches"):
            table.add_column(name, justify="right")
        for kernel in kernels:
            table.add_row(
                kernel["name"], str(kernel["registers"]), str(kernel["stack"]), f"{kernel['shared'] / 1024:.1f}",
                f"{kernel['launches']:,}",
            )  # fmt: skip
        print_table(console, table)
    for name in report.list_miscompiled_kernels():
        way_out = "auto rejects it on the GPU" if report.chooses_attention else "choose another attention_backend"
        console.print(
            f"[bold red]miscompiled[/]: {name} reads uninitialized registers, a bug of ptxas (docs/gpu.md); {way_out}"
        )
    if report.attention is not None:
        chosen = "; on the GPU, auto selects the fastest correct backend" if report.chooses_attention else ""
        console.print(f"[bold]attention[/]  {report.attention}{chosen}")
    for line in report.list_fallbacks():
        console.print(f"[bold]fallback to PyTorch[/]: {escape(line)}")


def _print_machine(report: RehearsalReport, console: Console) -> None:
    console.print()
    if (disk := report.disk) is not None:
        text = (
            f"[bold]disk[/]  checkpoint of {format_bytes(disk['checkpoint'])} (weights "
            f"{format_bytes(disk['weights'])}, states {format_bytes(disk['states'])}); the run needs "
            f"{format_bytes(disk['needed'])}: {format_quantity(disk['kept'], 'checkpoint')} plus the one being "
            "written, with its temporary files"
        )
        if "free" in disk:
            lacks = "  [red]too little[/]" if disk["free"] < disk["needed"] else ""
            text += f"; {format_bytes(disk['free'])} free in {escape(disk['folder'])}{lacks}"
        console.print(text)
    if (host := report.host_bytes) is not None:
        ranks = report.rehearsal.run.devices_per_node
        console.print(
            f"[bold]host memory[/]  {format_bytes(host)} per node while its {ranks} "
            f"rank{'' if ranks == 1 else 's'} build{'s' if ranks == 1 else ''} the model in float32"
        )
    if report.step_seconds is not None:
        low, high = report.step_seconds
        iters = report.rehearsal.run.config.training.train_iters
        durations = dict.fromkeys(format_approximate_duration(iters * seconds) for seconds in (low, high))
        console.print(
            f"[bold]time[/]  {_format_seconds(low)}–{_format_seconds(high)} per step, {iters:,} steps in "
            f"{' to '.join(durations)}: estimated as by ./deepy.py plan, not measured here"
        )
    if (slurm := report.slurm) is not None:
        if "starts" in slurm:
            low_starts, high_starts = slurm["starts"]
            starts = str(low_starts) if low_starts == high_starts else f"{low_starts} to {high_starts}"
            console.print(f"[bold]SLURM[/]  time limit {slurm['time']}: about {starts} job starts by this estimate")
        if "script" in slurm:
            console.print(escape(slurm["script"].rstrip()), highlight=False, soft_wrap=True)
        else:
            console.print(f"[bold]SLURM[/]  no batch script: {escape(slurm['error'])}")


def _print_coverage(report: RehearsalReport, console: Console) -> None:
    rehearsal = report.rehearsal
    console.print(f"[bold]covered[/]  {'; '.join(report.list_covered())}; in {format_duration(rehearsal.seconds)}")
    if rehearsal.run.synthetic_splits:
        console.print(
            "[bold]not read[/]  the run's own data, which are not on this machine or not named; train requires data"
        )
    if rehearsal.unmatched_ranks:
        ranks = f"{rehearsal.unmatched_ranks} rank{'' if rehearsal.unmatched_ranks == 1 else 's'}"
        console.print(f"[bold]not compared[/]  {ranks}: no rank that finished represents them")
    standing = [role for role in rehearsal.roles if len(role.represented_ranks) > 1]
    if standing:
        ranks = format_ranks([role.rank for role in standing])
        console.print(f"[bold]assumed[/]  ranks that did not run behave like {ranks} (--ranks all runs every rank)")
    console.print(f"[bold]not covered[/]  {'; '.join(NOT_COVERED)}")


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"

"""A plan in a terminal."""

from rich.console import Console
from rich.table import Table

from megatron.options.training import MICRO, STEPS
from megatron.planning.layouts import Layout
from megatron.planning.memory import SPARE
from megatron.planning.plan import Plan
from megatron.quantities import count, flop

GIB = 2**30


def show(plan: Plan, console: Console, most: int) -> None:
    """Print a plan.

    Args:
        plan: what to print.
        console: where.
        most: layouts that are listed.
    """
    _introduce(plan, console)
    if plan.refusal is not None:
        console.print(f"\nas configured: refused: {plan.refusal}", markup=False)
    if (layout := plan.detailed) is not None:
        whose = "as configured" if plan.given else "the best layout" if plan.fitting else "the layout that needs least"
        console.print(f"\n[bold]memory of one GPU, GiB[/] ({whose}: {_said(layout)})")
        console.print(_memory(plan))
        fits = "fits" if plan.fits(layout) else "does not fit"
        console.print(
            f"{fits} a GPU of {plan.cluster.gpu.gib:.1f} GiB, of which {SPARE:.0%} stay free for CUDA, NCCL and the "
            "allocator; (…) is not held at the worst moment"
        )
    if not plan.fitting:
        why = "fits: take more GPUs, or GPUs of more memory"
        if plan.detailed is None:
            why = "divides the batch and the model: take another number of GPUs, or another train_batch_size"
        console.print(f"\nno layout {why}")
        return
    console.print(f"\n[bold]layouts that fit[/], best first ({min(most, len(plan.fitting))} of {len(plan.fitting)})")
    console.print(_layouts(plan, most))
    console.print(
        "tp, cp, dp, pp: tensor, context, data and pipeline ranks; micro: sequences × micro-batches; comp, wait, "
        "comm: computing, the pipeline's bubble, communication; MFU: of the whole step, days: of all steps"
    )
    best = plan.fitting[0]
    changed = " ".join(f"{name}={_value(value)}" for name, value in best.keys.items())
    console.print(f"the first one's keys: {changed}", soft_wrap=True, highlight=False)


def _introduce(plan: Plan, console: Console) -> None:
    config, cluster = plan.config, plan.cluster
    training, model = config.training, config.model
    some = plan.given or plan.detailed
    batch = training.train_batch_size or (some.config.training.train_batch_size if some else 0) or 0
    tokens = training.train_iters * batch * model.seq_length
    peak = config.logging.peak_tflops or cluster.gpu.peak(training.compute_type)
    nodes = -(-cluster.gpus // cluster.per_node)
    over = f" on {nodes} nodes joined by {cluster.network:g} GB/s each" if nodes > 1 else ""
    console.print(
        f"{count(plan.parameters)} parameters in {training.compute_type}; {training.train_iters:,} steps of "
        f"{batch:,} × {model.seq_length:,} tokens are {count(tokens)} tokens and "
        f"{flop(tokens * plan.flops_per_token)}\n"
        f"{cluster.gpus} GPUs of {cluster.gpu.gib:.1f} GiB and {peak:g} TFLOP/s{over}; they reach {cluster.mfu:.0%} of "
        "that while they compute (--mfu)",
        highlight=False,
    )


def _said(layout: Layout) -> str:
    sizes, training = layout.sizes, layout.config.training
    again = ", activations recomputed" if layout.config.model.checkpoint_activations else ""
    stage = f", stage {layout.memory.stage} of the pipeline" if sizes.pipeline > 1 else ""
    return (
        f"tensor {sizes.tensor} × context {sizes.context} × data {sizes.data} × pipeline {sizes.pipeline}, "
        f"ZeRO {training.zero_optimization.stage}, micro-batch {training.train_micro_batch_size_per_gpu}{again}{stage}"
    )


def _memory(plan: Plan) -> Table:
    found = plan.backends()
    processor = plan.config.position.score_processor
    maps = "  of these score maps" + ("" if processor == "none" else f" and those of {processor}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("part")
    for name in found:
        table.add_column(name, justify="right")

    def row(part: str, name: str, held: str = "") -> None:
        cells = []
        for memory in found.values():
            kept = memory.activations + max(memory.logits, memory.working)
            moment = {
                "logits": kept >= memory.step and memory.logits >= memory.working,
                "working": kept >= memory.step and memory.working > memory.logits,
                "activations": kept >= memory.step,
                "step": memory.step > kept,
            }.get(held, True)
            text = f"{getattr(memory, name) / GIB:.2f}"
            cells.append(text if moment else f"({text})")
        table.add_row(part, *cells)

    row("weights", "weights")
    row("gradients", "gradients")
    row("optimizer", "optimizer")
    row("buffers", "buffers")
    row("activations", "activations", "activations")
    row(maps, "kept_maps", "activations")
    row("logits", "logits", "logits")
    row("a layer's backward pass", "working", "working")
    row(maps, "working_maps", "working")
    row("the optimizer's step", "step", "step")
    row("[bold]at the worst moment[/]", "total")
    return table


def _layouts(plan: Plan, most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("tp", "cp", "dp", "pp", "ZeRO", "micro"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    for name in ("GiB", "ms/step", "comp", "wait", "comm", "MFU", "days"):
        table.add_column(name, justify="right", no_wrap=True)
    for layout in plan.fitting[:most]:
        sizes, keys, time = layout.sizes, layout.keys, layout.time
        table.add_row(
            *(str(n) for n in (sizes.tensor, sizes.context, sizes.data, sizes.pipeline)),
            str(keys["zero_optimization.stage"]),
            f"{keys[MICRO]}×{keys[STEPS]}",
            "yes" if keys["checkpoint_activations"] else "no",
            f"{layout.memory.total / GIB:.1f}",
            f"{1e3 * time.total:,.0f}",
            *(f"{part / time.total:.0%}" for part in (time.computing, time.waiting, time.communicating)),
            f"{time.mfu:.0%}",
            f"{plan.days(layout):,.2f}" if plan.days(layout) < 10 else f"{plan.days(layout):,.0f}",
        )
    return table


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

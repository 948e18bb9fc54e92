"""Print a plan to a terminal."""

from rich.console import Console
from rich.table import Table

from megatron.config.execution import find_graph_obstacle
from megatron.options.training import ACCUMULATION_KEY, MICRO_BATCH_KEY
from megatron.planning.memory_estimate import RESERVED_FRACTION
from megatron.planning.parallel_layouts import ParallelLayout
from megatron.planning.plan import Plan, StepTimeRange
from megatron.utils.console import print_table
from megatron.utils.formatting import format_count, format_flops, format_quantity

GIB = 2**30

RECOMPUTED_PARTS = {False: "no", "selective": "attention", True: "layers"}
"""Words for what `checkpoint_activations` recomputes."""


def print_plan(plan: Plan, console: Console, max_layouts: int) -> None:
    """Print a plan.

    Args:
        plan: plan to print.
        console: output console.
        max_layouts: largest number of layouts to list.
    """
    for stage in plan.stages:
        console.print(
            f"{stage.description}: {stage.gpu_bytes / GIB:.1f} GiB, {stage.step_seconds:.3g} s per step, "
            f"{stage.days:.3g} days",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    if plan.largest_stage is not None:
        console.print(f"plan of {plan.largest_stage}\n", markup=False, highlight=False)
    _print_summary(plan, console)
    if plan.config_error is not None:
        console.print(f"\nThe configured layout is invalid: {plan.config_error}", markup=False)
    if (layout := plan.detailed_layout) is not None:
        layout_name = (
            "configured layout"
            if plan.configured_layout
            else "fastest layout"
            if plan.fitting_layouts
            else "layout with the lowest memory"
        )
        console.print(f"\n[bold]memory of one GPU, GiB[/] ({layout_name}: {_describe_layout(layout)})")
        print_table(console, _build_memory_table(plan))
        fits = "fits" if plan.fits_gpu(layout) else "does not fit"
        console.print(
            f"{fits} a GPU of {plan.cluster.gpu.gib:.1f} GiB; {RESERVED_FRACTION:.0%} is reserved for CUDA, "
            f"NCCL and the allocator; peak: {layout.memory.peak.name} (values in parentheses belong to other phases)"
        )
        if plan.uncounted_keys:
            console.print(f"not counted: evaluation during training with {' and '.join(plan.uncounted_keys)}")
        if (times := plan.estimate_measured(layout)) is not None:
            console.print(describe_step_time_range(times), markup=False)
        if plan.config.model.attention_backend == "auto":
            console.print(f"auto: {describe_auto(plan)}", markup=False)
        console.print(f"to rehearse this layout without a GPU: {plan.rehearse_command}", markup=False, soft_wrap=True)
    if not plan.fitting_layouts:
        reason = "fits: use more GPUs, or GPUs with more memory"
        if plan.detailed_layout is None:
            reason = "divides the batch and the model evenly: change --gpus or train_batch_size"
        console.print(f"\nno layout {reason}")
        return
    console.print(
        f"\n[bold]layouts that fit[/], fastest first ({min(max_layouts, len(plan.fitting_layouts))} of "
        f"{len(plan.fitting_layouts)})"
    )
    print_table(console, _build_layout_table(plan, max_layouts))
    console.print(
        "tp, cp, dp, pp: tensor, context, data and pipeline ranks; micro: micro-batch size × micro-batches; comp, "
        "wait, comm: compute, pipeline bubble, communication; MFU: of the whole step; days: for all steps"
    )
    console.print(f"keys of the first layout: {plan.fitting_layouts[0].overrides}", soft_wrap=True, highlight=False)


def describe_step_time_range(times: StepTimeRange) -> str:
    """Describe the step time with a score processor, estimated from FLOPs and from measurements."""
    return (
        f"{times.processor}: estimated from FLOPs, a step takes {times.planned_ratio:.2f} times as long as without it; "
        f"from measurements, {times.low_ratio:.2f} to {times.high_ratio:.2f} times ({times.source}); ms/step and days "
        "below are estimated from FLOPs"
    )


def describe_auto(plan: Plan) -> str:
    """Describe the choice of `attention_backend: auto`: the recorded one, or the default before a self-check."""
    if plan.checked_backend is not None:
        return f"uses {plan.checked_backend}, which the self-check on the run's GPU chose"
    pytorch = "PyTorch's fused attention" if plan.supports_sdpa else "row blocks in PyTorch"
    return f"uses {pytorch} until the self-check on your GPU selects a faster backend; then read that backend's column"


def _print_summary(plan: Plan, console: Console) -> None:
    config, cluster = plan.config, plan.cluster
    training, model = config.training, config.model
    layout = plan.configured_layout or plan.detailed_layout
    global_batch_size = training.train_batch_size or (layout.config.training.train_batch_size if layout else 0) or 0
    num_tokens = training.train_iters * global_batch_size * model.seq_length
    peak_tflops = config.logging.peak_tflops or cluster.gpu.get_peak_tflops(training.compute_dtype)
    num_nodes = -(-cluster.num_gpus // cluster.gpus_per_node)
    network_text = f" on {num_nodes} nodes with {cluster.network_gb_per_s:g} GB/s each" if num_nodes > 1 else ""
    console.print(
        f"{format_count(plan.num_parameters)} parameters in {training.compute_dtype}; "
        f"{format_quantity(training.train_iters, 'step')} of {global_batch_size:,} × {model.seq_length:,} tokens: "
        f"{format_count(num_tokens)} tokens, "
        f"{format_flops(num_tokens * plan.flops_per_token)}\n"
        f"{format_quantity(cluster.num_gpus, 'GPU')} of {cluster.gpu.gib:.1f} GiB and {peak_tflops:g} TFLOP/s"
        f"{network_text}; assumed compute efficiency {cluster.mfu:.0%} (--mfu)",
        highlight=False,
    )


def _describe_layout(layout: ParallelLayout) -> str:
    sizes, training = layout.sizes, layout.config.training
    recomputed = RECOMPUTED_PARTS[layout.config.model.checkpoint_activations]
    recompute_text = "" if recomputed == "no" else f", {recomputed} recomputed"
    stage_text = f", pipeline stage {layout.memory.stage}" if sizes.pipeline > 1 else ""
    return (
        f"tensor {sizes.tensor} × context {sizes.context} × data {sizes.data} × pipeline {sizes.pipeline}, "
        f"ZeRO {training.zero_optimization.stage}, micro-batch "
        f"{training.train_micro_batch_size_per_gpu}{recompute_text}{stage_text}"
    )


def _build_memory_table(plan: Plan) -> Table:
    processors = [name for name in plan.config.position.processors if name != "none"]
    map_label = "  score matrices" + (f", {', '.join(processors)} features" if processors else "")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("component")
    columns = plan.estimate_backends()
    for name in columns:
        table.add_column(name, justify="right")
    memories = [estimate.memory for estimate in columns.values()]

    def add_row(label: str, part: str) -> None:
        cells = []
        for memory in memories:
            largest = memory.get_largest(part)
            text = f"{largest / GIB:.2f}"
            cells.append(text if getattr(memory.peak, part) == largest else f"({text})")
        table.add_row(label, *cells)

    def add_plain_row(label: str, name: str) -> None:
        table.add_row(label, *(f"{getattr(memory, name) / GIB:.2f}" for memory in memories))

    add_plain_row("weights", "weights")
    add_plain_row("optimizer", "optimizer")
    add_row("gradients", "gradients")
    add_row("buffers", "buffers")
    add_row("activations", "activations")
    add_plain_row(map_label, "saved_maps")
    add_row("logits", "logits")
    add_row("backward workspace", "workspace")
    add_plain_row(map_label, "workspace_maps")
    add_row("optimizer step", "step")
    add_plain_row("[bold]peak[/]", "total")
    if plan.config.training.cuda_graph != "off" and find_graph_obstacle(plan.config) is None:
        add_plain_row("  with CUDA graphs, at most", "total_with_graphs")
    table.add_row("ms per step", *(f"{1e3 * estimate.step_time.total:,.0f}" for estimate in columns.values()))
    ranges = [estimate.measured for estimate in columns.values()]
    if any(ranges):
        cells = ("" if times is None else f"{1e3 * times.low:,.0f}–{1e3 * times.high:,.0f}" for times in ranges)
        table.add_row(f"  from measurements of {', '.join(processors)}", *cells)
    return table


def _build_layout_table(plan: Plan, max_layouts: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tp", "cp", "dp", "pp", "ZeRO", "micro"):
        table.add_column(name, justify="right")
    table.add_column("recompute")
    for name in ("GiB", "ms/step", "comp", "wait", "comm", "MFU", "days"):
        table.add_column(name, justify="right")
    for layout in plan.fitting_layouts[:max_layouts]:
        sizes, keys, step_time = layout.sizes, layout.config_keys, layout.step_time
        table.add_row(
            *(str(n) for n in (sizes.tensor, sizes.context, sizes.data, sizes.pipeline)),
            str(keys["zero_optimization.stage"]),
            f"{keys[MICRO_BATCH_KEY]}×{keys[ACCUMULATION_KEY]}",
            RECOMPUTED_PARTS[keys["checkpoint_activations"]],
            f"{layout.memory.total / GIB:.1f}",
            f"{1e3 * step_time.total:,.0f}",
            *(
                f"{part / step_time.total:.0%}"
                for part in (step_time.computing, step_time.waiting, step_time.communicating)
            ),
            f"{step_time.mfu:.0%}",
            f"{plan.estimate_days(layout):,.2f}"
            if plan.estimate_days(layout) < 10
            else f"{plan.estimate_days(layout):,.0f}",
        )
    return table

#!/usr/bin/env python3
"""Measure the host cost of a training step: time and launches, compared with a plain PyTorch GPT, on the null device.

    python tools/bench/host_time.py --json docs/results/host_time.json

Kernels take no time on the null device (megatron/rehearsal/null_device), so the time of a step is host time. Each case
is a separate process. In it, steps of the plain GPT (autocast, SDPA, fused AdamW, clipping; DistributedDataParallel
over two ranks) and of Farfield's loop alternate, so that a busy machine affects both alike. With two ranks, the process
is the first of them, with real NCCL process groups. Time is CPU time of the process over all threads. Launches are
exact counts of requests to the CUDA runtime, the driver, cuBLAS and NCCL, from the null device's library. Calls are
those of Python and C functions from Python, in the forward and the backward pass; unlike times they repeat exactly.

`--compile-plain` compiles the plain GPT with torch.compile, as a user who wants its best would. `--graphs` replays
Farfield's micro-batches as CUDA graphs, as it does by default on a GPU. `--layers` changes the number of layers: two
runs give the cost of a layer and of the rest. docs/results/host_time_compiled.json and host_time_graphs.json have both.

The flagship (2-7B cdape_kerple_log a100_8k on 64 ranks, with the kernels) is measured per micro-batch.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, comma_separated, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

METHODS: dict[str, tuple[str, str]] = {
    "none": ("none", "sdpa"),
    "rotary": ("rotary", "sdpa"),
    "kerple_log": ("kerple_log", "triton"),
    "cdape": ("cdape_kerple_log", "triton"),
}
"""Overlay of each method, and the backend intended for it on a GPU."""
SHAPES = {"125M": (12, 768, 12), "350M": (24, 1024, 16)}
"""Layers, hidden size and heads of the plain GPT, as in configs/model."""
LENGTH, VOCABULARY = 512, 50304
WARMUP_STEPS = 5
FLAGSHIP = ("2-7B", "cdape_kerple_log", "a100_8k")
FLAGSHIP_RANKS = 64
GOALS = {
    "none": "host ≤ 2 × plain, launches ≤ 1.2 × plain",
    "rotary": "host ≤ 1.2 × none, ≤ 150 launches more",
    "kerple_log": "host ≤ 1.2 × none, ≤ 150 launches more",
    "cdape": "host ≤ 2 × none, ≤ 700 launches more",
}


@dataclass(frozen=True)
class Case:
    """Case measured by one process."""

    corpus: str
    """Dataset of synthetic tokens, without file extension."""
    size: str
    ranks: int
    methods: list[str]
    rounds: int
    micro_batch: int
    flagship: bool = False
    uses_graphs: bool = False
    """True if Farfield's micro-batches run as CUDA graphs."""
    compiles_plain: bool = False
    """True if the plain GPT is compiled."""
    num_layers: int | None = None
    """Number of layers instead of the size's."""


# ------------------------------------------------------------------------------------------- in the case's own process


def build_trainer(names: list[str], values: dict[str, object], ranks: int) -> Any:
    """Build Farfield's trainer with the configuration that `./deepy.py train` would run."""
    from megatron.config.load import load_config
    from megatron.distributed.hardware import LocalHardware
    from megatron.distributed.launcher_environment import RankInfo
    from megatron.training.console import ConsoleReporter
    from megatron.training.resolve_run import resolve_run
    from megatron.training.trainer import Trainer
    from megatron.training.training_run import build_training_run

    fixed = {"train_iters": 1_000_000, "lr_decay_iters": 1_000_000, "eval_interval": 0, "log_interval": 1_000_000}
    pairs = [f"{key}={value}" for key, value in {**fixed, "device": "cuda", **values}.items()]
    rank = RankInfo(0, ranks, 0, min(ranks, 8))
    config = resolve_run(load_config(names, pairs).config, LocalHardware.detect(), rank_info=rank).config
    run = build_training_run(config, rank, ConsoleReporter(None, config.training.train_iters))
    run.engine.model.train()
    return Trainer(run, time.perf_counter())


class PlainTrainer:
    """Plain hand-written training loop in bfloat16 with autocast, whose forward pass and loss may be compiled."""

    def __init__(self, case: Case) -> None:
        import torch

        from tools.bench.plain_gpt import PlainGPT

        self.torch = torch
        layers, width, heads = SHAPES[case.size]
        self.plain = PlainGPT(case.num_layers or layers, width, heads, LENGTH, VOCABULARY, "none").cuda()
        self.model: Any = self.plain
        if case.ranks > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.plain, device_ids=[0])
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), 1e-4, fused=True)
        self.tokens = torch.randint(VOCABULARY, (case.micro_batch, LENGTH + 1)).pin_memory()

        def compute_loss(tokens: torch.Tensor) -> torch.Tensor:
            logits = self.model(tokens[:, :-1])
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        self.compute_loss = torch.compile(compute_loss, dynamic=False) if case.compiles_plain else compute_loss

    def step(self) -> None:
        tokens = self.tokens.to("cuda", non_blocking=True)
        with self.torch.autocast("cuda", self.torch.bfloat16):
            loss = self.compute_loss(tokens)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        self.optimizer.step()


class StepMeter:
    """Meter of host time and launches of single steps."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.counts: list[dict[str, int]] = []

    def measure(self, step: Any) -> None:
        from megatron.rehearsal.null_device.recorder import read_counters

        before, cpu, wall = read_counters(), time.process_time(), time.perf_counter()
        step()
        self.cpu.append(1e3 * (time.process_time() - cpu))
        self.wall.append(1e3 * (time.perf_counter() - wall))
        done = read_counters() - before
        self.counts.append({**asdict(done), "all_launches": done.all_launches})

    def summarize(self) -> dict[str, Any]:
        """Return medians; times are in milliseconds."""
        counts = {name: statistics.median_low([c[name] for c in self.counts]) for name in self.counts[0]}
        return {
            "cpu_ms": round(statistics.median(self.cpu), 2),
            "cpu_ms_quartiles": [round(q, 2) for q in statistics.quantiles(self.cpu, n=4)[::2]],
            "wall_ms": round(statistics.median(self.wall), 2),
            **counts,
        }


def count_calls(step: Callable[[], None]) -> int:
    """Return how many Python functions, and C functions from Python, a step calls."""
    import torch

    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with torch.autograd.set_multithreading_enabled(False):  # backward passes run in this thread
        step()
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    return count


def measure_case(case: Case) -> list[dict[str, Any]]:
    """Return a record per method; steps of the plain GPT alternate with each method's steps."""
    import gc

    from megatron.utils.signals import GracefulStop

    records, plain = [], None
    for method in case.methods:
        overlay, backend = METHODS[method]
        values = {
            "precision": "bf16", "checkpoint_activations": "false", "attention_backend": backend,
            "train_micro_batch_size_per_gpu": case.micro_batch, "train_batch_size": case.micro_batch * case.ranks,
            "num_gpus": case.ranks, "seq_length": LENGTH, "train_data_paths": f"[{case.corpus}]",
            "make_vocab_size_divisible_by": 128, "cuda_graph": "on" if case.uses_graphs else "off",
        }  # fmt: skip
        if case.num_layers is not None:
            values["num_layers"] = case.num_layers
        trainer = build_trainer([case.size, overlay], values, case.ranks)
        if plain is None:
            plain = PlainTrainer(case)
        meters = StepMeter(), StepMeter()
        with GracefulStop() as stop:

            def step(trainer: Any = trainer, stop: Any = stop) -> None:
                trainer.train_step(stop)

            for number in range(WARMUP_STEPS + case.rounds):
                if number == WARMUP_STEPS:
                    meters = StepMeter(), StepMeter()
                meters[0].measure(plain.step)
                meters[1].measure(step)
                if stop.signal is not None:
                    raise KeyboardInterrupt
            calls = count_calls(plain.step), count_calls(step)
        ratios = [own / other for other, own in zip(meters[0].cpu, meters[1].cpu, strict=True)]
        records.append({
            "size": case.size, "ranks": case.ranks, "method": method, "backend": backend,
            "plain": {**meters[0].summarize(), "calls": calls[0]},
            "farfield": {**meters[1].summarize(), "calls": calls[1]},
            "cpu_ratio": round(statistics.median(ratios), 3),
            "cpu_ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
        })  # fmt: skip
        trainer.close()
        trainer.run.close()
        del trainer
        gc.collect()
    return records


def measure_flagship(case: Case) -> list[dict[str, Any]]:
    """Measure the flagship's first rank: cost of a micro-batch and of the optimizer step."""
    from megatron.rehearsal.missing_ranks import skip_weight_initialization
    from megatron.utils.signals import GracefulStop

    with ExitStack() as stack:
        stack.enter_context(skip_weight_initialization())
        values = {
            "train_data_paths": f"[{case.corpus}]", "num_gpus": 8, "nodes": FLAGSHIP_RANKS // 8,
            "attention_backend": "triton", "cuda_graph": "off",
        }  # fmt: skip
        trainer = build_trainer(list(FLAGSHIP), values, FLAGSHIP_RANKS)
    engine, step_meter, micro_meter, whole = trainer.run.engine, StepMeter(), StepMeter(), StepMeter()
    own_step, own_forward = engine.step, engine.forward_backward
    count = trainer.run.config.training.gradient_accumulation_steps

    def forward_backward(*arguments: Any, **options: Any) -> Any:
        result: list[Any] = []
        micro_meter.measure(lambda: result.append(own_forward(*arguments, **options)))
        return result[0]

    engine.forward_backward = forward_backward
    engine.step = lambda lr: step_meter.measure(lambda: own_step(lr))
    with GracefulStop() as stop:
        for number in range(2 + case.rounds):
            if number == 2:
                for meter in (step_meter, micro_meter, whole):
                    meter.__init__()  # type: ignore[misc]
            whole.measure(lambda: trainer.train_step(stop))
            if stop.signal is not None:
                raise KeyboardInterrupt
    per_micro_batch = {
        name: round(value / count, 1) for name, value in micro_meter.summarize().items() if not isinstance(value, list)
    }
    return [{
        "configuration": " ".join(FLAGSHIP), "ranks": FLAGSHIP_RANKS, "micro_batches": count,
        "per_micro_batch": per_micro_batch, "optimizer_step": step_meter.summarize(), "step": whole.summarize(),
    }]  # fmt: skip


def run_case(file: Path) -> None:
    """Measure the case described by a file; write the records next to it."""
    import logging

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    case = Case(**json.loads(file.read_text()))
    records = measure_flagship(case) if case.flagship else measure_case(case)
    file.with_suffix(".records").write_text(json.dumps(records))
    sys.stdout.flush()
    os._exit(0)  # skips waiting for groups whose other ranks do not run


# ------------------------------------------------------------------------------------------------ in the tool's process


def start_case(case: Case, folder: Path, card: str) -> list[dict[str, Any]]:
    """Measure a case on the null device in a separate process, and return its records.

    Raises:
        SystemExit: if the process fails, with the end of its output.
    """
    from megatron.distributed.launcher_environment import RankInfo
    from megatron.rehearsal.null_device.environment import build_environment, get_gpu_model

    file = folder / f"{case.size}-{case.ranks}.json"
    file.write_text(json.dumps(asdict(case)))
    environment = build_environment(get_gpu_model(card), devices=min(case.ranks, 8), is_single_rank=case.ranks > 1)
    if case.ranks > 1:
        environment |= RankInfo(0, case.ranks, 0, min(case.ranks, 8)).to_environment("127.0.0.1", 29500)
    environment["OMP_NUM_THREADS"] = "1"
    with open(file.with_suffix(".out"), "wb") as output:
        command = [sys.executable, "-W", "ignore", __file__, "--case", str(file)]
        code = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
    if code != 0:
        printed = file.with_suffix(".out").read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"error: the case {case.size} on {case.ranks} ranks failed ({code}): {printed[-2000:]}")
    records: list[dict[str, Any]] = json.loads(file.with_suffix(".records").read_text())
    return records


def format_page(result: dict[str, Any]) -> str:
    size = f", with {result['layers']} layers" if result.get("layers") else ""
    lines = [
        "# Host time of a training step",
        "",
        f"A step of {result['micro_batch']} × {LENGTH} tokens per rank in bfloat16 on the null device"
        f"{size}. Kernels take no time there, so "
        "the table shows the cost of Python and of launches.",
        "Plain is a GPT of the same shape in plain PyTorch (autocast, SDPA, fused AdamW, clipping"
        f"{', torch.compile' if result.get('compiles_plain') else ''}). Its steps "
        "alternate with those of each method in the same process.",
        *(["Farfield's micro-batches run as CUDA graphs."] if result["uses_graphs"] else []),
        "Host time is CPU time of the process (median over steps; × plain is the median ratio of step pairs).",
        "Launches are exact counts of kernels, matrix products, copies, fills and collectives. Calls are of Python "
        "functions, and of C functions from Python.",
        "",
        "| model | ranks | method | backend | host ms | plain ms | × plain | × none | launches | plain's | × plain | "
        "more than none | Triton's | waits | calls | plain's |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    none = {(r["size"], r["ranks"]): r for r in result["records"] if r["method"] == "none"}
    for record in result["records"]:
        own, plain = record["farfield"], record["plain"]
        base = none.get((record["size"], record["ranks"]))
        times_none = "–" if base is None else f"{record['cpu_ratio'] / base['cpu_ratio']:.2f}"
        more = "–" if base is None else f"{own['all_launches'] - base['farfield']['all_launches']:,}"
        case = f"{record['size']} | {record['ranks']} | {record['method']} | {record['backend']}"
        lines.append(
            f"| {case} | {own['cpu_ms']:.1f} | "
            f"{plain['cpu_ms']:.1f} | {record['cpu_ratio']:.2f} | {times_none} | {own['all_launches']:,} | "
            f"{plain['all_launches']:,} | {own['all_launches'] / plain['all_launches']:.2f} | {more} | "
            f"{own['triton']} | {own['synchronizations']} | {own['calls']:,} | {plain['calls']:,} |"
        )
    lines.append("")
    if not result.get("compiles_plain"):
        lines += ["Goals: " + "; ".join(f"{method}: {goal}" for method, goal in GOALS.items()) + ".", ""]
    for record in result["flagship"]:
        micro, step = record["per_micro_batch"], record["optimizer_step"]
        lines += [
            f"`{record['configuration']}` on {record['ranks']} ranks, rank 0, with the kernels: "
            f"{micro['cpu_ms'] / 1e3:.3f} s of host time and {micro['all_launches']:,.0f} launches per micro-batch "
            f"({micro['triton']:,.0f} of Triton's), {step['cpu_ms'] / 1e3:.3f} s per optimizer step. "
            "Goal: under 0.25 s per micro-batch.",
            "",
        ]
    return "\n".join([*lines, format_provenance(result), ""])


def main() -> None:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=comma_separated(SHAPES), default="125M,350M")
    parser.add_argument("--ranks", type=comma_separated(("1", "2")), default="1,2")
    parser.add_argument("--methods", type=comma_separated(METHODS), default=",".join(METHODS))
    parser.add_argument("--rounds", type=int_at_least(2), default=15, help="timed steps of each model (15)")
    parser.add_argument("--micro-batch", type=int_at_least(1), default=32, help="sequences per rank and step (32)")
    parser.add_argument("--graphs", action="store_true", help="run Farfield's micro-batches as CUDA graphs")
    parser.add_argument("--compile-plain", action="store_true", help="compile the plain GPT")
    parser.add_argument("--layers", type=int_at_least(1), help="number of layers instead of the sizes' own")
    parser.add_argument("--gpu", default="h100", help="emulated GPU (h100)")
    parser.add_argument("--no-flagship", action="store_true", help="skip the flagship")
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    parser.add_argument("--case", type=Path, help="internal: measure the case of this file")
    arguments = parser.parse_args()
    if arguments.case is not None:
        run_case(arguments.case)
    measure_all(arguments)


def measure_all(arguments: Any) -> None:
    """Measure every case in turn; write the record after each."""
    from megatron.rehearsal.rehearsed_run import write_synthetic_corpus
    from megatron.utils.errors import FarfieldError

    def split(value: str | list[str]) -> list[str]:
        return value.split(",") if isinstance(value, str) else value

    result = {
        **collect_provenance(__file__, "cpu"),
        "card": arguments.gpu,
        "compiles_plain": arguments.compile_plain,
        "uses_graphs": arguments.graphs,
        "micro_batch": arguments.micro_batch,
        "layers": arguments.layers,
        "records": [],
        "flagship": [],
    }
    methods = split(arguments.methods)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = str(write_synthetic_corpus(folder / "corpus", VOCABULARY - 47, 8192)["train"])
        cases = [
            Case(
                corpus,
                size,
                int(ranks),
                methods,
                arguments.rounds,
                arguments.micro_batch,
                uses_graphs=arguments.graphs,
                compiles_plain=arguments.compile_plain,
                num_layers=arguments.layers,
            )
            for size in split(arguments.sizes)
            for ranks in split(arguments.ranks)
        ]
        if not arguments.no_flagship:
            cases.append(Case(corpus, FLAGSHIP[0], FLAGSHIP_RANKS, [], min(arguments.rounds, 4), 0, flagship=True))
        for case in cases:
            try:
                found = start_case(case, folder, arguments.gpu)
            except FarfieldError as error:
                raise SystemExit(f"error: {error}") from None
            result["flagship" if case.flagship else "records"] += found
            for record in found:
                print(json.dumps(record), flush=True)
            if arguments.json is not None:
                write_record(arguments.json, result, format_page(result))
    print(format_page(result))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compare runs with and without CUDA graphs: equality of results, time and memory.

    python tools/bench/graph_training.py --json docs/results/graph_training.json

Each case trains twice from the same seed in this process, with `cuda_graph: off` and `on`. The cases cover the code
that surrounds the graphs in `./deepy.py train`: DeepSpeed's optimizers with ZeRO 0, 1 and 2, loss scaling, accumulation
and recomputation. The losses of all steps, and the float32 masters after the last step, are compared bit for bit. Times
are those of whole steps with synchronization, without the first steps, in which kernels are compiled and graphs are
tried. The peak memory of the run without graphs is recorded with the estimate of `./deepy.py plan`. The exit code is 1
if a case fails or differs.
"""

import argparse
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, comma_separated, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()
    warnings.filterwarnings("ignore")

VOCABULARY = 50304
WARMUP_STEPS = 3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "kerple_log": ("kerple_log", {"precision": "bf16"}),
    "cdape": ("cdape_kerple_log", {"precision": "bf16"}),
    "zero_1": ("kerple_log", {"precision": "bf16", "zero_optimization": {"stage": 1}}),
    "zero_2_accumulation": (
        "kerple_log",
        {"precision": "bf16", "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 3},
    ),
    "zero_1_accumulation": (
        "kerple_log",
        {"precision": "bf16", "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 3},
    ),
    "fp16": ("kerple_log", {"precision": "fp16", "gradient_accumulation_steps": 2}),
    "fp32_recomputation": ("kerple_log", {"precision": "fp32", "checkpoint_activations": True, "z_loss": 1e-4}),
}
"""Overlay and configuration keys of each case."""
MODELS = {"tiny": (2, 64, 4), "125M": (12, 768, 12), "350M": (24, 1024, 16)}
"""Layers, width and heads of each model."""


def build_config(case: str, mode: str, model: str, length: int, batch: int, corpus: Path) -> Any:
    """Return the configuration of a case."""
    from megatron.config.load import load_config
    from megatron.config.schema import Config

    overlay, keys = CASES[case]
    layers, width, heads = MODELS[model]
    position = load_config(["125M", overlay]).config.position.model_dump()
    paths = {f"{split}_data_paths": [str(corpus / f"{split}_text_document")] for split in ("train", "valid", "test")}
    flat = {
        "num_layers": layers, "hidden_size": width, "num_attention_heads": heads, "seq_length": length,
        "max_position_embeddings": length, "make_vocab_size_divisible_by": 64, "train_iters": 1000,
        "train_micro_batch_size_per_gpu": batch, "attention_backend": "triton", "optimizer": {"params": {"lr": 1e-3}},
        "log_interval": 1000, "eval_interval": 0, "device": "cuda", "num_gpus": 1, "use_tensorboard": False,
        "save": None, "data_cache": str(corpus / "samples"), **paths, **position, **keys, "cuda_graph": mode,
    }  # fmt: skip
    return Config.from_flat(flat)


def train(config: Any, steps: int) -> dict[str, Any]:
    """Train for a number of steps. Return the losses, masters, times and memory of the run."""
    import torch

    from megatron.checkpoint.engine_state import list_optimizer_shards
    from megatron.distributed.hardware import LocalHardware
    from megatron.distributed.launcher_environment import RankInfo
    from megatron.distributed.mesh import ParallelSizes
    from megatron.planning.memory_estimate import estimate_memory
    from megatron.planning.model_costs import plan_model
    from megatron.training.console import ConsoleReporter
    from megatron.training.resolve_run import resolve_run
    from megatron.training.trainer import Trainer
    from megatron.training.training_run import build_training_run
    from megatron.utils.signals import GracefulStop

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resolved = resolve_run(config, LocalHardware.detect(), rank_info=RankInfo()).config
    run = build_training_run(resolved, RankInfo(), ConsoleReporter(None, resolved.training.train_iters))
    run.engine.model.train()
    lines: list[str] = []
    run.console.log = lines.append  # type: ignore[method-assign, assignment]
    losses: list[torch.Tensor] = []
    forward_backward = run.engine.forward_backward

    def listen(*arguments: Any, **options: Any) -> torch.Tensor:
        losses.append(forward_backward(*arguments, **options))
        return losses[-1]

    run.engine.forward_backward = listen  # type: ignore[method-assign]
    trainer, seconds = Trainer(run, time.perf_counter()), []
    never_stop = GracefulStop()  # not entered: Ctrl-C ends the tool at once, as nothing needs to be saved
    try:
        for _ in range(WARMUP_STEPS + steps):
            torch.cuda.synchronize()
            start_time = time.perf_counter()
            trainer.train_step(never_stop)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_time)
        masters = {shard.name: shard.master.clone() for shard in list_optimizer_shards(run.engine.deepspeed)}
        reserved = torch.cuda.memory_reserved()
        peak = torch.cuda.max_memory_allocated()
    finally:
        trainer.close()
        run.close()
    planned = estimate_memory(
        plan_model(resolved),
        ParallelSizes(),
        run.vocabulary.size,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory,
    )
    return {
        "losses": torch.stack(losses).tolist(),
        "masters": masters,
        "ms": 1e3 * statistics.median(seconds[WARMUP_STEPS:]),
        "reserved_gb": round(reserved / 1e9, 2),
        "peak_gb": round(peak / 1e9, 2),
        "planned_gb": round(planned.total / 1e9, 2),
        "lines": [line for line in lines if line.startswith("CUDA graphs")],
    }


def compare(case: str, model: str, length: int, batch: int, steps: int, corpus: Path) -> dict[str, Any]:
    """Train a case with and without CUDA graphs, and return its record."""
    import torch

    head = {"case": case, "model": model, "T": length, "B": batch, "steps": steps}
    try:
        eager, graphs = (train(build_config(case, mode, model, length, batch, corpus), steps) for mode in ("off", "on"))
    except Exception as failure:  # continue with the other cases
        return {**head, "failure": f"{type(failure).__name__}: {failure}".splitlines()[0]}
    is_equal = eager["losses"] == graphs["losses"] and all(
        torch.equal(master, graphs["masters"][name]) for name, master in eager["masters"].items()
    )
    return {
        **head,
        "equal": is_equal,
        "losses": [eager["losses"][0], eager["losses"][-1], graphs["losses"][-1]],
        **{
            f"{name}_{key}": round(found[key], 3)
            for name, found in (("eager", eager), ("graph", graphs))
            for key in ("ms", "reserved_gb", "peak_gb")
        },
        "planned_gb": eager["planned_gb"],
        "line": " ".join(graphs["lines"]),
    }


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=comma_separated(CASES), default=",".join(CASES))
    parser.add_argument("--model", choices=MODELS, default="350M")
    parser.add_argument("--length", type=int_at_least(16), default=512)
    parser.add_argument("--batch", type=int_at_least(1), default=1, help="sequences per micro-batch")
    parser.add_argument("--steps", type=int_at_least(1), default=10, help="number of timed steps")
    parser.add_argument("--json", type=parse_output_path, help="output file of the records")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    import torch

    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device found")
    from megatron.rehearsal.rehearsed_run import write_synthetic_corpus

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    result: dict[str, Any] = {**collect_provenance(__file__, "cuda"), "records": []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_synthetic_corpus(corpus, VOCABULARY, 65536)
        for case in arguments.cases:
            record = compare(case, arguments.model, arguments.length, arguments.batch, arguments.steps, corpus)
            result["records"].append(record)
            if "failure" in record:
                print(f"{case:<20} failed: {record['failure']}", flush=True)
            else:
                times = f"{record['eager_ms']:>8.2f} ms → {record['graph_ms']:>8.2f} ms per step"
                memory = f"{record['eager_reserved_gb']} → {record['graph_reserved_gb']} GB reserved"
                print(f"{case:<20} {times}   {memory}   {'equal' if record['equal'] else 'DIFFERENT'}", flush=True)
            if arguments.json:
                write_record(arguments.json, result)
    sys.exit(0 if all(record.get("equal") for record in result["records"]) else 1)


if __name__ == "__main__":
    main()

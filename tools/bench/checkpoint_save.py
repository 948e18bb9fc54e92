"""Measure the cost of a checkpoint: how long training blocks, and how much it slows down the following steps.

    python tools/bench/checkpoint_save.py --json docs/results/save.json

Trains the 125M model in one process on the CPU. Three kinds of rounds alternate, so that noise of the machine affects
all alike: steps alone; a save with the steps that run while it is written; and a blocking save without threads.
"""

import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from megatron.checkpoint import layout  # noqa: E402
from megatron.config.load import load_config  # noqa: E402
from megatron.data.corpus.prepare import prepare_corpus  # noqa: E402
from megatron.distributed.hardware import LocalHardware  # noqa: E402
from megatron.distributed.launcher_environment import RankInfo  # noqa: E402
from megatron.options.data import CorpusOptions  # noqa: E402
from megatron.training.console import ConsoleReporter  # noqa: E402
from megatron.training.resolve_run import resolve_run  # noqa: E402
from megatron.training.trainer import Trainer  # noqa: E402
from megatron.training.training_run import build_training_run  # noqa: E402
from megatron.utils.signals import GracefulStop  # noqa: E402

SHAPES = {"125M": (12, 768, 12, 512, 50304), "tiny": (2, 64, 2, 64, 64)}
"""Layers, hidden size, heads, sequence length and vocabulary size."""


def build_trainer(shape: str, corpus: Path, save: Path) -> Trainer:
    """Build a trainer with one micro-batch of one sequence per step, ready to train."""
    layers, width, heads, length, rows = SHAPES[shape]
    values = {
        "num_layers": layers, "hidden_size": width, "num_attention_heads": heads, "seq_length": length,
        "make_vocab_size_divisible_by": rows, "pos_emb": "rotary", "train_micro_batch_size_per_gpu": 1,
        "train_iters": 1_000_000, "eval_interval": 0, "log_interval": 1_000_000, "keep_last_n_checkpoints": 1,
        "train_data_paths": f"[{corpus / 'train_text_document'}]", "device": "cpu", "save": str(save),
    }  # fmt: skip
    config = load_config([], [f"{key}={value}" for key, value in values.items()]).config
    config = resolve_run(config, LocalHardware.detect()).config
    run = build_training_run(config, RankInfo(), ConsoleReporter(None, config.training.train_iters))
    run.engine.model.train()
    return Trainer(run, time.perf_counter())


def measure_saves(shape: str, rounds: int, place: Path) -> dict[str, Any]:
    """Measure seconds of each kind, one value per round or step. The first round warms up."""
    prepare_corpus(CorpusOptions(sources=["python"]), place / "corpus")
    trainer = build_trainer(shape, place / "corpus", place / "run")
    saver = trainer.saver
    times: dict[str, list[float]] = {"step": [], "stall": [], "step_while_writing": [], "written": [], "waited_for": []}

    def step(kind: str, stop: GracefulStop) -> None:
        start_time = time.perf_counter()
        trainer.train_step(stop)
        times[kind].append(time.perf_counter() - start_time)

    with closing(trainer.run), GracefulStop() as stop:
        for number in range(rounds + 1):
            step("step", stop)
            step("step", stop)
            start_time = time.perf_counter()
            trainer._save_checkpoint()
            times["stall"].append(time.perf_counter() - start_time)
            while saver.pending_step is not None:
                step("step_while_writing", stop)
            times["written"].append(time.perf_counter() - start_time)
            step("step", stop)
            start_time = time.perf_counter()
            trainer._save_checkpoint()
            saver.finish()
            times["waited_for"].append(time.perf_counter() - start_time)
            if number == 0:
                first = times["stall"][0]
                times = {kind: [] for kind in times}
            if stop.signal is not None:
                raise SystemExit(128 + stop.signal)
        files = [path for path in layout.resolve_checkpoint_path(place / "run").rglob("*") if path.is_file()]
    return {
        "shape": shape,
        "parameters": trainer.run.parameters,
        "bytes": sum(path.stat().st_size for path in files),
        "first_stall": round(first, 4),
        "medians": {kind: round(statistics.median(found), 4) for kind, found in times.items() if found},
        "rounds": rounds,
    }


def render_page(record: dict[str, Any]) -> str:
    at = record["medians"]
    rows = (
        ("a step", at["step"]),
        ("blocking part of a save: copying", at["stall"]),
        ("blocking part of the first save, with newly allocated memory", record["first_stall"]),
        ("a step while a checkpoint is written", at.get("step_while_writing", at["step"])),
        ("from the start of a save to the end of the step that publishes the checkpoint", at["written"]),
        ("a blocking save", at["waited_for"]),
    )
    lines = "\n".join(f"| {what} | {seconds:.3f} | {seconds / at['step']:.2f} |" for what, seconds in rows)
    return f"""# Cost of a checkpoint

The {record["shape"]} model ({record["parameters"]:,} parameters, float32, one sequence per step), one process on a CPU.
A checkpoint has {record["bytes"] / record["parameters"]:.1f} bytes per parameter.
Seconds are medians of {record["rounds"]} rounds. Steps alone, steps during a save and blocking
saves alternate.

| what | seconds | in steps |
|---|---|---|
{lines}

{format_provenance(record["stamp"])}
"""


def main() -> None:
    """Measure the saves and write the record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="125M")
    parser.add_argument("--rounds", type=int_at_least(1), default=5)
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measure_saves(arguments.shape, arguments.rounds, Path(place))
    record = {"stamp": collect_provenance(__file__, "cpu"), **found}
    print(render_page(record))
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))


if __name__ == "__main__":
    main()

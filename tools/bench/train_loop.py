#!/usr/bin/env python3
"""Compare tokens per second of Farfield's training loop with a plain PyTorch GPT of the same shape, in one process.

    python tools/bench/train_loop.py --json docs/results/bench_train.json

Both train on the same corpus with AdamW, clipping and a schedule. Farfield runs its full loop (DeepSpeed engine,
megatron-core model, indexed data, metrics). The plain model of plain_gpt.py runs in a minimal hand-written loop. Blocks
of steps alternate between the two, so that noise of the machine affects both alike. The result is the median ratio over
blocks. Records are written after each method. SIGTERM and Ctrl-C stop the tool after the current step and keep the
records of earlier methods.
"""

import argparse
import logging
import signal
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, comma_separated, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

import torch  # noqa: E402

from megatron.config.load import load_config  # noqa: E402
from megatron.config.schema import Config  # noqa: E402
from megatron.data.corpus.prepare import prepare_corpus  # noqa: E402
from megatron.data.datasets import load_token_stream  # noqa: E402
from megatron.distributed.hardware import LocalHardware  # noqa: E402
from megatron.distributed.launcher_environment import RankInfo  # noqa: E402
from megatron.options.data import CorpusOptions  # noqa: E402
from megatron.training.console import ConsoleReporter  # noqa: E402
from megatron.training.resolve_run import resolve_run  # noqa: E402
from megatron.training.trainer import Trainer  # noqa: E402
from megatron.training.training_run import build_training_run  # noqa: E402
from megatron.utils.signals import GracefulStop  # noqa: E402
from tools.bench.plain_gpt import PlainGPT  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

SHAPES = {
    "quickstart": {"layers": 4, "width": 128, "heads": 4, "length": 64, "batch": 32, "cdape_width": 16, "rows": 32,
                   "floor": 0.85},
    "medium": {"layers": 8, "width": 512, "heads": 8, "length": 512, "batch": 4, "cdape_width": 32, "rows": 64,
               "floor": 0.95},
}  # fmt: skip
METHODS = {
    "rotary": {"pos_emb": "rotary"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "cdape": {"pos_emb": "kerple_log", "score_processor": "cdape"},
}


def build_trainer(shape: dict, method: str, corpus: Path) -> Trainer:
    """Build Farfield's trainer with the configuration that `./deepy.py train` would run."""
    values = {
        "num_layers": shape["layers"], "hidden_size": shape["width"], "num_attention_heads": shape["heads"],
        "seq_length": shape["length"], "train_micro_batch_size_per_gpu": shape["batch"], "train_iters": 1_000_000,
        "attention_chunk_rows": shape["rows"], "make_vocab_size_divisible_by": 1,
        "lr_decay_style": "cosine", "warmup": 0.0, "eval_interval": 0,
        "train_data_paths": f"[{corpus / 'train_text_document'}]", "log_interval": 1_000_000,
        "optimizer.params.lr": 1e-3, "device": "cpu", **METHODS[method],
    }  # fmt: skip
    if "score_processor" in values:
        values["score_processor_options.width"] = shape["cdape_width"]
    return start_trainer(load_config([], [f"{key}={value}" for key, value in values.items()]).config)


def start_trainer(config: Config) -> Trainer:
    """Build the trainer of one process that prints nothing, ready for its first step."""
    config = resolve_run(config, LocalHardware.detect()).config
    run = build_training_run(config, RankInfo(), ConsoleReporter(None, config.training.train_iters))
    run.engine.model.train()
    return Trainer(run, time.perf_counter())


class PlainTrainer:
    """Minimal hand-written training loop."""

    def __init__(self, shape: dict, method: str, corpus: Path, vocabulary: int) -> None:
        self.shape = shape
        config = load_config([], [*MINIMAL_CONFIG, f"train_data_paths=[{corpus / 'train_text_document'}]"]).config
        self.data = torch.from_numpy(load_token_stream(config.data, "train").astype("int64"))
        self.model = PlainGPT(
            shape["layers"], shape["width"], shape["heads"], shape["length"], vocabulary, method, shape["cdape_width"]
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1_000_000)

    def step(self) -> None:
        length = self.shape["length"]
        starts = torch.randint(0, len(self.data) - length - 1, (self.shape["batch"],))
        window = torch.stack([self.data[s : s + length + 1] for s in starts.tolist()])
        logits = self.model(window[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()


MINIMAL_CONFIG = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_iters=1"]


class StoppedBySignal(Exception):
    """Exception for a received signal, with its number. It prevents a loop that takes no steps from being timed."""


def measure_speed(shape_name: str, method: str, corpus: Path, blocks: int, steps: int) -> dict:
    """Alternate blocks of steps; return tokens per second of each and the median ratio.

    Raises:
        StoppedBySignal: if the process receives SIGTERM or SIGINT.
    """
    shape = SHAPES[shape_name]
    trainer = build_trainer(shape, method, corpus)
    plain = PlainTrainer(shape, method, corpus, trainer.run.vocabulary.size)
    tokens = shape["batch"] * shape["length"] * steps
    times: dict[str, list[float]] = {"farfield": [], "plain": []}
    with closing(trainer.run), GracefulStop() as stop:
        takers = {"farfield": lambda: trainer.train_step(stop), "plain": plain.step}
        for block in range(blocks + 1):  # the first block warms up
            for name in sorted(takers, reverse=bool(block % 2)):
                start_time = time.perf_counter()
                for _ in range(steps):
                    takers[name]()
                    if stop.signal is not None:
                        raise StoppedBySignal(stop.signal)
                if block:
                    times[name].append(time.perf_counter() - start_time)
    ratios = [p / f for f, p in zip(times["farfield"], times["plain"], strict=True)]
    return {
        "shape": shape_name,
        "method": method,
        **{k: shape[k] for k in ("layers", "width", "heads", "length", "batch")},
        "parameters": {"farfield": sum(p.numel() for p in trainer.run.engine.model.parameters()),
                       "plain": sum(p.numel() for p in plain.model.parameters())},
        "tokens_per_second": {name: round(tokens / statistics.median(t)) for name, t in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
        "floor": shape["floor"],
        "blocks": blocks,
        "steps_per_block": steps,
    }  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=comma_separated(SHAPES), default="quickstart,medium")
    parser.add_argument("--methods", type=comma_separated(METHODS), default="rotary,kerple_log,cdape")
    parser.add_argument("--blocks", type=int_at_least(2), default=9)
    parser.add_argument("--json", type=parse_output_path, help="output file of the records")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        compare_speeds(arguments.shapes, arguments.methods, arguments.blocks, arguments.json)
    except StoppedBySignal as stopped:
        number = stopped.args[0]
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)


def compare_speeds(shapes: list[str], methods: list[str], blocks: int, file: Path | None) -> None:
    """Measure every method in every shape; print and write each record as soon as it is available."""
    result = {**collect_provenance(__file__, "cpu"), "records": []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "python"
        prepare_corpus(CorpusOptions(sources=["python"]), corpus)
        print(f"{'shape':<11} {'method':<11} {'farfield tok/s':>15} {'plain tok/s':>12} {'ratio':>6}   quartiles")
        for shape in shapes:
            for method in methods:
                record = measure_speed(shape, method, corpus, blocks, 15 if shape == "quickstart" else 1)
                result["records"].append(record)
                speed = record["tokens_per_second"]
                low, high = record["ratio_quartiles"]
                print(f"{shape:<11} {method:<11} {speed['farfield']:>15,} {speed['plain']:>12,} {record['ratio']:>6}"
                      f"   {low} … {high}", flush=True)  # fmt: skip
                if file is not None:
                    write_record(file, result)


if __name__ == "__main__":
    main()

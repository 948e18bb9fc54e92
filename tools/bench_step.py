#!/usr/bin/env python3
"""Time of one training step of whole models, position methods side by side, on one device.

    python tools/bench_step.py --shapes 125M:512 125M:2048 350M:512 --json docs/results/bench_step.json

A step is forward, backward and a fused AdamW update in the compute type. The models are Farfield's (megatron-core's
GPT with our attention), on GPUs with `sdpa` for rotary and `triton` for the others, and a GPT in plain PyTorch of the
same shape with flash attention and rotary positions, compiled on GPUs. Rounds go through all of them in turn; medians
and quartiles count.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

import torch  # noqa: E402

from megatron.model.build import build_model  # noqa: E402
from megatron.model.options import ModelOptions, PositionOptions  # noqa: E402
from megatron.training.hardware import peak_tflops  # noqa: E402
from tools.arguments import Parser, at_least, device, output_file  # noqa: E402
from tools.plain_gpt import PlainGPT  # noqa: E402
from tools.stamp import stamp  # noqa: E402

# layers, width, heads, as configs/model has them; "tiny" is for rehearsals
MODELS = {"tiny": (2, 64, 4), "125M": (12, 768, 12), "350M": (24, 1024, 16)}
VOCABULARY = 50304
CDAPE = {"score_processor": "cdape", "pos_emb_per_layer": True}
METHODS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "cdape": {"pos_emb": "kerple_log", **CDAPE},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def stepper(model: torch.nn.Module, loss_of: Callable[..., torch.Tensor], tokens: torch.Tensor) -> Callable[[], None]:
    """A function that takes one training step."""
    fused = tokens.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        optimizer.step()

    return step


def candidates(
    shape: str, length: int, tokens: torch.Tensor, dtype: torch.dtype, methods: list[str]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Steps by name, and Farfield's FLOPs per token by name."""
    layers, width, heads = MODELS[shape]
    options = ModelOptions(
        num_layers=layers, hidden_size=width, num_attention_heads=heads, seq_length=length,
        make_vocab_size_divisible_by=128,
    )  # fmt: skip
    steps: dict[str, Any] = {}
    flops: dict[str, float] = {}
    for name in [method for method in METHODS if method in methods]:
        position = METHODS[name]
        backend = "triton" if tokens.device.type == "cuda" and name != "rotary" else "auto"
        gpt = build_model(
            options, PositionOptions(**position), VOCABULARY, seed=1, device=tokens.device, dtype=dtype, backend=backend
        )
        steps[name] = stepper(gpt, lambda x, y, gpt=gpt: gpt(x, y).mean(), tokens)
        flops[name] = gpt.flops_per_token(length)
    if "plain" not in methods:
        return steps, flops
    plain = PlainGPT(layers, width, heads, length, VOCABULARY, "rotary").to(tokens.device, dtype)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(plain(x).float().flatten(0, 1), y.flatten())

    cuda = tokens.device.type == "cuda"
    steps["plain"] = stepper(plain, torch.compile(loss, dynamic=False) if cuda else loss, tokens)
    flops["plain"] = 6.0 * 12 * layers * width**2 + 6.0 * VOCABULARY * width + 6.0 * layers * width * (length + 1)
    return steps, flops


def bench(
    shape: str, length: int, batch: int, dtype: str, device: str, rounds: int, methods: list[str]
) -> list[dict[str, Any]]:
    """One record per candidate."""
    torch.compiler.reset()  # every shape is compiled for itself
    tokens = torch.randint(VOCABULARY, (batch, length + 1)).to(device)
    steps, flops = candidates(shape, length, tokens, DTYPES[dtype], methods)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 2):  # the first two warm up and compile
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            if device != "cpu":
                torch.cuda.synchronize()
            if round_ > 1:
                taken[name].append(time.perf_counter() - begun)
    peak = peak_tflops(torch.device(device), dtype, None)
    records = []
    for name, times in taken.items():
        middle = statistics.median(times)
        record = {
            "op": "train_step", "peer": name, "model": shape, "device": device, "dtype": dtype, "B": batch,
            "T": length, "ms": {"both": [round(1e3 * q, 3) for q in statistics.quantiles(times, n=4)]},
            "tokens_per_second": round(batch * length / middle),
            **{f"ratio_to_{other}": round(statistics.median(t / o for t, o in zip(times, taken[other], strict=True)), 4)
               for other in ("rotary", "kerple_log", "plain") if other in taken},
            "tflops": round(flops[name] * batch * length / middle / 1e12, 3),
            "mfu": None if peak is None else round(flops[name] * batch * length / middle / 1e12 / peak, 4),
            "rounds": rounds,
        }  # fmt: skip
        records.append(record)
        print(
            f"{shape:<6} T={length:<6} {name:<11} {1e3 * middle:>10.2f} ms {record['tokens_per_second']:>10,} tok/s"
            + "".join(f"   {record[key]:.3f} × {key[9:]}" for key in record if key.startswith("ratio_to_")), flush=True,
        )  # fmt: skip
    return records


def model_and_length(text: str) -> tuple[str, int]:
    """The type of MODEL:LENGTH."""
    model, _, length = text.partition(":")
    if model not in MODELS or not length.isdecimal() or int(length) < 1:
        raise argparse.ArgumentTypeError(f"must be MODEL:LENGTH with MODEL one of {', '.join(MODELS)}, not {text!r}")
    return model, int(length)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shapes",
        type=model_and_length,
        nargs="+",
        help="MODEL:LENGTH",
        default=[("125M", 512), ("125M", 2048), ("350M", 512)],
    )
    parser.add_argument("--methods", nargs="+", default=[*METHODS, "plain"], choices=[*METHODS, "plain"])
    parser.add_argument("--tokens", type=at_least(1), default=16384, help="tokens per step")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=at_least(2), default=15)
    parser.add_argument("--json", type=output_file)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    result = {**stamp(__file__, arguments.device), "records": []}
    for model, length in arguments.shapes:
        batch = max(1, arguments.tokens // length)
        result["records"] += bench(
            model, length, batch, arguments.dtype, arguments.device, arguments.rounds, arguments.methods
        )
        if arguments.json:  # after each shape: a run that is stopped leaves what it has
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure the time of a training step of whole models with several position methods, on one device.

    python tools/bench/train_step.py --shapes 125M:512 125M:2048 350M:512:1 --json docs/results/bench_step.json

A step consists of forward pass, backward pass and a fused AdamW update in the compute type. Farfield's models
(megatron-core's GPT with our attention) use `sdpa` for rotary and `triton` for the others on GPUs. They are compared
with a GPT of the same shape in plain PyTorch, with flash attention and rotary positions, compiled on GPUs. Each round
runs one step of every model. Results are medians and quartiles. Memory is the memory that a step adds to weights,
gradients and optimizer states.

`kerple_log`, `cdape` and `cdape_triton` with `_graph` appended replay forward and backward as CUDA graphs, as
`./deepy.py train` does with `cuda_graph: on`, beside the same methods launched kernel by kernel:

    python tools/bench/train_step.py --shapes 350M:512:1 350M:512:4 --methods kerple_log kerple_log_graph

`--layer` measures the forward and backward pass of a single layer instead, for lengths at which the logits do not fit
in memory. A model that fails is recorded with the reason, and the exit code is then 1. Ctrl-C stops the tool and keeps
the rounds measured so far.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_device, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()
    warnings.filterwarnings("ignore")

import torch  # noqa: E402

from megatron.attention.segments import build_segments  # noqa: E402
from megatron.distributed.process_groups import build_single_process_groups  # noqa: E402
from megatron.kernels.runtime import is_interpreted  # noqa: E402
from megatron.model.attention import AttentionContext  # noqa: E402
from megatron.model.build import build_model  # noqa: E402
from megatron.model.device_dtype import get_torch_dtype  # noqa: E402
from megatron.model.graphed_model import CudaCapture, GraphedModel, TrainingPasses  # noqa: E402
from megatron.options.model import ModelOptions  # noqa: E402
from megatron.options.position import PositionOptions  # noqa: E402
from megatron.training.metrics import find_peak_tflops  # noqa: E402
from tools.bench.error_gate import disable_tf32, format_exception  # noqa: E402
from tools.bench.mixer_switch import use_mixer  # noqa: E402
from tools.bench.plain_gpt import PlainGPT  # noqa: E402
from tools.bench.timing import compute_quartiles  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

# layers, width and heads, as in configs/model; "tiny" is for rehearsals
MODELS = {"tiny": (2, 64, 4), "125M": (12, 768, 12), "350M": (24, 1024, 16)}
VOCABULARY_SIZE = 50304
CDAPE = {"score_processor": "cdape", "pos_emb_per_layer": True}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"pos_emb": "none"},
    "rotary": {"pos_emb": "rotary"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "cdape": {"pos_emb": "kerple_log", **CDAPE},
    "cdape_triton": {"pos_emb": "kerple_log", **CDAPE},
    "rotary_unfused": {"pos_emb": "rotary"},
    "kerple_log_unfused": {"pos_emb": "kerple_log"},
}
"""Variants of methods.

`cdape_triton` is cdape with only Triton's kernels, without those in CUDA C++. `_unfused` is a method whose regions are
not compiled (`compile_regions: false`).
"""
GRAPH = "_graph"
GRAPH_PEERS = tuple(name + GRAPH for name in ("kerple_log", "cdape", "cdape_triton"))
PEERS = (*METHODS, *GRAPH_PEERS, "plain")
DEFAULT_PEERS = ("rotary", "kerple_log", "cdape", "plain")
NUM_WARMUP_ROUNDS = 2
"""Number of rounds for warm-up and compilation."""
StepFunction = Callable[[], None]


@dataclass(frozen=True)
class StepProblem:
    """Training step that every candidate computes."""

    model: str
    length: int
    batch: int
    dtype: str
    device: str
    layer: bool = False

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass
class Candidate:
    """Model with its measurements, or the reason why it failed."""

    step: StepFunction | None = None
    flops: float = 0.0
    """FLOPs per token, forward and backward."""
    seconds: list[float] = field(default_factory=list)
    memory: float | None = None
    """Peak memory of a step, in MB."""
    refusal: str | None = None


def build_farfield(problem: StepProblem, peer: str) -> Candidate:
    """Build Farfield's model, launched kernel by kernel or as CUDA graphs."""
    method = peer.removesuffix(GRAPH)
    layers, width, heads = MODELS[problem.model]
    takes_triton = problem.cuda or is_interpreted()
    options = ModelOptions(
        num_layers=1 if problem.layer else layers, hidden_size=width, num_attention_heads=heads,
        seq_length=problem.length, make_vocab_size_divisible_by=128, compile_regions=not method.endswith("_unfused"),
    )  # fmt: skip
    gpt = build_model(
        options,
        PositionOptions(**METHODS[method]),
        128 if problem.layer else VOCABULARY_SIZE,
        groups=build_single_process_groups(),
        seed=1,
        device=problem.device,
        dtype=get_torch_dtype(problem.dtype),
        backend="auto" if method.startswith(("none", "rotary")) or not takes_triton else "triton",
    )
    if problem.layer:
        return Candidate(_choose_kernels(method, _build_layer_step(problem, gpt, width)))
    launch = _launch_as_graphs(gpt) if peer != method else gpt
    step = _build_model_step(problem, gpt, lambda x, y: launch(x, labels=y).mean())
    return Candidate(_choose_kernels(method, step), gpt.count_flops_per_token(problem.length))


def _launch_as_graphs(gpt: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Return a function that captures the model's first micro-batch as CUDA graphs, and replays them for later ones."""
    gpt.train()
    captured: list[GraphedModel] = []

    def compute_losses(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not captured:
            if not tokens.is_cuda:
                raise RuntimeError("CUDA graphs need a GPU")
            passes, capture = TrainingPasses(gpt, with_log_z=False), CudaCapture()
            with capture.use_side_stream():
                for _ in range(2):
                    losses = passes.compute_losses(tokens, labels)
                    passes.compute_gradients(losses, torch.ones_like(losses))
            captured.append(GraphedModel(passes, tokens, labels, capture))
            captured[0].install()
        return gpt(tokens, labels=labels)

    return compute_losses


def _choose_kernels(method: str, step: StepFunction) -> StepFunction:
    if method != "cdape_triton":
        return step

    def step_without_mixer() -> None:
        with use_mixer(False):
            step()

    return step_without_mixer


def build_plain(problem: StepProblem) -> Candidate:
    """Build a GPT in plain PyTorch with rotary positions."""
    layers, width, heads = MODELS[problem.model]
    model = PlainGPT(layers, width, heads, problem.length, VOCABULARY_SIZE, "rotary")
    model = model.to(problem.device, get_torch_dtype(problem.dtype))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())

    flops = 6.0 * 12 * layers * width**2 + 6.0 * VOCABULARY_SIZE * width + 6.0 * layers * width * (problem.length + 1)
    return Candidate(
        _build_model_step(problem, model, torch.compile(loss, dynamic=False) if problem.cuda else loss), flops
    )


def _build_model_step(
    problem: StepProblem, model: torch.nn.Module, loss_of: Callable[..., torch.Tensor]
) -> StepFunction:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=problem.cuda)
    tokens = torch.randint(VOCABULARY_SIZE, (problem.batch, problem.length + 1)).to(problem.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        optimizer.step()

    return step


def _build_layer_step(problem: StepProblem, gpt: Any, width: int) -> StepFunction:
    layer = gpt.decoder.layers[0]
    like: dict[str, Any] = {"dtype": get_torch_dtype(problem.dtype), "device": problem.device}
    hidden = torch.randn(problem.length, problem.batch, width, **like).requires_grad_()
    upstream = torch.randn(problem.length, problem.batch, width, **like)
    wanted = [hidden, *layer.parameters(), *(gpt.position.parameters() if gpt.position is not None else ())]
    reading = AttentionContext(build_segments(problem.length))

    def step() -> None:
        torch.autograd.grad(layer(hidden, reading), wanted, upstream, allow_unused=True)

    return step


def build_candidate(problem: StepProblem, name: str) -> Candidate:
    """Build a candidate; one that cannot be built is recorded as failed."""
    torch.manual_seed(1)
    try:
        return build_plain(problem) if name == "plain" else build_farfield(problem, name)
    except Exception as failure:  # the others still count
        return Candidate(refusal=format_exception(failure))


def benchmark_problem(problem: StepProblem, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    """Return one record per candidate. Records of an interrupted problem have `cut`."""
    torch.compiler.reset()  # each shape is compiled separately
    found: dict[str, Candidate] = {}
    cut = False
    try:
        for name in (peer for peer in PEERS if peer in names):
            found[name] = build_candidate(problem, name)
        for _ in range(rounds + NUM_WARMUP_ROUNDS):
            for candidate in found.values():
                if candidate.refusal is None:
                    _time_step(problem, candidate)
    except KeyboardInterrupt:
        cut = True
    for candidate in found.values():  # if interrupted during warm-up, a second step's time is used; the first compiles
        candidate.seconds = candidate.seconds[NUM_WARMUP_ROUNDS:] or candidate.seconds[1:]
    records = [_build_record(problem, name, found) | ({"cut": True} if cut else {}) for name in found]
    for record in records:
        print(format_console_line(record), flush=True)
    return records


def _time_step(problem: StepProblem, candidate: Candidate) -> None:
    """Time one step."""
    assert candidate.step is not None
    if problem.cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start_time = time.perf_counter()
    try:
        candidate.step()
        if problem.cuda:
            torch.cuda.synchronize()
    except Exception as failure:  # out of memory, or a compiler error
        candidate.refusal = format_exception(failure)
        return
    candidate.seconds.append(time.perf_counter() - start_time)
    if problem.cuda:
        candidate.memory = (torch.cuda.max_memory_allocated() - before) / 1e6


def _build_record(problem: StepProblem, name: str, found: dict[str, Candidate]) -> dict[str, Any]:
    candidate = found[name]
    head = {
        "op": "layer" if problem.layer else "train_step", "peer": name, "model": problem.model,
        "device": problem.device, "dtype": problem.dtype, "B": problem.batch, "T": problem.length,
    }  # fmt: skip
    if candidate.refusal is not None or not candidate.seconds:
        return {**head, "ms": None, "rounds": 0} | ({"refusal": candidate.refusal} if candidate.refusal else {})
    middle = statistics.median(candidate.seconds)
    tflops = candidate.flops * problem.tokens / middle / 1e12
    peak = find_peak_tflops(torch.device(problem.device), problem.dtype, None)
    ratios = {}
    for other in ("rotary", "kerple_log", "plain"):
        if other in found and found[other].refusal is None and found[other].seconds:
            # After an interrupted round, one list is shorter.
            pairs = zip(candidate.seconds, found[other].seconds, strict=False)
            ratios[f"ratio_to_{other}"] = round(statistics.median(t / o for t, o in pairs), 4)
    whole = {"tflops": round(tflops, 3), "mfu": None if peak is None else round(tflops / peak, 4)}
    return {
        **head, "ms": {"both": compute_quartiles([1e3 * taken for taken in candidate.seconds], 3)},
        "tokens_per_second": round(problem.tokens / middle), **ratios, **({} if problem.layer else whole),
        "peak_memory_mb": None if candidate.memory is None else round(candidate.memory, 1),
        "rounds": len(candidate.seconds),
    }  # fmt: skip


def format_console_line(record: dict[str, Any]) -> str:
    """Format a record as a console line."""
    head = f"{record['model']:<6} T={record['T']:<6} B={record['B']:<3} {record['peer']:<17} "
    if record["ms"] is None:
        return head + f"{'—':>10}    {record.get('refusal', 'not measured')}"
    ratios = "".join(f"   {record[key]:.3f} × {key[9:]}" for key in record if key.startswith("ratio_to_"))
    return head + f"{record['ms']['both'][1]:>10.2f} ms {record['tokens_per_second']:>10,} tok/s{ratios}"


def parse_shape(text: str) -> tuple[str, int, int | None]:
    """Parse MODEL:LENGTH or MODEL:LENGTH:BATCH."""
    model, *sizes = text.split(":")
    if model not in MODELS or len(sizes) not in (1, 2) or not all(s.isdecimal() and int(s) > 0 for s in sizes):
        raise argparse.ArgumentTypeError(
            f"must be MODEL:LENGTH or MODEL:LENGTH:BATCH with MODEL one of {', '.join(MODELS)}, not {text!r}"
        )
    return model, int(sizes[0]), int(sizes[1]) if len(sizes) == 2 else None


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=parse_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shapes",
        type=parse_shape,
        nargs="+",
        help="MODEL:LENGTH or MODEL:LENGTH:BATCH",
        default=[("125M", 512, None), ("125M", 2048, None), ("350M", 512, None)],
    )
    parser.add_argument("--methods", nargs="+", default=None, choices=PEERS)
    parser.add_argument(
        "--tokens", type=int_at_least(1), default=16384, help="tokens per step if a shape has no batch size"
    )
    parser.add_argument("--layer", action="store_true", help="measure one layer, forward and backward")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int_at_least(2), default=15)
    parser.add_argument("--json", type=parse_output_path)
    arguments = parser.parse_args()
    if arguments.layer and (whole := [m for m in arguments.methods or () if m == "plain" or m in GRAPH_PEERS]):
        parser.error(f"argument --methods: {whole[0]} is a whole model, not a layer")
    arguments.methods = arguments.methods or [name for name in DEFAULT_PEERS if name != "plain" or not arguments.layer]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    disable_tf32()
    result: dict[str, Any] = {**collect_provenance(__file__, arguments.device), "records": []}
    for model, length, batch in arguments.shapes:
        batch = batch or max(1, arguments.tokens // length)
        problem = StepProblem(model, length, batch, arguments.dtype, arguments.device, arguments.layer)
        records = benchmark_problem(problem, arguments.rounds, arguments.methods)
        result["records"] += records
        if arguments.json:  # after each shape, so that an interrupted run keeps its records
            write_record(arguments.json, result)
        if any("cut" in record for record in records):
            raise KeyboardInterrupt
    refused = [record for record in result["records"] if "refusal" in record]
    for record in refused:
        print(f"error: {record['peer']} at {record['model']}:{record['T']}: {record['refusal']}", file=sys.stderr)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()

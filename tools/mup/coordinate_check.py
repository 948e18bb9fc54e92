#!/usr/bin/env python3
"""Measure how far a model's activations move in its first steps at four widths or depths.

Under muP they move equally far.

    python tools/mup/coordinate_check.py --json docs/results/mup_coordinates.json --png docs/results/mup_coordinates.png

This is the coordinate check of Yang et al. 2022 (2203.03466, appendix D.1). Models of several widths train for some
steps on one batch of random tokens. The tool compares the change of each activation, as its mean absolute coordinate.
Under muP the changes neither grow nor vanish with the width (or, with `--over layers`, with the depth under CompleteP).
Under the standard parametrization some grow. Measured activations:

    embedding, hidden      token embeddings, and output of the last norm
    queries·keys           scaled scores q·k of the first layer
    attention, feed-forward    branches of the last layer, before muP's multiplier
    residual stream        output of the last layer
    bias                   an encoding's bias (KERPLE: r1, r2) at the distances of the batch
    gate                   log σ of the first layer's forget gates, which are projections of its input (FoX)
    processor channels     a score processor's first convolution, which sums over the heads
    processor              output that the processor adds to scores and bias
    logits

The exponent is the slope of log(change) over log(size): 0 is constant, 1 is proportional. Each is a mean over seeds.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, comma_separated, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from megatron.config.schema import Config  # noqa: E402
from megatron.distributed.process_groups import build_single_process_groups  # noqa: E402
from megatron.model.build import build_model  # noqa: E402
from megatron.model.parameter_groups import build_parameter_groups  # noqa: E402
from megatron.position.encodings.fox import ForgetGate  # noqa: E402
from megatron.training.optimizer import build_optimizer  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

VOCABULARY, LENGTH, BATCH, HEAD_SIZE = 256, 64, 4, 16
METHODS: dict[str, dict[str, Any]] = {
    "kerple_log": {"pos_emb": "kerple_log"},
    "cdape": {"pos_emb": "kerple_log", "score_processor": "cdape"},
    "fox": {"pos_emb": "fox"},
}
SIZES = {"width": (64, 128, 256, 512), "layers": (2, 4, 8, 16)}
BASE_WIDTH, BASE_LAYERS = 64, 2
PARAMETRIZATIONS = ("muP", "standard")
Coordinates = dict[str, float]


def choose_config(method: str, over: str, size: int, parametrization: str, optimizer: str = "AdamW") -> Config:
    """Return the configuration of one model. At the smallest size both parametrizations are equal."""
    width, layers = (size, BASE_LAYERS) if over == "width" else (BASE_WIDTH, size)
    base = {"use_mup": True, "mup_base_hidden_size": BASE_WIDTH, "mup_base_num_layers": BASE_LAYERS}
    return Config.from_flat(
        {
            **METHODS[method], **(base if parametrization == "muP" else {}), "hidden_size": width,
            "num_layers": layers, "num_attention_heads": width // HEAD_SIZE, "seq_length": LENGTH,
            "attention_backend": "eager", "no_weight_tying": True, "make_vocab_size_divisible_by": 64,
            "init_method_std": 0.1, "output_layer_init_method": "normal",
            "optimizer": {"type": optimizer}, "weight_decay": 0.0,
        }
    )  # fmt: skip


def measure_changes(config: Config, steps: int, lr: float, seed: int) -> list[Coordinates]:
    """Return the mean absolute change of each activation since the start, after each step."""
    model = build_model(
        config.model, config.position, VOCABULARY, groups=build_single_process_groups(), seed=seed
    ).train()
    groups = build_parameter_groups(model, config.optimizer.weight_decay, config.optimizer.optimizer.algorithm)
    optimizer = build_optimizer(groups, config.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    start: dict[str, Tensor] = {}
    changes: list[Coordinates] = []
    for _ in range(steps + 1):
        seen = run_model(model, tokens)
        start = start or seen
        changes.append({name: float((value - start[name]).abs().mean()) for name, value in seen.items()})
        optimizer.zero_grad()
        model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()).mean().backward()
        optimizer.step()
    return changes[1:]


@torch.no_grad()
def run_model(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return the activations of one forward pass."""
    seen: dict[str, Tensor] = {}
    first, last = model.decoder.layers[0], model.decoder.layers[-1]
    attention = first.self_attention.core_attention

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    def note_scores(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        q, k = (x.detach().permute(1, 2, 0, 3) for x in inputs[:2])
        scores = q @ k.transpose(2, 3) * (attention.query_multiplier / q.shape[-1] ** 0.5)
        seen["queries·keys"] = scores.tril()

    def note_processor(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, bias, visible = inputs[:3]
        seen["processor"] = (output - scores - (0 if bias is None else bias)).masked_fill(~visible, 0)

    handles = [
        model.embedding.register_forward_hook(note("embedding")),
        attention.register_forward_pre_hook(note_scores),
        last.self_attention.linear_proj.register_forward_hook(note("attention")),
        last.mlp.register_forward_hook(note("feed-forward")),
        last.register_forward_hook(note("residual stream")),
        model.decoder.final_layernorm.register_forward_hook(note("hidden")),
    ]
    if attention.processor is not None:
        handles += [
            attention.processor.register_forward_hook(note_processor),
            attention.processor.hidden.register_forward_hook(note("processor channels")),
        ]
    handles += [
        gate.register_forward_hook(note("gate"))
        for gate in attention.encoding.modules()
        if isinstance(gate, ForgetGate)
    ]
    seen["logits"] = model(tokens[:, :-1].contiguous())
    bias = attention.encoding.table(torch.arange(float(LENGTH))).bias
    if bias is not None:
        seen["bias"] = bias.clone()
    for handle in handles:
        handle.remove()
    return seen


def measure_over_sizes(
    method: str, over: str, sizes: Sequence[int], parametrization: str, *, steps: int, lr: float, seeds: int,
    optimizer: str = "AdamW",
) -> dict[str, list[float]]:  # fmt: skip
    """Return the change of each activation after the last step, at each size."""
    found: dict[str, list[float]] = {}
    for size in sizes:
        config = choose_config(method, over, size, parametrization, optimizer)
        runs = [measure_changes(config, steps, lr, seed)[-1] for seed in range(seeds)]
        for name in runs[0]:
            found.setdefault(name, []).append(float(np.mean([run[name] for run in runs])))
    return found


def compute_exponent(sizes: Sequence[int], changes: Sequence[float]) -> float:
    """Return the slope of log(change) over log(size)."""
    return float(np.polyfit(np.log(sizes), np.log(changes), 1)[0])


def draw_changes(record: dict[str, Any], path: Path) -> None:
    """Draw a panel for each method and parametrization: changes over sizes, one line per activation."""
    from matplotlib.figure import Figure

    results = record["results"]
    methods = list(dict.fromkeys(entry["method"] for entry in results))
    figure = Figure(figsize=(4.2 * len(PARAMETRIZATIONS), 3.2 * len(methods)), layout="constrained")
    axes = figure.subplots(len(methods), len(PARAMETRIZATIONS), squeeze=False, sharex=True, sharey="row")
    for entry in results:
        axis = axes[methods.index(entry["method"])][PARAMETRIZATIONS.index(entry["parametrization"])]
        for number, (name, changes) in enumerate(entry["changes"].items()):
            axis.loglog(record["sizes"], changes, marker="o", markersize=3, color=f"C{number}", label=name)
        axis.set_title(f"{entry['method']}, {entry['parametrization']}", fontsize=9)
        axis.set_xticks(record["sizes"], [str(size) for size in record["sizes"]])
        axis.minorticks_off()
        axis.set_xlabel(record["over"])
        axis.set_ylabel(f"change in {record['steps']} steps", fontsize=8)
    for row in axes:
        row[0].legend(fontsize=6)
    figure.savefig(path, dpi=110)


def render_page(record: dict[str, Any]) -> str:
    sizes = record["sizes"]
    lines = [
        f"# Coordinate check over {record['over']}, {record['optimizer']}",
        "",
        f"Change of each activation in {record['steps']} steps on one batch with learning rate {record['lr']:g}:",
        f"mean absolute coordinate, averaged over {record['seeds']} seeds.",
        "The exponent is the slope of log(change) over log(size): 0 is constant, 1 is proportional.",
        "`tools/mup/coordinate_check.py` documents the measurement, and [optimizers.md](../optimizers.md) its meaning.",
    ]
    for entry in record["results"]:
        lines += ["", f"## {entry['method']}, {entry['parametrization']}", ""]
        lines += [
            "| activation | " + " | ".join(map(str, sizes)) + " | exponent |",
            "|---|" + "---|" * (len(sizes) + 1),
        ]
        for name, changes in entry["changes"].items():
            cells = " | ".join(f"{change:.3g}" for change in changes)
            lines.append(f"| {name} | {cells} | {entry['exponents'][name]:+.2f} |")
    return "\n".join([*lines, "", format_provenance(record["provenance"]), ""])


def parse_arguments() -> Any:
    parser = ToolParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", type=comma_separated(METHODS), default=list(METHODS))
    parser.add_argument("--over", choices=SIZES, default="width")
    parser.add_argument("--optimizer", choices=("AdamW", "Muon", "Lion"), default="AdamW")
    parser.add_argument("--steps", type=int_at_least(1), default=4)
    parser.add_argument("--seeds", type=int_at_least(1), default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    parser.add_argument("--png", type=parse_output_path, help="output file of the plot")
    return parser.parse_args()


def main() -> int:
    """Measure the changes, print them and write the requested files."""
    options = parse_arguments()
    sizes = SIZES[options.over]
    record: dict[str, Any] = {
        "provenance": collect_provenance(__file__, "cpu"), "over": options.over, "sizes": sizes,
        "optimizer": options.optimizer, "steps": options.steps, "seeds": options.seeds, "lr": options.lr, "results": [],
    }  # fmt: skip
    for method in options.methods:
        for parametrization in PARAMETRIZATIONS:
            changes = measure_over_sizes(
                method, options.over, sizes, parametrization, steps=options.steps, lr=options.lr, seeds=options.seeds,
                optimizer=options.optimizer,
            )  # fmt: skip
            exponents = {name: compute_exponent(sizes, values) for name, values in changes.items()}
            print(f"{method}, {parametrization}: change over {options.over} {', '.join(map(str, sizes))}; exponent")
            for name, values in changes.items():
                print(f"    {name:20} {' '.join(f'{value:9.4f}' for value in values)}  {exponents[name]:+.2f}")
            entry = {"method": method, "parametrization": parametrization, "changes": changes, "exponents": exponents}
            record["results"].append(entry)
    if options.json is not None:
        write_record(options.json, record, render_page(record))
    if options.png is not None:
        draw_changes(record, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())

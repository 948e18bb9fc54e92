"""Methods against the code that others published, on random weights that both hold.

    python tools/methods/compare.py ~/BAM --json docs/results/methods.json

~/BAM is a clone of github.com/ArthurSBianchessi/BAM, which trains with scalable softmax; transformers' Llama 4 is
compared without any. Nothing of either is a part of this project. Writes a record and, beside
it, a page. The exit code is 1 if anything differs by more than rounding.

H heads, d head dimension, D hidden size.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from megatron.distributed.process_groups import single_process  # noqa: E402
from megatron.model.build import build_model  # noqa: E402
from megatron.model.gpt import GPT  # noqa: E402
from megatron.options.model import ModelOptions, PositionOptions  # noqa: E402
from tools.records import collect_provenance, format_provenance, list_package_versions, write_record  # noqa: E402

LAYERS, WIDTH, HEADS, VOCABULARY, END = 3, 48, 4, 96, 95
LENGTHS = (2, 33, 200)
ALLOWED = 5e-5
"""Of the largest logit: float32 rounds each of the dozens of sums of a layer by 6e-8, and an angle of 200 by 1e-5."""
LAYER_NAMES = {  # BAM's, after Meta's Llama; transformers'
    "bam": ("layers.{}.", "attention.wq attention.wk attention.wv attention.wo feed_forward.w1 feed_forward.w3 "
            "feed_forward.w2 attention_norm ffn_norm", "tok_embeddings norm output"),
    "transformers": ("model.layers.{}.", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
                     "feed_forward.gate_proj feed_forward.up_proj feed_forward.down_proj input_layernorm "
                     "post_attention_layernorm", "model.embed_tokens model.norm lm_head"),
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A published model and ours with its weights."""

    title: str
    ours: GPT
    theirs: nn.Module
    call: Callable[[Tensor, Tensor | None], Tensor]
    """Their logits of tokens, and of document numbers where they keep documents apart."""
    documents: bool = False


def build_gpt(**position: Any) -> GPT:
    """Llama's layers with our attention."""
    model = ModelOptions(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, seq_length=64, norm="rmsnorm",
        activation="swiglu", intermediate_size=3 * WIDTH, mlp_multiple_of=1, no_weight_tying=True,
        use_bias_in_attn_linear=False, use_bias_in_mlp=False, make_vocab_size_divisible_by=VOCABULARY,
        rms_norm_epsilon=1e-5,
    )  # fmt: skip
    return build_model(model, PositionOptions(**position), VOCABULARY, groups=single_process(), seed=1).eval()


@torch.no_grad()
def share_weights(ours: GPT, theirs: nn.Module, kind: str, *, adjacent_pairs: bool = False) -> None:
    """Draw their weights and copy them.

    adjacent_pairs: their rotation turns the numbers 2c and 2c + 1 of a head together, where ours turns c and c + d/2.
    """
    generator = torch.Generator().manual_seed(7)
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)  # attention is far from uniform
        elif "seq_scale" not in name:
            parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.copy_(0.2 + torch.rand(parameter.shape, generator=generator))
    prefix, names, ends = LAYER_NAMES[kind]
    weights = dict(theirs.named_parameters())
    for index, layer in enumerate(ours.decoder.layers):
        own = [weights[f"{prefix.format(index)}{name}.weight"] for name in names.split()]
        q, k, v, output, gate, up, down, first_norm, second_norm = own
        heads = [x.unflatten(0, (HEADS, -1)) for x in (q, k, v)]
        if adjacent_pairs:
            heads[:2] = [x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for x in heads[:2]]
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv.weight.copy_(torch.cat(heads, 1).flatten(0, 1))
        attention.linear_proj.weight.copy_(output)
        mlp.linear_fc1.weight.copy_(torch.cat([gate, up]))
        mlp.linear_fc2.weight.copy_(down)
        layer.input_layernorm.weight.copy_(first_norm)
        layer.pre_mlp_layernorm.weight.copy_(second_norm)
        scale = weights.get(f"{prefix.format(index)}attention.seq_scale")
        for parameter in () if scale is None else attention.core_attention.temperature.parameters():
            parameter.copy_(scale.flatten())
    embedding, norm, head = (weights[f"{name}.weight"] for name in ends.split())
    ours.embedding.word_embeddings.weight.copy_(embedding)
    ours.decoder.final_layernorm.weight.copy_(norm)
    ours.output_layer.weight.copy_(head)


def load_module(path: Path) -> ModuleType:
    """A file of a clone, by itself."""
    spec = importlib.util.spec_from_file_location(f"published_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_comparisons(bam: Path) -> Iterator[Comparison]:
    """Of each method with published code."""
    sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCABULARY, "norm_eps": 1e-5}
    for encoding, stem, name in (("none", "nope_ssmax", "NoPESSMax"), ("rotary", "rotary_ssmax", "RotarySSMax")):
        module = load_module(bam / "models" / f"{stem}.py")
        theta = {"rope_theta": 10_000.0} if encoding == "rotary" else {}
        theirs = getattr(module, f"{name}Transformer")(getattr(module, f"{name}ModelArgs")(**sizes, **theta)).eval()
        for documents in (False, True) if encoding == "none" else (False,):
            mask = {"attention_mask": "document"} if documents else {}
            ours = build_gpt(pos_emb=encoding, attention_temperature="ssmax", **mask)
            share_weights(ours, theirs, "bam", adjacent_pairs=encoding == "rotary")
            title = f"ssmax, {encoding}{', documents' if documents else ''}: BAM's models/{stem}.py"
            yield Comparison(title, ours, theirs, theirs, documents)
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

    for floor_scale, attn_scale in ((8192, 0.1), (5, 0.7)):
        config = Llama4TextConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, intermediate_size_mlp=WIDTH,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS,
            moe_layers=[], no_rope_layers=[0] * LAYERS, attn_temperature_tuning=True, floor_scale=floor_scale,
            attn_scale=attn_scale, rms_norm_eps=1e-5, attn_implementation="eager",
        )  # fmt: skip
        theirs = Llama4ForCausalLM(config).eval()
        options = {"floor_scale": floor_scale, "attn_scale": attn_scale}
        ours = build_gpt(pos_emb="none", attention_temperature="llama4", attention_temperature_options=options)
        share_weights(ours, theirs, "transformers")
        title = f"llama4, floor_scale {floor_scale:,}, attn_scale {attn_scale}: transformers' Llama 4 without rotation"
        yield Comparison(title, ours, theirs, lambda tokens, _, model=theirs: model(tokens).logits)


@torch.no_grad()
def measure(comparison: Comparison) -> dict[str, float]:
    """The largest difference of any logit, relative to the largest logit, by length."""
    apart = {}
    for length in LENGTHS:
        tokens = torch.randint(0, END, (2, length), generator=torch.Generator().manual_seed(length))
        codes = None
        if comparison.documents:
            tokens[:, length // 3 :: 17] = END
            codes = torch.nn.functional.pad((tokens == END).cumsum(1)[:, :-1], (1, 0))
        comparison.ours.end_of_document = END if comparison.documents else None
        ours, theirs = comparison.ours(tokens), comparison.call(tokens, codes)
        apart[str(length)] = float((ours - theirs).abs().max() / theirs.abs().max())
    return apart


def render_page(record: dict[str, Any]) -> str:
    """The record for people."""
    lines = [f"| model | {' | '.join(f'{length} tokens' for length in LENGTHS)} |", f"|---|{'---|' * len(LENGTHS)}"]
    for row in record["rows"]:
        cells = [f"{row['apart'][str(length)]:.1e}" for length in LENGTHS]
        lines.append(f"| {' | '.join([row['model'], *cells])} |")
    return f"""# Methods against published code

Each row is one model of {LAYERS} layers, {HEADS} heads and width {WIDTH} with random weights, the same in both.
A number is the largest difference of any logit from that of the published code, relative to the largest logit, in
float32; {record["allowed"]:.0e} is allowed.
The published code was run from a clone and from the installed package; nothing of it is in this project.

{chr(10).join(lines)}

BAM is `github.com/ArthurSBianchessi/BAM` at {record["bam"]}.
Its scales of scores start at 1, and can be kept there, as `ssmax` can.
It multiplies scores where we multiply queries, and it counts the keys of a row's own document, as we do.
Of a single token its code makes no scores' scale at all, where the factor log 1 = 0 changes nothing: softmax over one
key is 1. So lengths begin at 2.
With SSMax its prior is scaled too unless `ssmax_prior` is false; a temperature here leaves a bias as it is.
`logn` is not in the table: Qwen's `use_logn_attn`, whose code is none of transformers' own, is the formula that
`tests/position/test_temperatures.py` computes in float64.

{format_provenance(record["stamp"])}
"""


def main() -> None:
    """Compare, write."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bam", type=Path, help="a clone of BAM")
    parser.add_argument("--json", type=parse_output_path, help="the record; its page goes beside it")
    arguments = parser.parse_args()
    rows = [{"model": each.title, "apart": measure(each)} for each in list_comparisons(arguments.bam)]
    worst = max(max(row["apart"].values()) for row in rows)
    for row in rows:
        print(row["model"], *(f"{apart:.1e}" for apart in row["apart"].values()))
    print(f"the largest difference is {worst:.1e}, {ALLOWED:.0e} is allowed")
    commit = ["git", "-C", str(arguments.bam), "rev-parse", "--short", "HEAD"]
    head = collect_provenance(__file__, "cpu")
    head["command"] = "python tools/methods/compare.py BAM --json docs/results/methods.json"
    head["versions"] |= list_package_versions(("transformers",))
    record = {
        "stamp": head, "allowed": ALLOWED, "rows": rows,
        "bam": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
    }  # fmt: skip
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))
    if worst > ALLOWED:
        sys.exit(1)


if __name__ == "__main__":
    main()

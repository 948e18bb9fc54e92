"""Generate docs/positions.md: every position encoding, score processor and attention temperature in the registry.

The page prints each method's own description (formula, source, advice), counts its parameters, and derives its traits
from the code. The constructor's docstring describes the options. A new file in `megatron/position/` gets its section
and pictures without changes to this file.
"""

import inspect
import math
import re
import sys
from itertools import groupby
from pathlib import Path
from textwrap import TextWrapper
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatron.attention import softmax
from megatron.config import method_names, neox_keys
from megatron.config.method_names import describe_compositions
from megatron.config.reference import describe_default, describe_type, format_table
from megatron.config.schema import list_config_keys
from megatron.config.yaml_files import format_value
from megatron.options.section import read_docstring
from megatron.position import registry, rotary_scaling
from megatron.position.base import PositionModule
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS, TokenRange
from tools.docs.position_panels import (
    BASE_ENCODING,
    MAX_DISTANCE,
    PROCESSOR_MAP_SIZE,
    SEED,
    SHAPE,
    build_drawn_processor,
    build_encoding,
    build_encoding_panels,
    build_processor,
    build_processor_panels,
    build_temperature_panels,
    measure_context,
)
from tools.docs.position_plots import MIN_BIAS, get_picture_path

PAGE = Path("docs/positions.md")
LAYERS = 12
WRAPPER = TextWrapper(120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
NESTED_WRAPPER = TextWrapper(
    120, initial_indent="    ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
)
"""Four spaces of indentation; the site's Markdown does not nest with fewer."""
HOOKS = {
    "embed": "adds to the embeddings",
    "rotate": "rotates queries and keys",
    "table": "a function of n alone (Toeplitz)",
    "dense": "a function of (i, j)",
    "contextual": "terms from queries and keys",
    "gate": "a bias from the layer's input",
}

CONTRACT = """\
## The attention contract

Per layer and head, for query i and key j ≤ i at the distance n = i − j:

1. `embed` adds a vector per position to the token embeddings, once. `rotate` rotates q_i and k_j by their positions.
   `gate` computes a number of at most 0 from the layer input, for each token l and head.
2. A temperature multiplies q_i by a factor of its row and head.
3. S = weight(n) · q_i·k_j/√d + the terms of `contextual`. Bias and weight come from `table`, as functions of n alone,
   or from `dense`. The sum of the gates of l = j + 1 … i is also a bias.
4. logits = processor(S, bias), or S + bias without a processor. The bias is added after the scaling by 1/√d.
5. The causal mask, the window, padding and document boundaries mask keys; a processor reads zeros there.
6. The softmax is computed in float32, with or without a sink, or replaced by stick-breaking (`softmax_type`). The
   product with v follows. Positions are integers and distances are float32 in every compute type.
7. A processor may change the attention weights between softmax and dropout (`process_weights`), and the output of each
   head before heads are concatenated (`process_output`).

A processor reads one row at a time unless it declares more. `preceding_rows` is the number of earlier rows that it also
reads: row blocks, ranks and decoding steps receive their queries, and the results of these rows are dropped.
`row_terms` adds a number per key to a running sum over rows, and every row reads the sum over all earlier rows. Row
blocks pass the sums on, and a cache stores one float32 per token. Documents are then computed one by one.

A hook that a method does not define adds nothing, so encodings, processors and temperatures combine freely.
`megatron/attention/reference.py` is an executable version of this contract.
"""

CHOOSING = """\
## Choosing a method

No record of this project tests a model larger than about a million parameters ([limits](card.md)), and papers disagree.
Compare two or three methods at your size, with several seeds, before a large run.

DAPE V2 (appendix A) recommends `kerple_log` as the default, `fire` with longer training lengths or more tokens, and
advises against `alibi` unless necessary, because it soon becomes local attention. Its best model is `cdape` on
`kerple_log` with a set of parameters per layer (overlay `cdape_kerple_log`). [claims.md](claims.md) shows the results
of small models: CDAPE on KERPLE is better than KERPLE at the training length, and `kerple_power` is better than
`kerple_log` at 32 times that length.

Exploring Transformer Extrapolation (theorem 3.4) proves that a model extrapolates if the series Σ exp(bias(n))
converges; [analysis.md](analysis.md#does-the-series-converge) lists the result for every encoding. The theorem concerns
the bias alone, not processors and contextual terms.

[The leaderboard](results/zoo.md) compares all methods at one small size. KERPLE (Chi et al. 2022), Exploring
Transformer Extrapolation (Qin et al. 2023) and DAPE V2 (Process attention score as feature map for length
extrapolation) are cited by name below. Perplexities and times under "When" are theirs, with their model sizes and data.

To train a method, put its [overlay](glossary.md#configurations) after the model:
`./deepy.py train 125M fox local_setup save=runs/fox`. The default of `pos_emb` is `learned`, and model files set
`rotary`, so the overlay `cdape` on a model file applies CDAPE to rotary positions. `fox` and `cdape_kerple_log` have
parameters in each layer; all layers of `kerple_log` share one set ([below](#one-set-of-parameters-or-one-per-layer)).
"""

SHARING = f"""\
## One set of parameters or one per layer

By default (`pos_emb_per_layer: false`) all layers share one set of parameters, as in KERPLE. With `true` each layer
has its own set, as in DAPE. Encodings that are added to the embeddings (`learned`, `sinusoidal`) exist once for all
layers; requesting one set per layer is an error. Finetuning (`finetune: true`) may change from one set to one per
layer: each layer then starts with a copy. A processor always has separate parameters in each layer.

The counts below are for {SHAPE.num_heads} heads of {SHAPE.head_dim}, {LAYERS} layers and a training length of
{SHAPE.train_length} (the 125M model), obtained by building the method.
"""

LAYERS_THAT_DIFFER = """\
## Layers that differ

`pos_emb`, `attention_window`, `score_processor`, `attention_temperature` and `softmax_type` accept a list instead of a
value.
The list is a pattern that starts with the first layer and repeats up to the last.
Its length must divide `num_layers`; a list of `num_layers` entries sets every layer.
Lists may have different lengths, and a single value applies to all layers:

```yaml
pos_emb: [rotary, rotary, rotary, none]
attention_window: [512, 512, 512, null]
score_processor: [none, none, none, cdape]
```

This gives three layers with rotary positions and a window of 512 tokens, followed by one without positions that sees
all tokens and applies CDAPE to its scores.
Options (`pos_emb_options` and the others) apply to every method of the pattern that has the option.
Layers with the same encoding share its parameters and its table, unless `pos_emb_per_layer` is true.
Encodings that are added to the token embeddings (`learned`, `sinusoidal`) belong to no layer and cannot be part of a
pattern.
For a layer with a window, the key/value cache stores only the keys that later tokens can see.
`evaluate --window W` sets the window W in every layer.

Six overlays use patterns.
`rnope_swa` (Yang et al. 2025) and `swan` (Puvvada et al. 2025) combine layers that have RoPE and a window with layers
that see all tokens without positions.
`smollm3` omits RoPE in every fourth layer, and `irope` gives such layers Llama 4's temperature.
`gpt_oss` has a window in every other layer, and sinks in all.
`gemma3` has a window and a smaller base (`rotary_local`) in five of six layers.
megatron-core's keys are supported: `no_rope_freq` and `window_attn_skip_freq` with a number or a list, and
`window_size`, a pair such as `[127, 0]` of the keys before and after a token.
"""

ADDING = """\
## Add a method

[The tutorial](tutorial.md) develops an encoding from an empty file to a curve.
A method may be in a folder outside the project ([python.md](python.md#methods-of-your-own)).
[CONTRIBUTING.md](../CONTRIBUTING.md#add-a-position-encoding) lists the requirements of a method in the project.
"""

TEMPERATURES = """\
## Attention temperatures

A temperature multiplies the query of row i by a factor, and thereby all scores of the row.
The factor increases with the number of visible keys, because a softmax over more keys is flatter.
It depends on the position of the row and on the number n of visible keys, including the row's own.

| case | n | position |
| --- | --- | --- |
| a row with one document | i + 1 | i |
| `attention_window: w` | the smaller of i + 1 and w | i |
| document masking | i + 1, with i counted within the document | within the document |
| a padded batch | the keys that are not padding | within the sequence |
| `randomized_positions` | i + 1: the number of keys, regardless of their distances | the randomized one |

The query is multiplied after its rotation and before any other use.
So the soft cap of scores limits the scaled scores, an encoding's weight and contextual terms apply to them (CoPE's
gates use scaled scores), and a processor reads them as S.
Terms without a query do not change: the bias B, and Transformer-XL's terms of u and v.
Keys and the key/value cache do not change either, so every backend and kernel supports temperatures.
Every layer has its own temperature with its own parameters.
These have no weight decay, AdamW updates them even with Muon, and muP does not change their learning rate.

A temperature without learned parameters can be added to a trained model or removed from it:
[a temperature at evaluation alone](evaluation.md#a-temperature-at-evaluation-alone).
Finetuning (`finetune: true`) may start with another temperature: `attention_temperature: ssmax` then has new
parameters.
"""


def _list_tables(module: ModuleType) -> list[str]:
    """Return the tables in a module's docstring."""
    lines = groupby(read_docstring(module).splitlines(), key=lambda line: line.startswith("|"))
    return ["\n".join(group) for is_table, group in lines if is_table]


SOFTMAX = f"""\
## Sinks, stick-breaking and gates

These options replace or extend the softmax. They combine with every encoding, processor, temperature and window.

`softmax_type` (megatron-core's key and names) determines the attention weights A of the logits x:

{chr(10).join(line for line in read_docstring(softmax).splitlines() if line.startswith("|"))}

A softmax must distribute all of a row's weight over keys, so models learn to put unneeded weight on the first token.
A sink absorbs it instead: an additional logit in the softmax, without a value.
With `learnable` each head of each layer learns its sink logit, which starts at 0. With `off-by-one` it stays 0.
Sinks are float32 in every compute type, have no weight decay, and have no measurable cost:
kernels start each row's sum with the sink.
With a sink, a constant that a processor adds to all logits of a head has an effect, unlike with a plain softmax.
`auto` does not choose `sdpa`, because SDPA has no sinks.
A layer without further terms then uses row blocks on a CPU. On a GPU it uses the fastest of row blocks, `triton` and
`flex`, as determined by the self-check.
Overlays: `sinks`, `off_by_one`, `gpt_oss`.

`stick-breaking` (overlay `stick_breaking`) encodes the order of tokens without positions. Going back from a row's own
token, which the row does not attend to, each key takes the fraction σ(x) of what later keys have left.
The first token of a sequence therefore attends to nothing, and weight that no key takes is lost.
(Models released by its authors add this remainder to the output, with the row's own value or a learned vector; the
paper's formula does not.)
PyTorch's row blocks compute it (`eager`, `chunked` and `auto`); the other backends raise an error.

`attention_output_gate` (megatron-core's key; overlay `gated_attention`) multiplies the output of each head by σ(W·x)
before the output projection, where x is the layer input. `true` gives a gate for every element, `headwise` one for
every head (Qiu et al. 2025, who find the former best).
W is a separate matrix without a bias, `self_attention.linear_gate`; tensor-parallel ranks shard it by heads.

transformers' gpt-oss has the same sinks: a test compares outputs and gradients.
Its models cannot be imported, because their feed-forward layers are mixtures of experts.
"""


ROTARY_SCALINGS = f"""\
## Rotary frequencies

The option `scaling` of rotary sets the frequency of each pair of dimensions.
Two scalings are meant for training and remove the position from slow pairs:
`p_rope` (`configs/position/p_rope.yml`) and `hope` (`configs/position/hope.yml`).
Pairs without a position compare the content of tokens, equally at any distance.
GPT-NeoX's `rotary_pct` is the option `fraction`, which is different:
it spreads all frequencies, including the slow ones, over fewer dimensions.

The other scalings stretch frequencies to read beyond the training length.
A trained model may have one as its option, like published models.
`./deepy.py evaluate RUN --rope yarn:8` applies one when the model is loaded:
[RoPE at evaluation alone](evaluation.md#rope-at-evaluation-alone).

θ_m = base^(−m/half) are the frequencies, m = 0 … half − 1, and λ_m = 2π/θ_m their wavelengths in tokens.
s is `factor`; L is `original_length`, the length of the original training;
N is the maximum length of the sequence.

{_list_tables(rotary_scaling)[0]}

p_rope has the option `share`. hope has `original_length`, by default the training length;
set it before finetuning at another length, so that the same pairs stay without a position.
llama3 has low = `low_freq_factor` and high = `high_freq_factor`, yarn has fast = `beta_fast` and slow = `beta_slow`,
and b(r) = half·ln(L/(2π·r))/ln(base) is the pair with r turns within L, rounded outwards to whole pairs.
longrope has lists with a number for each pair, short_m = `short_factor` and long_m = `long_factor`.
`attention_factor` replaces the factor by which yarn and longrope multiply cosines and sines.

selfextend and rerope keep the frequencies and change the distances of far tokens.
Tokens less than w = `neighbors` apart keep their distance; G is `group`.

{_list_tables(rotary_scaling)[1]}

Queries and keys are then rotated twice, and each score uses the rotation for its distance.
They need twice the memory, also in the cache. The backends `eager` and `chunked` support them, and `auto` uses these.

`xpos: true` (`configs/position/xpos.yml`) makes scores decay with the distance, fastest for fast pairs.
A query is multiplied by ζ_m^((i − c)/S) and a key by ζ_m^((c − j)/S), ζ_m = (m/half + 0.4)/1.4,
S = `xpos_scale_base`, and c is the middle of the sequence, so that the factors stay within the range of the data type.
A sequence that is too long for the data type raises an error: beyond 67,000 tokens at S = 512 in float32 and bfloat16,
beyond 4,500 in float16.

No model family of transformers implements hope, p_rope, ntk, dynamic, longrope, selfextend, rerope or xpos as defined
here, so `export --native` does not support them.
An export with this project's code supports all but dynamic, longrope and xpos,
because its cache does not know the final length of a text.

Two separate methods rotate differently: [`fope`](#fope) by sums of frequencies,
and [`pope`](#pope) by one frequency for each element of a head.
"""

PICTURES = f"""\
## How to read the pictures

The pictures are computed from the methods' own hooks at their initial values (seed {SEED}). For a method with learned
parameters they show the start of training, not its end. The dashed line is the training length,
{SHAPE.train_length}; curves extend to {MAX_DISTANCE:,}, with the distance on a logarithmic axis.
Biases below −{-MIN_BIAS:g}, a factor of {math.exp(MIN_BIAS):.0e}, are clipped.
Maps show the factor exp(bias) of the attention of query i to key j, or the weight of its score, on a logarithmic scale
if they span more than a decade.
Maps of signed values are blue below zero, red above it, and transparent at zero.

- Added to the embeddings: the cosine between the vectors of two positions.
- Rotated: the cosine between a query and a key that were both (1, …, 1) before the rotation.
- Contextual terms: their values for queries and keys drawn from N(0, 1).
- No hook at all: the attention of the causal mask with equal scores.
- Processors: row {PROCESSOR_MAP_SIZE - 1} before and after, the added term, and the change elsewhere when one
  score increases by 1. They use `{BASE_ENCODING}`, with queries and keys drawn from N(0, 1);
  the last panel has no bias.
- Temperatures: the factor of each row of one document, over a wider range of positions than for biases.
"""


READING = """\
## How to read an entry

The formula is followed by the parameters with their initial values and the bounds that training enforces. For example,
`r1 [H] ~ U(0, r1_below) ≥ 0.01` is one number per head, drawn uniformly between 0 and the option `r1_below` and never
below 0.01; `in [0.01, 2]` bounds both sides. N(0, std²) is a normal distribution with standard deviation `std`. Set
options in `pos_emb_options`, `score_processor_options` or `attention_temperature_options`. "Toeplitz" means that the
bias is constant along every diagonal of the score matrix, because it depends on n = i − j alone.
"""


def render_page() -> str:
    records, _ = registry.describe_methods(
        [*registry.list_encodings(), *registry.list_processors(), *registry.list_temperatures()]
    )
    encodings = [record for record in records if record["kind"] == "encoding"]
    processors = [record for record in records if record["kind"] == "processor"]
    temperatures = [record for record in records if record["kind"] == "temperature"]
    return "\n".join(
        [
            _render_introduction(encodings, processors, temperatures),
            CONTRACT,
            CHOOSING,
            SHARING,
            TEMPERATURES,
            SOFTMAX,
            ROTARY_SCALINGS,
            _render_windows(encodings),
            LAYERS_THAT_DIFFER,
            _render_compositions(),
            _render_names(),
            ADDING,
            PICTURES,
            READING,
            "## Encodings\n",
            *(_render_encoding(record) for record in encodings),
            "## Processors\n",
            *(_render_processor(record) for record in processors),
            "## Temperatures\n",
            *(_render_temperature(record) for record in temperatures),
        ]
    )


def _render_compositions() -> str:
    rows = [[f"`{name}`", f"{sentence}."] for name, sentence in describe_compositions().items()]
    return f"""\
## Overlays of several keys

Every method has an overlay with its name in `configs/position/`. These overlays set several keys or other keys:

{format_table(["overlay", "keys"], rows)}
"""


def _format_link(name: str) -> str:
    return f"[`{name}`](#{name})"


def _format_yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _list_hooks(encoding: Encoding) -> list[str]:
    return [hook for hook in type(encoding).traits() if hook in HOOKS]


def _render_introduction(
    encodings: list[dict[str, Any]], processors: list[dict[str, Any]], temperatures: list[dict[str, Any]]
) -> str:
    rows = []
    for record in encodings:
        encoding = build_encoding(record["name"])
        reach = "any" if encoding.max_length is None else "`max_position_embeddings`"
        hooks = ", ".join(f"`{hook}`" for hook in _list_hooks(encoding)) or "none"
        number = f"{_count_parameters(encoding):,}"
        rows.append(
            [
                _format_link(record["name"]),
                f"`{record['formula']}`",
                hooks,
                number,
                _format_yes_no(encoding.relative),
                reach,
            ]
        )
    headings = ["`pos_emb`", "formula", "hooks", "parameters", "relative", "length"]
    processor_rows = [
        [
            _format_link(record["name"]),
            f"`{record['formula']}`",
            f"{_count_parameters(build_processor(record['name'])):,}",
        ]
        for record in processors
    ]
    temperature_rows = [
        [
            _format_link(record["name"]),
            f"`{record['formula']}`",
            f"{_count_parameters(registry.build_temperature(record['name'], SHAPE)):,}",
        ]
        for record in temperatures
    ]
    return f"""\
# Position encodings, score processors and attention temperatures

<!-- Made by `make docs`; a test keeps it current. -->

{len(encodings)} encodings (`pos_emb`), {len(processors)} processors (`score_processor`) and \
{len(temperatures)} temperatures (`attention_temperature`),
one file each; all combinations work. The [glossary](glossary.md) defines these terms.
`./deepy.py positions` prints the same in the terminal. n = i − j ≥ 0 is the distance, H the number of heads, d the
head dimension, D the hidden size and T the sequence length.

{format_table(headings, rows)}
- **hooks:** where the method acts; see [the attention contract](#the-attention-contract).
- **parameters:** number of learned values in one set, shared by all layers or separate in each
  (see [below](#one-set-of-parameters-or-one-per-layer)).
- **relative:** yes if shifting all positions by the same amount changes nothing.
- **length:** maximum sequence length for which the method is defined. It may not perform well at that length.

A score processor computes new scores from the scores S and biases B of all heads.

{format_table(["`score_processor`", "formula", "parameters per layer"], processor_rows)}
[A temperature](#attention-temperatures) multiplies each query by a factor.

{format_table(["`attention_temperature`", "formula", "parameters per layer"], temperature_rows)}"""


def _render_windows(encodings: list[dict[str, Any]]) -> str:
    known = list_config_keys()
    rows = [
        [f"`{key.name}`", describe_default(key), describe_type(key.field.annotation), key.doc]
        for key in (known[("attention_window",)], known[("randomized_positions",)], known[("continuous_positions",)])
    ]
    without_positions = [
        f"`{record['name']}`"
        for record in encodings
        if not registry.load_encoding_class(record["name"]).takes_positions
    ]
    exceptions = " and ".join(filter(None, [", ".join(without_positions[:-1]), *without_positions[-1:]]))
    return f"""\
## Windows and randomized positions

A window combines with every method.
Randomized positions combine with all methods except {exceptions},
which read no positions; requesting both is an error.

{format_table(["key", "default", "values", "meaning"], rows)}
**A window** of w keys is a bias of 0 for n < w and of −∞ beyond. It has no weights, so finetuning may change it, and
`./deepy.py evaluate RUN --window w` evaluates a run with a window that it was not trained with. A window is the
baseline for methods beyond the training length: attention within a window extrapolates (Exploring Transformer
Extrapolation, sections 2.3 and 2.4), but no layer sees further. KERPLE makes this comparison for models trained on 512
tokens and evaluated on 4,096 (section 5.5). `kerple_log` has a lower perplexity with all tokens than with a window of
512, so it uses distant tokens. `alibi` has a higher perplexity than `kerple_log` with that window at almost all
positions.

**Randomized positions** (Ruoss et al. 2023, Randomized positional encodings boost length generalization of
transformers): the T tokens of a training sequence have T distinct positions of 0 … `randomized_positions` − 1 in
ascending order, drawn again for every optimizer step. Training thus covers the distances of long sequences. DAPE V2
uses them for algorithmic tasks (section 4, appendix G). All sequences of a batch share one draw.
Evaluation also uses randomized positions; its draw depends only on the length and is the same every time.
It is an error if a sequence has more tokens than there are positions, if there are fewer positions than `seq_length`,
or more than rows in a table of absolute positions.

With `continuous_positions: true` the positions are real numbers, drawn uniformly from 0 … `randomized_positions` − 1
(random float sampling, 2602.14050).
A bias is then computed for each pair of tokens at its own distance, in row blocks instead of from a table.
Two encodings support only integer positions: `learned` and `transformer_xl`.
`t5` supports real positions, because its buckets are intervals.
"""


def _render_names() -> str:
    rows = []
    for name, alias in neox_keys.POSITION_ALIASES.items():
        options = ", ".join(f"`{key}: {value}`" for key, value in alias.options.items())
        rows.append(
            [
                f"`{name}`",
                _format_link(alias.encoding) + (f" with {options}" if options else ""),
                _format_link(alias.processor) if alias.processor else "",
                "" if alias.per_layer is None else format_value(alias.per_layer),
            ]
        )
    options = [
        [
            f"`{rule.key}`",
            ", and ".join(
                f"`{option.option}`{f' × `{option.divisor_key}`' if option.divisor_key else ''} of "
                f"{', '.join(map(_format_link, option.methods))}"
                for option in rule.options
            ),
        ]
        for rule in neox_keys.METHOD_OPTION_ALIASES
    ]
    headings = ["their `pos_emb`", "`pos_emb`", "`score_processor`", "`pos_emb_per_layer`"]
    return f"""\
## Names in GPT-NeoX, KERPLE and DAPE

The configuration files of these projects load unchanged. Names that are not listed are the same here. In an empty
cell the name does not set the key.

{format_table(headings, rows)}
{format_table(["their key", "option"], options)}"""


def _read_summary(method: type[Any]) -> str:
    """Return the first paragraph of the docstring of a method's file."""
    text = inspect.getdoc(sys.modules[method.__module__]) or ""
    return " ".join(text.split("\n\n")[0].split())


def _escape(text: str) -> str:
    return text.replace("*", "\\*")


def _describe_parameters(record: dict[str, Any], encoding: Encoding) -> str:
    number = _count_parameters(encoding)
    if not number:
        return "none"
    parameters = _escape(record["parameters"])
    if type(encoding).overrides_hook("embed"):  # not per layer
        return f"{parameters}: {number:,}"
    return f"{parameters}: {number:,} for all layers, {LAYERS * number:,} with a set per layer"


@torch.no_grad()
def _describe_traits(encoding: Encoding) -> str:
    said = [f"`{hook}`, {HOOKS[hook]}" for hook in _list_hooks(encoding)] or ["adds nothing to attention"]
    if type(encoding).overrides_hook("table"):
        terms = encoding.table(torch.zeros(1))
    else:
        terms = encoding.dense(TokenRange(0, 1), TokenRange(0, 1), torch.zeros(()), ALL_HEADS)
    given = [which for which, value in terms._asdict().items() if value is not None]
    said += [f"gives a {' and a '.join(given)}"] if given else []
    said.append(
        "relative: shifting all positions changes nothing"
        if encoding.relative
        else "not relative: shifting all positions changes the result"
    )
    if not encoding.takes_positions:
        said.append("reads no positions")
    said.append("any length" if encoding.max_length is None else "at most `max_position_embeddings` positions")
    return "; ".join(said)


def _render_facts(facts: dict[str, str | list[str]]) -> str:
    """Render a list of facts; a fact that is a list has its entries below its name."""
    lines = []
    for name, text in facts.items():
        if isinstance(text, list):
            lines.append(f"- **{name}:**")
            lines += [NESTED_WRAPPER.fill(f"- {entry}") for entry in text]
        elif text:
            lines.append(WRAPPER.fill(f"- **{name}:** {text}"))
    return "".join(f"{line}\n" for line in lines)


def _describe_other_names(name: str) -> str:
    return ", ".join(f"`{other}`" for other in method_names.list_other_names(name))


def read_option_meanings(method: type[PositionModule]) -> dict[str, str]:
    """Return the options that the constructor's docstring describes under `Args:`."""
    _, _, arguments = (inspect.getdoc(method.__init__) or "").partition("Args:\n")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", arguments, re.MULTILINE)
    return {name: " ".join(meaning.split()).removesuffix(".") for name, meaning in entries}


def _describe_options(method: type[PositionModule], defaults: dict[str, Any]) -> str | list[str]:
    """Describe each option with its default, type and meaning."""
    if not defaults:
        return "none"
    found, meanings = method.options(), read_option_meanings(method)
    return [
        f"`{option}` = {format_value(default)} ({describe_type(found[option].annotation)})"
        + (f": {meanings[option]}" if option in meanings else "")
        for option, default in defaults.items()
    ]


def _describe_encoding_cost(encoding: Encoding) -> str:
    """Describe the extra products per score and per query, compared with plain attention."""
    plain = 4 * SHAPE.num_heads * SHAPE.head_dim
    cost = 2 * SHAPE.num_heads * (encoding.qk_head_dim + SHAPE.head_dim)
    text = f"{cost:,} FLOPs forward per query, key and layer for the products with k and v"
    text += ", as with rotary" if cost == plain else f"; rotary has {plain:,}"
    if more := encoding.product_flops(float(SHAPE.train_length)):
        text += f"; {more:,.0f} more per query and layer if it sees {SHAPE.train_length} keys"
    if type(encoding).overrides_hook("table") or type(encoding).overrides_hook("dense"):
        text += "; its bias or weight is computed once for all sequences of a batch"
    return text


def _render_picture(name: str, titles: list[str], note: str) -> str:
    # relative to the page's folder
    paths = [get_picture_path(name, number).relative_to(PAGE.parent) for number in range(1, len(titles) + 1)]
    images = [f"![{name}: {title}]({path.as_posix()})\n" for title, path in zip(titles, paths, strict=True)]
    return f"{''.join(images)}\n{note}\n" if note else "".join(images)


def _render_encoding(record: dict[str, Any]) -> str:
    name = record["name"]
    encoding = build_encoding(name)
    facts = {
        "Also called": _describe_other_names(name),
        "Parameters": _describe_parameters(record, encoding),
        "Options": _describe_options(type(encoding), record["options"]),
        "Traits": _describe_traits(encoding),
        "Cost": _describe_encoding_cost(encoding),
        "When": record["advice"],
        "Source": record["source"],
    }
    panels, note = build_encoding_panels(encoding)
    image = _render_picture(name, [panel.title for panel in panels], note)
    return (
        f"### {name}\n\n{_read_summary(type(encoding))}\n\n    {record['formula']}\n\n{_render_facts(facts)}\n{image}"
    )


def _render_processor(record: dict[str, Any]) -> str:
    name = record["name"]
    processor, alone = (build_processor(name, has_bias=has_bias) for has_bias in (True, False))
    number, fewer = _count_parameters(processor), _count_parameters(alone)
    facts = {
        "Also called": _describe_other_names(name),
        "Parameters": "none"
        if not number
        else f"{_escape(record['parameters'])}: {number:,} in each layer ({LAYERS * number:,} in {LAYERS})"
        + (f"; with an encoding that has no bias, {fewer:,} ({LAYERS * fewer:,})" if fewer < number else ""),
        "Options": _describe_options(type(processor), record["options"]),
        "Traits": _describe_processor_traits(name, processor),
        "Cost": f"{processor.flops_per_score():,.0f} FLOPs forward per query, key and layer for all heads; "
        f"the products with k and v take {4 * SHAPE.num_heads * SHAPE.head_dim:,}"
        + (
            ". The bias half of the first convolution is not included: for a Toeplitz bias it is computed once for all "
            "rows and sequences"
            if processor.overrides("bias_contribution")
            else ""
        ),
        "When": record["advice"],
        "Source": record["source"],
    }
    panels, note = build_processor_panels(name)
    image = _render_picture(name, [panel.title for panel in panels], note)
    return (
        f"### {name}\n\n{_read_summary(type(processor))}\n\n    {record['formula']}\n\n{_render_facts(facts)}\n{image}"
    )


def _describe_processor_traits(name: str, processor: Processor) -> str:
    """Describe the dimensions that a processor mixes before the softmax, and its other effects."""
    reach, mixes_heads = measure_context(build_drawn_processor(name, has_bias=False)[0])
    traits = [f"mixes {'the heads of a row, and ' * mixes_heads}keys up to {reach} apart"]
    if not reach:
        traits = ["mixes heads, each key by itself"]
    if processor.overrides("row_terms"):
        traits = ["sums over all earlier rows"]
    elif processor.preceding_rows:
        traits.append(f"reads the {processor.preceding_rows} previous rows")
    if processor.overrides("process_weights"):
        traits.append("also modifies the attention weights")
    if processor.kernel_parameters() is None:
        traits.append("not supported by kernels: row blocks compute it")
    return "; ".join(traits)


@torch.no_grad()
def _render_temperature(record: dict[str, Any]) -> str:
    name = record["name"]
    temperature = registry.build_temperature(name, SHAPE)
    number, lengths = _count_parameters(temperature), [1, *(SHAPE.train_length * times for times in (1, 4, 32))]
    num_keys = torch.tensor(lengths, dtype=torch.float32)
    factors = temperature(num_keys - 1, num_keys)[0].tolist()
    facts = {
        "Also called": _describe_other_names(name),
        "Parameters": "none" if not number else f"{_escape(record['parameters'])}: {number:,} in each layer",
        "Options": _describe_options(type(temperature), record["options"]),
        "Factors": ", ".join(f"{factor:.3g} in row {n:,}" for n, factor in zip(lengths, factors, strict=True))
        + ", at the initial values",
        "Cost": f"{SHAPE.num_heads * SHAPE.head_dim:,} FLOPs forward per query and layer, to scale the query",
        "When": record["advice"],
        "Source": record["source"],
    }
    image = _render_picture(name, [panel.title for panel in build_temperature_panels(temperature)], "")
    summary = _read_summary(type(temperature))
    return f"### {name}\n\n{summary}\n\n    {record['formula']}\n\n{_render_facts(facts)}\n{image}"

"""Generate docs/positions.md: every position encoding, score processor and attention temperature in the registry.

The page prints each method's own description (formula, source, advice), counts its parameters, and derives its traits
from the code. The constructor's docstring describes the options. A new file in `megatron/position/` gets its section
and picture without changes to this file.
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
    measure_reach,
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
    "rotate": "turns queries and keys",
    "table": "a function of n alone (Toeplitz)",
    "dense": "a function of (i, j)",
    "contextual": "terms from queries and keys",
    "gate": "a bias from the layer's input",
}

CONTRACT = """\
## The attention contract

Per layer and head, for query i and key j ≤ i at the distance n = i − j:

1. `embed` adds a vector per position to the token embeddings, once; `rotate` turns q_i and k_j by their positions.
   `gate` makes of the layer's input, at each token l and in each head, a number that is at most 0.
2. A temperature multiplies q_i by a factor of its row and head.
3. S = weight(n) · q_i·k_j/√d + the terms of `contextual`. Bias and weight come from `table`, as functions of n alone,
   or from `dense`; the sum of the gates of l = j + 1 … i is a bias too.
4. logits = processor(S, bias), or S + bias without a processor. The bias is added after the scaling by 1/√d.
5. The causal mask, the window, padding and document boundaries hide keys; a processor sees zeros there.
6. The softmax is taken in float32, with a sink or without, or stick-breaking in its place (`softmax_type`); then comes
   the product with v. Positions are integers and distances are float32, whatever the compute type.
7. A processor may change the attention weights between softmax and dropout (`process_weights`), and each head's output
   before heads are joined (`process_output`).

A processor reads one row at a time unless it declares more. `rows_above` is a number of rows above that it reads too:
blocks of rows, ranks and steps of decoding are given their queries, and what comes of these rows is dropped.
`row_terms` is what a row adds to a number of each key, of which every row reads the sum over all rows above it: blocks
hand the sums on, and a cache keeps one float32 per token. Documents are then computed one by one.

A hook that a method does not define adds nothing, so encodings, processors and temperatures combine
freely.
`megatron/attention/reference.py` is this contract in executable form.
"""

CHOOSING = """\
## Which one to take

DAPE V2 advises (appendix A): take `kerple_log` if you do not know which, since it does well in almost all settings
and has few parameters; `fire` may be better with longer training lengths or more tokens; do not take `alibi` unless
necessary, since it soon becomes local attention. The best model of that paper is `cdape` on `kerple_log` with a set
of parameters per layer (overlay `cdape_kerple_log`).

Exploring Transformer Extrapolation proves (theorem 3.4) that a model is sure to extrapolate if the series
Σ exp(bias(n)) converges. It converges for `alibi`, `type1`, `type2`, `kerple_power` and `kerple_bias_weight`, for
those heads of `kerple_log` whose r1 exceeds 1 (appendix B), of `kerple_log3` whose r1·r3 exceeds 1 and of `bam` whose β
is positive, but not for `inverse` and `inverse_nlogn`, the paper's counter-examples
([every encoding](analysis.md#does-the-series-converge)). The theorem is about the bias alone and says nothing of
processors and contextual terms.

Three papers are cited by name: KERPLE (Chi et al. 2022), Exploring Transformer Extrapolation (Qin et al. 2023) and
DAPE V2 (Process attention score as feature map for length extrapolation). Perplexities and times under "When" below
are theirs, at their sizes and on their data. What this code measures at a small size, for every method that is here,
is in [results/zoo.md](results/zoo.md): look there first if you mean to train a small model. There `cdape` on `fox` has
the lowest mean perplexity at 32× the training length, which over three seeds is not significantly lower than that of
`fox` or another method, and `cdape` on `kerple_log` the best mean rank over text, needles and tasks, because `fox`
forgets needles. `kerple_power`, with one seed, stands before `kerple_log`, with three, which is
the reverse of what KERPLE finds. It is one tiny model, trained for minutes.

## Compare some of them

The [overlay](glossary.md#configurations) of a method stands behind the model, and each run gets a folder of its own:

```
./deepy.py train 125M rotary local_setup save=runs/rotary
./deepy.py train 125M fox local_setup save=runs/fox
./deepy.py train 125M cdape_kerple_log local_setup save=runs/cdape
./deepy.py evaluate runs/rotary runs/fox runs/cdape --lengths 1x,4x,32x -o results/comparison
```

The 125M model is for GPUs; `configs/quickstart.yml` is a sweep of a model that two CPU cores train in minutes.
`pos_emb` is `learned` if no file sets it, and the files of models set `rotary`, so the overlay `cdape` on a model's
file puts CDAPE on rotary positions.
`fox` and `cdape_kerple_log` give each layer parameters of its own, `kerple_log` gives all layers one set
([below](#one-set-of-parameters-or-one-per-layer)).
"""

SHARING = f"""\
## One set of parameters or one per layer

`pos_emb_per_layer: false`, the default, gives all layers one set, as KERPLE does; `true` gives each layer its own,
as DAPE does. What is added to the embeddings (`learned`, `sinusoidal`) is there once for all layers: asking for one
set per layer is an error. Finetuning (`finetune: true`) may go from one set to one per layer: each layer then begins
with a copy. A processor always has parameters of its own in each layer.

Counts below are for {SHAPE.num_heads} heads of {SHAPE.head_dim}, {LAYERS} layers and a training length of
{SHAPE.train_length} (the 125M model), made by building the method.
"""

LAYERS_THAT_DIFFER = """\
## Layers that differ

`pos_emb`, `attention_window`, `score_processor`, `attention_temperature` and `softmax_type` take a list in the place
of a value.
The list is a pattern: its first entry is for the first layer, and it repeats from the first layer to the last.
Its length must divide `num_layers`; a list of `num_layers` entries names every layer.
The lists may have different lengths, and one value beside them holds for all layers:

```yaml
pos_emb: [rotary, rotary, rotary, none]
attention_window: [512, 512, 512, null]
score_processor: [none, none, none, cdape]
```

These are 3 layers that turn queries and keys and see 512 tokens, then one that sees all and knows no positions,
in which CDAPE reads the scores.
Options (`pos_emb_options` and the others) hold for every method of the pattern that has the option.
Layers with the same encoding share its parameters and its table, unless `pos_emb_per_layer` is true.
What is added to the token embeddings (`learned`, `sinusoidal`) belongs to no layer and can be in no pattern.
A cache of keys and values keeps of a layer with a window the keys that later tokens can see, and no others.
`evaluate --window W` gives every layer the window W.

Five overlays are of this kind.
`rnope_swa` (Yang et al. 2025) and `swan` (Puvvada et al. 2025) put layers with RoPE in a window beside layers that see
all tokens without positions.
`smollm3` leaves RoPE out of every fourth layer, and `irope` gives such a layer Llama 4's temperature.
`gpt_oss` has a window in every other layer, and sinks in all.
megatron-core's keys are understood: `no_rope_freq` and `window_attn_skip_freq` with a number or a list, and
`window_size`, a pair such as `[127, 0]`: the keys before a token, and after it.
"""

ADDING = """\
## Add a method

[The tutorial](tutorial.md) takes an encoding of your own from an empty file to a curve.
A method may lie in a folder outside the project ([python.md](python.md#methods-of-your-own)).
What a method needs that is to stay in the project is told in
[CONTRIBUTING.md](../CONTRIBUTING.md#add-a-position-encoding).
"""

TEMPERATURES = """\
## Attention temperatures

A temperature multiplies the query of row i by a factor, and with it all scores of that row.
The factor is larger where the row sees more keys, because a softmax over more keys is flatter.
It is told two things of a row: its position, and the number n of keys that it sees, its own included.

| where | n | position |
| --- | --- | --- |
| a row of one document | i + 1 | i |
| `attention_window: w` | the smaller of i + 1 and w | i |
| documents that are kept apart | i + 1, with i counted within the document | within the document |
| a padded batch | the keys that are not padding | within the sequence |
| `randomized_positions` | i + 1: keys are counted, however far apart they stand | the drawn one |

The query is multiplied after its rotation and before anything reads it.
So the soft cap of scores bounds the scaled ones, an encoding's weight and contextual terms take them (CoPE's gates are
those of scaled scores), and a processor sees them as S.
What has no query in it stays as it is: the bias B, and Transformer-XL's terms of u and v.
Keys are not touched, so neither is the cache of decoding, and every backend and kernel computes it without knowing.
Every layer has a temperature of its own, with parameters of its own.
These are not decayed, AdamW steps them beside Muon, and muP leaves their rate as it is.

A temperature without learned parameters can be put on a trained model, or taken off one:
[a temperature at evaluation alone](evaluation.md#a-temperature-at-evaluation-alone).
Finetuning (`finetune: true`) may begin with another temperature: `attention_temperature: ssmax` then has fresh
parameters.
"""


def _list_tables(module: ModuleType) -> list[str]:
    """Return the tables in a module's docstring."""
    lines = groupby(read_docstring(module).splitlines(), key=lambda line: line.startswith("|"))
    return ["\n".join(group) for is_table, group in lines if is_table]


SOFTMAX = f"""\
## Sinks, stick-breaking and gates

What comes after the logits is chosen beside them, and goes with every encoding, processor, temperature and window.

`softmax_type` (megatron-core's key and names) says what makes attention weights A of the logits x:

{chr(10).join(line for line in read_docstring(softmax).splitlines() if line.startswith("|"))}

A softmax must give all of a row's weight to keys, so models learn to put what they do not need on the first token.
A sink takes it instead: a logit that joins those of the keys and has no value.
With `learnable` each head of each layer learns its sink logit, which starts at 0. With `off-by-one` it stays 0.
Sinks are float32 in every compute type, are not decayed, and cost nothing that can be measured:
kernels begin each row's sum with the sink.
A constant that a processor adds to all logits of a head has an effect then, unlike under a softmax alone.
`auto` does not choose `sdpa`, because SDPA has no sinks.
A layer that adds nothing else then takes blocks of rows on a CPU,
and on a GPU what the check finds fastest of blocks of rows, `triton` and `flex`.
Overlays: `sinks`, `off_by_one`, `gpt_oss`.

`stick-breaking` (overlay `stick_breaking`) knows the order of tokens without positions: going back from its own token,
which a row does not attend to, each key takes the share σ(x) of what later keys have left.
The first token of a sequence therefore attends to nothing, and what no key takes is attention to nothing.
(Released models of its authors add that rest to the output, with the own value or a learned vector; the paper's
formula does not.)
PyTorch's blocks of rows compute it, `eager`, `chunked` and `auto`; the other backends refuse it.

`attention_output_gate` (megatron-core's key; overlay `gated_attention`) multiplies what each head attends to by
σ(W·x), x being the layer's input, before the output projection: a gate for every number with `true`, one for every
head with `headwise` (Qiu et al. 2025, who find the first best).
W is a matrix of its own, `self_attention.linear_gate`, without a bias; tensor-parallel ranks divide it by heads.

transformers' gpt-oss has the same sinks: a test compares outputs and gradients.
Its models cannot be imported all the same, because their feed-forward layers are mixtures of experts.
"""


ROTARY_SCALINGS = f"""\
## Rotary frequencies

The option `scaling` of rotary says how fast each pair of dimensions turns.
Two scalings are chosen for training, and give pairs that turn slowly no position at all:
`p_rope` (`configs/position/p_rope.yml`) and `hope` (`configs/position/hope.yml`).
The pairs without a position compare what tokens are, at any distance alike.
GPT-NeoX's `rotary_pct` is the option `fraction`, and something else:
it spreads all frequencies, the slow ones too, over fewer dimensions.

The others stretch frequencies to read further than a model was trained at.
A trained model has one as its option, as published models do;
`./deepy.py evaluate RUN --rope yarn:8` puts one on when a model is read:
[RoPE at evaluation alone](evaluation.md#rope-at-evaluation-alone).

θ_m = base^(−m/half) are the frequencies, m = 0 … half − 1, and λ_m = 2π/θ_m their wavelengths in tokens.
s is `factor`; L is `original_length`, the length of the original training;
N is the length that the sequence reaches.

{_list_tables(rotary_scaling)[0]}

p_rope takes `share`; hope takes `original_length`, which is the training length if absent:
say it before you fine-tune at another length, so that the same pairs stay.
llama3 has low = `low_freq_factor` and high = `high_freq_factor`, yarn has fast = `beta_fast` and slow = `beta_slow`,
and b(r) = half·ln(L/(2π·r))/ln(base) is the pair that turns r times within L, rounded outwards to whole pairs.
longrope has lists, short_m = `short_factor` and long_m = `long_factor`, of a number for each pair.
`attention_factor` replaces what yarn and longrope multiply cosines and sines by.

selfextend and rerope leave the frequencies as they are, and say how far apart far tokens count to be.
Near ones, fewer than w = `neighbors` tokens apart, are where they are; G is `group`.

{_list_tables(rotary_scaling)[1]}

Queries and keys are then rotated twice, and a score is that of its distance:
they take twice the room, in the cache too, and the backends `eager` and `chunked` compute them, which `auto` takes.

`xpos: true` (`configs/position/xpos.yml`) lets scores decay with the distance, those of fast pairs fastest.
A query is multiplied by ζ_m^((i − c)/S) and a key by ζ_m^((c − j)/S), ζ_m = (m/half + 0.4)/1.4,
S = `xpos_scale_base`, and c is the middle of the sequence, so that the factors stay within a type's range.
A sequence that is too long for that is refused: in float32 and bfloat16 beyond 67,000 tokens at S = 512,
in float16 beyond 4,500.

No family of transformers offers hope, p_rope, ntk, dynamic, longrope, selfextend, rerope or xpos as they are here,
so `export --native` refuses them.
An export with this project's code takes all but dynamic, longrope and xpos,
because its cache does not say how long a text will get.

Two methods of their own turn in other ways: [`fope`](#fope) by sums of frequencies,
and [`pope`](#pope) by one frequency for each number of a head.
"""

PICTURES = f"""\
## How to read the pictures

All are drawn from the methods' own hooks at their start values (seed {SEED}), so the picture of a method with learned
parameters shows where training begins, not where it ends. The dashed line is the training length,
{SHAPE.train_length}; curves reach to {MAX_DISTANCE:,}, with the distance on a logarithmic axis.
Biases below −{-MIN_BIAS:g}, a factor of {math.exp(MIN_BIAS):.0e}, are cut off.
Maps show the factor that a bias puts on the attention of query i to key j, exp(bias), or the weight on its score; on
a logarithmic scale where they span more than a decade.
Maps of values with a sign are blue below zero and red above it, and have no colour at zero.

- Added to the embeddings: the cosine between the vectors of two positions.
- Rotated: the cosine between a query and a key that were both (1, …, 1) before they were turned.
- Contextual terms: their values for queries and keys drawn from N(0, 1).
- No hook at all: the attention of the causal mask when all scores are equal.
- Processors: row {PROCESSOR_MAP_SIZE - 1} before and after, what is added to it, and what is added elsewhere when one
  score rises by 1. They work on `{BASE_ENCODING}` here, with queries and keys drawn from N(0, 1);
  the last panel has no bias.
- Temperatures: the factor of each row of one document, over a position that reaches further than for biases.
"""


READING = """\
## How to read an entry

Below the formula stand the parameters with their start values and the bounds that training keeps. For example,
`r1 [H] ~ U(0, r1_below) ≥ 0.01` is one number per head, drawn uniformly between 0 and the option `r1_below` and never
below 0.01; `in [0.01, 2]` bounds both sides. N(0, std²) is a normal distribution with the deviation `std`. Options go
into `pos_emb_options`, `score_processor_options` or `attention_temperature_options`. "Toeplitz" says that the bias is
the same along every diagonal of the score map, since it depends on n = i − j alone.
"""


def render_page() -> str:
    """Render the whole page."""
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
## Overlays that are no single method

Every method has an overlay of its own name in `configs/position/`. These set several keys, or another key:

{format_table(["overlay", "what it sets"], rows)}
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
one file each; all work with one another. The [glossary](glossary.md) says what these words mean.
`./deepy.py positions` prints the same in the terminal. n = i − j ≥ 0 is the distance; H is the number of heads, d their
dimension, D the hidden size and T the length of the sequence.

{format_table(headings, rows)}
- **hooks:** where the method acts; [the attention contract](#the-attention-contract) says where each stands.
- **parameters:** learned numbers of one set, for all layers or for each
  (see [below](#one-set-of-parameters-or-one-per-layer)).
- **relative:** whether moving all positions by the same amount changes nothing.
- **length:** the longest sequence that the method is defined for, which does not say that it does well there.

A score processor takes the scores S and biases B of all heads and computes new ones from them.

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
Randomized positions combine with all but {exceptions}:
these are told no positions, so there is nothing to draw, and asking for it is an error.

{format_table(["key", "default", "values", "meaning"], rows)}
**A window** of w keys is a bias of 0 for n < w and of −∞ beyond. It has no weights, so finetuning may choose
another, and `./deepy.py evaluate RUN --window w` reads a run within one that it was not trained with. A window is what
a method has to beat past the training length: attention within a window extrapolates (Exploring Transformer
Extrapolation, sections 2.3 and 2.4), but no layer looks beyond it. KERPLE makes the comparison for models trained on
512 tokens and read on 4,096 (section 5.5). `kerple_log` has a lower perplexity when it sees all tokens
than when a window of 512 hides the far ones, so it uses them; `alibi` has a higher one than `kerple_log` with that
window at almost all positions.

**Randomized positions** (Ruoss et al. 2023, Randomized positional encodings boost length generalization of
transformers): the T tokens of a training sequence stand at T distinct positions of 0 … `randomized_positions` − 1,
drawn anew for every optimizer step, in ascending order. Training thus meets the distances of long sequences. DAPE V2
trains in this way on algorithmic tasks (section 4, appendix G). All sequences of a batch share one draw.
Evaluation reads at drawn positions too; that draw depends on the length alone and is the same every time.
A sequence with more tokens than there are positions is refused, and so are fewer positions than `seq_length`, or more
than a table of absolute positions has rows.

With `continuous_positions: true` the positions are real numbers, drawn uniformly from 0 … `randomized_positions` − 1
(random float sampling, 2602.14050).
A bias is then computed for each pair of tokens at its own distance, in blocks of rows, and not from a table.
Two encodings know whole positions alone and refuse it: `learned` and `transformer_xl`.
`t5` takes it: its buckets are intervals.
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

The configuration files of these projects load as they are. A name that is not listed is the same here. An empty
cell says that the name leaves the key to the file and its default.

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
        "relative: moving all positions changes nothing"
        if encoding.relative
        else "not relative: moving all positions changes the result"
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
        text += f"; {more:,.0f} more per query and layer, where it sees {SHAPE.train_length} keys"
    if type(encoding).overrides_hook("table") or type(encoding).overrides_hook("dense"):
        text += "; what it adds or multiplies by is computed once for all sequences of a batch"
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
        "Cost": f"{processor.flops_per_score():,.0f} FLOPs forward per query, key and layer, all heads together; "
        f"the products with k and v take {4 * SHAPE.num_heads * SHAPE.head_dim:,}"
        + (
            ". The bias's half of the first convolution is not counted: of a Toeplitz bias it is computed once for all "
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
    reach, mixes_heads = measure_reach(build_drawn_processor(name, has_bias=False)[0])
    traits = [f"mixes {'the heads of a row, and ' * mixes_heads}keys up to {reach} apart"]
    if not reach:
        traits = ["mixes heads, each key by itself"]
    if processor.overrides("row_terms"):
        traits = ["sums over all rows above"]
    elif processor.rows_above:
        traits.append(f"reads the {processor.rows_above} rows above")
    if processor.overrides("process_weights"):
        traits.append("works on the attention weights too")
    if processor.kernel_parameters() is None:
        traits.append("no kernel fuses it: blocks of rows compute it")
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
        + ", at the start values",
        "Cost": f"{SHAPE.num_heads * SHAPE.head_dim:,} FLOPs forward per query and layer, its numbers times the factor",
        "When": record["advice"],
        "Source": record["source"],
    }
    image = _render_picture(name, [panel.title for panel in build_temperature_panels(temperature)], "")
    summary = _read_summary(type(temperature))
    return f"### {name}\n\n{summary}\n\n    {record['formula']}\n\n{_render_facts(facts)}\n{image}"

"""README.md of an export: what the model is, how it was trained, what was measured, how to load it."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.trained import Run
from megatron.data.tokenizers import Tokenizer
from megatron.formats.family import Family
from megatron.options.model import ffn_hidden_size
from megatron.quantities import count
from megatron.reports.layout import layouts
from megatron.reports.records import RESULTS, Record, read
from megatron.reports.tables import markdown

PICTURE = "results.png"

_PAGE = """---
library_name: transformers
pipeline_tag: text-generation
license: {license}
tags:
- farfield
- length-extrapolation
- {pos_emb}
---

# {title}

A GPT of {parameters} parameters with {positions}, trained on sequences of {length:,} tokens.
{stated}
## Loading

```python
{loading}
```

{remote}
{measured}
## Training

| setting | value |
|---|---|
{settings}
"""

_MEASURED = """
## Measured

{tables}

![perplexity by length]({picture})
"""


def card(
    run: Run, tokenizer: Tokenizer, family: Family, *, parameters: int, license: str | None, title: str
) -> tuple[str, bytes | None]:
    """The page, and a picture of what was measured, if anything was.

    Args:
        family: that the export is of.
        parameters: of the model.
        license: of the weights; None if the user did not say.
        title: the model's name.
    """
    found = _results(run)
    page = _PAGE.format(
        license=license or "other",
        pos_emb=run.config.position.pos_emb,
        title=title,
        parameters=count(parameters),
        positions=_positions(run),
        length=run.config.model.seq_length,
        stated="" if license else "Its licence was not stated when it was exported.\n",
        loading=_loading(remote=bool(family.code)),
        remote=_remote(run, family),
        measured=_measured(found),
        settings="\n".join(f"| {name} | {value} |" for name, value in _settings(run, tokenizer)),
    )
    return page, _picture(found) if found else None


def _results(run: Run) -> list[Record]:
    path = run.folder / RESULTS
    return read(path) if path.is_file() else []


def _picture(records: Sequence[Record]) -> bytes:
    from megatron.reports.plots import png  # matplotlib takes a while

    return png(records)


def _positions(run: Run) -> str:
    position = run.config.position
    words = f"`{position.pos_emb}` positions"
    if position.score_processor != "none":
        words += f" under `{position.score_processor}`"
    if position.attention_window is not None:
        words += f" in a window of {position.attention_window:,}"
    return words


def _loading(*, remote: bool) -> str:
    flag = ", trust_remote_code=True" if remote else ""
    return "\n".join(
        [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this folder, or its name on the Hub',
            f"tokenizer = AutoTokenizer.from_pretrained(folder{flag})",
            f"model = AutoModelForCausalLM.from_pretrained(folder{flag})",
            'tokens = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))",
        ]
    )


def _remote(run: Run, family: Family) -> str:
    if not family.code:
        drift = f"\nBut {family.drifts}." if family.drifts else ""
        return f"transformers' own `{family.architecture}` computes this model.{drift}"
    text = (
        "The modelling code is in this folder and needs torch and transformers (4.57 or 5).\n"
        "Pad on the left to generate from several prompts: a padded prompt gives what it gives alone.\n"
        "What the code would compute wrongly is refused: masks of rows and columns, foreign `position_ids`, static "
        "caches.\n"
    )
    if run.config.position.randomized_positions is not None:
        text += "Positions are randomized, so there is no cache: `use_cache=True` is refused.\n"
    return text


def _measured(records: Sequence[Record]) -> str:
    if not records:
        return ""
    tables = "\n".join(markdown(layout) for layout in layouts(records))
    return _MEASURED.format(tables=tables, picture=PICTURE)


def _settings(run: Run, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    model, training, progress = run.config.model, run.config.training, run.progress
    shape = f"{model.num_layers} layers, width {model.hidden_size:,}, {model.num_attention_heads} heads"
    options = {**run.config.position.pos_emb_options, **run.config.position.score_processor_options}
    rows = [
        ("shape", f"{shape}, feed-forward {ffn_hidden_size(model):,}, {model.activation}, {model.norm}"),
        ("options of positions", ", ".join(f"{name} = {value}" for name, value in options.items()) or "defaults"),
        ("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens"),
    ]
    if progress.step:
        optimizer = run.config.optimizer
        rows += [
            ("steps", f"{progress.step:,}"),
            ("tokens seen", f"{progress.consumed_tokens:,}"),
            ("batch", f"{training.train_batch_size:,} sequences" if training.train_batch_size else "as configured"),
            ("precision", training.compute_type),
            ("optimizer", f"{optimizer.optimizer.type}, learning rate {optimizer.optimizer.params.lr:g}"),
        ]
    return rows


def write_card(folder: Path, page: str, picture: bytes | None) -> None:
    """Write README.md and the picture that it shows."""
    (folder / "README.md").write_text(page, encoding="utf-8")
    if picture is not None:
        (folder / PICTURE).write_bytes(picture)

"""A run folder made of a source: config.yml, tokenizer/, and one checkpoint at step 0, whole or not at all.

    RUN/config.yml                     the keys of model and position; a training says the others
    RUN/tokenizer/                     its copy, as every run keeps one
    RUN/checkpoints/step_0000000/      model.safetensors in float32, config.yml, progress.json, manifest.json

The checkpoint has weights alone, no optimizer's states: it is evaluated, exported and finetuned, not resumed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron.config.schema import Config
from megatron.config.yaml_files import dump
from megatron.data.folders import whole_folder, written
from megatron.data.run_tokenizer import keep_tokenizer
from megatron.data.tokenizers import Tokenizer, open_tokenizer
from megatron.errors import RunError, UserError
from megatron.files import parse_json
from megatron.formats.farfield import TOKENIZER_KIND
from megatron.importing.source import Source, Weights
from megatron.options.data import TokenizerType
from megatron.planning.parameters import whole
from megatron.suggest import choose_from

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.checkpoint.stream import Form

MANY_LAYERS = 500
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")

TOKENIZER_FILES = (
    ("HFTokenizer", ("tokenizer.json",)),
    ("GPT2BPETokenizer", ("vocab.json", "merges.txt")),
    ("SPMTokenizer", ("tokenizer.model",)),
)
"""What a tokenizer is known by, the first that is there."""
CONFIG_FILE = "tokenizer_config.json"
ASK_NO_FILE = ("GPTNeoXTokenizer", "GPTNeoXTokenizerFast")
"""Classes of transformers that put nothing before a text, whatever a tokenizer.json says (transformers 5.23)."""


@dataclass(frozen=True)
class Imported:
    """What was made."""

    run: Path
    config: Config
    parameters: int
    tokenizer: str


def check_place(run: Path) -> None:
    """Refuse a place that holds something. Raises UserError."""
    if run.is_dir() and any(run.iterdir()):
        raise UserError(f"{run}: is there already, and is not empty; name another folder")
    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: is a file; name a folder")


def tokenizer_of(
    source: Source,
    kind: str | None,
    vocab_file: Path | None,
    merge_file: Path | None,
    end_token: str | None = None,
    add_bos: bool | None = None,
) -> Tokenizer:
    """The tokenizer that was named, or the source's own.

    Args:
        end_token: the token that ends a document, if it has none of the usual names.
        add_bos: does a token stand before every text? As the source says if None.

    Raises UserError: there is none, or its files are not what they should be.
    """
    if kind is not None:
        return open_tokenizer(kind, vocab_file, merge_file, end_token=end_token, bos=add_bos)
    if vocab_file is not None or merge_file is not None:
        raise UserError("vocab_file: say which tokenizer it belongs to with --tokenizer")
    known = dict(TOKENIZER_FILES)
    if source.tokenizer is not None:
        named = _named(source.tokenizer)
        for name, files in ((named, known.get(named, ())),) if named is not None else TOKENIZER_FILES:
            if all((source.tokenizer / file).is_file() for file in files):
                bos = _beginning_of_text(source.tokenizer, name, add_bos)
                return open_tokenizer(name, *(source.tokenizer / file for file in files), end_token=end_token, bos=bos)
    names = "; ".join(" and ".join(files) for _, files in TOKENIZER_FILES)
    raise UserError(
        f"{source.path}: holds no tokenizer ({names}); name it with --tokenizer (bytes, HFTokenizer, GPT2BPETokenizer "
        "or SPMTokenizer) and --vocab-file"
    )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """What transformers knows of the tokenizer of a folder; nothing if there is no such file that can be read."""
    try:
        values = parse_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # others' tokenizers are known by their files
    return values if isinstance(values, dict) else {}


def _beginning_of_text(folder: Path, kind: str, add_bos: bool | None) -> bool | str | None:
    """What stands before every text, as transformers does it: `bos` of `open_tokenizer`.

    A tokenizer.json says so itself, but for classes that do not ask it; other files leave it to `add_bos_token`.
    """
    values = _tokenizer_config(folder)
    token = values.get("bos_token")
    name = token.get("content") if isinstance(token, dict) else token
    named = name if isinstance(name, str) else True
    if add_bos is not None:
        return named if add_bos else False
    if kind == "HFTokenizer":
        return False if values.get("tokenizer_class") in ASK_NO_FILE else None
    return named if values.get("add_bos_token") is True else False


def _named(folder: Path) -> str | None:
    """The kind of tokenizer that an export of this project says it has."""
    path = folder / CONFIG_FILE
    named = _tokenizer_config(folder).get(TOKENIZER_KIND)
    if named is not None and named not in get_args(TokenizerType):
        raise UserError(f"{path}: {TOKENIZER_KIND} is {named!r}; {choose_from(str(named), get_args(TokenizerType))}")
    return named


def check_rows(tokens: int, rows: int, source: Path) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows. Raises UserError."""
    if tokens > rows:
        raise UserError(
            f"{source}: the tokenizer has {tokens:,} tokens, but the embedding has {rows:,} rows; it is another "
            "model's, or name the right one with --tokenizer"
        )


def check_sizes(source: Source) -> None:
    """Refuse a configuration of more parameters than there can be in the files of weights, before so many layers are
    built that it takes a while; fewer are compared with the files one by one.

    Raises UserError.
    """
    config = source.config()
    if config.model.num_layers < MANY_LAYERS:
        return
    try:
        described = whole(config, vocabulary=1)
    except UserError:  # an encoding whose parameters nobody has counted
        return
    there = sum(path.stat().st_size for path in source.path.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if described > there > 0:  # no format has less than a byte for a parameter
        raise UserError(
            f"{source.path}: its configuration describes {described:,} parameters, but its files of weights have "
            f"{there:,} bytes"
        )


def write(source: Source, run: Path, tokenizer: Tokenizer) -> Imported:
    """Make the run.

    Raises:
        UserError: the model cannot be built.
        RunError: a file of the source is damaged or does not fit its configuration, or the disk refuses. Nothing is
            left then.
    """
    check_sizes(source)
    with written(run), source.open(source.config()) as weights, whole_folder(run.resolve()) as new:
        check_rows(tokenizer.vocab_size, weights.rows, source.path)
        # The multiple that pads any number of tokens to these rows, whatever ranks can divide them.
        config = source.config(make_vocab_size_divisible_by=weights.rows)
        parameters = _fill(new, source, config, weights, tokenizer)
    return Imported(run, config, parameters, tokenizer.name)


def _fill(new: Path, source: Source, config: Config, weights: Weights, tokenizer: Tokenizer) -> int:
    from megatron.checkpoint import folder, manifest, stream
    from megatron.checkpoint.progress import Progress
    from megatron.distributed.processes import alone
    from megatron.model.build import build_model

    gpt = build_model(config.model, config.position, tokenizer.vocab_size, groups=alone(), device="meta")
    forms = {name: stream.Form(tuple(parameter.shape)) for name, parameter in gpt.named_parameters()}
    weights.check(list(forms))
    text = _text(source, config)
    (new / folder.CONFIG).write_text(text, encoding="utf-8")
    keep_tokenizer(tokenizer, new)
    checkpoint = new / folder.CHECKPOINTS / folder.name(0)
    checkpoint.mkdir(parents=True)
    entry = stream.write(checkpoint / folder.WEIGHTS, forms, _checked(source, weights, forms), {"step": "0"})
    (checkpoint / folder.CONFIG).write_text(text, encoding="utf-8")
    Progress(vocabulary={"size": tokenizer.vocab_size, "name": tokenizer.name}).write(checkpoint)
    small = manifest.seal(checkpoint, [checkpoint / folder.CONFIG, checkpoint / folder.PROGRESS])
    manifest.write(checkpoint, {folder.WEIGHTS: entry} | small)
    return gpt.num_parameters()


def _checked(source: Source, weights: Weights, forms: "Mapping[str, Form]") -> "Iterator[Tensor]":
    """The weights as the model wants them, one at a time."""
    import torch

    for name, form in forms.items():
        found = weights(name)
        if tuple(found.shape) != form.shape:
            raise RunError(
                f"{source.path}: {name} comes out as {list(found.shape)}, its configuration makes it {list(form.shape)}"
            )
        weight = found.to(form.dtype)
        if not bool(torch.isfinite(weight).all()):
            raise RunError(f"{source.path}: {name} is not finite")
        yield weight


def _text(source: Source, config: Config) -> str:
    """config.yml: what the model is, and nothing of how it was trained."""
    sections = (config.model, config.position)
    keys = {name: value for section in sections for name, value in section.model_dump(exclude_unset=True).items()}
    head = f"# A {source.called} model, imported. A training says the rest: train_iters, train_data_paths …"
    return f"{head}\n{dump(keys)}"

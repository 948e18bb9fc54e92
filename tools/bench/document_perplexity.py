#!/usr/bin/env python3
"""Measure the effect of document masking on perplexity: train with and without the mask, and evaluate both ways.

    ./deepy.py prepare python -o data/python
    python tools/bench/document_perplexity.py data/python runs/document_perplexity \
        --json docs/results/document_perplexity.json

Python's standard library is tokenized as bytes and cut into short documents, so that rows contain several. Each
function, method and class header is a document, and so is the text before the first of them. The order is random.
Models of the quickstart's size train on rows of 256 tokens with `attention_mask: causal` and `document`. Each is
evaluated with both masks, on the held-out files cut in the same way and on whole files. Existing runs and corpora are
reused.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

import numpy as np  # noqa: E402

METHODS = ("rotary", "kerple_log")
MASKS = ("causal", "document")
ROW_LENGTH = 256
MULTIPLES = (1.0, 2.0, 4.0, 8.0)
TEXTS = {"short": "definitions, cut as in training", "files": "whole files"}
SPLITS = ("train", "valid", "test")
DEFINITION = re.compile(r"(?<=\n\n)(?= *(?:@|def |class |async def ))")
"""Start of a function, method or class after an empty line."""


@dataclass(frozen=True)
class Measurement:
    """Perplexities of one run on one text."""

    method: str
    trained: str
    """Value of `attention_mask` in training."""
    evaluated: str
    text: str
    """Key of TEXTS."""
    perplexity: dict[str, list[float]]
    """Perplexity and the bounds of its 95% bootstrap interval, by length."""


def cut_definitions(text: str) -> Iterator[str]:
    """Split a file into consecutive parts: the text before the first definition, and each definition."""
    edges = [0, *(match.start() for match in DEFINITION.finditer(text)), len(text)]
    return (part for first, last in pairwise(edges) if (part := text[first:last]).strip())


def write_corpora(source: Path, folder: Path, seed: int) -> None:
    """Write the three splits as corpora of short documents, each in its own folder."""
    from megatron.data.corpus.prepare import prepare_corpus
    from megatron.data.indexed_dataset import open_indexed
    from megatron.data.load_tokenizer import load_tokenizer
    from megatron.options.data import CorpusOptions

    tokenizer = load_tokenizer(source)
    for number, split in enumerate(SPLITS):
        dataset = open_indexed(source / f"{split}_text_document")
        parts: list[str] = []
        for start, length in zip(dataset.starts.tolist(), dataset.lengths.tolist(), strict=True):
            parts += cut_definitions(tokenizer.decode(dataset.tokens[start : start + length - 1].tolist()))
        # Adjacent parts then come from different files in evaluation, as in training, which shuffles.
        order = np.random.default_rng([seed, number]).permutation(len(parts))
        folder.mkdir(parents=True, exist_ok=True)
        lines = folder / f"{split}.jsonl"
        text = "".join(json.dumps({"text": parts[index]}) + "\n" for index in order)
        if not lines.exists() or lines.read_text(encoding="utf-8") != text:  # otherwise the corpus exists already
            lines.write_text(text, encoding="utf-8")
        prepare_corpus(CorpusOptions(sources=[str(lines)], split=None), folder / split)


def train_run(corpus: Path, folder: Path, method: str, mask: str, steps: int, seed: int) -> None:
    """Train a model of the quickstart's size, unless its last checkpoint exists."""
    from megatron.checkpoint.trained_run import open_runs
    from megatron.config.load import merge_documents
    from megatron.config.yaml_files import read_yaml
    from megatron.training.train import train
    from megatron.utils.errors import UserError

    try:
        if open_runs([folder])[0].trainer_state.step == steps:
            return
    except UserError:
        pass  # no checkpoint yet
    batch = 2048 // ROW_LENGTH  # as many bytes per step as in the quickstart
    values: dict[str, Any] = {
        "pos_emb": method, "attention_mask": mask, "seed": seed, "seq_length": ROW_LENGTH, "train_iters": steps,
        "train_micro_batch_size_per_gpu": batch, "attention_chunk_rows": 128, "device": "cpu",
        "train_data_paths": f"[{corpus}/train/text_document]", "valid_data_paths": f"[{corpus}/valid/text_document]",
        "test_data_paths": f"[{corpus}/test/text_document]", "eval_interval": steps, "checkpoint_factor": steps,
        "save": folder,
    }  # fmt: skip
    quickstart = read_yaml(ROOT / "configs" / "quickstart.yml")
    model = replace(quickstart, values={key: value for key, value in quickstart.values.items() if key != "sweep"})
    train(merge_documents([model], [f"{key}={value}" for key, value in values.items()]).config)


def evaluate_run(
    corpus: Path, folder: Path, source: Path, method: str, trained: str, windows: int
) -> list[Measurement]:
    """Evaluate the perplexities of a run on both texts with both masks."""
    from megatron.evaluation.run import evaluate_runs
    from megatron.options.evaluation import EvaluationOptions

    texts = {"short": corpus / "test" / "text_document", "files": source / "test_text_document"}
    found = []
    for text, prefix in texts.items():
        for mask in MASKS:
            options = EvaluationOptions(
                multiples=list(MULTIPLES), num_windows=windows, data=str(prefix), attention_mask=mask, device="cpu"
            )
            records = evaluate_runs([folder], options, output=folder / "evaluated")
            values = {str(r.length): [r.value, r.low, r.high] for r in records if r.metric == "perplexity"}
            found.append(Measurement(method, trained, mask, text, values))
    return found


def format_page(measured: list[Measurement], shares: dict[str, Any], origin: str) -> str:
    lengths = [str(int(multiple * ROW_LENGTH)) for multiple in MULTIPLES]
    lines = [
        "# Perplexity with and without document masking in training and evaluation",
        "",
        f"Models of the quickstart's size, trained on rows of {ROW_LENGTH} bytes of Python's standard library,",
        f"cut into {shares['documents']:,} documents (functions, methods, class headers) in random order,",
        f"half of them shorter than {shares['median']:,} bytes; {shares['crossing']:.0%} of the rows contain several.",
        "Perplexity per byte with its 95% bootstrap interval over windows; one seed.",
        f"Every length and both masks score the same {shares['targets']:,} bytes of a text.",
    ]
    for text, title in TEXTS.items():
        lines += [
            "",
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| method | trained | evaluated | " + " | ".join(f"{int(length):,}" for length in lengths) + " |",
            "|---|---|---|" + "---|" * len(lengths),
        ]
        for each in measured:
            if each.text == text:
                cells = ["{:.3f} [{:.2f}, {:.2f}]".format(*each.perplexity[length]) for length in lengths]
                lines.append(f"| {each.method} | {each.trained} | {each.evaluated} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin, ""])


def main() -> None:
    """Train and evaluate missing runs, and write the record."""
    parser = ToolParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="corpus folder with the splits train, valid and test")
    parser.add_argument("folder", type=Path, help="folder of the corpora and runs")
    parser.add_argument("--steps", type=int_at_least(1), default=500, help="training steps (500)")
    parser.add_argument("--windows", type=int_at_least(1), default=64, help="windows per length (64)")
    parser.add_argument(
        "--seed", type=int_at_least(0), default=1234, help="seed of training and of the order of documents"
    )
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    arguments = parser.parse_args()
    from megatron.data.document_starts import compute_crossing_fraction
    from megatron.data.indexed_dataset import open_indexed

    folder, corpus = arguments.folder, arguments.folder / "corpus"
    write_corpora(arguments.source, corpus, arguments.seed)
    measured: list[Measurement] = []
    for method in METHODS:
        for mask in MASKS:
            run = folder / f"{method}_{mask}"
            train_run(corpus, run, method, mask, arguments.steps, arguments.seed)
            measured += evaluate_run(corpus, run, arguments.source, method, mask, arguments.windows)
            print(f"{method} trained with {mask}: evaluated", flush=True)
    documents = np.asarray(open_indexed(corpus / "train" / "text_document").lengths)
    shares = {
        "documents": len(documents),
        "median": int(np.median(documents)),
        "crossing": compute_crossing_fraction(documents, ROW_LENGTH),
        "targets": arguments.windows * ROW_LENGTH,
    }
    provenance = collect_provenance(__file__, "cpu")
    page = format_page(measured, shares, format_provenance(provenance))
    print(page)
    if arguments.json is not None:
        record = {**provenance, "steps": arguments.steps, "seed": arguments.seed, **shares}
        write_record(arguments.json, record | {"measured": [asdict(each) for each in measured]}, page)


if __name__ == "__main__":
    main()

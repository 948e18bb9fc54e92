"""`./deepy.py prepare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron.cli.options import with_options
from megatron.options.data import CorpusOptions


@with_options(CorpusOptions)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Files (.txt, .jsonl, .jsonl.gz or .zst, .parquet, .arrow), folders, [bold]python[/]: the standard "
            "library, or [bold]hf:NAME[/]: a dataset on Hugging Face's hub.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The corpus folder to make.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus that was made differently.")] = False,
    **options: Any,
) -> None:
    """Make a corpus: text in, Megatron's indexed datasets (.bin, .idx) and their tokenizer out.

    Documents are divided into train, valid and test as wholes. The datasets are readable by megatron-core, Megatron-LM
    and GPT-NeoX. Preparing the same thing again finds it there.

    [bold]Examples[/]

      ./deepy.py prepare python --output data/python

      ./deepy.py prepare pile.jsonl.zst -o data/pile --tokenizer HFTokenizer --vocab-file 20B_tokenizer.json --workers 8

      ./deepy.py prepare hf:allenai/c4:en -o data/c4 --tokens 2000000000 --tokenizer HFTokenizer --vocab-file 20B.json

      ./deepy.py prepare papers/ --suffixes .tex,.bib -o data/papers --tokenizer bpe --vocab-size 8192
    """
    from megatron.config.chosen import section_from_cli
    from megatron.launch.corpus_console import prepare_corpus

    prepare_corpus(section_from_cli(CorpusOptions, {**options, "sources": sources}), output, overwrite=overwrite)

"""`./deepy.py import` and `./deepy.py export`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron.cli.arguments import add_section_options, print_notes, print_to_stderr
from megatron.options.commands import ExportOptions, ImportOptions
from megatron.utils.errors import UserError


@add_section_options(ImportOptions)
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Model folder or checkpoint.", show_default=False)],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to create.", show_default=False)],
    **options: Any,
) -> None:
    """Import a model from another project as a run folder.

    SOURCE is a Hugging Face model folder (GPT-NeoX and Pythia, GPT-2, OPT, Llama 2 and 3, Mistral, SmolLM2 and 3, Qwen2
    and Qwen3, OLMo 2 and 3, Gemma 1 to 3, Granite, Phi-3, Command R), an export of this project, or a checkpoint of
    GPT-NeoX, KERPLE or DAPE. The imported model computes the same results; unsupported features raise an error that
    names them. The run can be evaluated, finetuned and used for generation like any other.

    [bold]Examples[/]

      ./deepy.py import pythia-160m runs/pythia

      ./deepy.py evaluate runs/pythia --data book.txt --lengths 1x,2x,4x

      ./deepy.py train runs/pythia/config.yml add_cdape load=runs/pythia save=runs/cdape seq_length=4096 …
    """
    from megatron.config.schema import parse_section
    from megatron.utils.formatting import format_count
    from megatron.utils.progress import WaitAnnouncer

    request = parse_section(ImportOptions, {**options, "config": options["config"] or []})
    with WaitAnnouncer(print_to_stderr, f"reading {source}"):
        from megatron.conversion.import_model import import_model  # importing torch takes seconds

        imported, notes = import_model(
            source,
            run,
            configs=request.config,
            tokenizer=request.tokenizer,
            vocab_file=request.vocab_file,
            merge_file=request.merge_file,
            end_token=request.end_token,
            add_bos=request.add_bos,
        )
    print_notes(notes)
    model = imported.config.model
    print(
        f"{run}: {format_count(imported.num_parameters)} parameters, {model.num_layers} layers of width "
        f"{model.hidden_size}, {', '.join(imported.config.position.encodings)}, training length {model.seq_length:,}, "
        f"tokenizer {imported.tokenizer}"
    )


@add_section_options(ExportOptions)
def export(
    run: Annotated[
        str,
        typer.Argument(help="Run folder or checkpoint; with --refresh, an export.", show_default=False),
    ],
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="Folder to create.", show_default=False)] = None,
    **options: Any,
) -> None:
    """Export a model for Hugging Face transformers: weights, tokenizer, model card, and modeling code.

    The folder needs only torch and transformers (4.57 or 5). All encodings, processors and windows can be exported; the
    code is the same that trained the model.

    [bold]Examples[/]

      ./deepy.py export runs/cdape exported/cdape

      ./deepy.py export runs/cdape/checkpoints/step_0010000 exported/cdape --dtype bfloat16 --license apache-2.0

      ./deepy.py export runs/rotary exported/rotary --native

      ./deepy.py export --refresh exported/cdape

    The third uses a native transformers class, for programs that support no others. The last updates the code of an
    older export, for example for a newer transformers version; results stay the same.
    """
    from megatron.config.schema import parse_section
    from megatron.utils.progress import WaitAnnouncer

    request = parse_section(ExportOptions, options)
    if request.refresh:
        check_refresh_options(request, folder)
        with WaitAnnouncer(print_to_stderr, f"updating {run}"):
            from megatron.conversion.refresh_export import refresh_export

            refresh_export(run, overwrite=request.overwrite)
        return
    if folder is None:
        raise UserError("missing folder: ./deepy.py export RUN DIR")
    with WaitAnnouncer(print_to_stderr, f"writing {folder}"):
        from megatron.conversion.export_model import export_model  # importing torch takes seconds

        export_model(
            run,
            folder,
            native=request.native,
            dtype=request.dtype,
            max_shard_size=request.shard,
            license=request.license,
            overwrite=request.overwrite,
        )


def check_refresh_options(request: ExportOptions, folder: Path | None) -> None:
    """Reject options of a new export with --refresh. Raises UserError."""
    if folder is not None:
        raise UserError(f"--refresh updates one export in place; omit {folder}")
    for name, value in request.model_dump().items():
        if name not in ("refresh", "overwrite") and value != ExportOptions.model_fields[name].default:
            raise UserError(f"{name} is {value}, which --refresh does not change; omit it")

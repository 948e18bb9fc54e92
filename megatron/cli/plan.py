"""`./deepy.py plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.cli.arguments import Arguments, ConfigFolder, load_config_arguments, with_options
from megatron.cli.console import print_notes
from megatron.options.commands import PlanOptions
from megatron.utils.errors import FarfieldError

if TYPE_CHECKING:
    from megatron.config.schema import Config

GPT2_VOCAB_SIZE = 50257


@with_options(PlanOptions)
def plan(
    arguments: Arguments,
    conf_dir: ConfigFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    **options: Any,
) -> None:
    """Estimate memory and time on GPUs, and find parallel layouts that fit.

    Nothing is trained and no GPU is needed: the estimate is computed from formulas that docs/planning.md explains and
    compares with measurements. Batch size, length, steps and precision stay as configured; only the parallel layout
    varies.

    [bold]Examples[/]

      ./deepy.py plan 2-7B cdape_kerple_log a100_8k --gpus 64 --gpu a100-40gb

      ./deepy.py plan 350M rotary a100_2k --gpus 8 --gpu a100-80gb --mfu 0.35 --json
    """
    from dataclasses import replace

    from megatron.config.validation_errors import parse_section
    from megatron.distributed.hardware import get_gpu_spec
    from megatron.planning.plan import make_plan
    from megatron.planning.step_time import Cluster

    request = parse_section(PlanOptions, options)
    gpu = get_gpu_spec(request.gpu)
    loaded = load_config_arguments(arguments, conf_dir)
    gpu = gpu if request.gib is None else replace(gpu, gib=request.gib)
    gpu_options = f"--gpu {request.gpu}" + ("" if request.gib is None else f" --gib {request.gib:g}")
    cluster = Cluster(gpu, request.gpus, request.gpus_per_node, request.network, request.mfu, gpu_options)
    result = make_plan(loaded.config, _find_vocab_size(loaded.config, request.vocabulary), cluster)
    if as_json:
        import json

        print(json.dumps(result.to_dict(request.layouts), indent=2))
        return
    from megatron.launch.console import PlainConsole
    from megatron.planning.print_plan import print_plan

    print_plan(result, PlainConsole(highlight=False), request.layouts)


def _find_vocab_size(config: Config, vocab_size: int | None) -> int:
    """Return the vocabulary size: as given, from the data, or GPT-2's."""
    from megatron.data.load_tokenizer import read_vocabulary

    if vocab_size is not None:
        return vocab_size
    try:
        return read_vocabulary(config.data).size
    except FarfieldError:
        print_notes(
            (f"the data's tokenizer was not found; assuming a vocabulary of {GPT2_VOCAB_SIZE} tokens (--vocabulary)",)
        )
        return GPT2_VOCAB_SIZE

"""Model card (README.md) of an export: architecture, training, results, and how to load it."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.trained_run import TrainedRun
from megatron.conversion.model_family import ModelFamily
from megatron.data.tokenizers import Tokenizer
from megatron.options.model import get_ffn_hidden_size
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.html_page import render_template
from megatron.reports.records import RESULTS_FILE, Record, read_records
from megatron.reports.table_formats import render_comparison_markdown
from megatron.utils.formatting import format_count

PLOT_FILE = "results.png"
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"


def render_model_card(
    run: TrainedRun, tokenizer: Tokenizer, family: ModelFamily, *, num_parameters: int, license: str | None, title: str
) -> tuple[str, bytes | None]:
    """Return the page, and a plot of the results if there are any.

    Args:
        family: family of the export.
        num_parameters: number of parameters of the model.
        license: license of the weights; None if not given.
        title: name of the model.
    """
    records = _read_results(run)
    all_tables = build_comparison_tables(records)
    tables, depth_maps = split_depth_maps(all_tables)
    page = render_template(
        TEMPLATE,
        license=license,
        title=title,
        num_parameters=format_count(num_parameters),
        position=run.config.position,
        train_length=run.config.model.seq_length,
        family=family,
        native_documents=describe_native_documents(family),
        tables=[
            *map(render_comparison_markdown, tables),
            *(depth_map.build_text_table().to_markdown() for depth_map in depth_maps),
        ],
        plot_file=PLOT_FILE,
        settings=_list_settings(run, tokenizer),
    )
    return page, _render_plot(all_tables) if records else None


def describe_native_documents(family: ModelFamily) -> str:
    """Return a sentence for a native transformers model whose run was trained with document masking."""
    return (
        "this model was trained with attention_mask: document, but the native transformers class "
        f"{family.architecture} treats a row as one document; put each document in its own row, or pass position_ids "
        "that restart"
    )


def _read_results(run: TrainedRun) -> list[Record]:
    path = run.folder / RESULTS_FILE
    return read_records(path) if path.is_file() else []


def _render_plot(tables: Sequence[ComparisonTable]) -> bytes:
    from megatron.reports.plots import render_plots_png  # importing matplotlib is slow

    return render_plots_png(tables)


def _list_settings(run: TrainedRun, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    model, training, trainer_state = run.config.model, run.config.training, run.trainer_state
    architecture = f"{model.num_layers} layers, width {model.hidden_size:,}, {model.num_attention_heads} heads"
    position = run.config.position
    options = {
        "encoding options": position.pos_emb_options,
        "score processor options": position.score_processor_options,
        "temperature options": position.attention_temperature_options,
    }
    rows = [
        ("shape", f"{architecture}, feed-forward {get_ffn_hidden_size(model):,}, {model.activation}, {model.norm}"),
        *(
            (title, ", ".join(f"{name} = {value}" for name, value in chosen.items()))
            for title, chosen in options.items()
            if chosen
        ),
        ("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens"),
    ]
    if trainer_state.step:
        optimizer = run.config.optimizer
        rows += [
            ("steps", f"{trainer_state.step:,}"),
            ("tokens seen", f"{trainer_state.consumed_tokens:,}"),
            ("batch", f"{training.train_batch_size:,} sequences" if training.train_batch_size else "as configured"),
            ("precision", training.compute_dtype),
            ("optimizer", f"{optimizer.optimizer.type}, learning rate {optimizer.optimizer.params.lr:g}"),
        ]
    return rows


def write_model_card(folder: Path, page: str, plot: bytes | None) -> None:
    """Write README.md and its plot."""
    (folder / "README.md").write_text(page, encoding="utf-8", errors="replace")  # names may not be valid UTF-8
    if plot is not None:
        (folder / PLOT_FILE).write_bytes(plot)

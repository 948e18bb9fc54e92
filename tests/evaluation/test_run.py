"""Evaluation of runs from their folders: compared runs and texts, output files, and errors before any work."""

import csv
import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import prepare
from models import build_model
from rich.console import Console
from safetensors.torch import save_file

from megatron.checkpoint import layout
from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.load import load_config
from megatron.config.schema import parse_section
from megatron.data.datasets import load_token_stream
from megatron.data.load_tokenizer import load_tokenizer, save_tokenizer
from megatron.evaluation.eval_target import choose_lengths
from megatron.evaluation.provenance import describe_machine, list_software_versions
from megatron.evaluation.run import evaluate_runs
from megatron.model.device_dtype import resolve_device
from megatron.options.evaluation import EvaluationOptions as Options
from megatron.options.evaluation import parse_lengths
from megatron.reports import plots, records
from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.records import Record
from megatron.utils.errors import RunError, UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

from .conftest import scored

ROUNDING = compute_tolerance(*count_gpt_sums(16, layers=1))
SHAPE = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=8", "train_iters=5"]
DATA = [f"{split}_data_paths=[corpus/{split}_text_document]" for split in ("train", "valid", "test")]


@pytest.fixture(autouse=True)
def picture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of records to draw; drawing itself is skipped because it costs more than evaluating these models."""
    asked: list[int] = []

    def render(tables: Sequence[ComparisonTable], **_: object) -> bytes:
        asked.append(sum(len(table.records) for table in tables))
        return b"\x89PNG"

    monkeypatch.setattr(plots, "render_plots_png", render)
    return asked


def evaluated(
    runs: Sequence[str | Path],
    lengths: Sequence[int] | str | None = None,
    *,
    output: str | None = None,
    console: Console | None = None,
    **options: object,
) -> list[Record]:
    """Call `evaluate_runs` with lengths in tokens or in command-line form, and other options by name."""
    of_text = {} if lengths is None else parse_lengths(lengths) if isinstance(lengths, str) else {"lengths": lengths}
    return evaluate_runs(runs, parse_section(Options, {**options, **of_text}), output=output, console=console)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with a corpus."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i * i} is the square of {i}\n" for i in range(100)))
    prepare(["text.txt"], "corpus", split=(0.4, 0.3, 0.3))
    return tmp_path


def make_run(
    name: str,
    *overrides: str,
    data: list[str] = DATA,
    tokenizer: str = "bytes",
    size: int = 257,
    step: int = 5,
    directory: str | None = None,
) -> Path:
    """Create a run folder with random weights, without training."""
    config = load_config([], [*SHAPE, *data, f"save={name}", "pos_emb=rotary", *overrides]).config
    model = build_model(config.model, config.position, size, seed=config.training.seed)
    checkpoint = Path(name) / "checkpoints" / f"step_{step:07d}"
    checkpoint.mkdir(parents=True)
    config.save(checkpoint / "config.yml")
    vocabulary = {"size": size, "name": tokenizer}
    TrainerState(step=step, consumed_tokens=step * 32, vocabulary=vocabulary, directory=directory).write(checkpoint)
    weights = {key: value.detach().clone() for key, value in model.state_dict().items() if torch.is_tensor(value)}
    save_file(weights, checkpoint / "model.safetensors")
    return Path(name)


def test_runs_side_by_side(place: Path, picture: list[int]) -> None:
    make_run("runs/a", "pos_emb=rotary")
    make_run("runs/b", "pos_emb=alibi", "score_processor=cdape")
    out = io.StringIO()
    found = evaluated(["runs/a", "runs/b"], "1x,32", windows=6, output="results", console=Console(file=out, width=150))
    assert [(r.method, r.length) for r in found] == [
        ("rotary", 8), ("rotary", 32), ("cdape+alibi", 8), ("cdape+alibi", 32),
    ]  # fmt: skip
    assert len({r.target_digest for r in found}) == 1
    for r in found:
        assert (r.tokens, r.windows, r.step, r.train_tokens, r.dataset) == (48, 6, 5, 160, "corpus/test_text_document")
        assert (r.tokenizer, r.backend, r.machine, r.software) == (
            "bytes",
            "auto",
            describe_machine(),
            list_software_versions(),
        )
    # Equals scoring the loaded model directly.
    loaded = load_model("runs/b")
    direct = scored(loaded, load_token_stream(loaded.run.config.data, "test"), Options(lengths=[8, 32], windows=6))
    assert [r.value for r in found[2:]] == [r.value for r in direct]

    assert records.read_records("results/results.json") == found
    rows = csv.DictReader(Path("results/results.csv").read_text().splitlines())
    assert [float(row["perplexity"]) for row in rows] == [r.value for r in found]
    assert Path("results/results.png").read_bytes() == b"\x89PNG"
    assert picture == [4]
    assert not Path("runs/a/results.json").exists()
    output = out.getvalue()
    assert "rotary seed 1234: loading" in output
    # These checkpoints were written by hand; training writes checksums.
    assert "runs/a: step_0000005, not verified: it has no checksums" in output
    assert f"{found[1].value:,.1f}" in output
    assert "written: results/results.json" in output


def test_one_run_keeps_its_results_in_its_folder_and_a_checkpoint_does_not(place: Path) -> None:
    run = make_run("runs/a", "pos_emb=t5")
    out = io.StringIO()
    evaluated([run], [8, 16], console=Console(file=out, width=200))
    assert len(records.read_records(run / "results.json")) == 2
    assert out.getvalue().startswith(f"results will be saved in {run}\n")
    evaluated([run / "checkpoints"], [12])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_0000005"]
    before = (run / "results.json").read_text()
    out = io.StringIO()
    evaluated([run / "checkpoints" / "step_0000005"], [8], console=Console(file=out))
    assert (run / "results.json").read_text() == before
    assert out.getvalue().startswith("results will not be saved; use --output FOLDER to save them\n")


def test_only_repeated_measurements_are_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("runs/a", "pos_emb=t5")
    first = evaluated([run], [8, 16])
    spans = evaluated([run], [8], protocol="nonoverlapping")
    train = evaluated([run], [8], data="corpus/train_text_document")
    window = evaluated([run], [8], window=4)
    assert records.read_records(run / "results.json") == [*first, *spans, *train, *window]
    out = io.StringIO()
    again = evaluated([run], [8, 32], console=Console(file=out, width=200))
    assert out.getvalue().startswith(
        f"results will be saved in {run}; the 5 records there are kept, except those measured again\n"
    )
    assert records.read_records(run / "results.json") == [*spans, *train, *window, *again]
    assert len(list(csv.DictReader((run / "results.csv").read_text().splitlines()))) == 5
    # Three tables, because results of other protocols and texts cannot be compared; the printed one shows this
    # evaluation.
    assert (run / "results.md").read_text().count("| method |") == len({r.target_digest for r in [*again, *train]}) + 2
    assert "nonoverlapping" not in out.getvalue()
    # From another folder, paths of the run and the text differ but mean the same.
    monkeypatch.chdir(place.parent)
    moved = evaluated([place / run], [8, 32])
    assert [r.value for r in moved] == [r.value for r in again]
    assert records.read_records(place / run / "results.json") == [*spans, *train, *window, *moved]


def test_a_folder_gathers_runs(place: Path) -> None:
    make_run("runs/a", "pos_emb=rotary")
    make_run("runs/b", "pos_emb=alibi")
    (a,) = evaluated(["runs/a"], [8], output="out")
    (b,) = evaluated(["runs/b"], [8], output="out")
    assert records.read_records("out/results.json") == [a, b]
    (again,) = evaluated(["./runs/a"], [8], output="out")
    assert records.read_records("out/results.json") == [b, again]
    Path("out/results.json").write_text("[")
    with pytest.raises(UserError, match=r"out/results.json: not JSON"):  # a file that cannot be parsed is not replaced
        evaluated(["runs/a"], [8], output="out")


def test_a_file_of_text_is_tokenized_as_the_run_was_trained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("runs/a")
    text = "The quick brown fox jumps over the lazy dog.\n" * 9
    Path("fox.txt").write_text(text)
    Path("fox.jsonl").write_text("\n".join(json.dumps({"text": text[i::2]}) for i in range(2)))
    (found,) = evaluated([run], [8], data="fox.txt")
    assert (found.dataset, found.tokenizer) == ("fox.txt", "bytes")
    stream = np.array([*text.encode(), 256])
    (direct,) = scored(load_model(run), stream, Options(lengths=[8]))
    assert found.value == direct.value
    (lines,) = evaluated([run], [8], data="fox.jsonl")
    stream = np.array([*text[::2].encode(), 256, *text[1::2].encode(), 256])
    assert lines.value == scored(load_model(run), stream, Options(lengths=[8]))[0].value
    # Byte tokenizers need no file, so the training corpus may be missing.
    Path("corpus").rename("gone")
    assert evaluated([run], [8], data="fox.txt")[0].value == found.value
    foreign = make_run("runs/foreign", tokenizer="HFTokenizer-0123456789ab")
    Path("notes").mkdir()
    for data, message in (
        ("fox.md", r"fox.md: its suffix must be \.txt, \.jsonl.*; rename a text file, for example to fox\.txt$"),
        ("notes", r"^--data: the folder notes contains no dataset"),
        ("empty.txt", "empty.txt: no text found"),
        ("nothing.txt", r"nothing.txt: no such file or folder; --data expects a file \(.txt"),
        (
            "shakespeare",
            "shakespeare: is a source of `prepare`; --data expects .* prepare shakespeare -o data/shakespeare`$",
        ),
        ("hf:allenai/c4:en", "hf:allenai/c4:en: is a source of .*`./deepy.py prepare hf:allenai/c4:en -o data/c4`$"),
    ):
        if data in ("fox.md", "empty.txt"):
            Path(data).write_text("")
        with pytest.raises(UserError, match=message):
            evaluated([run], [8], data=data)
    with pytest.raises(UserError, match=r"fox.txt: cannot load the tokenizer of runs/foreign: .*train_data_paths"):
        evaluated([foreign], [8], data="fox.txt")


def test_a_file_of_text_is_tokenized_by_the_tokenizer_of_the_corpus(place: Path) -> None:
    bpe = prepare(["text.txt"], "bpe", tokenizer="bpe", vocab_size=300, split=(0.4, 0.3, 0.3))
    data = [entry.replace("corpus/", "bpe/") for entry in DATA]
    run = make_run("runs/bpe", data=data, tokenizer=bpe.tokenizer, size=bpe.vocab_size)
    Path("more.txt").write_text("".join(f"{i * i} is the square of {i}\n" for i in range(100, 140)))
    (found,) = evaluated([run], [8], data="more.txt")
    prepare(["more.txt"], "again", tokenizer="HFTokenizer", vocab_file="bpe/tokenizer.json", split=None)
    (expected,) = evaluated([run], [8], data="again")
    assert (found.tokenizer, found.value) == (bpe.tokenizer, expected.value)
    assert found.text_digest == expected.text_digest
    with pytest.raises(UserError, match="was trained with tokenizer bytes, runs/bpe with HFTokenizer-"):
        evaluated([run, make_run("runs/bytes")], [8], data="more.txt")


def test_a_run_uses_its_own_tokenizer_if_the_corpus_is_missing(place: Path) -> None:
    bpe = prepare(["text.txt"], "bpe", tokenizer="bpe", vocab_size=300, split=(0.4, 0.3, 0.3))
    data = [entry.replace("corpus/", "bpe/") for entry in DATA]
    run = make_run("runs/bpe", data=data, tokenizer=bpe.tokenizer, size=bpe.vocab_size)
    (found,) = evaluated([run], [8], data="text.txt")
    save_tokenizer(load_tokenizer(bpe.folder), run)
    for suffix in ("bin", "idx"):  # a bare dataset, as written by GPT-NeoX's tools
        Path(f"bare.{suffix}").write_bytes(Path(f"bpe/test_text_document.{suffix}").read_bytes())
    (bare,) = evaluated([run], [8], data="bpe")
    shutil.rmtree("bpe")
    assert evaluated([run], [8], data="text.txt")[0].value == found.value
    assert evaluated([layout.resolve_checkpoint_path(run)], [8], data="text.txt")[0].value == found.value
    assert evaluated([run], [8], data="bare")[0].value == bare.value


@pytest.mark.parametrize("save", ["runs/a", "/absolute"])
def test_data_are_found_from_any_directory_and_after_the_tree_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str
) -> None:
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    Path("text.txt").write_text("".join(f"{i * i} is the square of {i}\n" for i in range(100)))
    prepare(["text.txt"], "corpus", split=(0.4, 0.3, 0.3))
    run = make_run(save if save == "runs/a" else str(work / "runs" / "a"), directory=str(work))
    (found,) = evaluated([run], [8])
    assert found.dataset == "corpus/test_text_document"
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    (other,) = evaluated([work / "runs" / "a"], [8])
    assert (other.dataset, other.value) == (str(work / "corpus" / "test_text_document"), found.value)
    # Another text with this name in the working directory is not the run's.
    Path("text.txt").write_text("something else\n" * 200)
    prepare(["text.txt"], "corpus", split=(0.4, 0.3, 0.3))
    (other,) = evaluated([work / "runs" / "a"], [8])
    assert other.value == found.value
    moved = work.rename(tmp_path / "moved")
    (other,) = evaluated([moved / "runs" / "a"], [8])
    assert (other.dataset, other.value) == (str(moved / "corpus" / "test_text_document"), found.value)


def test_a_run_without_training_provenance(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("runs/a")
    (found,) = evaluated([run], [8])
    monkeypatch.chdir(place.parent)
    assert evaluated([place / run], [8])[0].value == found.value
    monkeypatch.chdir(place / "runs")
    assert evaluated(["a"], [8])[0].value == found.value


def test_seeds_are_one_method_and_other_differences_are_not(place: Path) -> None:
    for seed in (1, 2):
        make_run(f"runs/{seed}", "pos_emb=rotary", f"seed={seed}")
    make_run("runs/wide", "pos_emb=rotary", "intermediate_size=8")
    found = evaluated(["runs/1", "runs/2"], [8])
    assert [(r.method, r.seed) for r in found] == [("rotary", 1), ("rotary", 2)]
    found = evaluated(["runs/1", "runs/wide"], [8], output="out")
    assert [r.method for r in found] == ["rotary [runs/1]", "rotary [runs/wide]"]
    assert "rotary [runs/wide]" in Path("out/results.csv").read_text()
    # Separate commands for the runs give the same results as one command.
    make_run("runs/rate", "pos_emb=rotary", "seed=3", "optimizer.params.lr=1e-2")
    for run in ("2", "rate"):
        evaluated([f"runs/{run}"], [8], output="out")
    rows = [line for line in Path("out/results.md").read_text().splitlines() if line.startswith("| rotary")]
    assert list(dict.fromkeys(row.split("|")[1].strip() for row in rows)) == [
        "rotary [runs/1, runs/2]", "rotary [runs/wide]", "rotary [runs/rate]"
    ]  # fmt: skip
    first, second = (records.read_records("out/results.json")[index] for index in (0, 2))
    assert first.training_digest == second.training_digest


def test_a_run_is_scored_up_to_its_maximum_length_with_a_note(place: Path) -> None:
    make_run("runs/a", "pos_emb=rotary")
    make_run("runs/learned", "pos_emb=learned", "max_position_embeddings=20")
    out = io.StringIO()
    found = evaluated(["runs/a", "runs/learned"], [8, 16, 32], output="out", console=Console(file=out, width=200))
    assert [(r.method, r.length) for r in found[3:]] == [("learned", 8), ("learned", 16)]
    assert len({r.target_digest for r in found}) == 1
    output = out.getvalue()
    assert (
        "runs/learned: pos_emb learned supports 20 positions (max_position_embeddings); scored at lengths up to 16\n"
        in output
    )
    assert "runs/a: pos_emb" not in output
    assert "max 20" in output.split("learned seed")[-1]
    assert Path("out/results.md").read_text().count("max 20") == 1


def test_a_window_at_evaluation_alone(place: Path) -> None:
    make_run("runs/whole", "pos_emb=kerple_log")
    make_run("runs/windowed", "pos_emb=kerple_log", "attention_window=4", "seed=1234")
    (whole,) = evaluated(["runs/whole"], [32])
    (asked,) = evaluated(["runs/whole"], [32], window=4)
    (own,) = evaluated(["runs/windowed"], [32])
    (same,) = evaluated(["runs/windowed"], [32], window=4)
    # Equal seeds give equal weights: only the visible context differs.
    assert asked.value == own.value == same.value
    assert asked.value != whole.value
    assert asked.method == asked.position == "kerple_log(window=4 at evaluation)"
    assert own.method == same.method == "kerple_log(window=4)"
    # In one layer, a window of 4 sees the last 4 tokens only.
    (longer,) = evaluated(["runs/windowed"], [32, 64], targets=8, windows=5)[1:]
    assert longer.change == pytest.approx(1, rel=2 * ROUNDING * longer.nll)


def test_a_temperature_at_evaluation_alone(place: Path) -> None:
    options = '{"floor_scale": 3, "attn_scale": 0.6}'
    make_run("runs/plain", "pos_emb=kerple_log")
    make_run("runs/llama4", "pos_emb=kerple_log", "attention_temperature=llama4",
             f"attention_temperature_options={options}", "seed=1234")  # fmt: skip
    make_run("runs/ssmax", "pos_emb=kerple_log", "attention_temperature=ssmax", "seed=1234")
    (plain,) = evaluated(["runs/plain"], [32])
    (asked,) = evaluated(["runs/plain"], [32], attention_temperature="llama4:floor_scale=3, attn_scale=0.6")
    (own,) = evaluated(["runs/llama4"], [32])
    (without,) = evaluated(["runs/llama4"], [32], attention_temperature="none")
    # Equal seeds give equal weights: only the scale of the scores differs.
    assert asked.value == own.value != plain.value
    assert without.value == plain.value
    named = "temperature=llama4(attn_scale=0.6, floor_scale=3)"
    assert asked.method == asked.position == f"kerple_log({named} at evaluation)"
    assert own.method == f"kerple_log({named})"
    assert without.method == "kerple_log(temperature=none at evaluation)"
    # Up to the training length, log-n scaling has no effect.
    (longer,) = evaluated(["runs/plain"], [32], attention_temperature="logn")
    (short,) = evaluated(["runs/plain"], [8], attention_temperature="logn")
    assert short.value == evaluated(["runs/plain"], [8])[0].value
    assert longer.value != plain.value
    assert evaluated(["runs/ssmax"], [32], attention_temperature="ssmax")[0].method == "kerple_log(temperature=ssmax)"
    fixed = evaluated(["runs/plain"], [32], attention_temperature="ssmax:learned=false,s=0.5")
    assert fixed[0].method == "kerple_log(temperature=ssmax(learned=False, s=0.5) at evaluation)"
    for run, temperature, message in (
        ("plain", "ssmax", "it has learned parameters, so it cannot be added to a trained model"),
        ("plain", "ssmax", "train with attention_temperature=ssmax, or use ssmax:learned=false"),
        ("plain", "foo", "choose from none, llama4, logn, ssmax:learned=false"),
        ("ssmax", "logn", "the run was trained with ssmax, whose learned parameters cannot be replaced"),
        ("ssmax", "none", "the run was trained with ssmax"),
        ("plain", "lgn", "attention_temperature lgn is not available; did you mean logn?"),
        ("plain", "logn:lenght=4", "has no option 'lenght'; it takes length; did you mean length?"),
        ("plain", "logn:4", "temperature logn:4: '4' must be OPTION=VALUE"),
        ("plain", "logn:length=1", "option length of logn is 1; it must be at least 2"),
    ):
        with pytest.raises(UserError) as caught:
            evaluated([f"runs/{run}"], [32], attention_temperature=temperature)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_frequencies_of_the_evaluation_alone(place: Path) -> None:
    make_run("runs/rotary", "pos_emb=rotary", "hidden_size=32")
    plain = evaluated(["runs/rotary"], [8, 32])
    for rope, changes in {"pi:4": (True, True), "ntk:4": (True, True), "dynamic": (False, True),
                          "yarn:4": (True, True)}.items():  # fmt: skip
        found = evaluated(["runs/rotary"], [8, 32], rope=rope)
        assert {record.method for record in found} == {f"rotary(rope={rope} at evaluation)"}
        assert tuple(a.value != b.value for a, b in zip(found, plain, strict=True)) == changes
    make_run("runs/alibi", "pos_emb=alibi")
    with pytest.raises(UserError, match="rope selfextend:4,2: option group of rotary is 4"):
        evaluated(["runs/rotary"], [8, 32], rope="selfextend:4,2")
    with pytest.raises(UserError, match="rope pi:4: the run's pos_emb is alibi; scaling needs rotary"):
        evaluated(["runs/rotary", "runs/alibi"], [8], rope="pi:4")


def test_which_text_is_scored(place: Path) -> None:
    make_run("runs/valid", data=DATA[:2])
    (found,) = evaluated(["runs/valid"], [8])
    assert found.dataset == "corpus/valid_text_document"
    (other,) = evaluated(["runs/valid"], [8], data="corpus/train_text_document")
    assert other.dataset == "corpus/train_text_document"
    assert other.target_digest != found.target_digest
    (layout,) = evaluated(["runs/valid"], [8], data="corpus")
    assert layout.dataset == "corpus/test_text_document"

    prepare(["text.txt"], "whole", split=None)
    shares = ["data_path=whole/text_document", "split=1,0,0"]
    make_run("runs/train_only", data=shares)
    with pytest.raises(UserError, match=r"runs/train_only: no test or valid data in its configuration; .*--data"):
        evaluated(["runs/train_only"], [8])
    (lines := Path("lines")).mkdir()
    for i in range(40):
        (lines / f"{i}.txt").write_text(f"{i} and some more text in document {i}\n")
    prepare(["lines"], "many", split=None)
    make_run("runs/shares", data=["data_path=many/text_document", "split=8,1,1"])
    (found,) = evaluated(["runs/shares"], [8])
    assert found.dataset == "many/text_document (test of 8,1,1)"


def test_equal_text_under_two_names_is_the_same_text(place: Path) -> None:
    make_run("runs/a")
    prepare(["text.txt"], "copy", split=(0.4, 0.3, 0.3))
    make_run("runs/b", data=[text.replace("corpus", "copy") for text in DATA])
    found = evaluated(["runs/a", "runs/b"], [8])
    assert len({r.target_digest for r in found}) == 1


def test_incomparable_runs_are_rejected_before_any_work(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_work(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    make_run("runs/a")
    make_run("runs/learned", "pos_emb=learned")
    make_run("runs/drawn", "randomized_positions=16")
    make_run("runs/valid", data=DATA[:2])
    make_run("runs/long", "seq_length=16")
    make_run("runs/foreign", tokenizer="HFTokenizer-0123456789ab")
    make_run("runs/cdape", "pos_emb=alibi", "score_processor=cdape")
    monkeypatch.setattr("megatron.checkpoint.load_model.load_model", no_work)
    for runs, options, message in (
        ([], {}, "no run given"),
        (["runs/none"], {}, "runs/none: no such folder"),
        (["corpus"], {}, "corpus: contains no checkpoint"),
        (["runs/a", "./runs/a"], {}, "the same checkpoint is given twice: runs/a, ./runs/a"),
        (["runs/a", "runs/learned"], {"lengths": [16]}, "runs/learned: pos_emb learned supports 8 positions (max_posi"),
        (["runs/drawn"], {"lengths": [32]}, "runs/drawn: pos_emb rotary supports 16 positions (randomized_positions)"),
        (["runs/a"], {"lengths": [8], "window": 0}, "command line: window is 0; it must be at least 1"),
        (["runs/a"], {"lengths": [8], "attention_mask": "prefix"}, "attention_mask is prefix; choose from causal, doc"),
        (["runs/a", "runs/valid"], {"lengths": [8]}, "choose one text for all with --data"),
        (["runs/a", "runs/long"], {}, "trained at different lengths (8, 16)"),
        (["runs/a", "runs/long"], {"lengths": "2x"}, "2x is ambiguous"),
        (["runs/foreign"], {"lengths": [8]}, "tokenized with bytes, but runs/foreign was trained with HFTokenizer"),
        (["runs/a"], {"lengths": [8, 1 << 20]}, "too few for the largest length; 1,048,576"),
        (["runs/a"], {"lengths": []}, "lengths is []; it must be a list of at least 1"),
        (["runs/a"], {"lengths": [4], "targets": 8}, "4 is shorter than the 8 targets"),
        (["runs/a"], {"lengths": [8], "protocol": "sliding"}, "protocol is sliding; choose from last, nonoverlapping"),
        (["runs/a"], {"lengths": [8], "backend": "fast"}, "backend is fast; choose from auto, eager"),
        (["runs/a", "runs/cdape"], {"lengths": [8], "backend": "sdpa"}, "attention_backend 'sdpa'"),
        (["runs/a"], {"lengths": [8], "precision": "fp8"}, "precision is fp8; choose from auto, fp32, bf16"),
        (["runs/a"], {"lengths": [8], "precision": "fp16", "device": "cpu"}, "needs a GPU"),
        (["runs/a"], {"lengths": [8], "data": "nowhere"}, "nowhere"),
        (
            ["runs/a"],
            {"lengths": [8], "output": "text.txt/x"},
            "--output is text.txt/x, but text.txt is a file; name a folder",
        ),
    ):
        with pytest.raises(UserError) as caught:
            evaluated(runs, **options)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_failure_keeps_the_runs_before_it(place: Path) -> None:
    make_run("runs/a", "pos_emb=rotary")
    broken = make_run("runs/b", "pos_emb=alibi")
    weights = broken / "checkpoints" / "step_0000005" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RunError):
        evaluated(["runs/a", "runs/b"], [8], output="results")
    assert [r.method for r in records.read_records("results/results.json")] == ["rotary"]


def test_bfloat16_weights_need_an_explicit_request(place: Path) -> None:
    run = make_run("runs/a", "pos_emb=kerple_log")
    (exact,) = evaluated([run], [16])
    (rounded,) = evaluated([run], [16], precision="bf16")
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16")
    assert rounded.value != exact.value
    # Logits below one after about 24 operations with relative errors of up to 2⁻⁹: √24 · 2⁻⁹ = 1%, twice.
    assert rounded.value == pytest.approx(exact.value, rel=0.02)


def test_chunked_backend_by_name(place: Path) -> None:
    run = make_run("runs/a", "pos_emb=kerple_log", "attention_chunk_rows=5")
    (auto,) = evaluated([run], [40])
    (chunked,) = evaluated([run], [40], backend="chunked")
    assert chunked.backend == "chunked"
    assert chunked.value == pytest.approx(auto.value, rel=ROUNDING * auto.nll)


def test_records_are_plain_json(place: Path) -> None:
    run = make_run("runs/a")
    evaluated([run], [8])
    (item,) = json.loads((run / "results.json").read_text())
    assert {"method", "train_length", "length", "protocol", "perplexity", "tokens", "seed"} <= set(item)
    assert item["bits_per_byte"] == pytest.approx(np.log2(item["perplexity"]), rel=0.05)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128,256", [128, 256]),
        ("2x, 1x,1.5x,20", [8, 12, 16, 20]),
        ("4×", [32]),
        ("1_024,8,8", [8, 1024]),
        (None, None),
    ],
)
def test_lengths_in_tokens_and_in_training_lengths(text: str | None, lengths: list[int] | None) -> None:
    asked = Options(**({} if text is None else parse_lengths(text)))
    assert choose_lengths(asked, [8, 8]) == tuple(lengths or [8, 16, 32, 64, 128, 256])


def test_multiples_are_exact_despite_rounding() -> None:
    assert 100 * 1.1 > 110
    assert 100 * 4.35 < 435
    assert choose_lengths(Options(**parse_lengths("1.1x,4.35x")), [100]) == (110, 435)


@pytest.mark.parametrize("text", ["", "8,", "x", "-8", "0", "0.3x", "1e99999x", "8.0", "nanx", "infx", "9" * 30])
def test_invalid_lengths(text: str) -> None:
    with pytest.raises(UserError, match=r"is not a length|it must be a whole number of tokens"):
        choose_lengths(Options(**parse_lengths(text)), [8])


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tpu", "cuda:x", "cuda:99"):
        with pytest.raises(UserError, match="device is "):
            resolve_device(name)


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (0, "this machine has no CUDA device (or torch was built without CUDA)"),
        (1, "this machine has 1 CUDA device, numbered from 0"),
        (2, "this machine has 2 CUDA devices, numbered from 0"),
    ],
)
def test_missing_devices(count: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UserError, match=re.escape(f"device is cuda:2, but {reason}") + "$"):
        resolve_device("cuda:2")


def test_the_output_folder_is_printed_after_all_checks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run("runs/a", "pos_emb=rotary"), io.StringIO()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for wrong in ({"rope": "yarn"}, {"device": "cuda"}):
        with pytest.raises(UserError):
            evaluated([run], [8], console=Console(file=out), **wrong)
    assert out.getvalue() == ""


def test_a_directory_in_progress_must_be_a_string(place: Path) -> None:
    run = make_run("runs/a", directory=5)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"progress.json: not a checkpoint's progress \(its directory is not a string"):
        evaluated([run], [8])


def test_progress_without_a_vocabulary_is_damage(place: Path) -> None:
    run = make_run("runs/a")
    checkpoint = run / "checkpoints" / "step_0000005"
    replace(TrainerState.read(checkpoint), vocabulary=None).write(checkpoint)
    with pytest.raises(Exception, match="has no vocabulary"):
        evaluated([run], [8])


def test_concurrent_evaluations_keep_each_others_results(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent evaluations keep each other's results in a shared folder.

    The second runs entirely during the first; a third evaluates the same run with other positions.
    """
    make_run("runs/a")
    make_run("runs/b", "pos_emb=alibi")
    others = [(["runs/b"], {}), (["runs/a"], {"rope": "yarn:4"})]

    def evaluate_others(*_: object) -> None:
        while others:
            runs, options = others.pop()
            evaluated(runs, [8, 16], output="both", windows=3, **options)

    asked = parse_section(Options, {"lengths": [8, 16], "windows": 3})
    evaluate_runs(["runs/a"], asked, output="both", progress=evaluate_others)
    found = records.read_records("both/results.json")
    assert [(r.run, r.method, r.length) for r in found] == [
        (run, method, length)
        for run, method in (("runs/a", "rotary(rope=yarn:4 at evaluation)"), ("runs/b", "alibi"), ("runs/a", "rotary"))
        for length in (8, 16)
    ]
    rows = list(csv.DictReader(Path("both/results.csv").read_text().splitlines()))
    assert len(rows) == len(found)
    assert sorted(path.name for path in Path("both").iterdir()) == [
        f"results.{x}" for x in ("csv", "json", "md", "png")
    ]

"""`analyze` from its arguments to a page: contents, accompanying files, and errors raised before any work."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_runs import make_run

from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.trained_run import open_run
from megatron.evaluation.analysis import run
from megatron.evaluation.analysis.analysis import (
    Analysis,
    AnalysisContext,
    Figure,
    list_analysis_names,
    load_analyses,
    needs_text,
)
from megatron.evaluation.analysis.from_text.empirical_receptive_field import measure_attention_mass
from megatron.evaluation.analysis.jobs import PAGE_FILE, find_ends_inside_documents, read_analysis_request
from megatron.evaluation.analysis.run import LOCK_FILE, analyze
from megatron.evaluation.texts import load_text
from megatron.options.commands import AnalysisOptions
from megatron.reports.html_page import HtmlPicture
from megatron.utils.atomic_io import FolderLock
from megatron.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
KERPLE = {"pos_emb": "kerple_log", "pos_emb_per_layer": True}
CDAPE = {**KERPLE, "score_processor": "cdape", "score_processor_options": {"width": 4}}
LENGTHS = [16, 96]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect pictures instead of drawing them, which takes longer than everything else."""
    asked: list[Figure] = []
    monkeypatch.setattr(
        run, "_draw_figure", lambda picture: (asked.append(picture), HtmlPicture("", "", picture.alt))[1]
    )
    return asked


def analyzed(runs: Sequence[str], output: str | None = None, configs: Sequence[str] = (), **options: Any) -> str:
    """Run an analysis and return its page."""
    reads_text = bool(runs) and any(map(needs_text, options.get("only") or list_analysis_names()))
    asked = AnalysisOptions(**{"lengths": LENGTHS, **({"windows": 2} if reads_text else {}), **options})
    return analyze(runs, asked, configs=configs, output=output).read_text(encoding="utf-8")


def rows_of(name: str, folder: str = "out") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((Path(folder) / f"{name}.csv").read_text(encoding="utf-8"))))


def test_models_are_shown_side_by_side(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    runs = [make_run("runs/rotary", corpus, pos_emb="rotary"), make_run("runs/cdape", corpus, **CDAPE)]
    out = io.StringIO()
    options = AnalysisOptions(lengths=LENGTHS, windows=2)
    configs = ["162M alibi num_attention_heads=2"]
    found = analyze(runs, options, configs=configs, output="out", console=Console(file=out, width=150))
    text = found.read_text(encoding="utf-8")
    assert found == Path("out") / PAGE_FILE
    assert re.findall('<h2 id="(.*?)">', text) == [*load_analyses(), "models", "environment", "cite"]
    methods = ["rotary", "cdape(width=4)+kerple_log(per_layer)", "alibi (untrained)"]
    for method in methods:
        assert f'<th scope="row">{method}</th>' in text
    # The page states which analyses do not apply.
    assert "Does not apply to rotary. It adds no bias." in text
    assert "Does not apply to rotary and alibi (untrained). For each: it has no score processor" in text
    assert "Does not apply to alibi (untrained). It is an untrained configuration." in text
    assert "rotary adds no bias and has no score processor, so it has no such maps." in text
    # The page is self-contained; links lead to its own sections and to the data.
    assert not re.search(r"(?:src|href)=\"(?!#|data:)(?!\w+\.(?:csv|json)\")", text)
    for name, analysis in load_analyses().items():
        assert (Path("out") / f"{name}.{analysis.data_format}").stat().st_size > 100
        assert f"{name}.{analysis.data_format}" in text
    assert len(pictures) >= 4
    assert re.findall('<figure class="chart dense" id="(.*?)"', text) == [
        "theoretical_receptive_field_chart", "effective_length_chart", "kernels_0", "kernels_1", "kernels_2",
        "empirical_receptive_field_16", "empirical_receptive_field_96", "attention_entropy_normalized",
        "attention_entropy_largest",
    ]  # fmt: skip
    shown = " ".join(re.findall('role="img" aria-label="(.*?)"', text))
    for method in methods[1:]:
        assert re.search(rf"medians in keys: .*{re.escape(method)} \d", shown), "what a chart shows, in words"
        assert re.search(rf"bias of {re.escape(method)}[^;.]*, from 0.00 at distance 0 to -[\d.,]+", shown)
    assert re.search(r"Empirical receptive field .* rotary at length 96: ", shown)
    output = out.getvalue()
    assert "out/analysis.html" in output
    assert "rotary: loading" in output
    assert "the page: drawing figures\n" in output

    verdicts = {(row["method"], row["verdict"]) for row in rows_of("convergence")}
    assert {("rotary", "diverges"), ("alibi (untrained)", "converges")} <= verdicts
    assert {row["layer"] for row in rows_of("convergence")} == {"all layers", "layer 0", "layer 1"}


def test_data_matches_the_measurements(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    run = make_run("runs/a", corpus, **CDAPE)
    analyzed([run])
    folder = "runs/a/analysis"
    loaded, opened = load_model(run, backend="eager"), open_run(run)
    tokens = load_text(run, opened.config, None).tokens
    # Two windows, at the beginning and the end of the text; all lengths share their ends.
    ends = [LENGTHS[-1], len(tokens) - 1]
    for length in LENGTHS:
        mass = measure_attention_mass(loaded.model, [tokens[end - length : end] for end in ends])
        rows = [row for row in rows_of("empirical_receptive_field", folder) if row["length"] == str(length)]
        sums = mass.by_distance.cumsum(-1)
        for row in rows:
            if row["quantity"] == "held by the last":
                expected = sums[int(row["layer"]), int(row["head"]), int(row["at"]) - 1].item()
                assert float(row["value"]) == pytest.approx(expected, rel=1e-4)
        assert {row["m"] for row in rows} == {str(length // 2)}
    effective = rows_of("effective_length", folder)
    r1 = loaded.model.decoder.layers[1].self_attention.core_attention.encoding.r1()
    r2 = loaded.model.decoder.layers[1].self_attention.core_attention.encoding.r2()
    for head, row in enumerate(effective[2:]):
        assert row["layer"] == "layer 1"
        exact = (math.exp(2 / r1[head].item()) - 1) / r2[head].item()
        assert row["effective_length"] == ("inf" if exact > 2**53 else str(math.ceil(exact)))
    maps = json.loads((Path(folder) / "score_maps.json").read_text(encoding="utf-8"))
    assert {(entry["length"], entry["map"]) for entry in maps} == {
        (length, kind) for length in LENGTHS for kind in ("score", "bias", "processor", "attention")
    }
    attention = next(entry for entry in maps if entry["map"] == "attention" and entry["length"] == 16)
    assert [len(line) for line in attention["cells"]] == list(range(1, 17))
    assert all(sum(line) == pytest.approx(1, abs=0.02) for line in attention["cells"])  # three digits each


def test_analysis_of_a_bias_needs_no_run(place: Path, pictures: list[Figure]) -> None:
    text = analyzed([], "out", ["162M type1", "162M type2"], lengths=[64], only=["theoretical_receptive_field"])
    assert "No text was read" in text
    fields = {
        (row["method"], row["epsilon"]): row["keys"]
        for row in rows_of("theoretical_receptive_field")
        if row["definition"] == "equation 22"
    }
    assert [fields["type1 (untrained)", share] for share in ("0.5", "0.1", "0.01", "0.001")] == ["1", "6", "61", "608"]
    assert [fields["type2 (untrained)", share] for share in ("0.5", "0.1", "0.01", "0.001")] == ["2", "4", "9", "15"]


def test_bias_from_layer_input_is_not_a_function_of_the_distance(
    place: Path, corpus: Path, pictures: list[Figure]
) -> None:
    """FoX's bias depends on the layer input, so no fixed bias is reported; its attention is measured."""
    text = analyzed([make_run("runs/fox", corpus, **{**CDAPE, "pos_emb": "fox"})], "out")
    reason = "Does not apply to cdape(width=4)+fox(per_layer). Its bias depends on the layer"
    assert text.count(reason) == 4
    assert "Does not apply to cdape(width=4)+fox(per_layer). It has neither a bias nor a weight over distances" in text
    assert sorted(path.stem for path in Path("out").iterdir()) == sorted(
        [*list_analysis_names("from_text"), "analysis"]
    )


def test_a_network_has_no_parameters_per_head(place: Path, pictures: list[Figure]) -> None:
    """Parameters per head are not confused with a network's. FIRE's network is as wide as the number of heads here."""
    text = analyzed([], "out", ["162M fire num_attention_heads=32", "162M kerple_log"], lengths=[64], only=["kernels"])
    assert "Parameters of kerple_log" in text
    assert "Parameters of fire" not in text


def test_lengths_beyond_a_position_table_are_skipped(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    run = make_run("runs/learned", corpus, pos_emb="learned")
    text = analyzed([run], "out", only=["empirical_receptive_field"])
    assert {row["length"] for row in rows_of("empirical_receptive_field")} == {"16"}
    text = analyzed([run], "other", only=["empirical_receptive_field"], lengths=[32])
    assert "Does not apply to learned. Its maximum length, 16, is below the shortest length." in text
    assert not (place / "other" / "empirical_receptive_field.csv").exists()


def test_seeds_are_distinguished(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    runs = [make_run("runs/one", corpus, seed=1), make_run("runs/two", corpus, seed=2)]
    analyzed(runs, "out", only=["kernels"])
    assert {row["method"] for row in rows_of("kernels")} == {"kerple_log", "kerple_log [runs/two]"}


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 6), st.integers(1, 5))
def test_windows_inside_documents(lengths: list[int], length: int, count: int) -> None:
    tokens = np.array([token for n in lengths for token in [*[1] * (n - 1), 0]] + [1] * 3)
    every = [end for end in range(length, len(tokens) + 1) if 0 not in tokens[end - length : end - 1]]
    found = find_ends_inside_documents(tokens, 0, length, count).tolist()
    assert len(found) == min(count, len(every))
    assert set(found) <= set(every)
    assert found == sorted(found)
    assert not found or (found[0], found[-1]) == (every[0], every[-1] if count > 1 else every[0])


def test_models_with_document_masking_read_within_documents(place: Path, corpus: Path) -> None:
    runs = [make_run(f"runs/{mask}", corpus, attention_mask=mask) for mask in ("causal", "document")]
    for lengths, where in (([8, 24], "each within one document"), ([8, 200], "because none is long enough")):
        inputs = read_analysis_request(runs, [], AnalysisOptions(lengths=lengths, windows=3), "out").inputs
        assert where in inputs.description
        assert [len(windows) for windows in inputs.windows.values()] == [3, 3]
        is_inside = all(60 not in window[:-1] for windows in inputs.windows.values() for window in windows)
        assert is_inside == (lengths[-1] == 24)
    assert "within" not in read_analysis_request(runs[:1], [], AnalysisOptions(lengths=[8]), "out").inputs.description


def test_windows_are_seen(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    run = make_run("runs/a", corpus, pos_emb="none")
    analyzed([run], "out", window=5, only=["convergence", "effective_length", "empirical_receptive_field"])
    assert {row["verdict"] for row in rows_of("convergence")} == {"converges"}
    assert {row["effective_length"] for row in rows_of("effective_length")} == {"5"}
    rows = rows_of("empirical_receptive_field")
    assert {row["value"] for row in rows if row["quantity"] == "held by the last" and row["at"] == "5"} == {"1"}


@pytest.mark.slow
def test_every_picture_is_drawn_in_both_widths(place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(
        run,
        "_draw_figure",
        lambda picture: (drawn.append((picture.draw(False), picture.draw(True))), HtmlPicture("", "", ""))[1],
    )
    analyzed([make_run("runs/a", corpus, **CDAPE)], layers=[0], heads=[1])
    assert len(drawn) >= 4
    for wide, narrow in drawn:
        assert wide[:8] == narrow[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(narrow[16:20], "big") <= 820  # 4 inches at 200 dpi
        assert wide != narrow


def test_negative_indices_count_from_the_end() -> None:
    model = SimpleNamespace(num_layers=4, num_attention_heads=2)
    options = AnalysisOptions(layers="-1,0,3,-5,7", heads="-2")  # type: ignore[arg-type]  # as on the command line
    context: Any = SimpleNamespace(config=SimpleNamespace(model=model), options=options)
    assert AnalysisContext.drawn_layers.__get__(context) == [3, 0], "without repetitions and missing layers"
    assert AnalysisContext.drawn_heads.__get__(context) == [0]


WRONG = [
    ({"runs": []}, "no run given; give a run folder, or a configuration with --config"),
    ({"runs": ["runs/none"]}, "runs/none"),
    ({"only": ["kernel"]}, "unknown analysis 'kernel'; did you mean kernels\\? choose from attention_entropy"),
    ({"layers": [2]}, "--layers: 2 does not exist; layers are numbered from 0 to 1, or from the end"),
    ({"heads": [-3]}, "--heads: -3 does not exist; heads are numbered from 0 to 1, or from the end from -1 to -2"),
    ({"configs": ["162M alibi"]}, "the page of several models needs --output FOLDER"),
    ({"runs": [], "configs": ["162M alibi"]}, "the page of a configuration needs --output FOLDER"),
    ({"only": ["kernels"], "data": "x.txt"}, "--data: no requested analysis reads a text"),
    ({"lengths": [10**6]}, "too few for the largest length"),
    ({"runs": ["runs/a", "runs/a"]}, "the same checkpoint is given twice"),
    ({"configs": ["162M alibis"], "output": "out"}, "alibi"),
    ({"configs": ["162M alibi", "162M alibi"], "output": "out"}, "--config '162M alibi': given twice"),
    ({"output": "text.txt"}, "--output is text.txt, which is a file"),
    ({"device": "tpu"}, "choose from auto, cpu, cuda"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_errors_are_reported_before_any_work(given: dict, message: str, place: Path, corpus: Path) -> None:
    make_run("runs/a", corpus)
    (place / "text.txt").write_text("1 2 3")
    with pytest.raises(UserError, match=message):
        analyzed(**{"runs": ["runs/a"], **given})
    assert not (place / "runs/a/analysis").exists()
    assert not (place / "out").exists()


def test_the_page_is_announced_after_all_checks(place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run("runs/a", corpus), io.StringIO()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for wrong in ({"attention_temperature": "ssmax"}, {"device": "cuda"}):
        with pytest.raises(UserError):
            analyze([run], AnalysisOptions(lengths=LENGTHS, windows=2, **wrong), console=Console(file=out))
    assert out.getvalue() == ""


def test_two_analyses_never_write_into_one_folder(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    make_run("runs/a", corpus)
    lock = FolderLock("out", name=LOCK_FILE, key="--output", busy_message="", lock_timeout=0.0)
    with pytest.raises(UserError, match="--output: out: another analysis is writing to this folder; wait"):
        analyzed(["runs/a"], "out", only=["kernels"])
    lock.release()
    analyzed(["runs/a"], "out", only=["kernels"])
    assert not (place / "out" / LOCK_FILE).exists()


def test_torch_is_imported_after_all_checks() -> None:
    modules = "megatron.evaluation.analysis.run, megatron.evaluation.analysis.jobs"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_analyses_are_found_by_their_files() -> None:
    assert sorted(load_analyses()) == list_analysis_names()
    assert len({analysis.order for analysis in load_analyses().values()}) == len(list_analysis_names())
    assert {name for name in list_analysis_names() if needs_text(name)} == set(list_analysis_names("from_text"))
    for analysis in load_analyses().values():
        assert isinstance(analysis, Analysis)
        assert analysis.title
        assert analysis.description.endswith(".")


def test_a_page_escapes_its_inputs() -> None:
    part = run.PageSection("x", "<t>", "a & b", ["<p>", run.Table(["<c>"], [["<v>"]])], {"<m>": "<r>."})
    text = run.render_analysis_page("<title>", ["<s>"], [part], run.Table(["m"], [["<n>"]]), {"<f>": "<g>"})
    for markup in ("<t>", "<v>", "<m>", "<r>", "<s>", "<n>", "<g>", "<c>"):
        assert markup not in text.replace("<title>", "", 1)


TASK = {
    **{f"{split}_data_paths": [] for split in ("train", "valid", "test")},
    **{"task": "reverse_string", "task_length": 8, "seq_length": 16, "no_weight_tying": True},
}


def test_a_run_trained_on_a_task_reads_its_sequences(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    run = make_run("runs/task", corpus, **TASK)
    read = read_analysis_request([run], [], AnalysisOptions(windows=3), "out").inputs
    assert read is not None
    assert list(read.windows) == [16, 64]  # inputs of 8 and 4 × 8, each followed by as many positions for the answers
    for length, windows in read.windows.items():
        assert len(windows) == 3
        for tokens in windows:
            assert set(tokens[: length // 2]) == {0, 1}
            assert set(tokens[length // 2 :]) == {2}
    text = analyzed([run], "out", ["162M alibi"], lengths=[8, 20])
    assert (
        "New sequences of the task reverse_string, 2 for each input length (8, 20). Including the answers, "
        "sequences have 16, 40 tokens." in text
    )
    assert {row["m"] for row in rows_of("empirical_receptive_field")} == {"8", "20"}
    assert max(int(row["distance"]) for row in rows_of("kernels")) == 39


def test_tasks_and_texts_cannot_be_mixed(place: Path, corpus: Path, pictures: list[Figure]) -> None:
    runs = [make_run("runs/task", corpus, **TASK), make_run("runs/text", corpus)]
    with pytest.raises(
        UserError, match="runs/text was trained on a text, runs/task on the task reverse_string; evaluate"
    ):
        analyzed(runs, "out")
    with pytest.raises(UserError, match="data applies to texts only, but the runs were trained on a task"):
        analyzed(runs[:1], "out", data="x.txt")
    assert not (place / "out").exists()
    assert "runs/text" in analyzed(runs, "out", lengths=[8], only=["convergence"])


def test_lengths_that_a_task_does_not_have(place: Path, corpus: Path) -> None:
    run = make_run("runs/task", corpus, **{**TASK, "task": "mqar", "task_length": 16, "task_options": {"pairs": 4}})
    with pytest.raises(UserError, match=r"lengths: 33 is not valid for the task mqar\(pairs=4\)"):
        analyzed([run], lengths=[33])
    assert not (place / "runs/task/analysis").exists()


def test_taps_match_each_length(corpus: Path, place: Path, pictures: list[Figure]) -> None:
    """Processor taps are measured at each length, because their values beyond the training length matter."""
    run = make_run("run", corpus, **CDAPE)
    weights = Path(run) / "checkpoints/step_0000004/model.safetensors"
    bent = {name: 40 * x if "linear_qkv.weight" in name else x for name, x in load_file(weights).items()}
    save_file(bent, weights)  # makes the processor nonlinear in the analyzed region
    made = analyzed([run], "out", only=["processor_taps"], lengths=[16, 64, 160])
    assert {row["length"] for row in rows_of("processor_taps")} == {"64", "160"}  # 16 tokens are too few
    assert [re.search(r"windows of (\d+) tokens", picture.alt)[1] for picture in pictures] == ["64", "160"]  # type: ignore[index]
    assert "<th>length</th>" in re.sub(r"<th[^>]*>", "<th>", made)
    short, long = (
        [row["mean"] for row in rows_of("processor_taps") if row["length"] == length] for length in ("64", "160")
    )
    assert len(short) == len(long)
    assert short != long


@pytest.mark.parametrize(
    ("encoding", "value", "reported"),
    [
        ("t5", math.inf, "Does not apply to t5. The parameter bias"),
        ("t5", 1e30, "stays at inf"),
        ("fire", 1e30, "stays at inf"),
        ("kerple_power", math.inf, "is not finite."),
        ("kerple_log", math.nan, "is not finite."),
    ],
)
def test_nonfinite_parameters_are_drawn_or_rejected(
    encoding: str, value: float, reported: str, place: Path, corpus: Path
) -> None:
    """A diverged run can be analyzed: maps are drawn, and sums without meaning are rejected."""
    run = make_run("runs/diverged", corpus, pos_emb=encoding)
    file = Path(run) / "checkpoints" / "step_0000004" / "model.safetensors"
    weights = load_file(file)
    names = [name for name in weights if "position" in name or "encoding" in name]
    assert names
    save_file({name: torch.full_like(t, value) if name in names else t for name, t in weights.items()}, file)
    page_text = analyzed([run], "out", only=["convergence", "bias_maps"])
    assert reported in page_text
    assert page_text.count("<img") >= 1, "the map of the bias is drawn"

"""Sweep from start to end, once with the real programs, and with replacements for every possible failure."""

import hashlib
import io
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from megatron.checkpoint.run_folder import SWEEP_LOCK, RunLock
from megatron.data.indexed_dataset import compute_dataset_digest
from megatron.planning.model_costs import count_parameters, plan_model
from megatron.reports.combine import combine_results
from megatron.sweeps import member_run
from megatron.sweeps import run_sweep as sweeps
from megatron.sweeps.remaining_work import find_finished_step
from megatron.sweeps.spec import read_sweep
from megatron.training import check_resources
from megatron.utils.errors import RunError, UserError
from megatron.utils.progress import WaitAnnouncer
from megatron.utils.signals import StoppedBySignal, convert_signals_to_exceptions, describe_signal

from .conftest import BASE, Initialiser, Trainer, run, write

ONE = BASE.replace("        rotary: {pos_emb: rotary}\n", "")
"""Sweep with a single variant."""


def test_a_sweep_from_text_to_report(place: Path) -> None:
    """One run with the real programs: prepared, trained in a separate process, evaluated, drawn."""
    write(ONE.replace("train_iters: 6", "train_iters: 60"))
    found, output = run()
    assert [(r.method, r.length, r.seed) for r in found] == [("mine", 16, 1234), ("mine", 64, 1234)]
    assert found[0].position == "cdape(width=4)+alibi"
    # An untrained model has perplexity 257, the vocabulary size; this text uses 25 different bytes.
    assert all(1 < r.value < 60 for r in found)
    assert all((r.tokens, r.windows, r.step, r.train_tokens) == (48, 3, 60, 60 * 4 * 16) for r in found)
    stored = json.loads(Path("out/results.json").read_text())
    assert [item["perplexity"] for item in stored] == [r.value for r in found]
    files = ("results.csv", "results.md", "results.png", "mine/seed_1234.yml", "mine/seed_1234/metrics.jsonl")
    assert all((place / "out" / name).stat().st_size > 0 for name in files)
    assert not Path("out/results.experiment.json").exists()
    report = Path("out/report.html").read_text()
    assert "cdape(width=4)+alibi" in report
    assert "sweep.yml" in report
    assert output.count("Perplexity per token, trained at 16 tokens") == 1

    assert output.startswith("preparing the text of the corpus corpus: listing files\n")
    last = (
        r"open out/report\.html in a browser; results\.json, \.csv, \.md and \.png are next to it \((\d+ min )?\d+ s\)"
    )
    assert re.fullmatch(last, output.splitlines()[-1]), "a method alone is compared with none"

    again, output = run()
    assert again == found
    assert "nothing to do: 1 of 1 runs are complete" in output
    assert "already trained" in output
    assert "already evaluated" in output


def test_all_variants_are_scored_on_the_same_targets_up_to_their_maximum_length(initialiser: Initialiser) -> None:
    write(BASE.replace("rotary: {pos_emb: rotary}", "learned: {pos_emb: learned}"))
    with pytest.raises(UserError, match=r"learned, seed 3: pos_emb learned supports 16 .*, less than length 32"):
        run("sweep.evaluate.multiples=[2, 4]", "sweep.seeds=[3, 4]")
    found, output = run("sweep.seeds=[3, 4]")
    assert [(r.method, r.seed, r.length, r.max_length) for r in found] == [
        *(("learned", seed, 16, 16) for seed in (3, 4)),
        *(("mine", seed, length, None) for seed in (3, 4) for length in (16, 64)),
    ]
    assert len({r.target_digest for r in found}) == 1
    end = "learned: pos_emb learned supports 16 positions (max_position_embeddings); scored at lengths up to 16\n"
    assert output.count(end) == 1
    assert "max 16" in Path("out/results.md").read_text()
    assert "max 16" in Path("out/report.html").read_text()


def test_an_error_of_a_stage_names_its_variant_and_not_the_evaluation(trainer: Trainer) -> None:
    stages = "[{until: 2}, {pos_emb_options: {base: 0.5}}]"
    with pytest.raises(UserError, match=r"^sweep.variants.mine: pos_emb: option base of rotary is 0.5; it must be"):
        run(f"sweep.variants={{mine: {{pos_emb: rotary, stages: {stages}}}}}")
    assert trainer.calls() == []


def test_every_variant_is_trained_with_every_seed(trainer: Trainer) -> None:
    found, _ = run("sweep.seeds=[3, 4]")
    members = [("rotary", 3), ("rotary", 4), ("mine", 3), ("mine", 4)]
    assert [(r.method, r.seed) for r in found if r.length == 16] == members
    assert [line for line in trainer.asked if not line.startswith("evaluate")] == [
        "rotary 3 None", "rotary 4 None", "alibi 3 None", "alibi 4 None",
    ]  # fmt: skip


def test_checkpoints_of_all_runs_must_fit_the_disk(
    trainer: Trainer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs, two checkpoints of each; what is already trained needs nothing more."""
    keys = ("checkpoint_factor=3", "sweep.variants={rotary: {pos_emb: rotary}, none: {pos_emb: none}}")
    planned = plan_model(read_sweep(["sweep.yml"], keys).members[0].config)
    weights = 4 * count_parameters(planned, 1)  # no corpus or tokenizer
    free = 2 * 2 * 3 * weights + weights
    monkeypatch.setattr(check_resources, "measure_free_bytes", lambda folder: free - 1)
    with pytest.raises(UserError, match=r"^sweep.output: out: the checkpoints of the 2 remaining runs need at l"):
        run(*keys)
    assert not (place / "out").exists()
    with pytest.raises(UserError, match=r"this machine's memory .*; set check_resources=false to start"):
        run(*keys, "num_layers=1000000")
    assert not (place / "out").exists()
    monkeypatch.setattr(check_resources, "measure_free_bytes", lambda folder: free)
    run(*keys)
    monkeypatch.setattr(check_resources, "measure_free_bytes", lambda folder: 0)
    run(*keys)
    more = [key.replace("none}}", "none}, alibi: {pos_emb: alibi}}") for key in keys]
    with pytest.raises(UserError, match="the remaining run needs at least"):
        run(*more)
    run(*more, "check_resources=false")


def test_a_failure_does_not_stop_others_and_is_retried(trainer: Trainer) -> None:
    trainer.fails_at = "rotary"
    with pytest.raises(RunError) as caught:
        run()
    assert str(caught.value) == (
        "1 of 2 runs failed: rotary, seed 1234: failed: the disk is full; run the same command to retry failed runs"
    )
    kept = json.loads(Path("out/results.json").read_text())
    assert [item["method"] for item in kept] == ["mine", "mine"]
    assert json.loads(Path("out/results.failures.json").read_text())[0]["reason"] == "the disk is full"

    trainer.fails_at = None
    trainer.calls()
    found, output = run()
    assert "rotary, seed 1234: resuming after step 3 of 6" in output
    assert trainer.calls() == ["rotary 1234 out/rotary/seed_1234", "evaluate out/rotary/seed_1234"]
    assert len(found) == 4
    assert not Path("out/results.failures.json").exists()


def test_a_diverged_run_is_a_result_unless_retried(trainer: Trainer) -> None:
    """A diverged run counts as a result until requested again.

    One variant has lr 1e18. The others run, the page explains the missing one, and later starts do not repeat it.
    """
    trainer.diverges = "rotary"
    with pytest.raises(
        RunError, match=r"1 of 2 runs failed: rotary, seed 1234: failed at step 3: its loss is nan; use --re"
    ):
        run("sweep.seeds=[1234]")
    assert trainer.calls() == ["rotary 1234 None", "alibi 1234 None", "evaluate out/mine/seed_1234"]
    for name in ("out/report.html", "out/results.md"):
        assert "failed at step 3: its loss is nan" in Path(name).read_text(), name
    with pytest.raises(RunError, match="failed at step 3"):
        run()
    assert trainer.calls() == []
    with pytest.raises(RunError, match="rotary, seed 1234: failed at step 3: its loss is nan; use --retry-failed"):
        sweeps.run_sweep(["sweep.yml"], console=quiet(), member=0)
    assert trainer.calls() == []
    trainer.diverges = None
    found = sweeps.run_sweep(["sweep.yml"], console=quiet(), retry_failed=True)
    assert trainer.calls() == ["rotary 1234 None", "evaluate out/rotary/seed_1234"]
    assert {record.method for record in found} == {"rotary", "mine"}
    assert "failed" not in Path("out/report.html").read_text()


def test_a_resumed_run_that_diverged_is_found_by_any_path(trainer: Trainer) -> None:
    trainer.fails_at = "rotary"
    with pytest.raises(RunError, match="the disk is full"):
        run()
    trainer.fails_at, trainer.diverges = None, "rotary"
    with pytest.raises(RunError, match="failed at step 3: its loss is nan"):
        run()
    assert "rotary 1234 out/rotary/seed_1234" in trainer.calls()
    for output in ("out", Path("out").absolute()):
        with pytest.raises(RunError, match="failed at step 3: its loss is nan"):
            run(f"sweep.output={output}")
        assert not [call for call in trainer.calls() if call.startswith("rotary")]


def test_failures_of_another_configuration_do_not_count(trainer: Trainer) -> None:
    trainer.diverges = "rotary"
    with pytest.raises(RunError, match="failed at step 3"):
        run()
    trainer.diverges, trainer.asked = None, []
    run("optimizer.params.lr=1e-3", "sweep.variants.mine={pos_emb: alibi}", "sweep.output=other")
    assert "rotary 1234 None" in trainer.calls()
    shutil.rmtree("out/mine")
    run("optimizer.params.lr=1e-3")  # in the folder where another rate diverged
    assert "rotary 1234 None" in trainer.calls()


def test_a_second_sweep_in_the_same_folder_is_rejected(trainer: Trainer) -> None:
    Path("out").mkdir()
    lock = RunLock("out", name=SWEEP_LOCK)
    with pytest.raises(
        UserError, match=r"sweep.output: out: a sweep is running in this folder; wait until it ends, or choose an"
    ):
        run()
    lock.release()
    run()
    run()
    assert not Path("out/.lock").exists()  # `status` identifies runs by it


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_training_that_ends_early_is_reported(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_run, "train_in_subprocess", lambda *_: None)
    with pytest.raises(RunError, match=r"stopped early without an error; output: out/rotary/seed_1234.txt"):
        run()


def test_a_stopped_sweep_prints_how_to_resume(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[str] = []
    monkeypatch.setattr(sweeps, "_build_line_printer", lambda console: output.append)
    for number, ending in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, StoppedBySignal)):
        monkeypatch.setattr(member_run, "train_in_subprocess", lambda *_, number=number: signal.raise_signal(number))
        with convert_signals_to_exceptions(), pytest.raises(ending) as stopped:
            run()
        assert output[-1] == "stopping; running trainings save first; repeat to stop immediately"
        name = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
        assert describe_signal(stopped.value) == f"{name}; run the same command to resume"
        output.clear()


def test_only_requested_work_is_repeated(trainer: Trainer) -> None:
    write(ONE)
    run()
    trainer.calls()
    run("sweep.evaluate.multiples=[1, 2]")
    assert trainer.calls() == ["evaluate out/mine/seed_1234"]
    results = Path("out/mine/seed_1234/results.json")
    there = json.loads(results.read_text())
    # If the run was also evaluated with another protocol or at other lengths, the sweep's own results are still found.
    for others in ([{**there[0], "protocol": "nonoverlapping"}, *there], there[1:]):
        results.write_text(json.dumps(others))
        found, _ = run("sweep.evaluate.multiples=[1, 2]")
        assert trainer.calls() == []
        assert [(r.protocol, r.length) for r in found] == [("last", 16), ("last", 32)]
    results.unlink()
    run("sweep.evaluate.multiples=[1, 2]")
    assert trainer.calls() == ["evaluate out/mine/seed_1234"]


def test_evaluations_of_the_same_targets_do_not_repeat_each_other(trainer: Trainer) -> None:
    write(ONE)
    far = "sweep.evaluations={far: {multiples: [8]}}"
    measured, _ = run(far)
    assert trainer.calls()[1:] == ["evaluate out/mine/seed_1234"] * 2
    assert [record.length for record in measured] == [16, 64, 128]
    assert run(far)[0] == measured
    assert trainer.calls() == []


def test_markers_of_earlier_versions_name_records_in_the_results(trainer: Trainer) -> None:
    write(ONE)
    measured, _ = run()
    trainer.calls()
    marker = Path("out/mine/seed_1234/evaluated.json")
    content = json.loads(marker.read_text())
    hashes = [hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in content["records"]]
    marker.write_text(json.dumps({**content, "records": hashes}))
    assert run()[0] == measured
    assert trainer.calls() == []
    for others in ([*hashes, "0"], [{"method": "mine", "speed": 1}]):
        marker.write_text(json.dumps({**content, "records": others}))
        run()
        assert trainer.calls() == ["evaluate out/mine/seed_1234"]


def test_another_configuration_is_another_run(trainer: Trainer) -> None:
    write(ONE)
    run()
    before = json.loads(Path("out/results.json").read_text())
    with pytest.raises(
        UserError, match=r"out/mine/seed_1234: contains a run .*weight_decay 0.1 in the run, 0.2 in the sweep"
    ):
        run("weight_decay=0.2")
    assert json.loads(Path("out/results.json").read_text()) == before
    run("log_interval=1", "attention_backend=chunked")  # verbosity and speed make no difference


def test_a_finished_training_without_its_test_is_started_again(trainer: Trainer) -> None:
    """A training killed between its last checkpoint and the end of its test is started again."""
    tests = "eval_interval=3"
    run(tests)
    assert [line.split()[0] for line in trainer.calls()] == ["rotary", "evaluate", "alibi", "evaluate"]
    Path("out/rotary/seed_1234/metrics.jsonl").write_text('{"kind": "test", "step": 6}\n')
    Path("out/mine/seed_1234/metrics.jsonl").write_text('{"kind": "test", "step": 6\n')
    _, output = run(tests)
    assert trainer.calls()[0] == "alibi 1234 out/mine/seed_1234"
    assert "mine, seed 1234: trained; evaluating the test text" in output


def test_a_damaged_checkpoint_does_not_count_as_finished(trainer: Trainer) -> None:
    write(ONE)
    run()
    trainer.calls()
    checkpoints = Path("out/mine/seed_1234/checkpoints")
    shutil.copytree(checkpoints / "step_0000006", checkpoints / "step_0000003")
    (checkpoints / "step_0000003" / "progress.json").write_text('{"step": 3}')
    (checkpoints / "step_0000006" / "model.safetensors").unlink()
    _, output = run()
    assert "mine, seed 1234: resuming after step 3 of 6" in output
    assert trainer.calls() == ["alibi 1234 out/mine/seed_1234", "evaluate out/mine/seed_1234"]


def test_remaining_time_is_estimated_from_measurements(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(configuration: Path, printed: Path, metrics: Path, watch: object) -> None:
        def slowly(step: int | None) -> None:
            time.sleep(0.001)
            watch(step)

        Trainer.train(trainer, configuration, printed, metrics, slowly)

    trainer.steps = (1, 2, 3)
    monkeypatch.setattr(member_run, "train_in_subprocess", watched)
    write(ONE)
    _, output = run("sweep.seeds=[3, 4, 5]")
    lines = output.splitlines()
    (todo,) = [line for line in lines if " to train or evaluate" in line]
    assert todo == "3 of 3 runs to train or evaluate; the time left is estimated after the first steps"
    (forecast,) = [line for line in lines if line.endswith("estimated from the first steps")]
    assert re.fullmatch(r"about \S+ s left in total, estimated from the first steps", forecast)
    first_done = next(number for number, line in enumerate(lines) if line.startswith("1 of 3 runs done"))
    assert lines.index(todo) < lines.index(forecast) < first_done
    done = [line.split(" runs done, about")[0] for line in lines if " runs done, about" in line]
    assert done == ["1 of 3", "2 of 3"]
    assert any(line.startswith("training mine, seed 5: step 0 of 6") for line in lines)
    _, output = run("sweep.seeds=[3, 4, 5, 6]")
    assert "1 of 4 runs to train or evaluate" in output


def test_its_last_line_is_a_command_to_resume(trainer: Trainer) -> None:
    write(BASE.replace("output: out", "output: 'my out'"))
    _, output = run()
    page, hint = output.splitlines()[-2:]
    assert page.startswith("open my out/report.html in a browser;")
    command, _, rest = hint.removeprefix("next: ").partition(" adds ")
    assert rest == "ratios to rotary at each length"  # more seeds allow significance
    assert command == "./deepy.py report 'my out' --against rotary"
    console = Console(record=True, width=200)
    combine_results([Path("my out")], console, against="rotary")
    assert "compared with rotary" in console.export_text()
    # A page that contains the comparison needs no other.
    write(BASE.replace("output: out", "output: out\n      against: rotary"))
    assert "next: " not in run()[1]


def test_sweeps_share_the_runs_that_they_both_need(trainer: Trainer) -> None:
    write(BASE.replace("output: out", "output: out\n      runs: pool\n      name: first"))
    first, _ = run()
    trained = trainer.calls()
    assert [line.split()[0] for line in trained] == ["rotary", "evaluate", "alibi", "evaluate"]
    write(
        BASE.replace("output: out", "output: out\n      runs: pool\n      name: second")
        .replace("rotary: {pos_emb: rotary}", "again: {pos_emb: rotary}")
        .replace("multiples: [1, 4]", "multiples: [1, 2]")
    )
    second, output = run()
    assert [line.split()[0] for line in trainer.calls()] == ["evaluate", "evaluate"], "both runs are there"
    assert "again, seed 1234: already trained" in output
    assert {record.method for record in second} == {"again", "mine"}
    # Results of the first sweep are kept, and nothing is repeated.
    write(BASE.replace("output: out", "output: out\n      runs: pool\n      name: first"))
    assert run()[0] == first
    assert trainer.calls() == []
    assert len(list(Path("pool").glob("*/seed_1234"))) == 2


def test_variants_of_one_sweep_share_a_run(trainer: Trainer) -> None:
    shared = BASE.replace("output: out", "output: out\n      runs: pool")
    write(shared.replace("mine: {", "same: {pos_emb: rotary, device: auto}\n        mine: {"))
    found, output = run()
    assert [line.split()[0] for line in trainer.calls()] == ["rotary", "evaluate", "evaluate", "alibi", "evaluate"]
    assert "same, seed 1234: already trained" in output
    assert {record.method for record in found} == {"rotary", "same", "mine"}
    # The number of tokens in a step is not in a run's name if it depends on the number of processes.
    write(shared.replace("mine: {", "same: {pos_emb: rotary, train_micro_batch_size_per_gpu: 8}\n        mine: {"))
    with pytest.raises(UserError, match=r"variants.same: it differs from rotary .* batch size, 8 instead of 4; set"):
        run()
    write(
        shared.replace(
            "mine: {",
            "same: {pos_emb: rotary, train_batch_size: 8, train_micro_batch_size_per_gpu: 8}\n        mine: {",
        )
    )
    run()
    assert [line.split()[0] for line in trainer.calls()] == ["rotary", "evaluate"]


def test_a_run_with_other_tokens_of_its_dataset_is_not_reused(trainer: Trainer) -> None:
    """The same folder may contain another corpus since the run was trained."""
    run()
    member = read_sweep(["sweep.yml"]).members[0]
    (state,) = member.folder.glob("checkpoints/*/progress.json")
    prefix = "corpus/train_text_document"
    trained_on = {prefix: compute_dataset_digest(Path(prefix)), "gone/text": "12 bytes"}
    state.write_text(json.dumps(json.loads(state.read_text()) | {"data_digests": trained_on}))
    assert find_finished_step(member) == 6
    trained_on[prefix] = "0" * 64
    state.write_text(json.dumps(json.loads(state.read_text()) | {"data_digests": trained_on}))
    with pytest.raises(UserError, match=rf"^{member.folder}: the tokens of {prefix} have changed since its training"):
        run()


def test_a_sweep_waits_for_another_that_trains_the_same_run(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    write(BASE.replace("output: out", "output: out\n      runs: pool").replace("mine: {", "same: {pos_emb: rotary} #"))
    first, same = read_sweep(["sweep.yml"]).members
    assert first.folder == same.folder
    lock = RunLock(first.folder.parent, name=f".{first.folder.name}.lock")

    def finish_other_training() -> None:
        trainer.save(first.resolved_config, first.folder, 6)
        lock.release(remove_file=True)

    def begin_wait(log: Callable[[str], object], activity: str) -> WaitAnnouncer:
        if not trainer.asked:  # the first of the two waits
            threading.Timer(0.2, finish_other_training).start()
        return WaitAnnouncer(log, activity, first=0.0)

    monkeypatch.setattr(member_run, "WaitAnnouncer", begin_wait)
    _, output = run()
    assert [line.split()[0] for line in trainer.calls()] == ["evaluate", "evaluate"]
    assert f"rotary, seed 1234: waiting for another process that trains {first.folder}" in output
    assert not list(first.folder.parent.glob(".*.lock"))


def test_a_report_has_the_table_of_a_paper(trainer: Trainer) -> None:
    table = (
        "output: out\n      title: Ours and theirs\n      against: rotary\n      differences: [They had more text.]\n"
        "      published: [{source: 'A paper, table 2', train_length: 512, lengths: [512, 2048], "
        "rows: {rotary: [9.1, 99.5], mine: [9.0, null]}}]"
    )
    write(BASE.replace("output: out", table))
    _, output = run()
    page = Path("out/report.html").read_text()
    for text in ("Ours and theirs", "A paper, table 2", "They had more text.", "compared with rotary", "99.50 |"):
        assert text in page
    assert "order agreement τ" in output
    combine_results([Path("out")], Console(quiet=True), output=Path("page.html"))
    page = Path("page.html").read_text()
    assert "<h1>Ours and theirs</h1>" in page
    assert "A paper, table 2" in page


def test_differences_are_stated_without_published_numbers(trainer: Trainer) -> None:
    """Deviations from the paper are listed even if no numbers are quoted, as for figures."""
    write(BASE.replace("output: out", "output: out\n      differences: [They had more text., And a GPU.]"))
    _, output = run()
    page = Path("out/report.html").read_text()
    for text in ("They had more text.", "And a GPU."):
        assert page.count(text) == 2  # also in the configuration shown
        assert text in output


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "{source: x, train_length: 8, lengths: [8], rows: {rotery: [1.0]}}",
            "'rotery' is not a variant of this sweep",
        ),
        ("{source: x, train_length: 8, lengths: [8], rows: {rotary: [1.0, 2.0]}}", "2 values for 1 length"),
        ("{source: x, train_length: 8, lengths: [8], metric: ppl, rows: {rotary: [1.0]}}", "'ppl' is not a metric"),
    ],
)
def test_invalid_published_tables_are_rejected(trainer: Trainer, table: str, message: str) -> None:
    write(BASE.replace("output: out", f"output: out\n      published: [{table}]"))
    with pytest.raises(UserError, match=message):
        run()


def test_training_lengths_side_by_side(trainer: Trainer) -> None:
    several = BASE.replace("rotary: {pos_emb: rotary}", "short: {pos_emb: rotary, seq_length: 8}")
    write(several.replace("multiples: [1, 4]", "lengths: [16, 32]"))
    with pytest.raises(UserError, match=r"sweep.evaluate.targets must set"):
        run()
    write(several.replace("multiples: [1, 4]", "lengths: [16, 32], targets: 8"))
    found, _ = run()
    assert {record.method for record in found} == {"short", "mine"}
    lengths = {member.variant: member.config.model.seq_length for member in read_sweep(["sweep.yml"]).members}
    assert lengths == {"short": 8, "mine": 16}

"""Saved records of sweeps: finished runs are not repeated, machines divide a sweep, and changes are noticed."""

import gzip
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from megatron.config.stages import list_stage_configs
from megatron.reports import paper_experiment, run_records
from megatron.reports.combine import build_sections, combine_results
from megatron.sweeps import results
from megatron.sweeps.run_sweep import run_sweep
from megatron.sweeps.spec import read_sweep
from megatron.utils.errors import RunError, UserError

from .conftest import BASE, Trainer, run, write

KEEP = "sweep.records=kept"


def list_trainings(trainer: Trainer) -> list[str]:
    found = [line for line in trainer.asked if not line.startswith("evaluate")]
    trainer.asked.clear()
    return found


def test_finished_members_are_read_from_their_records(trainer: Trainer) -> None:
    found, _ = run(KEEP, "sweep.seeds=[3, 4]")
    assert len(list_trainings(trainer)) == 4
    files = sorted(path.relative_to("kept").as_posix() for path in Path("kept").rglob("*.gz"))
    assert files == [f"{variant}/seed_{seed}.json.gz" for variant in ("mine", "rotary") for seed in (3, 4)]
    contents = {path: path.read_bytes() for path in Path("kept").rglob("*.gz")}
    shutil.rmtree("out")
    again, output = run(KEEP, "sweep.seeds=[3, 4]")
    assert (again, list_trainings(trainer)) == (found, [])
    assert "4 of 4 runs have saved records in kept" in output
    assert "nothing to do: 4 of 4 runs are complete" in output
    assert "rotary" in Path("out/report.html").read_text()
    Path("kept/rotary/seed_3.json.gz").unlink()
    run(KEEP, "sweep.seeds=[3, 4]")
    assert list_trainings(trainer) == ["rotary 3 None"]
    assert {path: path.read_bytes() for path in contents} == contents, "equal records are equal files"


def test_a_dry_run_without_the_corpus_does_not_ignore_saved_records(trainer: Trainer) -> None:
    """Records are matched by the corpus, so before its preparation they may replace any number of runs."""
    keys = [KEEP, "sweep.seeds=[3, 4]"]
    run(*keys)
    shutil.rmtree("out")
    Path("kept/rotary/seed_3.json.gz").unlink()

    def list_lines() -> list[str]:
        terminal = io.StringIO()
        run_sweep(["sweep.yml"], keys, Console(file=terminal, width=200), dry_run=True)
        return terminal.getvalue().splitlines()

    assert list_lines()[-1].startswith("1 of 4 runs to train or evaluate")
    shutil.rmtree("corpus")
    note, *states, count = list_lines()[-6:]
    matching = "after preparing the corpus, the sweep does not repeat those that match it"
    assert note == f"note: 3 runs have saved records in kept; {matching}"
    assert states.count("rotary, seed 3: new") == 1
    assert sum(state.endswith(": new, unless its saved records match") for state in states) == 3
    assert count == "1 to 4 of 4 runs to train or evaluate; nothing was started"


def test_a_report_is_made_from_saved_records_alone(trainer: Trainer) -> None:
    """The page has the sweep's numbers and title, and states how many runs are missing."""
    keys = (KEEP, "sweep.seeds=[3, 4]", "sweep.title=Two methods", "sweep.leaderboard={ablations: [cdape]}")
    found, _ = run(*keys)
    shutil.rmtree("out")
    (whole,) = build_sections([Path("kept")])
    assert (whole.title, whole.num_pending_runs, whole.leaderboard is not None) == ("Two methods", 0, True)
    assert {record.model_dump_json() for record in whole.records} == {record.model_dump_json() for record in found}
    Path("kept/mine/seed_4.json.gz").unlink()
    terminal = io.StringIO()
    combine_results([Path("kept")], Console(file=terminal), output=Path("page.md"))
    assert terminal.getvalue().startswith("\nTwo methods (1 run pending)\n")
    page = Path("page.md").read_text()
    assert "# Two methods (1 run pending)\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    board = {row.split("|")[1].strip(): row for row in reversed(rows)}  # rows of the first table win
    assert ("(n 1)" in board["mine"], "(n 1)" in board["rotary"]) == (True, False)
    # Runs of removed variants and of older definitions do not count.
    shutil.copytree("kept/mine", "kept/removed")
    older = Path("kept/mine/seed_3.json.gz")
    content = json.loads(gzip.decompress(older.read_bytes()))
    older.write_bytes(gzip.compress(json.dumps(content | {"digest": "older"}).encode()))
    terminal = io.StringIO()
    combine_results([Path("kept")], Console(file=terminal))
    ignored = "mine/seed_3.json.gz, removed/seed_3.json.gz"
    assert f"note: kept: ignoring 2 saved runs of removed or redefined variants: {ignored}\n" in (terminal.getvalue())
    (rest,) = build_sections([Path("kept")])
    assert rest.num_pending_runs == 2
    assert {record.method for record in rest.records} == {"rotary"}
    (one,) = build_sections([Path("kept/rotary/seed_3.json.gz")])
    assert {(record.method, record.seed) for record in one.records} == {("rotary", 3)}
    Path("kept/rotary/seed_3.json.gz").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"kept/rotary/seed_3\.json\.gz: cannot be read as saved records"):
        build_sections([Path("kept")])
    Path("empty").mkdir()
    with pytest.raises(UserError, match=r"^empty: no results\.json and no records of runs found; "):
        build_sections([Path("empty")])


@pytest.mark.parametrize(
    ("change", "num_trained"),
    [
        (["hidden_size=32"], 2),
        (["sweep.evaluate.windows=2"], 2),
        (["sweep.variants={rotary: {pos_emb: rotary}, mine: {pos_emb: alibi}}"], 1),
        (["log_interval=3", "sweep.title=T"], 0),
    ],
)
def test_a_member_whose_definition_changes_runs_again(trainer: Trainer, change: list[str], num_trained: int) -> None:
    run(KEEP)
    list_trainings(trainer)
    shutil.rmtree("out")
    run(KEEP, *change)
    assert len(list_trainings(trainer)) == num_trained


def test_another_text_is_noticed(trainer: Trainer, place: Path) -> None:
    run(KEEP)
    list_trainings(trainer)
    for folder in ("out", "corpus"):
        shutil.rmtree(folder)
    (place / "text" / "0.txt").write_text("another text\n" * 12)
    run(KEEP)
    assert len(list_trainings(trainer)) == 2


def test_a_diverged_run_is_a_saved_result(trainer: Trainer) -> None:
    """Other machines neither repeat it nor count it as missing; reports and --retry-failed know it."""
    keys = (KEEP, "sweep.leaderboard={}")
    trainer.diverges = "rotary"
    with pytest.raises(RunError, match=r"1 of 2 runs failed: rotary, seed 1234: failed at step 3: its loss is nan"):
        run(*keys)
    assert len(list_trainings(trainer)) == 2
    shutil.rmtree("out")
    saved = {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*.json.gz")}
    with pytest.raises(RunError, match=r"1 of 2 runs failed: .*--retry-failed"):
        run(*keys)
    assert {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*.json.gz")} == saved
    assert list_trainings(trainer) == []
    (section,) = build_sections([Path("kept")])
    assert ([failure.method for failure in section.failures], section.num_pending_runs) == (["rotary"], 0)
    assert section.board is not None
    assert (section.board.missing, "rotary" in section.board.ranking) == ({}, True)
    trainer.diverges = None
    found, _ = run(*keys, retry_failed=True)
    assert (list_trainings(trainer), {record.method for record in found}) == (["rotary 1234 None"], {"rotary", "mine"})
    assert build_sections([Path("kept")])[0].failures == []


def test_machines_divide_a_sweep(trainer: Trainer) -> None:
    """Two parts train every run once, and the last one's report has all of them."""
    keys = (KEEP, "sweep.seeds=[3, 4, 5]")
    trained = []
    for part in (1, 2):
        found, _ = run(*keys, f"sweep.part={part}/2", f"sweep.output=out{part}")
        trained.append(list_trainings(trainer))
        assert len(found) == 2 * 3 * part, "the second machine has the first one's records"
    assert [len(part) for part in trained] == [3, 3]
    assert not set(trained[0]) & set(trained[1])
    found, _ = run(*keys)
    assert (len(found), list_trainings(trainer)) == (12, [])


def test_another_text_of_a_blend_or_a_stage_is_noticed(trainer: Trainer, place: Path) -> None:
    """Corpora of several datasets, and those of stages, count by their content."""
    run("sweep.variants={rotary: {pos_emb: rotary}}", "sweep.output=prepared")
    for name in ("corpus2", "other2"):
        shutil.copytree("corpus", name)
    for key in (
        "train_data_paths=[[corpus2/train_text_document, other2/train_text_document]]",
        "stages=[{until: 3}, {train_data_paths: [other2/train_text_document]}]",
    ):
        keys = (KEEP, "sweep.variants={rotary: {pos_emb: rotary}}", key)
        digests = []
        for end in (b"", b"\x01\x00" * 8):
            (path,) = Path("other2").glob("train_text_document.bin")
            path.write_bytes(path.read_bytes() + end)
            Path("other2/corpus.json").unlink(missing_ok=True)
            (member,) = read_sweep(["sweep.yml"], keys).members
            digests.append(results._describe_corpora(member.config.data))
            digests[-1] += [results._describe_corpora(stage.data) for stage in list_stage_configs(member.config)]
        assert digests[0] != digests[1]


def test_another_text_of_an_evaluation_is_noticed(trainer: Trainer, place: Path) -> None:
    """The content of `evaluate.data` counts, for saved records and for evaluations in the runs' own folders."""
    book = place / "book.txt"
    book.write_text("one text of a book\n" * 40)
    keys = ("sweep.variants={rotary: {pos_emb: rotary}}", f"sweep.evaluate.data={book}")
    run(KEEP, keys[0])
    list_trainings(trainer)
    for text in ("one text of a book\n", "two texts of a book\n"):
        book.write_text(text * 40)
        run(KEEP, *keys)
        assert any(line.startswith("evaluate") for line in trainer.asked), "the trained run is evaluated again"
        trainer.asked.clear()
    run(KEEP, *keys)
    assert trainer.asked == []
    run(*keys, "sweep.output=other")
    trainer.asked.clear()
    book.write_text("a third text of a book\n" * 40)
    run(*keys, "sweep.output=other")
    assert [line.split()[0] for line in trainer.asked] == ["evaluate"]


def test_other_code_of_a_method_is_noticed(trainer: Trainer, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = ["first"]
    monkeypatch.setattr(results, "compute_user_method_digests", lambda position: {"mine.py": digests[0]})
    run(KEEP)
    list_trainings(trainer)
    digests[0] = "second"
    run(KEEP, "sweep.output=other")
    assert len(list_trainings(trainer)) == 2


def test_unwritable_records_are_an_error_before_any_training(trainer: Trainer) -> None:
    Path("file").write_text("mine")
    for keys, message in (
        (["sweep.part=1/2"], "sweep.part needs sweep.records"),
        ([KEEP, "sweep.part=3/2"], "sweep.part is 3/2; it must be PART/PARTS, such as 1/2 and 2/2 for two machines"),
        ([KEEP, "sweep.part=half"], "sweep.part is half; it must be PART/PARTS"),
        ([KEEP, "sweep.part=1"], "sweep.part is 1; it must be PART/PARTS"),
        ([KEEP, "sweep.variants.late={branch: {variant: rotary, step: 3}}"], "sweep.records: variant late branches"),
        (["sweep.records=file"], "sweep.records is file"),
        (["sweep.records=/proc/records"], "sweep.records is /proc/records"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            run(*keys)
    assert trainer.asked == []
    run(KEEP)
    file = Path("kept/rotary/seed_1234.json.gz")
    foreign = gzip.compress(gzip.decompress(file.read_bytes()).replace(b'"method"', b'"methods"'))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    for content in (b"", b"mine", file.read_bytes()[:-9], gzip.compress(b"{}"), foreign, bytes(damaged)):
        file.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(f"{file}: cannot be read as saved records")):
            run(KEEP)
        assert file.read_bytes() == content


def test_a_full_disk_ends_no_other_run(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs are trained, the report is written, and the sweep then fails."""

    def fail(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_records, "write_bytes_atomically", fail)
    with pytest.raises(RunError, match=r"results of 2 runs could not be saved: .*No space left on device"):
        run(KEEP)
    assert len(list_trainings(trainer)) == 2
    assert Path("out/report.html").exists()


def test_an_unwritable_description_is_an_error_before_any_training(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file beside the records is written once, at the start, so that its errors end no run."""
    usual = paper_experiment.write_text_atomically

    def fail(path: Path, content: str) -> Path:
        if "kept" in path.parts:
            raise OSError(28, "No space left on device")
        return usual(path, content)

    monkeypatch.setattr(paper_experiment, "write_text_atomically", fail)
    with pytest.raises(UserError, match=r"sweep\.records is kept: cannot be written \(No space left on device\)"):
        run(KEEP)
    assert trainer.asked == []


def test_records_may_be_saved_inside_the_output_folder(trainer: Trainer) -> None:
    write(BASE.replace("output: out", "output: out\n      records: out/kept"))
    run()
    assert Path("out/kept/mine/seed_1234.json.gz").stat().st_size < 4000

"""Evidence runs: their corpus, their order and time limits, and what a next visit finds done."""

import argparse
import json
import tarfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.planning.plan import make_plan
from megatron.sweeps.spec import Sweep, read_sweep
from tools.gpu import evidence, evidence_corpus
from tools.gpu.evidence import SWEEP, Estimator, build_cluster, run_evidence

ROOT = Path(__file__).resolve().parents[2]
RUNS, LARGE_RUNS = 15, 3
"""Number of runs, and of those at the shape of 125M, which come last."""


@cache
def read_evidence() -> Sweep:
    return read_sweep([SWEEP])


@cache
def plan_runs() -> list[float]:
    """Return the planned seconds of all runs."""
    estimator = Estimator(build_cluster("cpu"))
    return [estimator.plan_seconds(member) for member in read_evidence().members]


def test_the_sweep_has_the_size_that_it_states() -> None:
    """Twelve methods with 29M parameters and 60M tokens, at most as many as the packed corpus has in two passes.

    Three have the shape of 125M, 91M parameters with this vocabulary, and a third of the tokens.
    """
    sweep = read_evidence()
    assert len(sweep.members) == len({member.variant for member in sweep.members}) == RUNS
    recorded = json.loads((ROOT / "docs/results/evidence_corpus.json").read_text())
    assert recorded["archive_bytes"] <= evidence_corpus.MAX_ARCHIVE_BYTES
    for index, member in enumerate(sweep.members):
        is_large = index >= RUNS - LARGE_RUNS
        training = member.config.training
        tokens = training.train_iters * (training.train_micro_batch_size_per_gpu or 0) * member.config.model.seq_length
        assert tokens == pytest.approx(20e6 if is_large else 60e6, rel=0.01)
        assert tokens <= 2 * recorded["splits"]["train"]["tokens"]
        plan = make_plan(member.config, evidence_corpus.VOCABULARY_SIZE, build_cluster("cpu"))
        assert plan.num_parameters == pytest.approx(91.4e6 if is_large else 29.5e6, rel=0.01)
        assert member.variant.endswith("-125M") == is_large
        assert plan.configured_layout is not None
        assert plan.fits_gpu(plan.configured_layout)
    evaluated = sweep.members[0].evaluation
    assert (evaluated.lengths or [])[0] == 512
    assert (evaluated.lengths or [])[-1] == 16384


def find_index(variant: str) -> int:
    return [member.variant for member in read_evidence().members].index(variant)


class Machine:
    """Clock, and runs that take a time and leave records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self.now, self.ran, self.seconds = 0.0, list[int](), seconds
        self.finished: dict[str, list[dict[str, Any]]] = {}
        self.failing: int | None = None
        self.forgetting: int | None = None
        monkeypatch.setattr(evidence.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(evidence, "run_member", self.run)
        monkeypatch.setattr(evidence, "read_sweep", lambda *_: read_evidence())
        monkeypatch.setattr(Estimator, "plan_seconds", lambda self, member: plan_runs()[find_index(member.variant)])
        monkeypatch.setattr(evidence, "find_records", lambda sweep, member: self.finished.get(member.variant))

    def run(self, files: list[str], index: int, seconds: float) -> str | None:
        self.ran.append(index)
        taken = self.seconds(index)
        self.now += min(taken, seconds)
        if taken > seconds:
            return f"cut after {seconds:.0f} s"
        if index == self.failing:
            return "error: planted"
        if index == self.forgetting:
            return None
        variant = read_evidence().members[index].variant
        self.finished[variant] = [{"method": variant, "length": 512, "perplexity": 7.0 + index}]
        return None


@pytest.fixture
def visit(tmp_path: Path) -> Callable[[int], list[dict[str, Any]]]:
    """Function that visits a machine for some seconds and returns what the JSON file has."""

    def run(seconds: int) -> list[dict[str, Any]]:
        path = tmp_path / "a.json"
        arguments = argparse.Namespace(seconds=seconds, json=path, device="cpu")
        found = run_evidence([SWEEP], arguments, tmp_path / "a.tar")
        assert json.loads(path.read_text())["records"] == found
        return found

    return run


def test_visits_continue_with_the_first_run_without_records(
    monkeypatch: pytest.MonkeyPatch, visit: Callable[[int], list[dict[str, Any]]]
) -> None:
    members, planned = read_evidence().members, plan_runs()
    machine = Machine(monkeypatch, lambda index: planned[index] / 2)
    first = visit(600)
    assert machine.ran[0] == 0
    assert machine.now <= 600
    done = [record for record in first if "seconds" in record]
    assert 0 < len(done) < RUNS
    assert all("perplexity" in record for record in done)
    assert all("s are left" in record["refusal"] for record in first if "seconds" not in record)
    visits = 1
    while len(machine.finished) < RUNS:
        before, start = set(machine.finished), machine.now
        waiting = next(index for index, member in enumerate(members) if member.variant not in before)
        position = len(machine.ran)
        visit(600)
        assert machine.ran[position] == waiting
        assert machine.now - start <= 600
        visits += 1
    assert sorted(machine.ran) == list(range(RUNS))  # none twice
    assert visits > 1
    assert all("seconds" not in record and "perplexity" in record for record in visit(1))


def test_a_slower_machine_starts_no_run_that_it_cannot_finish(
    monkeypatch: pytest.MonkeyPatch, visit: Callable[[int], list[dict[str, Any]]]
) -> None:
    """The estimates of later runs follow the first one, which took three times its plan."""
    planned = plan_runs()
    machine = Machine(monkeypatch, lambda index: 3 * planned[index])
    records = visit(round(3 * planned[0] + 2 * min(planned)))
    assert machine.ran == [0]
    assert "refusal" not in records[0]


def test_a_run_that_fails_is_not_repeated_in_a_visit(
    monkeypatch: pytest.MonkeyPatch, visit: Callable[[int], list[dict[str, Any]]]
) -> None:
    machine = Machine(monkeypatch, lambda index: 10.0)
    machine.failing, machine.forgetting = 1, 2
    records = visit(100_000)
    assert machine.ran == list(range(RUNS))
    refused = {record["peer"]: record["refusal"] for record in records if "refusal" in record}
    assert list(refused) == [member.variant for member in read_evidence().members[1:3]]
    assert list(refused.values()) == ["error: planted", "ended without records in docs/results/evidence"]


def test_runs_and_records_have_the_same_folder_wherever_the_visit_starts(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = list[tuple[Path, Path]]()

    def run(files: list[str], arguments: argparse.Namespace, archive: Path | None) -> list[dict[str, Any]]:
        folders.append((Path.cwd(), arguments.json))
        return []

    monkeypatch.setattr(evidence, "run_evidence", run)
    monkeypatch.setattr(evidence, "unpack_corpus", lambda folder: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    assert not command(evidence, "--json", "a.json")
    assert folders == [(ROOT, tmp_path / "a.json")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")
def test_invalid_arguments_are_one_line(refuses: Callable[..., None], tmp_path: Path) -> None:
    refuses(evidence, says="no CUDA device found; --rehearse")
    refuses(evidence, "--rehearse", "seq_length", says="'seq_length' is not of the form KEY=VALUE")
    refuses(evidence_corpus, "--output", str(tmp_path), says="exists; remove it")


def test_documents_are_those_of_packages_with_permissive_licenses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = evidence_corpus.collect_documents(("iniconfig", "pluggy"), tmp_path / "a.jsonl")
    texts = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [each["package"] for each in found] == ["iniconfig", "pluggy"]
    assert [each["version"] for each in found] == [distribution(name).version for name in ("iniconfig", "pluggy")]
    assert all("MIT" in each["license"] for each in found)
    assert sum(each["files"] for each in found) == len(texts)
    assert sum(each["bytes"] for each in found) == sum(len(each["text"].encode()) for each in texts)
    assert any(each["text"].startswith("from __future__ import") for each in texts)
    evidence_corpus.collect_documents(("iniconfig", "pluggy"), tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    for terms in ("GPL-3.0-only", "MIT AND LGPL-2.1", "Limited use is permitted"):
        monkeypatch.setattr(evidence_corpus, "read_license", lambda package, terms=terms: terms)
        with pytest.raises(SystemExit, match=rf"iniconfig .* has the license '{terms}'"):
            evidence_corpus.collect_documents(("iniconfig",), tmp_path / "c.jsonl")
    with pytest.raises(SystemExit, match="no-such-package is not installed"):
        evidence_corpus.collect_documents(("no-such-package",), tmp_path / "c.jsonl")


def test_an_archive_has_no_times_and_comes_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / "train_text_document.bin").write_bytes(bytes(1000))
    (folder / "corpus.json").write_text("{}")
    for name in ("one.tar.xz", "two.tar.xz"):
        (folder / "corpus.json").touch()
        evidence_corpus.pack_folder(folder, tmp_path / name)
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
    away = tmp_path / "away/evidence"
    away.parent.mkdir()
    with pytest.raises(SystemExit, match=r"evidence\.tar\.xz not found"):
        evidence.unpack_corpus(away)
    (tmp_path / "one.tar.xz").rename(away.with_name("evidence.tar.xz"))
    whole = away.with_name("evidence.tar.xz").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no archive"):
        away.with_name("evidence.tar.xz").write_bytes(damaged)
        with pytest.raises(SystemExit, match=r"^error: .*evidence\.tar\.xz cannot be unpacked: .+; copy it again$"):
            evidence.unpack_corpus(away)
        assert [path.name for path in away.parent.iterdir()] == ["evidence.tar.xz"]
    away.with_name("evidence.tar.xz").write_bytes(whole)
    evidence.unpack_corpus(away)
    assert (away / "train_text_document.bin").read_bytes() == bytes(1000)
    with tarfile.open(away.with_name("evidence.tar.xz")) as packed:
        assert {member.mtime for member in packed} == {0}


def test_summaries_have_perplexities_by_method_and_length() -> None:
    rows = [
        {"method": "rotary", "length": 512, "perplexity": 9.0, "step_seconds": 0.1},
        {"method": "rotary", "length": 1024, "perplexity": 19.0},
        {"method": "rotary (yarn)", "length": 512, "perplexity": 8.0},
    ]
    found = evidence.summarize_run(rows)
    assert found["perplexity"] == {"rotary": {"512": 9.0, "1024": 19.0}, "rotary (yarn)": {"512": 8.0}}
    assert found["step_seconds"] == 0.1

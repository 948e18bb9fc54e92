"""Sweep over a task: read, estimated and tested without a corpus."""

from pathlib import Path

import pytest

from megatron.data.tasks.task_config import read_task_config
from megatron.distributed.process_groups import build_single_process_groups
from megatron.model.build import build_model
from megatron.reports.records import record_from_row
from megatron.reports.run_records import sort_baselines_last
from megatron.sweeps import remaining_work
from megatron.sweeps.remaining_work import estimate_work
from megatron.sweeps.spec import read_sweep

SWEEP = """\
num_layers: 1
hidden_size: 16
num_attention_heads: 2
no_weight_tying: true
make_vocab_size_divisible_by: 1
task: mqar
task_length: 12
task_options: {pairs: 2, vocabulary: 20}
train_iters: 5
train_batch_size: 4
device: cpu
sweep:
  output: results
  variants: {none: {pos_emb: none}, alibi: {pos_emb: alibi}}
  evaluate: {multiples: [1, 2], windows: 6}
"""


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("sweep.yml").write_text(SWEEP, encoding="utf-8")
    return read_sweep(["sweep.yml"])


def test_work_counts_the_lengths_that_are_drawn(members) -> None:
    config = members.members[0].config
    assert read_task_config(config.data).lengths == (8, 10, 12)
    # Estimates count the output layer for a single token only.
    model = build_model(config.model, config.position, 1, groups=build_single_process_groups(), device="meta")
    output: list[str] = []
    found = estimate_work(members, dict.fromkeys(members.members, 0), output.append)
    of_sequence = [length * model.count_flops_per_token(length) for length in (8, 10, 12)]
    for each in found.values():
        assert each.training.work == pytest.approx(5 * 4 * sum(of_sequence) / 3)
        asked = sum(length * model.count_flops_per_token(length) for length in (12, 24))
        assert each.evaluations[None].work == pytest.approx(6 * asked / 3)
    assert output == []


def test_a_task_has_a_test(members) -> None:
    """A task always has a test, so a run killed between its last checkpoint and the end of its test is resumed."""
    assert all(map(remaining_work.lacks_test_record, members.members))


def test_shipped_sweeps_are_read() -> None:
    for name in ("mqar", "chomsky"):
        found = read_sweep([name])
        assert len(found.members) == 18
        assert {member.config.data.task for member in found.members} == {"mqar" if name == "mqar" else "even_pairs"}
    paper = read_sweep(["chomsky", "chomsky_paper"], ["task=odds_first"]).members
    assert len(paper) == 33
    assert {(member.config.data.task, member.config.data.task_length) for member in paper} == {("odds_first", 40)}
    for task in ("reverse_string", "missing_duplicate", "bucket_sort"):
        assert read_sweep(["chomsky"], [f"task={task}"]).members[0].config.data.task == task


def test_floors_follow_the_runs_once() -> None:
    shared = {"train_length": 8, "length": 8, "protocol": "task", "accuracy": 0.5, "tokens": 9, "seed": 0}
    floor, other = (record_from_row({**shared, "method": f"floor: {name}"}) for name in ("one", "other"))
    runs = [record_from_row({**shared, "method": "alibi", "run": name}) for name in ("a", "b")]
    again = floor.replace()
    assert sort_baselines_last([runs[0], floor, other, runs[1], again]) == [*runs, floor, other]

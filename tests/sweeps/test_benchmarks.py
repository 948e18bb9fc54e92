"""Benchmarks, additional evaluations, seeds of variants, and concurrent members."""

import html
import json
import re
import signal
import time
from pathlib import Path

import forked
import pytest
import yaml
from forked import Forked
from rich.console import Console

from megatron.checkpoint.layout import find_latest_checkpoint, parse_step
from megatron.reports.combine import combine_results
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.leaderboard import Ablation, Leaderboard, LeaderboardReport
from megatron.reports.leaderboard_summary import build_answers
from megatron.reports.records import read_records
from megatron.sweeps import worker_pool
from megatron.sweeps.spec import read_sweep
from megatron.training.metrics_log import read_last_step
from megatron.utils.errors import RunError, UserError

from .conftest import BASE, ROOT, Initialiser, Trainer, run, write

ZOO = BASE.replace(
    "      evaluate: {multiples: [1, 4], windows: 3}\n",
    """\
      seeds: [1]
      against: rotary
      leaderboard: {ablations: [cdape]}
      evaluate: {multiples: [1, 4], windows: 3}
      evaluations:
        scaled: {variants: [rotary], rope: "pi:4", lengths: [16, 64], windows: 3}
      benchmarks:
        copy:
          keys: &copy
            num_layers: 1
            hidden_size: 16
            num_attention_heads: 2
            no_weight_tying: true
            make_vocab_size_divisible_by: 1
            task: copy_string
            task_length: 4
            train_iters: 4
            train_micro_batch_size_per_gpu: 4
            optimizer: {type: AdamW, params: {lr: 1e-2}}
            eval_interval: 0
            device: cpu
            use_tensorboard: false
          evaluate: {lengths: [4, 8], windows: 6}
""",
).replace("mine: {pos_emb: alibi,", "mine: {seeds: [1, 2], pos_emb: rotary,")


def test_every_variant_is_trained_on_every_benchmark_with_its_seeds(place: Path) -> None:
    write(ZOO)
    members = read_sweep(["sweep.yml"]).members
    assert [(m.name, str(m.folder), m.config.data.task) for m in members] == [
        ("rotary, seed 1", "out/rotary/seed_1", None),
        ("mine, seed 1", "out/mine/seed_1", None),
        ("mine, seed 2", "out/mine/seed_2", None),
        ("rotary, copy, seed 1", "out/rotary/copy/seed_1", "copy_string"),
        ("mine, copy, seed 1", "out/mine/copy/seed_1", "copy_string"),
        ("mine, copy, seed 2", "out/mine/copy/seed_2", "copy_string"),
    ]
    assert [list(m.evaluations) for m in members] == [[None, "scaled"], [None], [None], [None], [None], [None]]
    assert members[0].get_method("scaled") == "rotary (scaled)"
    # A benchmark's keys replace the shared ones, and the variant's keys override them.
    assert members[5].config.position.score_processor == "cdape"
    assert (members[5].config.training.train_iters, members[5].config.data.train_data_paths) == (4, [])
    less = read_sweep(["sweep.yml"], ["sweep.benchmarks.copy.seeds=[7]", "sweep.benchmarks.copy.variants=[mine]"])
    assert [m.name for m in less.members][3:] == ["mine, copy, seed 7"]
    longer = read_sweep(["sweep.yml"], ["sweep.benchmarks.copy.keys.train_iters=9", "train_iters=2"]).members
    assert [m.config.training.train_iters for m in longer] == [2, 2, 2, 9, 9, 9]
    benchmarks = yaml.safe_load(ZOO)["sweep"]["benchmarks"]
    benchmarks["copy"]["keys"]["optimizer"]["params"]["lr"] = 1e-2  # a string for YAML's library
    write(ZOO[: ZOO.index("      benchmarks:")])  # no file defines any
    given = [f"sweep.benchmarks={json.dumps(benchmarks)}", "sweep.benchmarks.copy.keys.train_iters=9", "train_iters=2"]
    added = read_sweep(["sweep.yml"], given).members
    assert [(m.name, m.config) for m in added] == [(m.name, m.config) for m in longer]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("copy:", "seed_3:"), "benchmark 'seed_3': benchmark names become folder names"),
        (("task: copy_string", "task: copy_strig"), "copy_strig"),
        (("task: copy_string", "seed: 3"), "seed is set by the sweep: use sweep.seeds"),
        (("lengths: [4, 8]", "lenghts: [4, 8]"), "unknown key 'sweep.benchmarks.copy.evaluate.lenghts'"),
        (("keys: &copy", "kes: &copy"), "key 'sweep.benchmarks.copy.kes'; did you mean sweep.benchmarks.copy.keys?"),
        (("variants: [rotary]", "variants: [rotry]"), "'rotry' is not a variant; did you mean rotary?"),
        (("windows: 3}\n      benchmarks", "widows: 3}\n      benchmarks"), "sweep.evaluations.scaled.widows"),
        (("seeds: [1, 2]", "seeds: [1, 1]"), "seeds is [1, 1]; it must be a list of distinct integers"),
        (("seeds: [1, 2]", "seeds: 3"), "seeds is 3; it must be a list"),
        (("output: out", "output: out\n      jobs: 0"), "sweep.jobs is 0; it must be at least 1 or auto"),
        (("output: out", "output: out\n      jobs: autoo"), "sweep.jobs is 'autoo'; it must be an integer or auto"),
        (("ablations: [cdape]", "ablations: [cdap]"), "'cdap' is not a score processor"),
        (("ablations: [cdape]", "ablation: [cdape]"), "unknown key 'sweep.leaderboard.abl"),
        (("hidden_size: 16\n            num", "hiden_size: 16\n            num"), "unknown key 'hiden_size'"),
    ],
)  # fmt: skip
def test_errors_are_reported_with_their_line(trainer: Trainer, change: tuple[str, str], message: str) -> None:
    assert change[0] in ZOO
    write(ZOO.replace(*change))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        run()
    assert "sweep.yml" in str(caught.value)
    assert trainer.asked == []


def test_results_are_measured_once_and_reused(initialiser: Initialiser) -> None:
    write(ZOO)
    found, output = run()
    perplexities = [(r.method, r.seed, r.length) for r in found if r.metric == "perplexity"]
    assert perplexities == [
        ("rotary", 1, 16), ("rotary", 1, 64), ("rotary (scaled)", 1, 16),
        ("rotary (scaled)", 1, 64),
        ("mine", 1, 16), ("mine", 1, 64), ("mine", 2, 16), ("mine", 2, 64),
    ]  # fmt: skip
    accuracies = [(r.method, r.seed, r.length) for r in found if r.metric == "accuracy" and r.run is not None]
    assert accuracies == [(m, s, n) for m, s in (("rotary", 1), ("mine", 1), ("mine", 2)) for n in (4, 8)]
    page = html.unescape(Path("out/report.html").read_text(encoding="utf-8"))
    assert "Missing results" not in page  # rotary has no seed 2, and is to have none
    # The page, the console and `report` agree, based on these records.
    board = LeaderboardReport(
        Leaderboard("rotary", (Ablation("cdape", "mine", "rotary"),)), build_comparison_tables(found)
    )
    combine_results([Path("out")], Console(quiet=True), output=Path("out/board.md"))
    markdown = Path("out/board.md").read_text(encoding="utf-8").replace("\n", " ")
    assert [ranked_benchmark.kind for ranked_benchmark in board.ranked_benchmarks] == ["text", "tasks"]
    for answer in build_answers(board):
        assert all(sentence in output and sentence in page and sentence in markdown for sentence in answer.sentences)
    assert len(initialiser.calls()) == 6
    Path("out/mine/copy/seed_2/evaluated.json").unlink()
    again, output = run()
    assert initialiser.calls() == []
    assert output.count("already evaluated") == 6
    assert [(r.method, r.seed, r.length, r.value) for r in again] == [
        (r.method, r.seed, r.length, r.value) for r in found
    ]


def test_a_branch_waits_for_its_trunk_and_a_shared_folder_for_its_turn(place: Path) -> None:
    branch = "        late: {branch: {variant: rotary, step: 4}, train_iters: 8}\n      evaluate"
    write(BASE.replace("      evaluate", branch, 1))
    rotary, mine, late = read_sweep(["sweep.yml"]).members
    assert worker_pool._choose_next([late, mine], [rotary]) is mine
    assert worker_pool._choose_next([late], [rotary]) is None
    assert worker_pool._choose_next([late], [mine]) is late
    write(
        BASE.replace("output: out", "output: out\n      runs: shared").replace(
            "mine: {", "same: {pos_emb: rotary}\n        mine: {"
        )
    )
    rotary, same, mine = read_sweep(["sweep.yml"]).members
    assert worker_pool._choose_next([same, mine], [rotary]) is mine


@pytest.mark.usefixtures("without_plots")
def test_concurrent_members_stop_together_and_resume(place: Path) -> None:
    """With the real programs, interrupted members all save, and the same sweep finishes them."""
    steps = 150
    write(ZOO.replace("train_iters: 6", f"train_iters: {steps}").replace("log_interval: 2", "log_interval: 1"))
    variants = "sweep.variants={rotary: {pos_emb: rotary}, mine: {pos_emb: alibi}}"
    command = ["sweep", "sweep.yml", "sweep.jobs=2", variants, "sweep.benchmarks={}", "sweep.evaluations={}"]
    runs = [Path(f"out/{name}/seed_1") for name in ("rotary", "mine")]
    sweep = Forked(ROOT / "deepy.py", *command, output=place / "first.txt", env={"COLUMNS": "200"})
    try:
        while not any(read_last_step(folder / "metrics.jsonl", 0.0) for folder in runs):
            assert sweep.poll() is None
            time.sleep(0.05)
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait(120) == 128 + signal.SIGTERM
    finally:
        sweep.kill()
    assert "2 of 2 runs to train or evaluate, 2 at a time" in sweep.printed()
    assert "run the same command to resume" in sweep.printed()
    saved = [find_latest_checkpoint(folder) for folder in runs]
    stopped = [step for path in saved if path is not None and 0 < (step := parse_step(path) or 0) < steps]
    assert stopped
    done = forked.run(ROOT / "deepy.py", *command, cwd=place, env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert all(f"resuming after step {step} of {steps}" in done.stdout for step in stopped)
    records, output = run(*command[2:])
    assert output.count("already evaluated") == 2
    assert read_records("out/results.json") == records
    assert [(r.method, r.length, r.step) for r in records] == [
        (name, length, steps) for name in ("rotary", "mine") for length in (16, 64)
    ]
    assert all(r.step_seconds and r.train_memory_gib and r.memory_gib for r in records)


def test_a_dead_worker_fails_only_its_member(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(BASE)
    monkeypatch.setattr(worker_pool, "join_python_path", lambda: str(place))  # no worker can start there
    with pytest.raises(RunError, match=r"2 of 2 runs failed: .*its process died with exit code 1"):
        run("sweep.jobs=auto", "sweep.jobs=2")

"""A small sweep end to end with the real programs; and, with a stand-in for training, everything that can go wrong."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from megatron.errors import RunError, UserError
from megatron.launch import sweep
from megatron.model.options import PositionOptions
from megatron.position.registry import encodings, processors

BASE = """
    num_layers: 1
    hidden_size: 16
    num_attention_heads: 2
    seq_length: 16
    train_data_paths: [corpus/train_text_document]
    test_data_paths: [corpus/test_text_document]
    train_iters: 6
    train_micro_batch_size_per_gpu: 4
    optimizer: {type: AdamW, params: {lr: 1e-2}}
    eval_interval: 0
    log_interval: 2
    device: cpu
    use_tensorboard: false
    sweep:
      output: out
      corpus: {sources: [text], folder: corpus, split: [0.5, 0, 0.5]}
      variants:
        rotary: {pos_emb: rotary}
        mine: {pos_emb: alibi, score_processor: cdape, score_processor_options: {width: 4}}
      evaluate: {multiples: [1, 4], windows: 3}
"""

# Stands where `deepy.py train FILE` does: makes a checkpoint folder without weights, quickly.
TRAINER = """
    import json, os, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from megatron.config.schema import Config
    config = Config.read(sys.argv[2])
    with open("calls", "a") as calls:
        calls.write(f"{{config.position.pos_emb}} {{config.training.seed}} {{config.checkpoint.load}}\\n")
    run = Path(config.checkpoint.save)
    stop = config.training.train_iters
    if config.position.pos_emb == os.environ.get("STOP_AT"):
        stop = 3
    checkpoint = run / "checkpoints" / f"step_{{stop:07d}}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    config.save(checkpoint / "config.yml")
    (checkpoint / "progress.json").write_text(json.dumps({{"step": stop}}))
    (checkpoint / "model.safetensors").write_text("weights")
    if stop == 3:
        sys.exit("noise\\nerror: the loss is NaN\\nmore noise")
"""

ROOT = Path(__file__).parents[2]


def write(text: str, name: str = "sweep.yml") -> str:
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a little text to learn."""
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "text"
    texts.mkdir()
    for number in range(12):
        lines = (f"line {i} of text {number}: {'abc' * (i % 3)} {i * number}\n" for i in range(12))
        (texts / f"{number}.txt").write_text("".join(lines))
    return tmp_path


def run(*overrides: str, file: str = "sweep.yml") -> tuple[list, str]:
    out = io.StringIO()
    found = sweep.run([file], overrides, Console(file=out, width=200))
    return found, out.getvalue()


@pytest.fixture
def trainer(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, and evaluation replaced by a record of what it was asked for."""
    write(TRAINER.format(root=str(ROOT)), "trainer.py")
    monkeypatch.setattr(sweep, "DEEPY", place / "trainer.py")
    write(BASE)

    def evaluate(
        runs: list[Path], lengths: list[int], *args: object, names: list[str], output: Path, **_: object
    ) -> list:
        from megatron.reports.records import Record, write

        with open("calls", "a") as calls:
            calls.write(f"evaluate {runs[0]}\n")
        known = {"train_length": 16, "protocol": "last", "tokens": 48, "method": names[0], "metric": "perplexity"}
        seed = int(str(runs[0]).rsplit("_", 1)[1])
        found = [Record(**known, length=length, value=5.0, seed=seed, run=str(runs[0])) for length in lengths]
        write(output / "results.json", found)
        return found

    monkeypatch.setattr("megatron.evaluation.run.evaluate_runs", evaluate)
    return place


def calls() -> list[str]:
    lines = Path("calls").read_text().splitlines()
    Path("calls").unlink()
    return lines


def test_a_sweep_from_text_to_report(place: Path) -> None:
    write(BASE.replace("train_iters: 6", "train_iters: 60"))
    found, said = run()
    assert [(r.method, r.length, r.seed) for r in found] == [
        ("rotary", 16, 1234), ("rotary", 64, 1234), ("mine", 16, 1234), ("mine", 64, 1234),
    ]  # fmt: skip
    assert [r.position for r in found[::2]] == ["rotary", "cdape(width=4)+alibi"]
    assert len({r.target_digest for r in found}) == 1
    # A model that has learned nothing has 257, the vocabulary; this text uses 25 different bytes.
    assert all(1 < r.value < 60 for r in found)
    assert all((r.tokens, r.windows, r.step, r.train_tokens) == (48, 3, 60, 60 * 4 * 16) for r in found)
    stored = json.loads(Path("out/results.json").read_text())
    assert [item["perplexity"] for item in stored] == [r.value for r in found]
    for name in (
        "results.csv",
        "results.md",
        "results.png",
        "report.html",
        "rotary/seed_1234.yml",
        "mine/seed_1234/metrics.jsonl",
    ):
        assert (place / "out" / name).stat().st_size > 0
    report = Path("out/report.html").read_text()
    assert "cdape(width=4)+alibi" in report
    assert "sweep.yml" in report
    assert said.count("Perplexity per token, trained at 16 tokens") == 1
    assert "left)" in said

    again, said = run()
    assert again == found
    assert "trained already" in said
    assert "evaluated already" in said


def test_every_variant_meets_every_seed(trainer: Path) -> None:
    found, _ = run("sweep.seeds=[3, 4]")
    assert [(r.method, r.seed) for r in found if r.length == 16] == [
        ("rotary", 3),
        ("rotary", 4),
        ("mine", 3),
        ("mine", 4),
    ]
    assert [line for line in calls() if not line.startswith("evaluate")] == [
        "rotary 3 None", "rotary 4 None", "alibi 3 None", "alibi 4 None",
    ]  # fmt: skip


def test_a_failure_keeps_what_is_finished_and_the_same_command_carries_on(
    trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_AT", "alibi")
    with pytest.raises(RunError) as caught:
        run()
    assert str(caught.value).startswith("mine, seed 1234: the loss is NaN (2 results are kept in out)")
    assert "\n" not in str(caught.value)
    kept = json.loads(Path("out/results.json").read_text())
    assert [item["method"] for item in kept] == ["rotary", "rotary"]
    assert "1 runs to come" in Path("out/report.html").read_text()
    assert "noise" in Path("out/mine/seed_1234.txt").read_text()
    calls()

    monkeypatch.delenv("STOP_AT")
    found, said = run()
    assert "mine, seed 1234: resumes after step 3 of 6" in said
    assert calls() == ["alibi 1234 out/mine/seed_1234", "evaluate out/mine/seed_1234"]
    assert len(found) == 4


def test_only_what_is_asked_for_anew_is_done_anew(trainer: Path) -> None:
    run()
    calls()
    run("sweep.evaluate.multiples=[1, 2]")
    assert calls() == ["evaluate out/rotary/seed_1234", "evaluate out/mine/seed_1234"]
    results = Path("out/rotary/seed_1234/results.json")
    there = json.loads(results.read_text())
    # Somebody evaluated that run by another protocol: what the sweep measured is still there, and found.
    results.write_text(json.dumps([{**there[0], "protocol": "nonoverlapping"}, *there]))
    found, _ = run("sweep.evaluate.multiples=[1, 2]")
    assert not Path("calls").exists()
    assert {r.protocol for r in found} == {"last"}
    results.write_text(json.dumps(there[1:]))  # in the sweep's own way, but at other lengths
    run("sweep.evaluate.multiples=[1, 2]")
    assert calls() == ["evaluate out/rotary/seed_1234"]


def test_another_configuration_is_not_taken_for_the_same_run(trainer: Path) -> None:
    run()
    before = json.loads(Path("out/results.json").read_text())
    with pytest.raises(UserError, match=r"out/rotary/seed_1234: holds a run .*weight_decay 0.1 there, 0.2 here"):
        run("weight_decay=0.2")
    assert json.loads(Path("out/results.json").read_text()) == before
    run("log_interval=1", "attention_backend=chunked")  # how loud and how fast is no difference


def test_a_training_that_dies_without_a_word_is_told(trainer: Path) -> None:
    write("import sys; sys.exit(9)", "trainer.py")
    with pytest.raises(
        RunError, match=r"rotary, seed 1234: training ended with exit code 9; .*out/rotary/seed_1234.txt"
    ):
        run()
    write("", "trainer.py")
    with pytest.raises(RunError, match="ended early without an error"):
        run()


def test_an_interrupt_ends_the_training(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets one signal, in a session of its own, and its time to save; a second Ctrl-C does without."""
    write(
        """
        import os, signal, sys, time
        from pathlib import Path

        def save(*_):
            time.sleep(1)
            Path("saved").touch()
            sys.exit(143)

        signal.signal(signal.SIGTERM, save)
        parent = os.environ["FARFIELD_PARENT"]
        Path("started").write_text(f"{os.getpid()} {os.getsid(0)} {parent}")
        time.sleep(60)
        """,
        "trainer.py",
    )

    def interrupted(*_: object) -> None:
        if Path("started").is_file() and Path("started").read_text():
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sweep, "_last_step", interrupted)
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(["sweep.yml"], (), Console(file=out, width=200))
    assert "stopping; a training under way saves after its step first" in out.getvalue()
    pid, session, parent = map(int, Path("started").read_text().split())
    assert (session, parent) == (pid, os.getpid())
    assert Path("saved").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

    for name in ("started", "saved"):
        Path(name).unlink()
    usual = subprocess.Popen.wait

    def impatient(self: subprocess.Popen, timeout: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", usual)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", impatient)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not Path("saved").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("started").read_text().split()[0]), 0)


def test_a_finished_training_without_its_test_is_started_again(trainer: Path) -> None:
    """It was killed between its last checkpoint and the end of its test."""
    tests = "eval_interval=3"
    run(tests)
    assert [line.split()[0] for line in calls()] == ["rotary", "evaluate", "alibi", "evaluate"]
    Path("out/rotary/seed_1234/metrics.jsonl").write_text('{"kind": "test", "step": 6}\n')
    Path("out/mine/seed_1234/metrics.jsonl").write_text('{"kind": "test", "step": 6\n')
    _, said = run(tests)
    assert calls()[0] == "alibi 1234 out/mine/seed_1234"
    assert "mine, seed 1234: is trained; its test is made up for" in said


def test_a_damaged_checkpoint_is_no_finished_training(trainer: Path) -> None:
    run()
    calls()
    checkpoints = Path("out/mine/seed_1234/checkpoints")
    shutil.copytree(checkpoints / "step_0000006", checkpoints / "step_0000003")
    (checkpoints / "step_0000003" / "progress.json").write_text('{"step": 3}')
    (checkpoints / "step_0000006" / "model.safetensors").unlink()
    _, said = run()
    assert "mine, seed 1234: resumes after step 3 of 6" in said
    assert calls() == ["alibi 1234 out/mine/seed_1234", "evaluate out/mine/seed_1234"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("output: out", "outptu: out"), "sweep.yml:16: unknown key 'sweep.outptu'; did you mean output?"),
        (("windows: 3", "window: 3"), "sweep.yml:21: unknown key 'sweep.evaluate.window'; did you mean windows?"),
        (("windows: 3", "windows: 0"), "sweep.yml:21: sweep.evaluate.windows is 0; it must be at least 1"),
        (("windows: 3", "protocol: first"), "sweep.evaluate.protocol is first"),
        (("multiples: [1, 4]", "multiples: [1, 4], lengths: [16]"), "lengths or multiples, not both"),
        (("multiples: [1, 4]", "multiples: [0.3]"), "'0.3x' is not a length"),
        (("windows: 3", "windows: 3000"), "enough for"),
        (("multiples: [1, 4]", "multiples: [4096]"), "too few for the largest length"),
        (("rotary: {pos_emb: rotary}", "rotary: {pos_emb: rotery}"), "sweep.yml:19: "),
        (("rotary: {pos_emb: rotary}", "rotary: {pos_em: rotary}"), "sweep.yml:19: unknown key 'pos_em'"),
        (("rotary: {pos_emb: rotary}", "a/b: {pos_emb: rotary}"), "sweep.yml:19: variant 'a/b' names a folder"),
        (("rotary: {pos_emb: rotary}", "rotary: {seed: 1}"), "sweep.yml:19: seed is set by the sweep: use sweep.seeds"),
        (("rotary: {pos_emb: rotary}", "rotary: {seq_length: 32}"), "all variants of a sweep need the same"),
        (("train_iters: 6", "train_iters: 6\n    save: runs/x"), "sweep.yml:9: save is set by the sweep: use"),
        (("output: out", "output: out\n      seeds: [1, 1]"), "sweep.yml:17: sweep.seeds repeats a seed"),
        (("output: out", "output: text/1.txt/x"), "sweep.output is text/1.txt/x, but text/1.txt is a file; name"),
        (("sources: [text]", "sources: [nothing]"), "nothing"),
        (("variants:", "variants: {}\n      varients:"), "unknown key 'sweep.varients'; did you mean variants?"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_are_told_before_anything_is_trained(
    trainer: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in BASE
    write(BASE.replace(*change))
    with pytest.raises(UserError) as caught:
        run()
    assert message in str(caught.value)
    assert not Path("calls").exists()


def test_mistakes_on_the_command_line(trainer: Path) -> None:
    for override, message in (
        ("seed=3", "command line: seed is set by the sweep: use sweep.seeds=…"),
        ("sweep.output.x=3", "sweep.output is out, not a mapping"),
        ("sweep.evaluat.windows=3", "command line: unknown key 'sweep.evaluat'; did you mean evaluate?"),
        ("sweep.evaluate.windows=0", "command line: sweep.evaluate.windows is 0"),
        ("sweep.evaluate={window: 3}", "command line: unknown key 'sweep.evaluate.window'"),
        ("sweep.seeds=3", "command line: sweep.seeds is 3"),
        (
            "sweep.seeds=[5000000000]",
            "command line: item 1 of sweep.seeds is 5000000000; it must be at most 4294967295",
        ),
        ("num_layrs=3", "num_layers"),
    ):
        with pytest.raises(UserError) as caught:
            run(override)
        assert message in str(caught.value)


def test_files_without_a_sweep(place: Path) -> None:
    with pytest.raises(UserError, match="there is no sweep: mapping"):
        sweep.read(["125M"])
    write("sweep: [1]")
    with pytest.raises(UserError, match=r"sweep.yml:1: sweep is \[1\]; it must be a mapping of keys"):
        sweep.read(["quickstart", "sweep.yml"])


def test_of_several_files_with_a_sweep_the_later_wins_key_by_key(place: Path) -> None:
    write(BASE, "base.yml")
    over = "num_layers: 2\nsweep:\n  output: elsewhere\n  seeds: [1234]\n  variants:\n    t5: {pos_emb: t5}\n"
    write(over)
    found = sweep.read(["base.yml", "sweep.yml"])
    assert [(m.variant, str(m.folder), m.config.model.num_layers) for m in found.members] == [
        ("t5", "elsewhere/t5/seed_1234", 2)
    ]
    assert (found.options.evaluate.windows, found.options.corpus.folder) == (3, "corpus")
    assert found.notes == (
        "sweep.output (base.yml:16) replaced (sweep.yml:3)",
        "sweep.variants (base.yml:18) replaced (sweep.yml:5)",
        "num_layers 1 (base.yml:2) replaced by 2 (sweep.yml:1)",
    )
    assert set(found.texts) == {"base.yml", "sweep.yml"}
    write(over.replace("pos_emb: t5", "pos_em: t5"))
    with pytest.raises(UserError, match=r"sweep.yml:6: unknown key 'pos_em'"):
        sweep.read(["base.yml", "sweep.yml"])
    write(BASE.replace("windows: 3", "windows: 0"), "base.yml")
    with pytest.raises(UserError, match=r"base.yml:21: sweep.evaluate.windows is 0"):
        sweep.read(["base.yml", "sweep.yml"])
    with pytest.raises(UserError, match=r"command line: sweep.output.x: sweep.output is elsewhere, not a mapping"):
        sweep.read(["base.yml", "sweep.yml"], ["sweep.output.x=3"])


def test_the_quickstart_is_valid() -> None:
    found = sweep.read([str(ROOT / "configs" / "quickstart.yml")])
    assert [member.variant for member in found.members] == ["rotary", "kerple_log", "cdape"]
    assert {member.config.model.seq_length for member in found.members} == {64}
    assert found.members[2].config.position.score_processor == "cdape"
    assert found.options.evaluate.multiples == [1, 2, 4, 8, 16, 32]
    assert found.notes == ()


def test_the_zoo_has_every_encoding_alone_and_every_processor_at_the_quickstarts_budget() -> None:
    configs = ROOT / "configs"
    zoo = sweep.read([str(configs / "quickstart.yml"), str(configs / "zoo.yml")])
    quickstart = sweep.read([str(configs / "quickstart.yml")])
    assert (zoo.options.output, zoo.options.evaluate, zoo.options.corpus, zoo.options.seeds) == (
        "runs/zoo", quickstart.options.evaluate, quickstart.options.corpus, quickstart.options.seeds,
    )  # fmt: skip
    positions = {member.variant: member.config.position for member in zoo.members}
    default = PositionOptions()
    for name in encodings():
        assert positions[name] == default.model_copy(update={"pos_emb": name})
    assert {position.score_processor for position in positions.values()} == {"none", *processors()}
    positional = {"save", "max_position_embeddings", *PositionOptions.model_fields}
    budgets = [
        {name: value for name, value in member.config.flat().items() if name not in positional}
        for member in (*zoo.members, *quickstart.members)
    ]
    assert all(budget == budgets[0] for budget in budgets)


def test_how_long_it_takes_is_told_from_what_was_measured(trainer: Path) -> None:
    steps = textwrap.indent(textwrap.dedent("""
        import time
        run.mkdir(parents=True)
        for step in (1, 2, 3):
            with open(run / "metrics.jsonl", "a") as file:
                print(json.dumps({{"step": step}}), file=file)
            time.sleep(0.7)
    """), "    ")  # fmt: skip
    slow = TRAINER.replace("    stop = config", steps + "    stop = config", 1)
    write(slow.format(root=str(ROOT)), "trainer.py")
    _, said = run("sweep.seeds=[3, 4]")
    lines = said.splitlines()
    # Known before the first training: 6 steps of 4 × 16 tokens, 3 windows of 16 and of 64, four times.
    (todo,) = [line for line in lines if " to do: " in line]
    assert todo.startswith("4 of 4 runs to do: ")
    assert "FLOP of training and " in todo
    (forecast,) = [line for line in lines if line.endswith("at the speed of the first steps")]
    assert "for 4 of 4 runs" in forecast
    first_done = next(number for number, line in enumerate(lines) if line.startswith("1 of 4 runs done"))
    assert lines.index(todo) < lines.index(forecast) < first_done
    done = [line.split(" runs done, about")[0] for line in lines if " runs done, about" in line]
    assert done == ["1 of 4", "2 of 4", "3 of 4"]
    assert any(line.startswith("3/4 train mine, seed 3: step 0 of 6") for line in lines)
    _, said = run("sweep.seeds=[3, 4, 5]")
    assert "2 of 6 runs to do: " in said
    _, said = run("sweep.seeds=[3, 4, 5]")
    assert "all 6 runs are done" in said


def test_a_variant_whose_positions_end_is_announced_and_scored_up_to_there(place: Path) -> None:
    write(BASE.replace("rotary: {pos_emb: rotary}", "learned: {pos_emb: learned}"))
    with pytest.raises(UserError, match=r"learned, seed 1234: pos_emb learned ends at 16 .*, length 32 is past it"):
        run("sweep.evaluate.multiples=[2, 4]")
    found, said = run()
    assert [(r.method, r.length, r.max_length) for r in found] == [
        ("learned", 16, 16), ("mine", 16, None), ("mine", 64, None),
    ]  # fmt: skip
    assert len({r.target_digest for r in found}) == 1
    assert (
        said.count("learned: pos_emb learned ends at 16 positions (max_position_embeddings); scored at lengths up") == 1
    )
    assert "max 16" in Path("out/results.md").read_text()
    assert "max 16" in Path("out/report.html").read_text()


def test_reading_a_sweep_needs_no_torch() -> None:
    code = "import sys; from megatron.launch.sweep import read; read(['quickstart']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

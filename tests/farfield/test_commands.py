"""Commands in a script: return values and exceptions."""

import gzip
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fork_server import ForkingPopen
from tiny_runs import tiny_config, write_corpora

import farfield
from farfield import commands
from farfield.commands import format_flags, format_overrides, prepare
from megatron.config.load import load_config, read_config
from megatron.position import catalog, registry
from megatron.position.facts import AttentionDims
from megatron.sweeps.remaining_work import find_finished_step
from megatron.training.train import train
from megatron.utils.errors import FarfieldWarning

ROOT = Path(__file__).resolve().parents[2]
OWN = '''"""A penalty."""
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import EncodingCost

class {name}(Encoding):
    formula = "-n/8"
    parameters_summary, source, advice = "", "a test", "None."
    adds_bias = True
    cost = EncodingCost()

    def table(self, distances):
        return ScoreTerms(bias=(-distances / 8).expand(self.dims.num_heads, -1))
'''


@pytest.fixture
def user_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with one encoding, named by `FARFIELD_METHODS`."""
    (tmp_path / "methods" / "encodings").mkdir(parents=True)
    (tmp_path / "methods" / "encodings" / "eighths.py").write_text(OWN.format(name="Eighths"))
    monkeypatch.setenv(catalog.METHODS_VARIABLE, str(tmp_path / "methods"))
    return tmp_path / "methods" / "encodings"


def test_an_error_is_raised_and_not_printed_too(monkeypatch, capfd) -> None:
    code = "import sys; print('reading'); print('error: nope: no such file', file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr(commands, "COMMAND", ["-c", code])
    with pytest.raises(farfield.UserError, match=r"^nope: no such file$"):
        commands.run_command("prepare")
    assert capfd.readouterr() == ("reading\n", "")


def test_the_output_of_a_command_is_closed(monkeypatch) -> None:
    children = []
    open_child = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **keys: children.append(open_child(*args, **keys)) or children[-1]
    )
    monkeypatch.setattr(commands, "COMMAND", ["-c", "print('done')"])
    commands.run_command("prepare", quiet=True)
    assert children[0].stdout.closed


def test_an_interrupted_command_shows_what_it_prints_while_it_stops(monkeypatch, capfd) -> None:
    """A training prints where it saved and how to resume it."""
    code = (
        "import os, signal, sys, time\n"
        "def stop(*_):\n    print('saved; resume with …'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('step 1', flush=True)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(commands, "COMMAND", ["-c", code])
    with pytest.raises(KeyboardInterrupt):
        commands.run_command("train")
    assert capfd.readouterr().out.endswith("saved; resume with …\n")


@pytest.fixture
def commands_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands as forks of this process. The notebooks' corpus is prepared by a separate process."""
    monkeypatch.setattr(subprocess, "Popen", ForkingPopen)


def test_torch_waits_for_the_first_model() -> None:
    code = "import sys, farfield; dir(farfield); farfield.UserError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    with pytest.raises(AttributeError, match=r"has no attribute 'laod'; it has .* load, "):
        farfield.laod  # noqa: B018


def test_keys_match_the_command_line(tmp_path: Path) -> None:
    keys = {
        "pos_emb": ["rotary", "none"], "save": str(tmp_path / "1e5"), "attention_window": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "optimizer.params.eps": 1e-7,
    }  # fmt: skip
    config = load_config(["162M"], format_overrides(keys)).config
    assert config.position.pos_emb == ["rotary", "none"]
    assert config.checkpoint.save == str(tmp_path / "1e5")
    assert config.position.attention_window is None
    params = config.optimizer.optimizer.params
    assert format_overrides({"seed": np.int64(5), "save": Path("runs/😀")}) == ["seed=5", 'save="runs/😀"']
    with pytest.raises(farfield.UserError, match="is not a valid configuration value"):
        format_overrides({"seed": object()})
    assert (params.lr, params.eps) == (1e-3, 1e-7)


def test_options_become_flags() -> None:
    assert format_flags({"overwrite": False}) == []
    options = {"suffixes": [".tex", ".bib"], "vocab_size": 300, "overwrite": True, "add_bos": False, "merge_file": None}
    assert format_flags(options) == ["--suffixes=.tex,.bib", "--vocab-size=300", "--overwrite", "--no-add-bos"]


@pytest.mark.usefixtures("commands_are_forks")
def test_a_corpus_is_prepared_as_asked(tmp_path: Path) -> None:
    (tmp_path / "one.tex").write_text("alpha beta " * 40)
    (tmp_path / "two.md").write_text("not read")
    folder = prepare(tmp_path, output=tmp_path / "corpus", suffixes=[".tex"], split="none", add_bos=False, quiet=True)
    (found,) = folder.glob("*.bin")
    assert found.read_bytes()
    assert b"not read" not in found.read_bytes()


def test_a_digest_is_of_code_alone(user_methods: Path) -> None:
    def digest(old: str, new: str) -> str:
        (user_methods / "eighths.py").write_text(OWN.format(name="Eighths").replace(old, new))
        return catalog.compute_method_digests({"encodings": ["eighths", "alibi"]})["encodings/eighths.py"]

    body = "return ScoreTerms(bias=(-distances / 8)"
    plain = digest("", "")
    assert digest('"a test"', '"a book"') == digest("A penalty.", "Another.") == plain
    assert digest("    def table", "    # faster\n\n    def table") == plain
    for change in ("distances / 4", "distances / 8.0", "distances // 8"):
        assert digest("distances / 8", change) != plain
    named = [digest(body, f"source = {n}; " + body.replace("8", "source")) for n in (8, 4)]
    assert named[0] != named[1], "a local name is no description"
    (user_methods / "eighths.py").write_text("class (")
    with pytest.raises(catalog.MethodFileError, match=r"eighths\.py:1: invalid syntax"):
        catalog.compute_method_digests({"encodings": ["eighths"]})


@pytest.mark.usefixtures("commands_are_forks")
def test_a_training_with_a_user_method(tmp_path: Path, user_methods: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """A method in a user's folder is trained by a separate process, loaded here, and rejected without its file."""
    corpus = write_corpora(tmp_path / "text")
    config = tiny_config(corpus, tmp_path / "run", train_iters=2, pos_emb="eighths", device="cpu")
    config.save(tmp_path / "run.yml")
    run = farfield.train(tmp_path / "run.yml", seed=5)
    assert run == tmp_path / "run"
    assert "step" in capsys.readouterr().out
    model = farfield.load(run, device="cpu")
    assert model.method_name == "eighths"
    assert model.config["seed"] == 5
    assert model.bias_table(9)[0, 0].tolist() == [-n / 8 for n in range(9)]
    assert "eighths" in [method["name"] for method in farfield.list_methods()]
    environment = {"PATH": "/usr/bin:/bin"}
    asked = [sys.executable, str(ROOT / "deepy.py"), "evaluate", str(run)]
    refused = subprocess.run(asked, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"error: {run}: eighths.py not found in" in refused.stderr
    assert "FARFIELD_METHODS" in refused.stderr


@pytest.mark.usefixtures("commands_are_forks")
def test_a_changed_method_is_reported_and_not_resumed(tmp_path: Path, user_methods: Path) -> None:
    corpus = write_corpora(tmp_path / "text")
    config = tiny_config(corpus, tmp_path / "run", train_iters=2, pos_emb="eighths", device="cpu")
    config.save(tmp_path / "run.yml")
    train(config)
    run = tmp_path / "run"
    file = user_methods / "eighths.py"
    file.write_text(file.read_text().replace("a test", "a better one") + "\n# a comment\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FarfieldWarning)
        farfield.load(run, device="cpu")
    file.write_text(file.read_text().replace("distances / 8", "distances / 4"))
    with pytest.warns(FarfieldWarning, match=r"the code of encodings/eighths\.py has changed since the training"):
        model = farfield.load(run, device="cpu")
    assert model.bias_table(3)[0, 0].tolist() == [0, -0.25, -0.5], "the file as it is now"
    stored = read_config(run / "config.yml")
    member = SimpleNamespace(folder=run, config=stored, resolved_config=stored, origin=None, results=run)
    with pytest.raises(farfield.UserError, match=r"was trained with different code of encodings/eighths\.py"):
        find_finished_step(member)
    (user_methods / "half.py").write_text("class Half(")
    assert farfield.load(run, device="cpu").method_name == "eighths", "another file that is broken is in nobody's way"
    with pytest.raises(farfield.UserError, match=r"half\.py:1: "):
        farfield.list_methods()
    with pytest.raises(farfield.UserError, match=r"encodings/eighths\.py: its code has changed since .*finetune=true"):
        farfield.train(tmp_path / "run.yml", load=str(run), train_iters=3, quiet=True)


@pytest.mark.usefixtures("commands_are_forks")
def test_a_failed_command_is_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(farfield.UserError, match="save is not set"):
        farfield.train("162M")
    with pytest.raises(farfield.UserError, match="no data to train on"):
        farfield.train("162M", save=str(tmp_path / "run"), quiet=True)
    with pytest.raises(farfield.UserError, match="nothing: no such file"):
        farfield.prepare("nothing", output=tmp_path / "corpus", quiet=True)
    with pytest.raises(farfield.UserError, match=r": no results.json and no records of runs found"):
        farfield.read_results(tmp_path)
    with pytest.raises(farfield.UserError, match=r"^path is nope, which does not exist; give a results.json or its"):
        farfield.read_results("nope")


def test_a_folder_with_a_file_for_each_run_is_read_as_by_report(tmp_path: Path) -> None:
    saved = []
    for run in ("alibi/seed_1234.json.gz", "rotary/seed_1235.json.gz"):
        (tmp_path / run).parent.mkdir()
        content = (ROOT / "docs/results/zoo" / run).read_bytes()
        (tmp_path / run).write_bytes(content)
        saved += json.loads(gzip.decompress(content))["records"]
    found = farfield.read_results(tmp_path)
    for field in ("method", "seed", "length", "perplexity"):
        assert [row.get(field) for row in found] == [record.get(field) for record in saved]


def test_user_methods_must_not_hide_ours(user_methods: Path) -> None:
    (user_methods / "rotary.py").write_text(OWN.format(name="Mine"))
    with pytest.raises(catalog.MethodFileError, match=r"rotary.py: .*rotary.py already has that name"):
        catalog.list_encodings()
    with pytest.raises(farfield.UserError, match="rename one of the files"):
        farfield.list_methods()


def test_errors_in_user_files_are_one_line(user_methods: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = AttentionDims(num_heads=2, head_dim=4, hidden_size=8, train_length=16, max_length=16)
    assert registry.build_encoding("eighths", dims).formula == "-n/8"
    (user_methods / "broken.py").write_text("import nothing_of_that_name\n" + OWN.format(name="Broken"))
    with pytest.raises(catalog.MethodFileError, match=r"broken.py:1: ModuleNotFoundError"):
        registry.build_encoding("broken", dims)
    monkeypatch.setenv(catalog.METHODS_VARIABLE, str(user_methods.parent.parent / "nowhere"))
    with pytest.raises(catalog.MethodFileError, match="nowhere has no folder encodings, processors or temperatures"):
        catalog.list_encodings()


@pytest.mark.parametrize("source", ["--help", "-h", "--overwrite", "--version"])
def test_no_argument_becomes_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(farfield.UserError, match=source):
        prepare(source, output="corpus", quiet=True)
    for call in (farfield.train, farfield.sweep):
        with pytest.raises(farfield.UserError, match=source):
            call(source)
    with pytest.raises(farfield.UserError, match="there is no option help"):
        prepare("python", output="corpus", help=True)
    assert list(tmp_path.iterdir()) == []


WRONG_VALUES = (None, 5, 2.5, "", "\ud800", "a\0b", [5], {}, {(1, 2): 3}, object(), b"x", {1}, np.array(3), type)


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: ascii(value)[:30])
def test_invalid_arguments_raise_user_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    monkeypatch.chdir(tmp_path)
    calls = {
        "runs": [lambda: farfield.evaluate(value), lambda: farfield.analyze(value)],
        "run": [lambda: farfield.load(value)],
        "path": [lambda: farfield.read_results(value)],
        "sources": [lambda: prepare(value, output="corpus")],
        "files": [lambda: farfield.train(value), lambda: farfield.sweep(value)],
        "output": [lambda: prepare("python", output=value)],
        "seed": [lambda: prepare("python", output="corpus", seed=value)] if value not in (5, 3) else [],
        "hf.split": [lambda: prepare("python", output="corpus", hf_split=value)] if value is not None else [],
    }
    if value is not None:
        calls["output"] += [lambda: farfield.evaluate("run", value), lambda: farfield.analyze("run", value)]
    for name, functions in calls.items():
        for function in functions:
            with pytest.raises(farfield.UserError, match=name) as refused:
                function()
            assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []

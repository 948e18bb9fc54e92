"""Tasks of lm-evaluation-harness during training: they change nothing, and equal an evaluation of the checkpoint."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import losses, records, same_weights, tiny_config, train_with_processes

from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.distributed.hardware import LocalHardware
from megatron.options.evaluation import EvaluationOptions, TaskOptions
from megatron.training.check_start import TrainingMachines, check_start
from megatron.training.resolve_run import resolve_run
from megatron.training.train import train
from megatron.utils.errors import RunError, UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

pytest.importorskip("lm_eval", reason="requirements-eval.txt is not installed")
from megatron.evaluation.harness_tasks import evaluate_tasks

pytestmark = pytest.mark.usefixtures("no_pictures")

ROUNDING = compute_tolerance(*count_gpt_sums(32, layers=2))
TASKS = {
    "choose": 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\n'
    'doc_to_target: "{{gold}}"\nmetric_list: [{metric: acc}]\n',
    "read": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}}"\n'
    "metric_list: [{metric: word_perplexity}]\n",
    "write": 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{choices[0]}}"\n'
    "generation_kwargs: {until: [], max_gen_toks: 3, do_sample: true, temperature: 1.0}\n"
    "metric_list: [{metric: exact_match}]\n",
}
KEYS: dict[str, Any] = {"train_iters": 4, "score_processor": "dape", "hidden_dropout": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a task of each kind of request, about sequences of numbers."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {"q": " ".join(str((start + i) % 60) for i in range(9)), "choices": [str(start), "7", "8 9"], "gold": start % 3}
        for start in range(0, 60, 7)
    ]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    data = f"{{data_files: {{test: {folder}/documents.jsonl}}, cache_dir: {folder}/cache}}"
    shared = f"dataset_path: json\ndataset_kwargs: {data}\ntest_split: test\nmetadata: {{version: 1.0}}\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{shared}{text}")
    return folder


def harness(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"harness": {"tasks": list(TASKS), "interval": 2, "include_path": str(folder), "limit": 7, **keys}}


def values(run: Path) -> dict[tuple[str, int], float]:
    """Return the values of all tasks by metric and step."""
    metrics = {"choose": "acc", "read": "word_perplexity", "write": "exact_match"}
    return {
        (metric, step): record[metric]
        for task, metric in metrics.items()
        for step, record in records(run, f"harness/{task}").items()
    }


def test_tasks_change_no_number_and_equal_an_evaluation(
    corpus: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tasks change no loss and no weight, also in a resumed run, and leave nothing on the console of a rank."""
    train(tiny_config(corpus, tmp_path / "plain", **KEYS))
    capfd.readouterr()
    level = logging.getLogger("lm_eval").level
    train(tiny_config(corpus, tmp_path / "tasks", **KEYS, **harness(folder, at_start=True, num_fewshot=1)))
    assert capfd.readouterr().err.replace("\r", "").count("it/s") == 0
    assert logging.getLogger("lm_eval").level == level
    half = KEYS | {"train_iters": 2, "lr_decay_iters": 4}
    train(tiny_config(corpus, tmp_path / "resumed", **half, **harness(folder, num_fewshot=1)))
    config = tiny_config(corpus, tmp_path / "resumed", **KEYS, **harness(folder, num_fewshot=1))
    train(config.replace(load=str(tmp_path / "resumed")))
    for name in ("tasks", "resumed"):
        assert losses(tmp_path / name) == losses(tmp_path / "plain")
        assert same_weights(tmp_path / name, tmp_path / "plain")
    found = values(tmp_path / "tasks")
    assert {step for _, step in found} == {0, 2, 4}
    assert values(tmp_path / "resumed") == {key: value for key, value in found.items() if key[1] > 0}
    assert found["word_perplexity", 4] < found["word_perplexity", 0]
    record = records(tmp_path / "tasks", "harness/choose")[4]
    assert (record["requests"], record["acc"] * 7 == round(record["acc"] * 7)) == (21, True)
    assert 0 < record["acc_stderr"] < 1

    options = TaskOptions(tasks=list(TASKS), include_path=str(folder), limit=7, num_fewshot=1)
    evaluated = evaluate_tasks([tmp_path / "tasks"], options, EvaluationOptions(lengths=[16]))
    assert {(each.metric, 4): each.value for each in evaluated} == pytest.approx(
        {key: value for key, value in found.items() if key[1] == 4}, rel=ROUNDING
    )


@pytest.mark.slow
def test_processes_divide_the_requests(corpus: Path, folder: Path, tmp_path: Path) -> None:
    """Data and tensor parallelism and ZeRO 3 give the values of one process."""
    keys = {"train_iters": 1, "score_processor": "dape", **harness(folder, limit=4), "attention_mask": "document"}
    train(tiny_config(corpus, tmp_path / "alone", **keys))
    halves = {"train_micro_batch_size_per_gpu": 2, "num_gpus": 2}
    layouts: dict[str, dict[str, Any]] = {
        "data": halves,
        "zero3": {**halves, "zero_optimization": {"stage": 3}},
        "tensor": {"num_gpus": 2, "model_parallel_size": 2},
    }
    configs = [tiny_config(corpus, tmp_path / name, **keys, **more) for name, more in layouts.items()]
    assert train_with_processes(tmp_path / "job", configs) == [None] * len(layouts)
    alone = values(tmp_path / "alone")
    for name in layouts:
        assert values(tmp_path / name) == pytest.approx(alone, rel=ROUNDING)
        counts = [records(tmp_path / each, "harness/write")[1] for each in ("alone", name)]
        assert counts[0]["tokens"] == counts[1]["tokens"]


def check(config: Config) -> None:
    """Check a start as a dry run does."""
    check_start(resolve_run(config, LocalHardware(0, 1)), TrainingMachines())


def test_errors_come_before_the_first_step(
    corpus: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import tasks as of_harness

    # Skips the thousands of built-in tasks, which take ten seconds to list.
    usual = of_harness.TaskManager
    monkeypatch.setattr(
        of_harness, "TaskManager", lambda include_path, **_: usual(include_path=include_path, include_defaults=False)
    )
    hub = "task: hub\ndataset_path: nobody/no-such-data\ntest_split: test\nmetadata: {version: 1.0}\n"
    (folder / "hub.yaml").write_text(hub + TASKS["read"])
    for options, message in (
        ({"tasks": ["chose"]}, r"^harness.tasks: unknown task 'chose'; did you mean .*choose"),
        ({"include_path": "nowhere"}, r"^harness.include_path nowhere: not a folder"),
        ({"length": 3}, r"^harness.tasks: write: generates up to 3 tokens.* at length 3; use larger harness.length"),
        ({"metadata": "4096"}, r"^harness.metadata: '4096' is not a mapping"),
        ({"metadata": "{4096: a}"}, r"^harness.metadata: key 4096 is not a string"),
        ({"tasks": ["hub"]}, r"^harness.tasks hub: .* not in the Hugging Face cache, and harness.download is false"),
    ):
        keys = harness(folder, **options)
        run = tmp_path / "refused"
        for start in (check, train):
            with pytest.raises((UserError, RunError), match=message) as error:
                start(tiny_config(corpus, run, **keys))
            assert "\n" not in str(error.value)
        assert not (run / "config.yml").exists()
    # A dry run does not reach the hub for data that training downloads.
    hub_run = resolve_run(
        tiny_config(corpus, run, **harness(folder, tasks=["hub"], download=True)), LocalHardware(0, 1)
    )
    assert not check_start(hub_run, TrainingMachines(), may_download=False).has_task_data
    with pytest.raises(RunError, match="the hub cannot be reached"):
        check_start(hub_run, TrainingMachines())
    learned = {**harness(folder, length=32), "pos_emb": "learned"}
    with pytest.raises(UserError, match=r"harness.length: 32 tokens, but the model has 16 positions"):
        check(tiny_config(corpus, **learned))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"harness.tasks needs the package lm_eval, .* -r requirements-eval.txt"):
        train(tiny_config(corpus, **harness(folder)))


def test_layouts_and_tasks_that_cannot_be_evaluated_are_rejected_by_name() -> None:
    def load(*pairs: str) -> Config:
        return load_config(["125M"], ["train_data_paths=[a]", "harness.tasks=piqa", *pairs]).config

    assert load("model_parallel_size=2").logging.harness.tasks == ["piqa"]
    assert load("harness.metadata={lengths: [4]}").logging.harness.metadata == {"lengths": [4]}
    with pytest.raises(UserError, match=r"harness.metadata is 4096; it must be a mapping or a string"):
        load("harness.metadata=4096")
    for pair, reason in (
        ("pipe_parallel_size=2", "not supported with pipe_parallel_size 2"),
        ("context_parallel_size=2", "not supported with context_parallel_size 2"),
    ):
        with pytest.raises(UserError, match=f"harness.tasks: {reason}"):
            load(pair)
    loaded = load_config(["125M"], ["train_data_paths=[a]", "harness.limit=7"])
    assert any("harness.limit has no effect: harness.tasks is []" in note for note in loaded.notes)

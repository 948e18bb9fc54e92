"""Tasks of lm-evaluation-harness, offline, compared with direct computations without batches, padding or cache."""

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.load import load_config
from megatron.distributed.process_groups import build_single_process_groups
from megatron.evaluation.harness_tasks import build_task_records, evaluate_tasks
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.options.evaluation import EvaluationOptions, TaskOptions
from megatron.reports.records import Record, read_records
from megatron.utils.errors import RunError, UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

pytestmark = pytest.mark.usefixtures("no_pictures")

pytest.importorskip("lm_eval", reason="requirements-eval.txt is not installed")

LENGTHS = [12, 24]
DOCUMENTS = [f"{i * i} is the square of {i}, é {'and more ' * (i % 4)}" for i in range(7)]
QUESTIONS = [
    {"q": "one ", "choices": ["two", "three words"], "gold": 0},
    {"q": "a question that is longer than both of the lengths ", "choices": ["a", "b", "c"], "gold": 2},
    {"q": "", "choices": ["now", "never"], "gold": 1},
    {"q": "trailing  ", "choices": ["x", "yy"], "gold": 0},
    {"q": "mid", "choices": ["dle", "night", "day"], "gold": 1},
]
ROUNDING = compute_tolerance(*count_gpt_sums(16, layers=1))  # rounding of a token's log probability
TASK = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{data}.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
metadata: {{version: 1.0}}
target_delimiter: ""
"""
TASKS = {
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "choices": """\
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "asked": """\
output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "written": """\
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tasks of each kind, and a group of two of them."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS))
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "yaml").mkdir()
    for name, text in TASKS.items():
        data = "documents" if name == "texts" else "questions"
        (folder / "yaml" / f"{name}.yaml").write_text(f"task: {name}\n{TASK.format(folder=folder, data=data)}{text}")
    group = "group: both\ntask: [choices, asked]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    (folder / "yaml" / "both.yaml").write_text(f"{group}metadata: {{version: 1.0}}\n")
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """Run with random weights and a byte tokenizer."""
    return make_run(place / "run")


def make_run(folder: Path, *overrides: str) -> Path:
    shape = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=12", "train_iters=5"]
    position = ["pos_emb=kerple_log", "score_processor=cdape", "init_method_std=0.3"]
    data = ["train_data_paths=[gone/train_text_document]"]
    config = load_config([], [*shape, *position, *data, f"save={folder}", *overrides]).config
    model = build_model(config.model, config.position, 257, groups=build_single_process_groups(), seed=3)
    checkpoint = folder / "checkpoints" / "step_0000005"
    checkpoint.mkdir(parents=True)
    config.save(checkpoint / "config.yml")
    TrainerState(step=5, consumed_tokens=480, vocabulary={"size": 257, "name": "bytes"}).write(checkpoint)
    weights = {key: value.detach().clone() for key, value in model.state_dict().items() if torch.is_tensor(value)}
    save_file(weights, checkpoint / "model.safetensors")
    return folder


def given(place: Path, run: Path, tasks: str, **options: Any) -> list[Record]:
    of_tasks = {name: options.pop(name) for name in ("limit", "num_fewshot") if name in options}
    chosen = TaskOptions(tasks=tasks.split(","), include_path=str(place / "yaml"), **of_tasks)
    how = {name: options.pop(name) for name in ("output", "console") if name in options}
    return evaluate_tasks([run], chosen, EvaluationOptions(**options), **how)


@torch.no_grad()
def logs(model: GPT, tokens: list[int]) -> torch.Tensor:
    """Return the log probabilities after each token, float64 [T, V], of one whole sequence."""
    return model(torch.tensor([tokens]))[0].double().log_softmax(-1)


def of_continuation(model: GPT, context: str, continuation: str, length: int) -> tuple[float, bool]:
    before = list(context.encode()) or [256]
    after = list(continuation.encode())
    stripped = context.rstrip()
    if context and stripped != context:  # trailing spaces move to the continuation, because words start with them
        before, after = list(stripped.encode()), [*context[len(stripped) :].encode(), *after]
    tokens = [*before, *after][-length - 1 :]
    found = logs(model, tokens[:-1])[-len(after) :]
    return float(found[range(len(after)), after].sum()), found.argmax(-1).tolist() == after


def of_document(model: GPT, text: str, length: int) -> float:
    """Sum the log probabilities of a document in windows; each token is scored once, the last window with the longest
    context.
    """
    stream = [256, *text.encode()]
    total, scored = 0.0, 0
    while scored < len(stream) - 1:
        new = min(length, len(stream) - 1 - scored)
        end = scored + new + 1
        window = stream[max(0, end - length - 1) : end]
        found = logs(model, window[:-1])[-new:]
        total += float(found[range(new), window[-new:]].sum())
        scored += new
    return total


@pytest.fixture(scope="module")
def found(place: Path, run: Path) -> dict[tuple[str, str, int], Record]:
    """Records of all tasks at two lengths, with batches of several rows."""
    records = given(place, run, "texts,choices,asked,written", lengths=LENGTHS, batch_tokens=60)
    return {(record.protocol.split(",")[0], record.metric, record.length): record for record in records}


@pytest.mark.parametrize("length", LENGTHS)
def test_perplexities_of_documents(found: dict[tuple[str, str, int], Record], run: Path, length: int) -> None:
    model = load_model(run).model
    total = sum(of_document(model, text, length) for text in DOCUMENTS)
    units = {
        "byte": sum(len(text.encode()) for text in DOCUMENTS),
        "word": sum(len(re.split(r"\s+", text)) for text in DOCUMENTS),
    }
    for of, count in units.items():
        record = found["texts", f"{of}_perplexity", length]
        assert math.log(record.value) == pytest.approx(-total / count, rel=ROUNDING)
        assert record.tokens == units["byte"]
    assert found["texts", "byte_perplexity", length].bits_per_byte == pytest.approx(
        -total / units["byte"] / math.log(2)
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_choices_and_continuations(found: dict[tuple[str, str, int], Record], run: Path, length: int) -> None:
    model = load_model(run).model
    right = right_by_length = 0
    for question in QUESTIONS:
        sums = [of_continuation(model, question["q"], choice, length)[0] for choice in question["choices"]]
        by_length = [value / len(choice) for value, choice in zip(sums, question["choices"], strict=True)]
        right += sums.index(max(sums)) == question["gold"]
        right_by_length += by_length.index(max(by_length)) == question["gold"]
    assert found["choices", "acc", length].value == right / len(QUESTIONS)
    assert found["choices", "acc_norm", length].value == right_by_length / len(QUESTIONS)
    answers = [of_continuation(model, question["q"], question["choices"][0], length) for question in QUESTIONS]
    mean = -sum(value for value, _ in answers) / len(answers)
    assert math.log(found["asked", "target_perplexity", length].value) == pytest.approx(mean, rel=ROUNDING)
    assert found["asked", "acc", length].value == sum(greedy for _, greedy in answers) / len(answers)


def test_generated_text_is_greedy_over_full_passes(place: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.evaluation.harness import HarnessModel

    seen: list[tuple[str, str]] = []
    usual = HarnessModel.generate_until

    def watched(self: HarnessModel, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        texts = usual(self, requests)
        seen.extend((request.args[0], text) for request, text in zip(requests, texts, strict=True))
        return texts

    monkeypatch.setattr(HarnessModel, "generate_until", watched)
    given(place, run, "written", lengths=[24], batch_tokens=60)
    model = load_model(run).model
    assert [context for context, _ in seen] == [question["q"] for question in QUESTIONS]
    for context, text in seen:
        tokens = (list(context.encode()) or [256])[-16:]
        start = len(tokens)
        while len(tokens) < start + 8 and tokens[start:].count(256) == 0:
            tokens.append(int(logs(model, tokens)[-1, :257].argmax()))
        expected = bytes(token for token in tokens[start:] if token != 256).decode(errors="replace")
        assert text == re.split("e|\n", expected)[0]


def test_records_describe_the_measurement(found: dict[tuple[str, str, int], Record]) -> None:
    record = found["choices", "acc", 24]
    assert (record.protocol, record.train_length, record.tokenizer, record.step) == ("choices, 0-shot", 12, "bytes", 5)
    assert re.search(r"torch .*, lm_eval \d", record.software or "")
    first = found["choices", "acc", 12]
    assert (record.change, record.change_from) == (record.value - first.value, 12)
    assert first.target_digest == record.target_digest != found["asked", "acc", 12].target_digest
    assert first.stderr == pytest.approx(math.sqrt(first.value * (1 - first.value) / (len(QUESTIONS) - 1)))


def test_groups_limits_examples_and_a_folder_that_keeps_perplexities(place: Path, run: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    (group,) = given(
        place, run, "both", limit=3, num_fewshot=1, output=tmp_path, console=Console(file=out, width=200)
    )  # fmt: skip
    assert (group.protocol, group.metric, group.length) == ("both, 1-shot", "acc", 12)
    parts = {record.protocol: record for record in given(place, run, "choices,as*", limit=3, num_fewshot=1)
             if record.metric == "acc"}  # fmt: skip
    assert set(parts) == {"choices, 1-shot", "asked, 1-shot"}
    assert group.value == pytest.approx(sum(record.value for record in parts.values()) / 2)
    assert group.tokens == sum(record.tokens for record in parts.values())
    output = out.getvalue()
    assert re.search(r"asked: \d of 3 requests were truncated on the left to 12 tokens", output)
    assert "Task accuracy in %, trained at 12 tokens, protocol both, 1-shot\n" in output
    lengths = given(place, run, "choices", limit=3, num_fewshot=1, lengths=LENGTHS)
    assert len({record.target_digest for record in lengths}) == 1  # each length has the same examples
    given(place, run, "texts", output=tmp_path)
    assert {record.protocol for record in read_records(tmp_path / "results.json")} == {"both, 1-shot", "texts, 0-shot"}


MADE = """\
import datasets


def make(**told):
    texts = [{"input": "x" * length, "max_length": length} for length in told["lengths"]]
    return {"test": datasets.Dataset.from_list([{**text, "outputs": ["e", "no such text"]} for text in texts])}


def judge(doc, results):
    found = sum(text in "e" + results[0] for text in doc["outputs"]) / 2
    return {"8": -1.0, str(doc["max_length"]): found}


def mean(values):
    counted = [value for value in values if value != -1]
    return sum(counted) / len(counted) if counted else -1
"""


def test_texts_generated_by_a_task(place: Path, run: Path, tmp_path: Path) -> None:
    """As in RULER, a program generates texts of the given lengths and names its metrics by them."""
    (tmp_path / "made.py").write_text(MADE)
    metrics = "".join(
        f"  - {{metric: '{n}', aggregation: !function made.mean, higher_is_better: true}}\n" for n in (8, 12, 16)
    )
    (tmp_path / "made.yaml").write_text(
        "task: made\ndataset_path: ''\ntest_split: test\ncustom_dataset: !function made.make\n"
        "process_results: !function made.judge\noutput_type: generate_until\ndoc_to_text: '{{input}}'\n"
        "doc_to_target: '{{outputs}}'\ngeneration_kwargs: {until: [], max_gen_toks: 4, do_sample: false}\n"
        f"metadata: {{version: 1.0}}\nmetric_list:\n{metrics}"
    )
    tasks = TaskOptions(tasks=["made"], include_path=str(tmp_path), metadata="{lengths: [12, 16]}")
    found = evaluate_tasks([run], tasks, EvaluationOptions(lengths=[24]), output=tmp_path / "out")
    assert {(record.protocol, record.metric, record.value) for record in found} == {
        (f"made, 0-shot, texts of {length} tokens", "string_match", 0.5) for length in (12, 16)
    }
    with pytest.raises(UserError, match="--metadata: '4096' is not a mapping"):
        evaluate_tasks([run], tasks.replace(metadata="4096"), EvaluationOptions())


def test_unsupported_requests_are_reported_in_one_line(place: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import tasks as of_harness

    # Skips the thousands of built-in tasks, which take ten seconds to list.
    usual = of_harness.TaskManager
    monkeypatch.setattr(
        of_harness, "TaskManager", lambda include_path, **_: usual(include_path=include_path, include_defaults=False)
    )
    for tasks, options, message in (
        ("text", {}, r"unknown task 'text'; did you mean .*texts"),
        ("texts", {"data": "x.txt"}, "data applies to texts only, but --tasks is given"),
        ("texts", {"protocol": "nonoverlapping"}, "protocol applies to texts only"),
        (
            "written",
            {"lengths": [8]},
            r"written: generates up to 8 tokens, which leaves no room .* length 8; use larger",
        ),
        ("choices", {"lengths": [4]}, r"a continuation of \d+ tokens cannot be scored at length 4"),
    ):
        with pytest.raises((UserError, RunError), match=message) as error:
            given(place, run, tasks, **options)
        assert "\n" not in str(error.value)
    text = TASK.format(folder=place, data="questions")
    (place / "yaml" / "unsafe.yaml").write_text(f"task: unsafe\nunsafe_code: true\n{text}{TASKS['written']}")
    with pytest.raises(UserError, match="--tasks unsafe: runs model-generated code, which is not supported"):
        given(place, run, "unsafe")
    (place / "questions.jsonl").rename(place / "moved.jsonl")
    with pytest.raises(RunError, match=r"--tasks written: cannot be read: .*questions.jsonl"):
        given(place, run, "written")
    (place / "moved.jsonl").rename(place / "questions.jsonl")
    learned = make_run(place / "learned", "pos_emb=learned", "score_processor=none")
    with pytest.raises(UserError, match="learned supports 12 positions"):
        given(place, learned, "texts", lengths=[24])
    with pytest.raises(UserError, match="nowhere: not a folder"):
        evaluate_tasks([run], TaskOptions(tasks=["a"], include_path="nowhere"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--tasks needs the package lm_eval, .*: pip install -r requirements-eval.txt"):
        given(place, run, "texts")


def test_a_text_without_spaces_has_an_infinite_perplexity_per_word(place: Path, run: Path) -> None:
    """A word of 600 bytes costs more nats than the logarithm of the largest float; the other metrics are kept."""
    (place / "long.jsonl").write_text(json.dumps({"text": "長" * 200}))
    text = TASK.format(folder=place, data="long") + TASKS["texts"]
    (place / "yaml" / "long.yaml").write_text(f"task: long\n{text}")
    console = Console(file=io.StringIO(), width=200)
    (record,) = given(place, run, "long", lengths=[12], console=console)
    assert record.metric == "byte_perplexity"
    assert 600 * math.log(record.value) > math.log(sys.float_info.max)
    assert "long, 0-shot: word_perplexity = inf does not fit in a record" in console.file.getvalue()


def test_an_empty_choice_is_rejected(run: Path) -> None:
    from lm_eval.api.instance import Instance

    from megatron.checkpoint.load_model import load_model
    from megatron.data.tokenizers import ByteTokenizer
    from megatron.evaluation.harness import HarnessModel

    doc: dict[str, object] = {}
    asked = [
        Instance(request_type="loglikelihood", doc=doc, arguments=("a", text), idx=0, metadata=("choices", 4, 1))
        for text in ("b", "")
    ]
    with pytest.raises(RunError, match="choices: document 4 has an empty choice"):
        HarnessModel(load_model(run).model, ByteTokenizer(), 12).loglikelihood(asked)


def test_values_not_in_records_are_reported() -> None:
    from megatron.evaluation.harness import RequestCounts

    about = {"method": "a", "train_length": 8, "length": 8, "seed": 1}
    values = {
        "alias": "told",
        "mcc,none": 0.25,
        "mcc_stderr,none": 0.1,
        "exact_match,strict-match": 0.5,
        "exact_match_stderr,strict-match": "N/A",
        "byte_perplexity,none": math.inf,
    }
    output: list[str] = []
    results = {"results": {"told": values}, "n-shot": {"told": 3}}
    (record,) = build_task_records(results, {"told": RequestCounts(num_tokens=7)}, about, output.append)
    assert (record.protocol, record.value, record.stderr, record.tokens) == ("told, 3-shot, strict-match", 0.5, None, 7)
    assert output == [
        "told, 3-shot: mcc = 0.25 does not fit in a record",
        "told, 3-shot: byte_perplexity = inf does not fit in a record",
    ]


def test_a_batch_that_is_too_large_is_divided(place: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.evaluation.harness import HarnessModel

    whole = given(place, run, "choices")
    usual, refused = HarnessModel._forward, []

    def small(self: HarnessModel, rows: Any, wanted: Any) -> Any:
        if len(rows) > 2:
            refused.append(len(rows))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return usual(self, rows, wanted)

    monkeypatch.setattr(HarnessModel, "_forward", small)
    assert [record.value for record in given(place, run, "choices")] == [record.value for record in whole]
    assert refused
    monkeypatch.setattr(HarnessModel, "_forward", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(RunError, match="12 tokens do not fit the memory of cpu"):
        given(place, run, "choices")


@pytest.mark.slow
def test_an_export_gives_the_same_answers(place: Path, run: Path) -> None:
    """`lm_eval --model hf` on the exported folder gives the same loglikelihoods and the same text."""
    pytest.importorskip("transformers", reason="requirements-eval.txt is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from megatron.conversion.export_model import export_model
    from megatron.data.tokenizers import ByteTokenizer
    from megatron.evaluation.harness import HarnessModel

    export_model(str(run), place / "exported")
    exported = HFLM(
        pretrained=str(place / "exported"),
        trust_remote_code=True,
        max_length=24,
        dtype="float32",
        device="cpu",
        batch_size=2,
    )
    ours = HarnessModel(load_model(run).model, ByteTokenizer(), 24, batch_tokens=60)

    def asked(kind: str, texts: list[tuple[Any, ...]]) -> list[Any]:
        requests = [
            [Instance(kind, {}, text, number, ("t", number, 1)) for number, text in enumerate(texts)]  # type: ignore[arg-type]
            for _ in range(2)
        ]
        return [getattr(model, kind)(own) for model, own in zip((exported, ours), requests, strict=True)]

    choices = [(question["q"], choice) for question in QUESTIONS for choice in question["choices"]]
    theirs, found = asked("loglikelihood", choices)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in theirs], rel=2 * ROUNDING)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in theirs]
    theirs, found = asked("loglikelihood_rolling", [(text,) for text in DOCUMENTS])
    assert found == pytest.approx(theirs, rel=2 * ROUNDING)
    how = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    theirs, found = asked("generate_until", [(question["q"] or "x", dict(how)) for question in QUESTIONS])
    assert found == theirs

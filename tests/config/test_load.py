"""Merging of files and overrides, search for files, and error messages."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.config.execution import resolve_batch_sizes
from megatron.config.load import find_config, load_config
from megatron.config.schema import list_config_keys
from megatron.options.launch import SlurmOptions
from megatron.options.optimizer import OptimizerParams
from megatron.utils.atomic_io import LOCK, FolderLock
from megatron.utils.errors import MAX_PROBLEMS, UserError

BASE = """\
num_layers: 2
hidden_size: 24
num_attention_heads: 3
seq_length: 17
train_iters: 5
optimizer:
  type: Adam
  params: {lr: 6e-4, betas: [0.9, 0.95]}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files by name into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def _write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / f"{name}.yml").write_text(text)

    _write(base=BASE)
    return _write


def problems(files: list[str], overrides: list[str] = ()) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(files, overrides)
    return str(caught.value).splitlines()


def only_problem(files: list[str], overrides: list[str] = ()) -> str:
    (line,) = problems(files, overrides)
    return line


def test_the_arguments_of_a_load_can_be_pasted_into_a_shell(write, tmp_path):
    write(over="seed: 7")
    assert load_config(["base", "over"], ["eval_lengths=[2x, 4x]"]).arguments == "base over 'eval_lengths=[2x, 4x]'"
    assert load_config(["base", "over"], search=[tmp_path]).arguments == f"{tmp_path}/base.yml {tmp_path}/over.yml"


def test_a_method_without_the_keys_of_its_file_is_noted(write):
    """Published definitions are in configs/position. A key that the user sets, to whatever value, is a decision."""

    def list_noted(*overrides: str, files: Sequence[str] = ()) -> list[str]:
        """Return what the notes say that files of methods also set."""
        notes = load_config(["base.yml", *files], overrides).notes
        return [note.partition(" also sets ")[2].partition("; add that file")[0] for note in notes]

    (note,) = load_config(["base.yml"], ["pos_emb=fox"]).notes
    assert note == (
        "configs/position/fox.yml, which defines fox as published, also sets pos_emb_per_layer: true; add that file, "
        "or set other values to omit this note"
    )
    assert list_noted(files=["fox"]) == list_noted("pos_emb=fox", "pos_emb_per_layer=false") == []
    assert list_noted("pos_emb=[fox, none]") == ["pos_emb_per_layer: true"]
    assert list_noted("pos_emb=fope", "pos_emb_per_layer=true") == ["pos_emb_options: {released: true}"]
    assert list_noted("pos_emb=bam", "pos_emb_options.location=false") == []
    assert list_noted("pos_emb=cope", "score_processor=mta", "score_processor_options.gate=false") == [
        "pos_emb_per_layer: true",
        "score_processor_options: {weights_query_kernel_size: 6, weights_key_kernel_size: 11, mixes_scores: true, "
        "depth_scale: false, absolute: true}",
    ]
    # Defaults of our keys are what these files set, so nothing is missing.
    assert list_noted("pos_emb=kerple_log", "score_processor=cdape", "attention_temperature=llama4") == []


def test_later_layers_win_and_report_replaced_values(write):
    write(over="# x\noptimizer: {params: {lr: 1e-3}}\nseed: 7\n")
    loaded = load_config(["base.yml", "over"], ["seed=8", "optimizer.params.lr=0.01"])
    params = loaded.config.optimizer.optimizer.params
    assert (params.lr, params.betas, loaded.config.training.seed) == (0.01, [0.9, 0.95], 8)
    assert loaded.notes == ()  # layers that replace values are normal
    assert loaded.layers.replacements == [
        "optimizer.params.lr 0.0006 (base.yml:8) replaced by 0.001 (over.yml:2)",
        "seed 7 (over.yml:3) replaced by 8 (command line)",
        "optimizer.params.lr 0.001 (over.yml:2) replaced by 0.01 (command line)",
    ]


def test_repeating_a_value_is_not_reported(write):
    write(over="num_layers: 2\n")
    assert load_config(["base", "over"]).layers.replacements == []


@pytest.mark.parametrize(
    ("first", "second", "dropped"),
    [
        ("train_iters: 9", "train_epochs: 2", "train_iters"),
        ("train_epochs: 2", "train_iters: 9", "train_epochs"),
        ("lr_warmup_iters: 3", "warmup: 0.1", "lr_warmup_iters"),
        ("lr_warmup_iters: 3", "warmup: 0", "lr_warmup_iters"),
        ("warmup: 0.1", "lr_warmup_iters: 0", "warmup"),
        ("train_iters: 9", "stages: [{until: 4}, {until: 8}]\nsave: x", "train_iters"),
        ("train_epochs: 2", "stages: [{until: 4}, {until_tokens: 9000}]\nsave: x", "train_epochs"),
        ("load: x\nfinetune: true", "rollback: true", "finetune"),
        ("load: x\nrollback: true", "finetune: true", "rollback"),
        ("data_path: a", "train_data_paths: [b]", "data_path"),
        ("train_data_paths: [b]\nvalid_data_paths: [c]", "data_path: a", "valid_data_paths"),
        ("train_data_paths: [b]\ntokenizer_type: bytes", "task: copy_string\ntask_length: 8", "train_data_paths"),
    ],
)
def test_a_later_alternative_replaces_an_earlier_one(write, first, second, dropped):
    write(first=first, second=second)
    loaded = load_config(["base", "first", "second"])
    assert (dropped,) not in loaded.layers.values
    assert any(line.startswith(dropped) and "second.yml:1" in line for line in loaded.layers.replacements)


@pytest.mark.parametrize(
    ("own", "foreign", "farfield_value", "foreign_value"),
    [
        ("lr_decay_iters: 9", "lr_decay_fraction: 0.5", 9, 50),
        ("attention_window: 7", "window_size: [4, 0]", 7, 5),
    ],
)
def test_the_later_of_a_key_and_its_foreign_name_wins(write, own, foreign, farfield_value, foreign_value):
    write(own=f"train_iters: 100\n{own}", foreign=f"train_iters: 100\n{foreign}")
    path = (own.partition(":")[0],)
    assert load_config(["base", "foreign", "own"]).layers.values[path].value == farfield_value
    assert load_config(["base", "own", "foreign"]).layers.values[path].value == foreign_value


def test_replaced_keys_exclude_no_others(write):
    """A task excludes texts and the length; a text in a later layer excludes the task and restores the length."""
    write(task="task: copy_string\ntask_length: 8", text="train_data_paths: [a]")
    config = load_config(["base", "task", "text"]).config
    assert (config.data.task, config.model.seq_length) == (None, load_config(["base"]).config.model.seq_length)


@pytest.mark.parametrize("value", ["train_iters=0", "train_iters=null", "stages=[{until: 4}, {}]", "data_path=null"])
def test_an_empty_value_replaces_nothing(write, value):
    write(first="train_epochs: 2\ntrain_data_paths: [a]\nsave: x")
    layers = load_config(["base", "first"], [value]).layers
    assert layers.values[("train_epochs",)].value == 2
    assert ("train_data_paths",) in layers.values


@pytest.mark.parametrize("key", ["save", "load", "vocab_file", "hostfile"])
def test_an_empty_path_is_rejected(write, key):
    assert only_problem(["base"], [f'{key}=""']) == f"command line: {key} is empty; give a value, or null for none"


@pytest.mark.parametrize("key", ["train_data_paths", "valid_data_paths", "score_processor", "slurm.options"])
def test_an_empty_item_is_rejected(write, key):
    problem = f"command line: item 2 of {key} is empty; leave it out"
    assert problem in only_problem(["base"], [f'{key}=[none, ""]'])


def test_a_name_that_is_not_utf_8_is_rejected(write):
    """A name that is not UTF-8 is rejected, because it cannot be written into configurations or checkpoints."""
    problem = only_problem(["base"], ["save=runs/caf\udce9"])
    assert problem.startswith(r"command line: save: 'runs/caf\udce9' is not valid UTF-8; choose")


def test_null_unsets_the_keys_of_a_mapping(write):
    write(cluster="slurm: {partition: long, time: '1:00:00'}\noptimizer: {params: {lr: 0.5}}\n", empty="slurm:\n")
    found = load_config(["base", "cluster"], ["slurm=null", "slurm.partition=short", "optimizer.params=null"])
    assert found.config.launch.slurm == SlurmOptions(partition="short")
    assert found.config.optimizer.optimizer.params == OptimizerParams()
    assert "slurm.time 1:00:00 (cluster.yml:1) unset by slurm null (command line)" in found.layers.replacements
    assert "slurm is empty (null); give it keys" in only_problem(["base", "empty"])


def test_null_unsets_what_an_earlier_layer_set(write):
    assert load_config(["base"], ["train_iters=null"]).config.training.train_iters == 0
    assert "num_layers" in only_problem(["base"], ["num_layers=null"])  # no default


def test_a_key_unset_on_the_command_line_is_as_if_never_set(write):
    """Two batch sizes determine the third, so the default of an unset one must not count as a value."""
    write(saved="train_micro_batch_size_per_gpu: 8\ngradient_accumulation_steps: 1\n")
    for unset, sizes in {"gradient_accumulation_steps": (8, 4), "train_micro_batch_size_per_gpu": (32, 1)}.items():
        found = load_config(["base", "saved"], [f"{unset}=null", "train_batch_size=32"])
        resolved = resolve_batch_sizes(found.config, 1)
        assert (resolved["train_micro_batch_size_per_gpu"], resolved["gradient_accumulation_steps"]) == sizes
        assert any(
            line.startswith(unset) and line.endswith("unset (command line)") for line in found.layers.replacements
        )


def test_dashes_and_underscores_are_the_same(write):
    write(dashes="num-attention-heads: 4\noptimizer: {params: {lr: 2e-3}}\n")
    config = load_config(["base", "dashes"], ["hidden-size=32"]).config
    assert (config.model.num_attention_heads, config.model.hidden_size) == (4, 32)
    write(both="seq-length: 3\nseed: 1\nseq_length: 3\n")
    assert only_problem(["base", "both"]) == "both.yml:3: seq_length is given twice; see both.yml:1"


def test_a_key_written_twice_in_one_file_is_rejected(write):
    write(both="optimizer: {params: {lr: 1e-3}}\noptimizer.params.lr: 1e-2\n")
    assert "optimizer.params.lr is given twice" in only_problem(["base", "both"])
    assert load_config(["base"], ["seed=1", "seed=2"]).config.training.seed == 2
    assert "seed 1 replaced by 2 (command line, given twice)" in load_config(["base"], ["seed=1", "seed=2"]).notes


CONTRADICTIONS = [
    (("pos_emb: nope_dapev2", "score_processor: dape"), "score_processor", ("cdape", "dape")),
    (("pos_emb: kerple", "pos_emb_per_layer: false"), "pos_emb_per_layer", ("true", "false")),
    (("batch_size: 3", "train_micro_batch_size_per_gpu: 5"), "train_micro_batch_size_per_gpu", ("3", "5")),
    (("lr: 1", "optimizer: {params: {lr: 2}}"), "optimizer.params.lr", ("1", "2")),
    (("zero_stage: 1", "zero_optimization.stage: 2"), "zero_optimization.stage", ("1", "2")),
]


@pytest.mark.parametrize(("lines", "name", "values"), CONTRADICTIONS)
@pytest.mark.parametrize("order", [1, -1])
def test_two_names_of_a_key_contradict_each_other_in_either_order(write, lines, name, values, order):
    write(both="\n".join(lines[::order]))
    first, second = values[::order]
    assert only_problem(["base", "both"]) == f"both.yml:2: {name} {second} contradicts {first} (both.yml:1)"


@pytest.mark.parametrize("overrides", [["lr=1", "optimizer.params.lr=2"], ["optimizer.params.lr=2", "lr=1"]])
def test_two_names_of_a_key_on_the_command_line(write, overrides):
    second, first = overrides[1][-1], overrides[0][-1]
    expected = f"command line: optimizer.params.lr {second} contradicts {first} (command line)"
    assert only_problem(["base"], overrides) == expected


def test_two_names_of_a_key_may_agree(write):
    write(both="lr: 2e-3\noptimizer: {params: {lr: 0.002}}\npos_emb: nope_dapev2\nscore_processor: cdape\n")
    config = load_config(["base", "both"]).config
    assert (config.optimizer.optimizer.params.lr, config.position.score_processor) == (0.002, "cdape")
    assert load_config(["base", "both"], ["lr=1"]).config.optimizer.optimizer.params.lr == 1  # a later layer wins


def test_all_problems_are_reported_with_their_location(write):
    write(bad="num_layrs: 3\nnorm: layrnorm\ntrain_iters: 1e5\nhidden_dropout: 2\nweight_decay: true\n")
    found = problems(["base", "bad"], ["seed=x"])
    assert found[0].startswith("bad.yml:1: unknown key 'num_layrs'; did you mean num_layers")
    expected = [
        r"^bad\.yml:2: norm is layrnorm; did you mean layernorm\? choose from layernorm, rmsnorm",
        r"^bad\.yml:3: train_iters is 100000.0; it must be an integer, written 100000$",
        r"^bad\.yml:4: hidden_dropout is 2; it must be less than 1$",
        r"^bad\.yml:5: weight_decay is true; it must be a number$",
        r"^command line: seed is 'x'; it must be an integer$",
    ]
    for pattern in expected:
        assert any(re.search(pattern, line) for line in found), (pattern, found)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hidden_dropout=.nan", "it must be a finite number"),
        ("weight_decay=.inf", "it must be a finite number"),
        ("seed=-1", "it must be at least 0"),
        ("seq_length=1e30", "seq_length is 1e+30; it must be an integer of at most 1000000000"),
        ("seq_length=1e3", "seq_length is 1000.0; it must be an integer, written 1000"),
        ("no_weight_tying=1", "it must be true or false"),
        ("no_weight_tying=yes", "it must be true or false"),
        ("save=3", "it must be a string"),
        ('save="a\\0b"', r"save: value is 'a\x00b'; a string cannot contain a null character"),
        ('train_data_paths=["a\\0b"]', "null character"),
        ("fp16.type=[a]", "fp16.type is ['a']; choose from bfloat16, bf16, fp16, float16"),
        ("fp16.type=banana", "fp16.type is banana; choose from bfloat16, bf16, fp16, float16"),
        ("expansion_factor=.inf", "expansion_factor is inf; it must be a finite positive number"),
        ("expansion_factor=.nan", "expansion_factor is nan; it must be a finite positive number"),
        ("expansion_factor=1e308", "expansion_factor × hidden_size is too large for intermediate_size"),
        (f"expansion_factor={10**400}", "expansion_factor × hidden_size is too large for intermediate_size"),
        ("expansion_factor=1e9", "intermediate_size is 24000000000; it must be at most 1000000"),
        ("seed=99999999999999999999", "it must be at most 4294967295"),
        ("train_iters=10000000000000000000000", "it must be at most 1000000000"),
        ("train_micro_batch_size_per_gpu=1000001", "it must be at most 1000000"),
        ("gradient_accumulation_steps=1000001", "it must be at most 1000000"),
        ("train_batch_size=1000001", "it must be at most 1000000"),
        ("train_data_paths=a", "it must be a list"),
        ("train_data_weights=[a]", "item 1 of train_data_weights is 'a'; it must be a number"),
        ("optimizer=adam", "it must be a mapping"),
        ("pos_emb_options=3", "it must be a mapping"),
        ("optimizer.params.betas=[0.9]", "betas is [0.9]; it must be a list of 2 numbers"),
        ("valid_data_sets={a b: x}", "valid_data_sets: 'a b': the name of a set must start with a letter and use only"),
        ('seed="3"', "seed is '3'; it must be an integer, without quotes"),
        ('zero_optimization.stage="1"', "zero_optimization.stage is '1'; did you mean 1? choose from 0, 1, 2, 3"),
        ("lr=nan", "it must be a finite number"),
        ("eval_lengths=[2x, y]", "item 2 must be a multiple of the training length, greater than 1, such as 4x, or"),
        ("slurm.partition=[a b]", "slurm.partition is ['a b']; it must be a string"),
        ("slurm.partition=a b", "slurm.partition is a b; it must be one word without quotes"),
        ("slurm.time=soon", "slurm.time is soon; it must be a time limit in SLURM's format"),
        ("fp16=null", "fp16 is empty (null); give it keys, or remove it"),
        ("optimizer.params.lrr=1", "did you mean optimizer.params.lr?"),
        ("zero_optimization.stagge=1", "did you mean zero_optimization.stage?"),
        ("zero_optimization.stage=4", "choose from 0, 1, 2, 3"),
        ("stage=1", "did you mean stages or zero_optimization.stage?"),
        ("betas=[0.9, 0.9]", "did you mean optimizer.params.betas?"),
        ("save.folder=x", "unknown key 'save.folder'"),
        ("xyzzy=9", "`./deepy.py keys` lists all keys"),
        ("num_heads=9", "did you mean num_kv_heads or num_attention_heads"),
        ("model_parallel_size=0", "at least 1"),
        ("context_parallel_size=2.5", "context_parallel_size"),
        ("optimizer_type=sgd", "use Adam, AdamW, Muon or Lion"),
    ],
)
def test_errors_name_key_value_and_valid_values(write, override, message):
    line = only_problem(["base"], [override])
    assert line.startswith("command line: ")
    assert message in line, line


@pytest.mark.parametrize("key", list_config_keys().values(), ids=lambda key: key.name)
@pytest.mark.parametrize("value", [str(10**22), str(10**400), "-" + str(10**22), ".inf", "[[a]]", "{a: b}", '"a\\0"'])
def test_every_value_is_accepted_or_rejected_with_user_error(write, key, value):
    """Any value is either accepted or rejected with UserError; other exceptions never occur."""
    with suppress(UserError):
        load_config(["base"], ["device=cpu", f"{key.name}={value}"])


def test_every_integer_has_an_upper_bound(write):
    for key in list_config_keys().values():
        if key.field.annotation in (int, int | None):
            assert "it must be at most" in only_problem(["base"], [f"{key.name}={10**22}"]), key.name


def test_misspelled_keys_are_reported_with_a_suggestion():
    """Every key that misses its second, middle or last letter is reported, with the correct key as a suggestion."""
    keys = list_config_keys()
    correct = {}
    for *section, name in (key.path for key in keys.values() if len(key.path[-1]) >= 5):
        for cut in (1, len(name) // 2, len(name) - 1):
            wrong = (*section, name[:cut] + name[cut + 1 :])
            if wrong not in keys:
                correct.setdefault(".".join(wrong), ".".join((*section, name)))
    overrides = [f"{wrong}=1" for wrong in correct]
    found = []
    for start in range(0, len(overrides), MAX_PROBLEMS):
        found += problems([], overrides[start : start + MAX_PROBLEMS])
    for wrong, right in correct.items():
        message = next(line for line in found if line.startswith(f"command line: unknown key '{wrong}';"))
        assert right in message, message


def test_missing_keys_are_reported_with_meaning_and_searched_files(write):
    three = "hidden_size, num_attention_heads, seq_length are missing; "
    three += "set them, or also name a file that does, such as model/125M"
    assert only_problem([], ["num_layers=2"]) == f"command line: {three}"
    write(empty="{}", some="seed: 3\n")
    assert only_problem(["empty", "some"], ["num_layers=2"]) == f"empty.yml, some.yml: {three}"
    sizes = ["num_layers=2", "num_attention_heads=2", "seq_length=8"]
    one = "hidden_size is missing (width of the residual stream); set it in a file or as hidden_size=…"
    assert only_problem([], sizes) == f"command line: {one}"
    assert only_problem([]) == "no configuration given; name a file, such as model/125M"


def test_an_empty_file_is_reported(write):
    write(nothing="# only a comment\n")
    assert only_problem(["nothing.yml"]) == "nothing.yml: contains no keys"


def test_an_invalid_method_is_reported_with_other_problems(write):
    write(wrong="num_layers: two\npos_emb: ropee\n")
    found = problems(["wrong.yml"])
    assert any(line.startswith("wrong.yml:1: num_layers is 'two'; it must be") for line in found)
    assert any(line.startswith("wrong.yml:2: pos_emb ropee is not available; ") for line in found)


def test_overrides_must_be_pairs(write):
    assert only_problem(["base"], ["seed"]) == "command line: 'seed' is not key=value"
    assert "not a YAML value" in only_problem(["base"], ["seed=[1"])


def test_names_are_found_without_suffix_and_in_subfolders(write, tmp_path):
    folder = tmp_path / "configs" / "model"
    folder.mkdir(parents=True)
    (folder / "tiny.yml").write_text("num_layers: 9\n")
    assert find_config("tiny") == Path("configs/model/tiny.yml")
    assert find_config("model/tiny") == Path("configs/model/tiny.yml")
    assert find_config("base") == Path("base.yml")
    assert load_config(["base", "tiny.yml"]).config.model.num_layers == 9
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "base.yml").write_text(BASE + "seed: 5\n")
    assert find_config("base", ["mine"]) == Path("mine/base.yml")  # the given folder comes first
    assert load_config(["base.yml"], search=["mine"]).config.training.seed == 5
    loaded = load_config(["base", "model/tiny", "kerple_log"], search=["mine"])  # the others are still found
    assert loaded.files[:2] == (Path("mine/base.yml"), Path("configs/model/tiny.yml"))
    assert loaded.config.position.pos_emb == "kerple_log"


def test_ambiguous_and_unknown_names_are_reported(write, tmp_path):
    for name in ("model", "other"):
        (tmp_path / "configs" / name).mkdir(parents=True)
        (tmp_path / "configs" / name / "tiny.yml").write_text("{}")
    line = only_problem(["tiny"])
    assert "configs/model/tiny.yml, configs/other/tiny.yml" in line
    assert "did you mean 125M" in only_problem(["125N"])
    assert "did you mean" not in only_problem(["qqqq.yml"])
    lock = FolderLock(tmp_path / "run", name=LOCK, key="save", busy_message="", lock_timeout=0)
    assert only_problem(["run/config.yml"]).startswith("run/config.yml: not written yet: a run is starting in run; ")
    lock.release()
    assert "run/config.yml: no such configuration file" in only_problem(["run/config.yml"])
    with pytest.raises(UserError, match="no such configuration folder"):
        load_config(["base"], search=["nowhere"])


def test_shipped_configurations_are_found_from_anywhere(write):
    assert find_config("125M.yml", ["configs"]).name == "125M.yml"
    assert find_config("kerple_log").parent.name == "position"


def test_choosing_another_encoding_drops_the_options_of_the_first(write):
    write(
        first="pos_emb: rotary\npos_emb_options: {base: 500}\n",
        second="pos_emb: t5\npos_emb_options: {num_buckets: 16}\n",
        same="pos_emb: rotary\n",
    )
    loaded = load_config(["base", "first", "second"])
    assert loaded.config.position.pos_emb_options == {"num_buckets": 16}
    assert "pos_emb_options.base 500 (first.yml:2) dropped: it belongs to rotary" in loaded.notes
    assert load_config(["base", "first", "same"]).config.position.pos_emb_options == {"base": 500}
    # The order of overrides on the command line does not matter.
    late = load_config(["base", "first"], ["pos_emb_options.max_distance=64", "pos_emb=t5"]).config
    assert late.position.pos_emb_options == {"max_distance": 64}


def test_precision_switches_agree_with_the_precision_key(write):
    write(
        half="fp16: {enabled: true, loss_scale: 0}\n",
        brain="bf16: {enabled: true}\n",
        off="fp16: {enabled: false}\n",
        both="fp16: {enabled: true}\nbf16: {enabled: true}\n",
    )

    def precision(*files: str, overrides: list[str] = ()) -> tuple[str, bool, bool]:
        training = load_config(["base", *files], overrides).config.training
        return training.precision, training.fp16.enabled, training.bf16.enabled

    assert precision() == ("fp32", False, False)
    assert precision("half") == ("fp16", True, False)
    assert precision("half", "brain") == ("bf16", False, True)
    assert precision("half", "off") == ("fp32", False, False)
    assert precision("brain", "off") == ("bf16", False, True)
    assert precision("half", overrides=["precision=fp32"]) == ("fp32", False, False)
    assert precision(overrides=["precision=bfloat16"]) == ("bf16", False, True)
    assert "contradicts" in only_problem(["base", "both"])
    assert "contradicts" in only_problem(["base"], ["precision=fp16", "bf16.enabled=true"])
    assert "choose from fp32, bf16, fp16" in only_problem(["base"], ["precision=half"])
    assert "true or false" in only_problem(["base"], ["fp16.enabled=maybe"])


def test_a_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/null", "/dev/zero"):
        with pytest.raises(UserError, match=rf"^{path}: is a pipe or a device; it must be a file$"):
            load_config([path])


def test_a_folder_is_rejected(tmp_path):
    with pytest.raises(UserError, match=rf"^{tmp_path}: is a folder; give a configuration file in it"):
        load_config([tmp_path])


def test_an_unused_key_is_reported(write):
    write(over="split: 8,1,1\nwandb_project: mine\n")
    notes = load_config(["base", "over"], ["train_data_paths=[x]"]).notes
    assert "over.yml:1: split has no effect: train_data_paths is ['x']" in notes
    assert any(note.endswith("wandb_project has no effect: use_wandb is false") for note in notes)
    assert not any("split" in note for note in load_config(["base", "over"], ["data_path=x"]).notes)


@pytest.mark.parametrize(
    ("keys", "reason", "used"),
    [
        (["layernorm_epsilon=3", "norm=rmsnorm"], "norm is rmsnorm, qk_norm is null", "norm=layernorm"),
        (["rms_norm_epsilon=3"], "norm is layernorm, qk_norm is null", "norm=rmsnorm"),
        (
            ["init_method_std=1", "init_method=small_init", "output_layer_init_method=wang_init"],
            "init_method is small_init, output_layer_init_method is wang_init",
            "init_method=normal",
        ),
        (["fp16.hysteresis=3", "fp16.loss_scale=8", "precision=fp16"], "fp16.loss_scale is 8.0", "fp16.loss_scale=0"),
        (["attention_check=false", "attention_backend=sdpa"], "attention_backend is sdpa", "attention_backend=auto"),
        (["decay_positions=true", "weight_decay=0"], "weight_decay is 0.0", "weight_decay=1"),
        (["min_lr=1e-5", "lr_decay_style=constant"], "lr_decay_style is constant", "lr_decay_style=cosine"),
        (["profile.with_stack=true"], "profile.from is null", "profile.from=3 profile.to=4"),
        (["profile.ranks=[1]"], "profile.from is null, memory_snapshot is null", "memory_snapshot=3"),
    ],
)
def test_a_key_that_depends_on_another_is_reported(write, keys, reason, used):
    key = keys[0].partition("=")[0]
    assert f"command line: {key} has no effect: {reason}" in load_config(["base"], keys).notes
    assert not any("no effect" in note for note in load_config(["base"], [*keys, *used.split()]).notes)


@pytest.mark.parametrize(
    ("keys", "read", "unread"),
    [
        (["min_lr=1e-5", "lr_decay_style=constant"], "lr_decay_style: linear", "weight_decay: 0.2"),
        (["lr_wsd_decay_iters=3"], "lr_decay_style: wsd", "lr_decay_style: cosine"),
        (["weighted_sampler_alpha=0.3", "train_data_paths=[a,b]"], "weight_by_num_documents: true", "weight_decay: 0"),
    ],
)
def test_a_key_that_a_stage_reads_has_an_effect(write, keys, read, unread):
    for change, is_noted in ((read, False), (unread, True)):
        stages = f"stages=[{{until: 4}}, {{{change}}}]"
        notes = load_config(["base"], [*keys, stages, "train_iters=8", "save=runs/a"]).notes
        assert any("no effect" in note for note in notes) == is_noted


def test_validation_without_an_interval_is_reported(write):
    keys = ["eval_at_start=true", "eval_lengths=[2x]", "valid_data_sets={a: x}"]
    notes = load_config(["base"], [*keys, "eval_interval=0"]).notes
    assert notes == ("command line: eval_at_start, eval_lengths, valid_data_sets.a have no effect: eval_interval is 0",)
    assert load_config(["base"], [*keys, "eval_interval=5"]).notes == ()


def test_a_validation_set_is_located_by_its_key(write):
    loaded = load_config(["base"], ["valid_data_sets={a: x}"])
    with pytest.raises(UserError, match=r"^command line: valid_data_sets\.a: no"), loaded.layers.locate_errors():
        raise UserError("valid_data_sets.a: no", "valid_data_sets.a")


def test_validation_sets_can_be_combined_with_a_data_path(write):
    write(sets="train_data_paths: [b]\nvalid_data_sets: {a: x}")
    data = load_config(["base", "sets"], ["data_path=c"]).config.data
    assert (data.data_path, data.train_data_paths, data.valid_data_sets) == ("c", [], {"a": "x"})


def test_keys_of_an_unused_section_are_reported_together(write):
    write(
        job="slurm: {partition: a, account: b, requeue: true}\nlauncher: slurm\nnum_gpus: 1\n",
        half="precision: fp16\nfp16: {loss_scale: 3, hysteresis: 2}\n",
    )
    assert not any("no effect" in note for note in load_config(["base", "job", "half"]).notes)
    notes = load_config(["base", "job", "half"], ["launcher=auto", "precision=bf16", "slurm.mem=8G"]).notes
    assert [note for note in notes if "no effect" in note] == [
        "job.yml:1: slurm.partition, slurm.account have no effect: launcher is auto",
        "command line: slurm.mem has no effect: launcher is auto",
        "half.yml:2: fp16.loss_scale has no effect: precision is bf16",
    ]


def test_validation_lengths_in_tokens_are_multiples_of_the_training_length(write):
    length = load_config(["base"]).config.model.seq_length
    assert load_config(["base"], [f"eval_lengths={2 * length},4x"]).config.training.eval_lengths == [2 * length, "4x"]
    for lengths, fault in (
        (f"[{length}]", f"{length} tokens are not a multiple of seq_length {length}, greater than 1"),
        (f"[{2 * length + 1}]", f"{2 * length + 1} tokens are not a multiple of seq_length"),
        (f"[{2 * length}, 2x]", "eval_lengths: 2x is listed more than once"),
    ):
        assert fault in only_problem(["base"], [f"eval_lengths={lengths}"])

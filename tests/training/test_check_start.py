"""A dry run and a SLURM submission report the errors that the run would raise before its first step."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny_config, write_corpora, write_corpus

from megatron.config.load import LoadedConfig, load_config
from megatron.config.schema import Config
from megatron.data import datasets, sample_index
from megatron.data.indexed_dataset import IndexedTokens
from megatron.data.load_tokenizer import Vocabulary
from megatron.distributed.hardware import LocalHardware
from megatron.launch import slurm
from megatron.launch.dispatch import launch_training
from megatron.training.train import train
from megatron.utils.errors import FarfieldError, UserError

CPU = LocalHardware(num_gpus=0, num_cores=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "bare")
    return write_corpora(folder)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[slurm.SlurmJob]:
    """Jobs submitted to SLURM."""
    jobs: list[slurm.SlurmJob] = []

    def take(job: slurm.SlurmJob) -> str:
        jobs.append(job)
        return "17"

    monkeypatch.setattr(slurm, "submit_job", take)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return jobs


def launch(config: Config, *, dry: bool = False) -> list[str]:
    """Launch like the command line; return the lines printed beside the results."""
    notes: list[str] = []
    layers = load_config([], ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8"]).layers
    launch_training(LoadedConfig(config, (), (), layers), None, notes.extend, dry_run=dry, hardware=CPU)
    return notes


def write_other_tokens(prefix: Path, token: int) -> str:
    """Write a dataset whose last document contains a token."""
    from megatron.data.core_datasets import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for number in range(40):
        builder.add_document(np.array([number, 7, 7, token if number == 39 else 7] * 5, np.int32), [20])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def _bare(corpus: Path) -> dict[str, object]:
    return {"train_data_paths": [str(corpus.parent / "bare")], "valid_data_paths": []}


REFUSED: dict[str, tuple[Callable[[Path, Path], dict[str, object]], str]] = {
    "no tokenizer": (lambda corpus, folder: _bare(corpus), "tokenizer_type: the data have no corpus.json"),
    "tokenizer files": (
        lambda corpus, folder: (
            _bare(corpus)
            | {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/nowhere/v.json", "merge_file": "/nowhere/m.txt"}
        ),
        "/nowhere/v.json",
    ),
    "another tokenizer": (lambda corpus, folder: {"tokenizer_type": "bytes"}, "tokenizer_type: bytes does not match"),
    "negative token": (
        lambda corpus, folder: {
            "train_data_paths": [write_other_tokens(folder / "negative", -1)],
            "tokenizer_type": "bytes",
            "valid_data_paths": [],
        },
        "has token -1, but ids start at 0",
    ),
    "validation token": (
        lambda corpus, folder: {
            "train_data_paths": [write_other_tokens(folder / "fine", 1)],
            "valid_data_paths": [write_other_tokens(folder / "large", 300)],
            "tokenizer_type": "bytes",
            "eval_interval": 2,
        },
        "has token 300, but tokenizer bytes has only 257 tokens",
    ),
    "short text": (lambda corpus, folder: {"seq_length": 8192}, "one sample of seq_length 8,192 needs 8,193"),
    "documents": (
        lambda corpus, folder: {
            "train_data_paths": [write_other_tokens(folder / "joined", 1)],
            "valid_data_paths": [],
            "tokenizer_type": "bytes",
            "attention_mask": "document",
        },
        "attention_mask: document, but the documents of",
    ),
    "no such epochs": (lambda corpus, folder: {"train_epochs": 0.001, "train_iters": 0}, "tokens, less than one step"),
    "positions": (
        lambda corpus, folder: {"pos_emb": "learned", "eval_lengths": ["4x"]},
        "eval_lengths: 4x is 64 tokens, but the model has 16 positions",
    ),
    "nothing to load": (lambda corpus, folder: {"load": str(folder / "nowhere")}, "nowhere: no such folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_runs_are_rejected_at_the_start(
    name: str, corpus: Path, tmp_path: Path, submitted: list[slurm.SlurmJob], capsys: pytest.CaptureFixture[str]
) -> None:
    build, message = REFUSED[name]
    config = tiny_config(corpus, tmp_path / "runs" / "a", device="cpu", **build(corpus, tmp_path))
    reported = []
    for start in (
        lambda: train(config),
        lambda: launch(config, dry=True),
        lambda: launch(config.replace(launcher="slurm", num_gpus=1)),
        lambda: launch(config.replace(launcher="slurm", num_gpus=1), dry=True),
    ):
        with pytest.raises(FarfieldError) as refused:
            start()
        reported.append((type(refused.value), str(refused.value)))
    assert message in reported[0][1]
    assert set(reported) == {reported[0]}
    assert submitted == []
    assert capsys.readouterr().out == ""


def test_an_incompatible_checkpoint_is_rejected_at_the_start(
    corpus: Path, tmp_path: Path, submitted: list[slurm.SlurmJob]
) -> None:
    trained = tiny_config(corpus, tmp_path / "a", device="cpu", train_iters=1)
    train(trained)
    longer = trained.replace(load=str(tmp_path / "a"), train_iters=2)
    queued = longer.replace(launcher="slurm", num_gpus=1)
    assert any("resuming from" in note for note in launch(longer, dry=True))
    launch(queued)
    assert len(submitted) == 1
    for config, message in (
        (longer.replace(num_layers=1), "num_layers: this run has 1"),
        (
            longer.replace(**_bare(corpus), tokenizer_type="bytes"),
            "the vocabulary bytes",
        ),
    ):
        for start in (config, config.replace(launcher="slurm", num_gpus=1)):
            with pytest.raises(UserError, match=message):
                launch(start, dry=start is config)
    named = str(tmp_path / "a/checkpoints/step_0000001")
    states = Path(named) / "states/rank_00000.safetensors"
    states.write_bytes(states.read_bytes()[:-1])
    with pytest.raises(FarfieldError, match=r"step_0000001: damaged: states/rank_00000.safetensors has"):
        launch(queued.replace(load=named))
    assert len(submitted) == 1
    (tmp_path / "b/tokenizer").mkdir(parents=True)
    (tmp_path / "b/tokenizer/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not a copy of the run's tokenizer"):
        launch(trained.replace(save=str(tmp_path / "b")), dry=True)


def test_a_processor_added_in_finetuning_is_checked_at_the_start(corpus: Path, tmp_path: Path) -> None:
    train(tiny_config(corpus, tmp_path / "a", device="cpu", train_iters=1))
    keys = {"load": str(tmp_path / "a"), "finetune": True, "score_processor": "dape"}
    added = tiny_config(corpus, tmp_path / "b", device="cpu", **keys)
    with pytest.raises(UserError, match=r"score_processor: .* was trained without one; to add dape, set"):
        launch(added, dry=True)
    launch(added.replace(score_processor_options={"zero_init": True, "residual_bias": True}), dry=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"container": "{}/nowhere.sif"}, r"^slurm.container: no such image: .*/nowhere.sif$"),
        ({"container": "./nowhere.sqsh", "container_runtime": "pyxis"}, r"^slurm.container: no such image"),
        ({"container": "docker://a/b", "container_mounts": ["/nowhere:/data"]}, r"^slurm.container_mounts: no such"),
        ({"python": "{}/bin/python"}, r"^slurm.python is .*/bin/python, which does not exist or is not executable$"),
        ({"container": "docker://a/b"}, None),
        ({"container": "{}/there.sif", "container_mounts": ["{}"]}, None),
        ({"container": "nvcr.io#nvidia/pytorch:26.01-py3", "container_runtime": "pyxis"}, None),
        ({"python": "python3"}, None),
    ],
)
def test_files_named_in_a_job_exist(
    keys: dict[str, object], message: str | None, corpus: Path, tmp_path: Path, submitted: list[slurm.SlurmJob]
) -> None:
    (tmp_path / "there.sif").touch()
    there = json.loads(json.dumps(keys).replace("{}", str(tmp_path)))
    config = tiny_config(corpus, tmp_path / "a", launcher="slurm", num_gpus=1, slurm=there)
    if message is not None:
        with pytest.raises(UserError, match=message):
            launch(config)
    else:
        launch(config)
    assert len(submitted) == (message is None)


def test_checks_left_to_the_nodes_are_reported(
    corpus: Path, tmp_path: Path, submitted: list[slurm.SlurmJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = tiny_config(corpus, tmp_path / "a", launcher="slurm", num_gpus=1, use_wandb=True, wandb_mode="online")
    with pytest.raises(UserError, match="wandb_mode online: no login"):
        launch(online)
    notes = launch(online.replace(slurm={"setup": ["export WANDB_API_KEY=$(cat key)"]}))
    assert any(note.startswith("not checked: facts known only on the training machines: GPUs") for note in notes)
    assert "use_wandb: its package and login are checked only there" in notes
    tasks = online.replace(slurm={"setup": ["export WANDB_API_KEY=$(cat key)"]}, harness={"tasks": ["piqa"]})
    assert "harness.tasks: their package, data and requests are checked only there" in launch(tasks)
    moved = {"container": "docker://a/b", "container_mounts": [f"{tmp_path}:/data"]}
    elsewhere = online.replace(train_data_paths=["/data/train"], valid_data_paths=[], slurm=moved)
    assert any("the data must exist there; not found here: " in note for note in launch(elsewhere))
    assert len(submitted) == 3


def test_a_training_on_this_machine_reads_its_tokens_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    usual = datasets.check_all_tokens

    def check(name: str, dataset: IndexedTokens, vocabulary: Vocabulary) -> None:
        reads.append(name)
        usual(name, dataset, vocabulary)

    for module in (datasets, sample_index):
        monkeypatch.setattr(module, "check_all_tokens", check)
    config = tiny_config(corpus, tmp_path / "a", device="cpu", train_iters=1)
    launch(config, dry=True)
    assert len(reads) == 1
    launch(config)
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"precision": "fp16"}, "precision is fp16, which needs a GPU, and device is cpu"),
        ({"memory_snapshot": 1}, "memory_snapshot is 1, but this run uses the CPU"),
    ],
)
def test_unsupported_cpu_runs_are_rejected_before_the_queue(
    keys: dict[str, object], message: str, corpus: Path, tmp_path: Path, submitted: list[slurm.SlurmJob]
) -> None:
    config = tiny_config(corpus, tmp_path / "a", launcher="slurm", num_gpus=1, device="cpu", **keys)
    with pytest.raises(UserError, match=message):
        launch(config)
    assert submitted == []


def test_a_dry_run_checks_without_a_known_number_of_gpus(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(corpus, tmp_path / "a", device="cuda")
    notes = launch(config, dry=True)
    assert any(note.startswith("not checked: facts known only on the training") for note in notes)
    with pytest.raises(UserError, match="one sample of seq_length 8,192"):
        launch(config.replace(seq_length=8192), dry=True)


@pytest.mark.parametrize(("token", "message"), [(300, "has token 300"), (None, "stages: stage 2 reads data with the")])
def test_the_data_of_a_later_stage_are_checked_before_the_first(
    token: int | None, message: str, corpus: Path, tmp_path: Path
) -> None:
    first = write_other_tokens(tmp_path / "first", 1)
    later = corpus / "train_text_document" if token is None else write_other_tokens(tmp_path / "later", token)
    stages = [{"until": 2}, {"train_data_paths": [str(later)]}]
    keys = {"train_data_paths": [first], "valid_data_paths": [], "stages": stages, "device": "cpu"}
    own = {} if token is None else {"tokenizer_type": "bytes"}
    if token is None:  # each names its own tokenizer in corpus.json
        keys["train_data_paths"] = [str(corpus / "train_text_document")]
        stages[1]["train_data_paths"] = [write_bytes_corpus(tmp_path)]
    config = tiny_config(corpus, tmp_path / "run", **keys, **own)
    for start in (lambda: train(config), lambda: launch(config, dry=True)):
        with pytest.raises(UserError, match=message):
            start()


def write_bytes_corpus(folder: Path) -> str:
    """Prepare a corpus of bytes; return its training data."""
    from corpora import prepare

    (folder / "text.txt").write_text("the quick brown fox " * 200)
    prepare([str(folder / "text.txt")], folder / "bytes", tokenizer="bytes", split=(1.0, 0.0, 0.0), workers=1)
    return str(folder / "bytes/train_text_document")


def test_over_ssh_missing_data_is_reported_and_invalid_data_rejected(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    there = {
        "launcher": "ssh",
        "hostfile": str(tmp_path / "hosts"),
        "num_gpus": 2,
        "device": "cpu",
        "train_batch_size": 8,
    }
    config = tiny_config(corpus, tmp_path / "a", **there)
    elsewhere = config.replace(train_data_paths=["/elsewhere/text"], valid_data_paths=[])
    notes = launch(elsewhere, dry=True)
    assert any("the data must exist there; not found here: train_data_paths: no dataset" in note for note in notes)
    with pytest.raises(UserError, match="tokenizer_type: bytes does not match the data"):
        launch(config.replace(tokenizer_type="bytes"), dry=True)

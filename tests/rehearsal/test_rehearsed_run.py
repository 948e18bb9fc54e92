"""Configuration of a rehearsal: everything that determines a rank's work, and none of the user's files."""

import json

import numpy as np
import pytest
from command_line import calls_without

from megatron.config.load import load_config
from megatron.data.blend import list_dataset_slices
from megatron.data.datasets import check_dataset_slice, load_token_stream
from megatron.data.load_tokenizer import read_vocabulary
from megatron.distributed.mesh import ParallelSizes
from megatron.options.data import SPLITS, DataOptions
from megatron.rehearsal import rehearsed_run
from megatron.rehearsal.rehearsed_run import STEPS, plan_rehearsal, write_synthetic_corpus
from megatron.utils.errors import UserError

FLAGSHIP = ("2-7B", "cdape_kerple_log", "a100_8k")
MACHINE_KEYS = {"gradient_accumulation_steps", "num_workers", "hang_timeout", "num_gpus", "nodes"}


def plan(*files, gpus=None, per_node=None, vocabulary=None, **keys):
    loaded = load_config(files, [f"{key}={value}" for key, value in keys.items()])
    return plan_rehearsal(loaded.config, gpus, per_node, vocabulary)


def test_rehearsed_configurations_differ_in_length_and_paths_only(tmp_path):
    run = plan(*FLAGSHIP, gpus=64, save="runs/a", load="runs/a", use_wandb="true", eval_iters=10)
    assert run.sizes == ParallelSizes(context=4, data=16)
    assert (run.devices_per_node, run.vocab_size) == (8, 50257)
    config = run.build_config(tmp_path)
    changed = {
        key
        for key, value in run.config.get_keys_by_policy("architecture", "context", "initialization", "numerics").items()
        if config.get_keys_by_policy("architecture", "context", "initialization", "numerics")[key] != value
    }
    assert changed == set()
    assert config.training.train_iters == STEPS
    assert config.training.gradient_accumulation_steps == 2
    assert config.training.train_batch_size == 32
    assert config.training.zero_optimization == run.config.training.zero_optimization
    assert config.checkpoint.save == str(tmp_path / "run")
    assert config.checkpoint.load is None
    assert config.data.data_cache == str(tmp_path / "data_cache")
    assert not config.logging.use_wandb
    assert read_vocabulary(config.data).size == 50257
    assert {path.parent for path in tmp_path.iterdir()} == {tmp_path}
    data, *others = run.notes
    assert data == (
        "the configuration names no data; random text with a vocabulary of 50,257 tokens replaces them (--vocabulary)"
    )
    reported = "\n".join(others)
    for words in ("2 of the 4 micro-batches", "load: runs/a", "wandb"):
        assert words in reported
    assert "vocabulary" not in reported


def test_a_pipeline_has_as_many_micro_batches_as_are_in_flight_and_one_more(tmp_path):
    run = plan("125M", "kerple_log", "a100_2k_slow_network", gpus=16)
    assert run.sizes == ParallelSizes(tensor=4, data=2, pipeline=2)
    assert run.build_config(tmp_path).training.gradient_accumulation_steps == 3


def test_missing_splits_are_not_synthesized(tmp_path):
    run = plan("125M", "none", gpus=1, train_data_paths="[/nowhere/text]", precision="bf16")
    config = run.build_config(tmp_path)
    assert run.synthetic_splits == ("train",)
    assert config.data.train_data_paths
    assert config.data.valid_data_paths == config.data.test_data_paths == []
    assert "/nowhere/text" in run.notes[0]


def test_a_task_needs_no_corpus(tmp_path):
    run = plan(
        "125M",
        "none",
        gpus=2,
        task="copy_string",
        task_length=40,
        seq_length=82,
        precision="bf16",
        train_micro_batch_size_per_gpu=2,
    )
    assert run.synthetic_splits == ()
    assert run.build_config(tmp_path).data.task == "copy_string"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="--vocabulary is 7, but the data have"):
        plan("125M", "none", gpus=2, vocabulary=7, task="copy_string", task_length=40, seq_length=82, precision="bf16")


def test_nodes_match_the_configuration():
    run = plan("125M", "kerple_log", "a100_2k", "slurm_a100", nodes=4, save="runs/a")
    assert (run.world_size, run.devices_per_node) == (16, 4)
    assert run.requested.launch.launcher == "slurm"
    assert run.config.launch.launcher == "auto"


def test_a_plan_and_a_rehearsal_have_the_same_gpus(tmp_path):
    """Without options they are those of the configuration; the rehearsal that a plan prints has the plan's options."""
    jobs = {
        (): (8, 8),
        ("nodes=2",): (16, 8),
        ("num_gpus=2",): (2, 2),
        ("num_gpus=4", "nodes=3", "train_batch_size=96"): (12, 4),
        ("model_parallel_size=2", "context_parallel_size=8"): (16, 8),
    }
    batch = "train_micro_batch_size_per_gpu=4"  # the configured layouts are valid, so that the command needs no keys
    jobs = {(batch, *keys): gpus for keys, gpus in jobs.items()}
    options = ("--gpus", "16", "--gpus-per-node", "4", "--vocabulary", "1000000", "--mfu", "0.3")
    calls = {keys: ("plan", "125M", "kerple_log", *keys, "--json") for keys in jobs}
    other = ("plan", "125M", "kerple_log", batch, *options, "--json")
    found = calls_without((), [*calls.values(), other], tmp_path)
    for keys, expected in jobs.items():
        made = json.loads(found[calls[keys]][1])
        assert (made["gpus"], made["gpus_per_node"]) == expected
        run = plan("125M", "kerple_log", **dict(key.split("=") for key in keys))
        assert (run.world_size, run.devices_per_node) == expected
    command = json.loads(found[other][1])["rehearse"]
    assert command == (
        f"./deepy.py rehearse 125M kerple_log {batch} --gpus 16 --gpu a100-40gb --gpus-per-node 4 --mfu 0.3 "
        "--vocabulary 1000000"
    )


@pytest.mark.parametrize(
    ("gpus", "per_node", "message"),
    [
        (6, None, "does not divide the 6 processes"),
        (12, None, "--gpus 12: not a multiple of 8 GPUs per node"),
        (64, 5, "--gpus 64: not a multiple of 5 GPUs per node"),
        (3, None, "does not divide the 3 processes"),
    ],
)
def test_indivisible_numbers_of_gpus_are_rejected_in_one_line(gpus, per_node, message):
    with pytest.raises(UserError, match=message) as refused:
        plan(*FLAGSHIP, gpus=gpus, per_node=per_node)
    assert "\n" not in str(refused.value)


def test_offloaded_states_must_fit_the_machine(monkeypatch):
    offload = {"zero_optimization": "{stage: 2, offload_optimizer: {device: cpu}}"}
    monkeypatch.setattr(rehearsed_run, "detect_memory", lambda: 16 * 2**30)
    with pytest.raises(UserError, match=r"updates 31 GiB of states in host memory, but this machine has 16 GiB"):
        plan("2-7B", "none", "a100_2k", gpus=1, **offload)
    assert plan("2-7B", "none", "a100_2k", gpus=8, **offload).world_size == 8


def test_runs_that_cannot_fit_are_rehearsed_only_on_request():
    config = load_config(FLAGSHIP).config
    assert plan_rehearsal(config, 64, None, None, gpu_memory=40 << 30).config.launch.check_resources
    with pytest.raises(UserError, match=r"num_layers 1000000 × .* a rank needs at least .* but a GPU has 40 GiB"):
        plan_rehearsal(config.replace(num_layers=1000000), 64, None, None, gpu_memory=40 << 30)
    run = plan_rehearsal(config.replace(num_layers=1000000, check_resources=False), 64, None, None, gpu_memory=40 << 30)
    assert run.config.model.num_layers == 1000000


def test_the_largest_stage_is_rehearsed():
    stages = "[{until: 10}, {until: 20, seq_length: 4096}, {seq_length: 2048, train_batch_size: 4}]"
    run = plan("125M", "kerple_log", gpus=2, save="runs/a", train_iters=30, train_batch_size=64, stages=stages)
    assert "rehearsing stage 2 of 3, which needs the most memory" in run.notes
    assert (run.config.model.seq_length, run.config.training.train_batch_size) == (4096, 8)
    assert run.config.training.stages == []


def test_a_synthetic_corpus_has_the_vocabulary_and_several_sequences(tmp_path):
    prefixes = write_synthetic_corpus(tmp_path / "corpus", vocab_size=70_001, seq_length=400_000)
    data = DataOptions(**{f"{split}_data_paths": [str(prefixes[split])] for split in SPLITS})
    vocabulary = read_vocabulary(data)
    assert (vocabulary.size, vocabulary.eod) == (70_001, 0)
    for split in SPLITS:
        (dataset_slice,) = list_dataset_slices(data, split)
        check_dataset_slice(dataset_slice, split, 400_000, vocabulary)
        tokens = load_token_stream(data, split, vocabulary)
        assert len(tokens) >= 3 * 400_001
        assert tokens.max() < 70_001
        assert len(np.unique(tokens)) > 60_000
    documents = write_synthetic_corpus(tmp_path / "documents", vocab_size=50, seq_length=10, document_length=4)
    tokens = np.fromfile(f"{documents['train']}.bin", "<i4")
    assert (tokens[3::4] == 0).all()

"""A stopped and resumed run equals an uninterrupted run; changes that would break this are rejected."""

import io
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import prepare
from rich.console import Console
from safetensors.torch import load_file
from tiny_runs import losses, records, tiny_config, write_corpora, write_corpus

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.engine_state import MOMENTS, EngineCounters, list_optimizer_shards
from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.resume import plan_resume
from megatron.checkpoint.trained_run import open_run
from megatron.config.load import load_config, read_config
from megatron.config.yaml_files import format_value
from megatron.data import load_tokenizer
from megatron.distributed.process_groups import build_single_process_groups
from megatron.training.summary import build_resume_command
from megatron.training.train import train
from megatron.utils.errors import UserError

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


@pytest.mark.parametrize(
    ("stage", "precision"),
    # Stages 1 and 2 share DeepSpeed's optimizer; tests/training/test_methods.py covers bfloat16 with stage 1.
    [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")],
)
def test_stopped_and_resumed_is_uninterrupted_bit_for_bit(
    corpus: Path, tmp_path: Path, stage: int, precision: str
) -> None:
    """Includes dropout, validation, accumulation, a processor and the final weights."""
    keys = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "precision": precision,
        "score_processor": "dape", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "lr_decay_iters": 5, "eval_interval": 2, **DROPOUT,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny_config(corpus, whole, train_iters=5, checkpoint_factor=2, **keys))
    train(tiny_config(corpus, parts, train_iters=3, **keys))
    train(tiny_config(corpus, parts, train_iters=5, load=str(parts), **keys))
    assert losses(parts) == losses(whole)
    assert records(parts, "valid")[4] == {
        **records(whole, "valid")[4],
        "seconds": records(parts, "valid")[4]["seconds"],
    }
    one, two = (load_model(run).model.state_dict() for run in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one if isinstance(one[name], torch.Tensor))


def test_metrics_between_checkpoints_match_an_uninterrupted_run(corpus: Path, tmp_path: Path) -> None:
    """An interval interrupted by a stop is reported completely, and steps after the checkpoint are rolled back."""
    keys = {"train_iters": 12, "log_interval": 5, "checkpoint_factor": 7}
    train(tiny_config(corpus, tmp_path / "whole", **keys))
    train(tiny_config(corpus, tmp_path / "run", **keys))
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / layout.format_checkpoint_name(12))  # as after a crash between steps 10 and 12
    train(tiny_config(corpus, tmp_path / "run", **keys, load=str(tmp_path / "run")))
    assert list(records(tmp_path / "run")) == [5, 10, 12]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [r["tokens"] for r in records(tmp_path / "run").values()] == [5 * 64, 10 * 64, 12 * 64]


def test_extending_a_run_keeps_the_order_of_its_data(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run longer than one epoch keeps its data order when extended; another train_iters would reshuffle it.

    The test compares the tokens read. An epoch of the corpus has about 16 batches of 16.
    """
    from megatron.training.engine import Engine

    seen: list[torch.Tensor] = []
    usual = Engine.forward_backward

    def accumulate(self: Engine, micro_batches: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.extend(batch["tokens"].clone() for batch in micro_batches)
        return usual(self, micro_batches, *args, **kwargs)

    monkeypatch.setattr(Engine, "forward_backward", accumulate)

    def read(**keys: object) -> torch.Tensor:
        seen.clear()
        batch = {"train_micro_batch_size_per_gpu": 16, "train_batch_size": 16}
        train(tiny_config(corpus, log_interval=100, lr_decay_iters=50, **batch, **keys))
        return torch.cat(seen)

    one, two = tmp_path / "one", tmp_path / "two"
    first = read(train_iters=20, save=str(one))
    shutil.copytree(one, two)
    rest = read(train_iters=33, save=str(one), load=str(one))
    for iters in (25, 33):  # in two parts
        more = read(train_iters=iters, save=str(two), load=str(two))
        rest = rest[len(more) :] if torch.equal(rest[: len(more)], more) else pytest.fail("another order")
    assert len(rest) == 0
    assert json.loads((layout.resolve_checkpoint_path(two) / "progress.json").read_text())["train_samples"] == 320
    again = read(train_iters=33, save=str(tmp_path / "fresh"))
    assert len(first) == 320
    assert not torch.equal(again[:320], first)  # a run planned for 33 steps has another order, so the test can fail


def test_optimizer_options_come_from_the_new_configuration(trained: Path, corpus: Path, tmp_path: Path) -> None:
    run = copied(trained, tmp_path / "run")
    stream = io.StringIO()
    optimizer = {"params": {"lr": 1e-2, "betas": [0.5, 0.6]}}
    keys = {"train_iters": 6, "lr_decay_iters": 4, "min_lr": 1e-3}
    train(tiny_config(corpus, run, load=str(run), optimizer=optimizer, **keys), Console(file=stream, width=200))
    assert "optimizer.params.betas: was [0.9, 0.95], now [0.5, 0.6]" in stream.getvalue()
    other = copied(trained, tmp_path / "other")
    train(tiny_config(corpus, other, load=str(other), **keys))
    assert losses(run)[:5] == losses(other)[:5]
    assert losses(run)[5] != losses(other)[5]  # first step that new betas can change


@pytest.mark.parametrize(
    ("key", "value", "old"),
    [
        ("pos_emb", "alibi", "kerple_log"),
        ("hidden_size", 64, "32"),
        ("score_processor", "dape", "none"),
        ("pos_emb_per_layer", True, "false"),
        ("seq_length", 8, "16"),
        ("activation", "relu", "gelu"),
    ],
)
def test_a_changed_model_is_rejected_naming_the_field(
    trained: Path, corpus: Path, tmp_path: Path, key: str, value: object, old: str
) -> None:
    with pytest.raises(UserError, match=f"^{key}: this run has {format_value(value)}, but .* was trained with {old}"):
        train(tiny_config(corpus, tmp_path / "new", load=str(trained), **{key: value}))


def test_other_data_is_rejected_if_its_tokenizer_differs(trained: Path, tmp_path: Path) -> None:
    other = write_corpora(tmp_path / "other")
    numbers = tmp_path / "other" / "numbers.json"
    tokenizer = json.loads(numbers.read_text())
    tokenizer["model"]["vocab"] |= {"sixty-one": 61, "sixty-two": 62}
    numbers.write_text(json.dumps(tokenizer))
    sources = [str(tmp_path / "other" / "counting.jsonl")]
    prepare(sources, other, tokenizer="HFTokenizer", vocab_file=numbers, workers=1, overwrite=True)
    with pytest.raises(UserError, match=r"\(63 tokens\), but .* vocabulary HFTokenizer-\w+ \(61 tokens\)"):
        train(tiny_config(other, shutil.copytree(trained, tmp_path / "new"), load=str(tmp_path / "new")))


def test_replaced_data_are_noted_when_a_run_resumes(tmp_path: Path) -> None:
    """The paths in the configuration stay the same, so comparing the keys does not show it."""
    corpus, run, out = write_corpora(tmp_path / "corpus"), tmp_path / "run", io.StringIO()
    train(tiny_config(corpus, run, train_iters=2))
    prefix = tiny_config(corpus, run).data.train_data_paths[0]
    train(tiny_config(corpus, run, train_iters=3, load=str(run)), Console(file=out, width=300))
    assert "its tokens have changed" not in out.getvalue()
    source = tmp_path / "corpus" / "counting.jsonl"
    source.write_text(source.read_text() * 2)
    prepare([str(source)], corpus, tokenizer="HFTokenizer", vocab_file=tmp_path / "corpus" / "numbers.json",
            workers=1, overwrite=True)  # fmt: skip
    train(tiny_config(corpus, run, train_iters=4, load=str(run)), Console(file=out, width=300))
    checkpoint = run / "checkpoints" / layout.format_checkpoint_name(3)
    assert f"{prefix}: its tokens have changed since {checkpoint} was written" in out.getvalue()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"stage": 0}, {"stage": 3}),
        ({"stage": 3}, {"stage": 0}),
        ({"stage": 0}, {"stage": 2}),
        ({"stage": 1}, {"stage": 3, "sub_group_size": 500}),
        ({"stage": 3, "sub_group_size": 500}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_deepspeed_optimizer_resumes_masters_and_moments(
    corpus: Path, tmp_path: Path, before: dict[str, object], after: dict[str, object], precision: str
) -> None:
    keys = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "precision": precision}
    train(tiny_config(corpus, tmp_path, zero_optimization=before, train_iters=2, lr_decay_iters=5, **keys))
    engines: list[Any] = []
    usual = EngineCounters.load_state_dict

    def load_state_dict(self: EngineCounters, state_dict: Any) -> None:
        usual(self, state_dict)
        engines.append({shard.name: shard for shard in list_optimizer_shards(self._engine)})
        states = load_file(layout.resolve_checkpoint_path(tmp_path) / "states" / "rank_00000.safetensors")
        weights = load_file(layout.resolve_checkpoint_path(tmp_path) / "model.safetensors")
        for name, shard in engines[0].items():
            assert torch.equal(shard.master, weights[name].view(-1))
            assert float(shard.step) == 2
            for kind in MOMENTS["AdamW"]:
                assert torch.equal(shard.moments[kind], states[f"{kind}/{name}"])
                assert shard.moments[kind].any()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineCounters, "load_state_dict", load_state_dict)
        train(tiny_config(corpus, tmp_path, zero_optimization=after, load=str(tmp_path), lr_decay_iters=5, **keys))
    assert len(engines) == 1
    assert len(losses(tmp_path)) == 4


def test_another_precision_resumes_from_the_masters_with_a_note(trained: Path, corpus: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    keys = {"precision": "bf16", "train_iters": 6, "zero_optimization": {"stage": 1}}
    train(tiny_config(corpus, tmp_path, load=str(trained), **keys), Console(file=stream, width=200))
    assert "at step 4 with train_iters 4 → 6, precision null → bf16" in stream.getvalue()
    train(tiny_config(corpus, tmp_path / "fp32", load=str(trained), train_iters=6))
    # A bfloat16 model agrees with float32 to a few units of its eighth bit.
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "fp32"), rel=2**-5)


def test_the_starting_checkpoint_is_unambiguous(trained: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"save: {trained} already contains checkpoints .*add load={trained}"):
        train(tiny_config(corpus, trained))
    with pytest.raises(UserError, match=r"load: .*nowhere: no such folder"):
        train(tiny_config(corpus, tmp_path / "new", load=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"load: .*empty: contains no checkpoint"):
        train(tiny_config(corpus, tmp_path / "new", load=str(tmp_path / "empty")))
    old = trained / "checkpoints" / layout.format_checkpoint_name(2)
    with pytest.raises(
        UserError, match=r"save: .* checkpoints up to step_0000004, but .* or roll back .*rollback=true"
    ):
        train(tiny_config(corpus, trained, load=str(old), train_iters=6))
    again = f"this run would start at step 0; .* resume from the newest with load={trained} finetune=false$"
    with pytest.raises(UserError, match=again):
        train(tiny_config(corpus, trained, load=str(trained), finetune=True))
    elsewhere = copied(trained, tmp_path / "elsewhere") / "checkpoints" / layout.format_checkpoint_name(2)
    with pytest.raises(UserError, match=r"would start from .*elsewhere.*step_0000002; choose another folder"):
        train(tiny_config(corpus, trained, load=str(elsewhere), rollback=True, train_iters=6))

    stream = io.StringIO()
    fresh = tmp_path / "fresh"
    result = train(tiny_config(corpus, fresh, load=str(fresh), train_iters=2), Console(file=stream, width=200))
    assert f"load: {fresh} has no checkpoint yet; starting at step 0" in stream.getvalue()
    assert result.step == 2


def test_a_moved_run_resumes_in_its_folder_and_not_at_its_old_path(trained: Path, corpus: Path, tmp_path: Path) -> None:
    """`train RUN/config.yml load=RUN` has the old path as `save`. A branch from a named checkpoint may use it."""
    old, moved = tmp_path / "old", tmp_path / "moved"
    train(tiny_config(corpus, old, train_iters=2, lr_decay_iters=4))
    old.rename(moved)
    keys = {"lr_decay_iters": 4, "train_iters": 4}
    with pytest.raises(UserError, match=rf"save: {old} .* moved or copied; resume .* with save={moved}, or branch"):
        train(tiny_config(corpus, old, load=str(moved), **keys))
    assert not layout.list_checkpoints(old)
    checkpoint = moved / "checkpoints" / layout.format_checkpoint_name(2)
    train(tiny_config(corpus, old, load=str(checkpoint), **keys))
    assert losses(old) == losses(trained)[2:]
    with pytest.raises(UserError, match="moved or copied"):
        train(tiny_config(corpus, old, load=str(moved), **keys))
    train(tiny_config(corpus, moved, load=str(moved), **keys))
    assert losses(moved) == losses(trained)


def test_another_folder_takes_over_from_an_older_checkpoint(trained: Path, corpus: Path, tmp_path: Path) -> None:
    old = trained / "checkpoints" / layout.format_checkpoint_name(2)
    train(tiny_config(corpus, tmp_path / "branch", load=str(old)))
    assert losses(tmp_path / "branch") == losses(trained)[2:]
    assert steps(tmp_path / "branch") == [4]
    assert steps(trained) == [2, 4]
    branch, whole = open_run(tmp_path / "branch"), open_run(trained)
    assert (branch.trainer_state.origin, branch.training_digest) == (None, whole.training_digest)


def test_runs_with_different_rate_histories_are_not_seeds_of_one_method(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    def resume(name: str, **keys: Any) -> str:
        run = copied(trained, tmp_path / name)
        train(tiny_config(corpus, run, load=str(run), **keys))
        return open_run(run).training_digest

    other_rate = {"optimizer": {"type": "Adam", "params": {"lr": 5e-4}}}
    longer = resume("longer", train_iters=5)
    assert open_run(tmp_path / "longer").trainer_state.origin is None
    changed = resume("changed", train_iters=5, **other_rate)
    train(tiny_config(corpus, tmp_path / "always", train_iters=5, **other_rate))
    assert len({longer, changed, open_run(tmp_path / "always").training_digest}) == 3
    run = tmp_path / "changed"
    train(tiny_config(corpus, run, load=str(run), train_iters=6, **other_rate))
    origin = f"{open_run(trained).training_digest} at step 4"
    assert open_run(run).trainer_state.origin == origin  # kept when resumed again


def steps(run: Path) -> list[int | None]:
    return [layout.parse_step(path) for path in layout.list_checkpoints(run)]


def test_a_finished_run_has_nothing_to_do(trained: Path, corpus: Path, tmp_path: Path) -> None:
    run = copied(trained, tmp_path / "run")
    stream = io.StringIO()
    result = train(tiny_config(corpus, run, load=str(run)), Console(file=stream, width=200))
    assert "nothing to do: the run is at step 4, and train_iters is 4; increase it to continue" in stream.getvalue()
    assert (
        f"the last checkpoint is {run / 'checkpoints' / layout.format_checkpoint_name(4)}; next: " in stream.getvalue()
    )
    assert "saved" not in stream.getvalue()
    assert (result.step, result.checkpoint) == (4, run / "checkpoints" / layout.format_checkpoint_name(4))
    assert losses(run) == losses(trained)


def test_finetuning_loads_only_the_weights(trained: Path, corpus: Path, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "text" / "other", seed=9)
    shutil.copy(corpus / "corpus.json", tmp_path / "text" / "corpus.json")
    keys = {"train_data_paths": [str(other)], "tokenizer_type": None}
    description = json.loads((corpus / "corpus.json").read_text())
    del description["files"]  # checksums of other data
    (tmp_path / "text" / "corpus.json").write_text(json.dumps(description))
    shutil.copy(corpus / "tokenizer.json", tmp_path / "text")
    shutil.copy(f"{other}.bin", tmp_path / "text" / "train_text_document.bin")
    shutil.copy(f"{other}.idx", tmp_path / "text" / "train_text_document.idx")
    keys = {"train_data_paths": [str(tmp_path / "text" / "train_text_document")], "seq_length": 32}
    tuned = tmp_path / "tuned"
    result = train(tiny_config(corpus, tuned, load=str(trained), finetune=True, train_iters=1, log_interval=1, **keys))
    assert result.step == 1
    assert json.loads((layout.resolve_checkpoint_path(tuned) / "progress.json").read_text())["consumed_samples"] == 4
    scratch = train(tiny_config(corpus, tmp_path / "scratch", train_iters=1, **keys))
    assert result.loss is not None
    assert scratch.loss is not None
    assert result.loss < scratch.loss - 0.02
    # Runs with other seeds start with the same weights; resuming does not change a run's origin.
    origin = f"weights of {open_run(trained).training_digest} at step 4"
    assert open_run(tuned).trainer_state.origin == origin
    assert open_run(tuned).training_digest != open_run(tmp_path / "scratch").training_digest
    printed = shlex.split(build_resume_command(read_config(tuned / "config.yml")))[2:]
    plan = plan_resume(load_config(printed[:1], printed[1:]).config, build_single_process_groups())
    assert (plan.trainer_state.step, plan.resumes, plan.origin) == (1, True, origin)
    with pytest.raises(UserError, match="hidden_size"):
        train(tiny_config(corpus, tmp_path / "no", load=str(trained), finetune=True, hidden_size=64))


def test_a_start_reads_the_stored_configuration_and_the_tokenizer_once(
    trained: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def count(module: Any, name: str) -> None:
        usual = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **keys: (reads.append(name), usual(*args, **keys))[1])

    count(manifest, "read_yaml")
    count(load_tokenizer, "load_tokenizer_from_files")
    train(tiny_config(corpus, tmp_path / "fresh", train_iters=1))
    assert reads == ["load_tokenizer_from_files"]
    reads.clear()
    train(tiny_config(corpus, tmp_path / "branch", load=str(trained), train_iters=5))
    assert sorted(reads) == ["load_tokenizer_from_files", "read_yaml"]

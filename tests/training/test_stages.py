"""Runs in stages and branches: bit for bit equal to an unbroken run, and every token once."""

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import VOCABULARY, losses, records, same_weights, tiny_config, train_and_print, train_with_processes

from megatron.checkpoint import layout
from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.checkpoint.resume import plan_resume
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.execution import build_stages
from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.mesh import ParallelSizes
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.model import ModelOptions
from megatron.planning.memory_estimate import estimate_memory
from megatron.planning.model_costs import plan_model
from megatron.training import training_run
from megatron.training.check_start import resolve_data
from megatron.training.engine import Engine
from megatron.training.resolve_run import resolve_run
from megatron.training.schedule import build_schedule
from megatron.training.train import train
from megatron.training.trainer import Trainer
from megatron.utils.errors import RunError, UserError
from megatron.utils.formatting import format_bytes

STAGES = [
    {"until": 3, "seq_length": 8},
    {"until": 5, "seq_length": 16, "pos_emb_options.base": 500.0},
    {"seq_length": 32, "optimizer.params.lr": 3e-3},
]


def weighted(corpus: Path) -> dict[str, Any]:
    """Two corpora, one of them named by its folder, weighted by their documents; from step 5 on with other weights."""
    return {
        "train_data_paths": [str(corpus), str(corpus / "test_text_document")], "weight_by_num_documents": True,
        "stages": [*STAGES[:2], {**STAGES[2], "weighted_sampler_alpha": 0.3}],
    }  # fmt: skip


def staged(corpus: Path, run: Path | None = None, **keys: Any) -> Config:
    flat = {
        "pos_emb": "rotary", "train_iters": 8, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 8,
        "seq_length": 8, "lr_decay_style": "wsd", "lr_wsd_decay_iters": 3, "stages": STAGES, "hidden_dropout": 0.1,
    }  # fmt: skip
    return tiny_config(corpus, run, **{**flat, **keys})


def printed(config: Config) -> list[str]:
    return train_and_print(config)[0].splitlines()


class Killed(Exception):
    """Exception that simulates SIGKILL: nothing is written afterwards."""


def kill_at(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """End a run without output before the given step, counted from its start."""
    usual, count = Trainer.train_step, itertools.count()

    def train_step(self: Trainer, stop: Any) -> bool:
        if next(count) == num_steps:
            raise Killed
        return usual(self, stop)

    monkeypatch.setattr(Trainer, "train_step", train_step)


@pytest.fixture
def read_text(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[torch.Tensor]]:
    """Tokens of every training step, flat and in order."""
    steps: list[torch.Tensor] = []
    usual = Engine.forward_backward

    def forward_backward(self: Engine, micro_batches: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        # Every token is the label of its predecessor, so each is a label once.
        steps.append(torch.cat([batch["labels"].flatten() for batch in micro_batches]))
        return usual(self, micro_batches, *args, **kwargs)

    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    return lambda: steps


def test_a_staged_run_is_the_same_wherever_it_is_killed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A staged run is the same after a kill at any step, also if a stage starts another blend with document weights."""
    config = staged(corpus, tmp_path / "whole", checkpoint_factor=2, **weighted(corpus))
    lines = printed(config)
    paths = [str(corpus / f"{split}_text_document") for split in ("train", "test")]
    assert f"train_data_paths: {corpus} is {paths[0]}" in lines
    # With alpha 1, each of two corpora gets half, whatever their documents.
    first, _, last = (line for line in lines if line.startswith("train_data_paths by documents"))
    assert first.startswith(f"train_data_paths by documents, weighted_sampler_alpha 1: 0.5 of {paths[0]} (")
    assert last.startswith("train_data_paths by documents, weighted_sampler_alpha 0.3: 0.")
    output = [line for line in lines if line.startswith("stage ")]
    assert output == [
        "stage 1 of 3 begins, until step 3: 16 × 8 tokens per step, learning rate 1.00e-02",
        "stage 2 of 3 begins, until step 5: 8 × 16 tokens per step, learning rate 1.00e-02; seq_length: 8 → 16, "
        "pos_emb_options.base: null → 500.0, train_batch_size: 16 → 8",
        "stage 3 of 3 begins, until step 8: 4 × 32 tokens per step, learning rate 3.00e-03; seq_length: 16 → 32, "
        "weighted_sampler_alpha: 1.0 → 0.3, train_batch_size: 8 → 4, optimizer.params.lr: 0.01 → 0.003",
    ]
    found = records(tmp_path / "whole")
    assert list(found) == list(range(1, 9))
    assert [found[step]["tokens"] for step in found] == [128 * step for step in found]
    # Every checkpoint contains the configuration of its stage; loading the run gives the last one's.
    for step, length in ((2, 8), (3, 8), (4, 16), (5, 16), (6, 32), (8, 32)):
        path = tmp_path / "whole" / "checkpoints" / layout.format_checkpoint_name(step)
        stored = load_checkpoint_config(path)
        assert (stored.model.seq_length, stored.data.train_data_paths) == (length, paths)  # folder resolved to paths
        assert TrainerState.read(path).step == step
    assert load_model(tmp_path / "whole").run.config.model.seq_length == 32
    for killed in (2, 3, 5, 6):  # 3 and 5 are boundaries
        run = tmp_path / f"killed_{killed}"
        again = config.replace(save=str(run), load=str(run))
        with monkeypatch.context() as patch:
            kill_at(patch, killed)
            with pytest.raises(Killed):
                train(again)
        train(again)
        assert losses(run) == losses(tmp_path / "whole")
        assert same_weights(run, tmp_path / "whole")


@pytest.mark.parametrize("layout_keys", [{"zero_optimization": {"stage": 1}}, {"context_parallel_size": 2}])
def test_two_processes_go_through_the_same_stages(corpus: Path, tmp_path: Path, layout_keys: dict[str, Any]) -> None:
    keys = {"hidden_dropout": 0.0, "train_micro_batch_size_per_gpu": 2, **weighted(corpus)}
    train(staged(corpus, tmp_path / "one", **keys))
    both = staged(corpus, tmp_path / "two", num_gpus=2, **keys, **layout_keys)
    assert train_with_processes(tmp_path / "job", [both]) == [None]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    ends = [records(tmp_path / name)[8]["tokens"] for name in ("one", "two")]
    assert ends == [8 * 128] * 2


def test_stages_that_change_nothing_are_one_run(corpus: Path, tmp_path: Path) -> None:
    """Stages of one length are bit for bit equal to a run without stages."""
    plain = staged(corpus, tmp_path / "plain", stages=[], seq_length=16)
    train(plain)
    train(plain.replace(save=str(tmp_path / "staged"), stages=[{"until": 3}, {"until": 6}, {}]))
    assert losses(tmp_path / "plain") == losses(tmp_path / "staged")
    assert same_weights(tmp_path / "plain", tmp_path / "staged")
    # A run that is stopped and resumed with a list of stages continues the same text.
    first = plain.replace(save=str(tmp_path / "later"), stages=[], train_iters=4, lr_decay_iters=8)
    train(first)
    train(first.replace(load=str(tmp_path / "later"), stages=[{"until": 5}, {}], train_iters=8))
    assert losses(tmp_path / "later") == losses(tmp_path / "plain")


def test_the_text_is_the_same_at_any_length(
    corpus: Path, tmp_path: Path, read_text: Callable[[], list[torch.Tensor]]
) -> None:
    """Step s reads the same tokens for any stage lengths: those of a run at the longest length in megatron-core's
    order.
    """
    train(staged(corpus, tmp_path / "staged"))
    staged_steps, _ = read_text()[:], read_text().clear()
    plain = {"stages": [], "seq_length": 32, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    train(staged(corpus, tmp_path / "plain", **plain))
    assert all(torch.equal(one, other) for one, other in zip(staged_steps, read_text(), strict=True))


def test_new_weights_continue_after_consumed_data(tmp_path: Path, read_text: Callable[[], list[torch.Tensor]]) -> None:
    """New weights continue after the data already read.

    For any weights, lengths and datasets of stages, no block is repeated or skipped except those reported in a line,
    and the fractions follow the weights.
    """
    paths = []
    for name, first in (("a", 0), ("b", 20_000), ("c", 40_000)):  # tokens identify their positions
        paths.append(str(write_numbered(tmp_path / name, first, 2400)))
    keys = {
        "train_data_paths": paths[:2], "valid_data_paths": [], "train_iters": 12, "seq_length": 4,
        "train_batch_size": 16,
    }  # fmt: skip
    config = tiny_config(
        tmp_path, tmp_path / "run", pos_emb="rotary", tokenizer_type="bytes", **keys,
        stages=[
            {"until": 4, "train_data_weights": [1.0, 1.0]},
            {"until": 7, "seq_length": 16, "train_data_weights": [3.0, 1.0]},
            {"until": 9, "train_data_paths": [paths[0], paths[2]], "train_data_weights": [1.0, 1.0]},
            {"seq_length": 8},
        ],
    )  # fmt: skip
    lines = printed_with_large_vocabulary(config)
    assert not [line for line in lines if "left out" in line]
    steps = [step.numpy() for step in read_text()]
    assert all(len(step) == 64 for step in steps)
    read = np.concatenate(steps)
    assert len(np.unique(read)) == len(read)  # nothing twice
    shares = [[int(((step // 20_000) == name).sum()) // 16 for name in range(3)] for step in steps]
    assert np.sum(shares[:4], axis=0).tolist() == [8, 8, 0]
    assert np.sum(shares[4:7], axis=0).tolist() == [9, 3, 0]
    assert np.sum(shares[7:], axis=0).tolist() == [10, 0, 10]
    blocks = [np.unique(read[read // 20_000 == name]) for name in range(3)]
    for tokens in blocks:  # whole blocks of 16, each at the start of a sample
        assert len(tokens) % 16 == 0
        runs = np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1)
        assert all(len(run) % 16 == 0 for run in runs)


def write_numbered(prefix: Path, first: int, tokens: int) -> Path:
    """Write a dataset of one document whose tokens count up."""
    from megatron.data.core_datasets import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(np.arange(first, first + tokens, dtype=np.uint16), [tokens])
    builder.finalize(f"{prefix}.idx")
    return prefix


def printed_with_large_vocabulary(config: Config, **options: Any) -> list[str]:
    from megatron.data.load_tokenizer import Vocabulary
    from megatron.training import start_plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_plan, "read_vocabulary", lambda data: Vocabulary(50_000, "numbers", None, None))
        return train_and_print(config, **options)[0].splitlines()


def test_a_staged_run_resumes_after_its_data_were_moved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dataset continues where it was, also one that an earlier stage read; other data are not taken for it."""
    config = staged(corpus, tmp_path / "whole", checkpoint_factor=2, **weighted(corpus))
    train(config)
    for number, num_steps in enumerate((4, 6)):
        run, old, new = tmp_path / f"run_{number}", tmp_path / f"old_{number}", tmp_path / f"new_{number}"
        shutil.copytree(corpus, old)
        with monkeypatch.context() as patch:
            kill_at(patch, num_steps)
            with pytest.raises(Killed):
                train(config.replace(save=str(run), **weighted(old)))
        old.rename(new)
        moved = config.replace(save=str(run), load=str(run), **weighted(new))
        other = [str(new / f"{split}_text_document") for split in ("valid", "test")]
        with pytest.raises(UserError, match=f"^train_data_paths: no dataset {old}/train_text_document"):
            train(moved.replace(train_data_paths=other))
        train(moved)
        assert losses(run) == losses(tmp_path / "whole")
        assert same_weights(run, tmp_path / "whole")


def test_a_stage_reports_a_dropped_partial_sequence(corpus: Path, tmp_path: Path) -> None:
    config = staged(
        corpus, tmp_path, train_iters=5,
        stages=[{"until": 3, "train_batch_size": 3, "train_micro_batch_size_per_gpu": 3}, {"seq_length": 32,
                "train_batch_size": 2}],
    )  # fmt: skip
    # 3 steps of 3 × 8 tokens are 72: a block of 32 and more than two.
    lines = printed(config)
    assert "the text continues at the next 32-token block: 24 tokens are skipped" in lines


def test_a_branch_equals_a_run_with_a_decay_there(corpus: Path, tmp_path: Path) -> None:
    """A branch is bit for bit equal to a run with that decay, and copies nothing of the trunk's checkpoint."""
    trunk = tiny_config(
        corpus, tmp_path / "trunk", train_iters=8, lr_decay_style="wsd", lr_warmup_iters=1, lr_decay_iters=10**6,
        extra_save_iters=[4], hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    train(trunk)
    start = tmp_path / "trunk" / "checkpoints" / layout.format_checkpoint_name(4)
    for name, keys in {
        "a": {"train_iters": 7, "lr_decay_iters": 7, "lr_wsd_decay_iters": 3},
        "b": {"train_iters": 6, "lr_decay_iters": 6, "lr_wsd_decay_iters": 2, "lr_wsd_decay_style": "linear"},
    }.items():
        branch = trunk.replace(save=str(tmp_path / name), load=str(start), extra_save_iters=[], **keys)
        lines = printed(branch)
        output = [line for line in lines if line.startswith("branching from")]
        assert len(output) == 1
        assert output[0].startswith(f"branching from {start} at step 4 with train_iters 8 → {keys['train_iters']}")
        assert not [line for line in lines if ", now " in line]
        train(trunk.replace(save=str(tmp_path / f"one_{name}"), extra_save_iters=[], **keys))
        assert losses(tmp_path / name) == losses(tmp_path / f"one_{name}")[4:]
        assert same_weights(tmp_path / name, tmp_path / f"one_{name}")
        names = [path.name for path in layout.list_checkpoints(tmp_path / name)]
        assert names == [layout.format_checkpoint_name(keys["train_iters"])]
    with pytest.raises(UserError, match=r"^weight_decay: this run has 0\.3, but .* was trained with 0\.1; a branch"):
        train(trunk.replace(save=str(tmp_path / "c"), load=str(start), weight_decay=0.3))
    with pytest.raises(UserError, match=r"^seed: .*a branch can change only the schedule: load only the weights"):
        train(trunk.replace(save=str(tmp_path / "c"), load=str(start), seed=3))
    # Changes beyond the schedule are stages: other data for the decay, or a longer context.
    stages = [{"until": 4}, {"weight_decay": 0.3}]
    train(trunk.replace(save=str(tmp_path / "d"), load=str(start), stages=stages))
    assert losses(tmp_path / "d")[:1] == losses(tmp_path / "trunk")[4:5]
    assert not same_weights(tmp_path / "d", tmp_path / "trunk")


@pytest.mark.parametrize("finetune", [False, True])
def test_a_run_that_is_killed_before_its_first_checkpoint_starts_again_from_the_same_weights(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finetune: bool
) -> None:
    """Branches and finetunings do so however often they are killed, by their first command and by that of a restart."""
    trunk = tiny_config(corpus, tmp_path / "trunk", train_iters=3, lr_decay_style="constant")
    train(trunk)
    first = trunk.replace(save=str(tmp_path / "a"), load=str(tmp_path / "trunk"), finetune=finetune, train_iters=6)
    restart = first.replace(load=str(tmp_path / "a"))
    for attempt in (first, first, restart, restart.replace(finetune=False), restart.replace(finetune=False)):
        with monkeypatch.context() as patch:
            kill_at(patch, 2)
            with pytest.raises(Killed):
                train(attempt)
        saved = read_config(tmp_path / "a" / "config.yml").checkpoint
        assert (saved.load, saved.finetune) == (first.checkpoint.load, finetune)
    train(restart.replace(finetune=False))
    train(first.replace(save=str(tmp_path / "b")))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert same_weights(tmp_path / "a", tmp_path / "b")


def test_a_stage_with_a_decay_starts_its_own_schedule(corpus: Path, tmp_path: Path) -> None:
    """A stage that names a decay starts its own schedule.

    The infinite schedule restarts in the second half of a run: warmup, cooldown and annealing again.
    """
    infinite = {
        "lr_decay_style": "infinite", "constant_lr": 5e-3, "min_lr": 1e-4, "lr_warmup_iters": 2,
        "lr_cooldown_iters": 3, "lr_anneal_iters": 2,
    }  # fmt: skip
    config = staged(corpus, tmp_path, train_iters=20, stages=[{"until": 10, **infinite}, {**infinite, "warmup": 0.0}])
    config = resolve_run(config, LocalHardware.detect()).config
    rates = []
    for stage in build_stages(config):
        schedule = build_schedule(stage.config.optimizer, stage.schedule_end, stage.schedule_first)
        rates += [schedule(step) for step in range(stage.first_step, stage.end_step)]
    assert rates[:10] == pytest.approx(rates[10:], rel=1e-12)
    assert rates[9] == pytest.approx(5e-3 * (1e-4 / 5e-3) ** 0.5)
    assert rates[10] == pytest.approx(1e-2 / 3)
    quiet = staged(corpus, tmp_path, stages=[{"until": 4, "lr_decay_style": "constant"}, {"lr_decay_style": "linear"}])
    *_, last = build_stages(resolve_run(quiet, LocalHardware.detect()).config)
    schedule = build_schedule(last.config.optimizer, last.schedule_end, last.schedule_first)
    assert [schedule(step) for step in range(4, 8)] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])  # no new warmup


def test_insufficient_memory_is_reported_for_the_current_stage(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An out-of-memory error names the stage, in its steps, while building its model, and after resuming in it."""
    config = staged(corpus, tmp_path, stages=[{"until": 4}, {"until": 6, "seq_length": 32}, {"seq_length": 16}])
    resolved = resolve_run(config, LocalHardware.detect()).config
    second = build_stages(resolved)[1].config
    planned = estimate_memory(plan_model(second), ParallelSizes(), VOCABULARY).total
    assert planned > 1.01 * estimate_memory(plan_model(resolved), ParallelSizes(), VOCABULARY).total
    output = re.escape(
        "the plan of stage 2 of 3 of this run, train_micro_batch_size_per_gpu 2 × seq_length 32, needs "
        f"{format_bytes(planned)} on each rank"
    )
    usual_step, usual_build = Trainer.train_step, training_run.build_model

    def train_step(self: Trainer, stop: Any) -> bool:
        if self.run.config.model.seq_length == 32:
            raise MemoryError
        return usual_step(self, stop)

    def build_model(options: ModelOptions, *args: Any, **kwargs: Any) -> Any:
        if options.seq_length == 32:
            raise MemoryError
        return usual_build(options, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    with pytest.raises(RunError, match=output):
        train(config)
    with pytest.raises(RunError, match=output):
        train(config.replace(load=str(tmp_path)))
    monkeypatch.setattr(training_run, "build_model", build_model)
    with pytest.raises(RunError, match=output):
        train(config.replace(load=str(tmp_path)))


def test_stages_in_tokens_end_at_steps_and_resolving_again_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    config = staged(
        corpus, tmp_path, train_iters=0,
        stages=[{"until_tokens": 500}, {"until_tokens": 900.0, "seq_length": 16, "train_batch_size": 4},
                {"until_tokens": 1100, "seq_length": 32}],
    )  # fmt: skip
    resolved = resolve_run(config, LocalHardware.detect()).config
    stages = build_stages(resolved)
    # 128 tokens per step until 512, then 64: 900 is reached after 7 more, 1100 after 3.
    assert [(stage.first_step, stage.end_step, stage.tokens_per_step) for stage in stages] == [
        (0, 4, 128), (4, 11, 64), (11, 14, 64),
    ]  # fmt: skip
    assert resolved.training.train_iters == 14
    assert resolve_run(resolved, LocalHardware.detect()).config == resolved
    for stage in stages:  # a checkpoint also stores later stages
        later = build_stages(stage.config)[stage.index :]
        ends = [[(s.first_step, s.end_step) for s in some] for some in (later, stages[stage.index :])]
        assert ends[0] == ends[1]
        assert later[0].config == stage.config
    with pytest.raises(UserError, match="the last stage ends at step 14, but train_iters is 20; remove one"):
        resolve_run(config.replace(train_iters=20), LocalHardware.detect())
    with pytest.raises(UserError, match="stages need save"):
        resolve_run(config.replace(save=None), LocalHardware.detect())


def test_a_checkpoint_of_another_stage_is_rejected(corpus: Path, tmp_path: Path) -> None:
    config = staged(corpus, tmp_path, train_iters=3)
    train(config)
    moved = resolve_run(
        staged(corpus, tmp_path, load=str(tmp_path), stages=[{"until": 2}, {"seq_length": 16}]), LocalHardware.detect()
    ).config
    with pytest.raises(UserError, match=r"^seq_length: this run has 16, but .* was trained with 8"):
        plan_resume(moved, ProcessGroups())


def test_epochs_determine_the_steps_and_a_run_keeps_them(
    tmp_path: Path, read_text: Callable[[], list[torch.Tensor]]
) -> None:
    """Epochs determine the number of steps, which a run keeps.

    The expected steps are computed by hand from the datasets' sizes. One epoch reads no token twice and omits less than
    a step of each dataset. A corpus that grows later changes nothing, and lines and the progress bar count the run's
    own steps.
    """
    path = str(write_numbered(tmp_path / "a", 0, 1000))
    keys = {"valid_data_paths": [], "pos_emb": "rotary", "train_iters": 0, "tokenizer_type": "bytes"}
    run = tmp_path / "run"
    config = tiny_config(tmp_path, run, train_data_paths=[path], train_epochs=1.0, checkpoint_factor=13, **keys)
    lines = printed_with_large_vocabulary(config)
    # 999 / 16 gives 62 sequences of 16 (a label follows the last token), and 15 steps of 4.
    assert "train_epochs 1: 1,000 tokens of text give 15 steps" in lines
    read = torch.cat(read_text())
    assert len(read) == 15 * 64 == len(read.unique())
    assert load_checkpoint_config(layout.resolve_checkpoint_path(tmp_path / "run")).training.train_iters == 15
    other = tiny_config(
        tmp_path, tmp_path / "other", train_data_paths=[path], train_epochs=2.5,
        stages=[{"until": 4}, {"seq_length": 32}], **keys,
    )  # fmt: skip
    settled, _ = resolve_data(resolve_run(other, LocalHardware.detect()).config)
    assert settled.training.train_iters == (2499 // 32 * 32) // 64  # at any length, 64 tokens per step
    twice = config.replace(
        train_data_paths=[path, str(write_numbered(tmp_path / "b", 1000, 3000))], train_data_weights=[1.0, 1.0]
    )
    settled, (line,) = resolve_data(resolve_run(twice, LocalHardware.detect()).config)
    assert settled.training.train_iters == (62 + 187) // 4
    assert line.endswith("reads by weight: a 2.00 times, b 0.67 times")
    with pytest.raises(UserError, match="train_iters is 7, but train_epochs 1 gives 15 steps; set only one"):
        resolve_data(resolve_run(config.replace(train_iters=7), LocalHardware.detect()).config)
    with pytest.raises(UserError, match="tokens, less than one step"):
        resolve_data(resolve_run(config.replace(train_epochs=0.05), LocalHardware.detect()).config)

    write_numbered(tmp_path / "a", 0, 2000)
    shutil.rmtree(layout.resolve_checkpoint_path(run))
    lines = printed_with_large_vocabulary(config.replace(load=str(run)), force_terminal=True)
    assert "train_epochs 1: 2,000 tokens of text give 31 steps" in lines
    assert "train_epochs: the run keeps the 15 steps of its start, instead of 31" in lines
    assert not [line for line in lines if "/31" in line]
    assert [line for line in lines if "step 15/15 " in line]
    plan = plan_resume(
        resolve_data(resolve_run(config.replace(load=str(run)), LocalHardware.detect()).config)[0],
        ProcessGroups(),
    )
    assert plan.stage.config.training.train_iters == 15
    assert not [note for note in plan.notes if "train_iters" in note]


def test_a_run_rolls_back_within_its_stage(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run rolls back within its stage.

    A persistently bad loss in the second stage sends the run to the checkpoint at the boundary, written by the previous
    stage with another length. It skips the bad data and is then bit for bit equal to a run that never read them.
    """
    usual, calls = Engine.forward_backward, itertools.count(1)
    labels: list[torch.Tensor] = []

    def forward_backward(self: Engine, micro_batches: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) == 5:
            micro_batches[0]["loss_mask"].fill_(float("nan"))
        labels.append(torch.cat([batch["labels"].flatten() for batch in micro_batches]))
        return usual(self, micro_batches, *args, **kwargs)

    stages = [{"until": 3, "seq_length": 8}, {"seq_length": 16}]
    config = staged(corpus, tmp_path / "run", stages=stages, on_bad_loss="rollback", max_bad_steps=1)
    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    lines = printed(config)
    assert any("rolling back to" in line and "step_0000003" in line for line in lines)
    # Steps 1 to 4, the bad fifth, and then 4 to 8 again after it.
    assert len(labels) == 10
    state = TrainerState.read(layout.resolve_checkpoint_path(tmp_path / "run"))
    assert (state.step, state.skipped_samples, state.rollbacks) == (8, 16, 1)
    assert state.consumed_samples == 3 * 16 + 16 + 5 * 8
    again, _ = labels[5:], labels.clear()
    train(config.replace(save=str(tmp_path / "clean"), train_iters=10))
    assert all(torch.equal(one, other) for one, other in zip(again, labels[5:], strict=True))


def test_a_rollback_to_an_earlier_stage_skips_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_text: Callable[[], list[torch.Tensor]]
) -> None:
    """A second rollback goes to a checkpoint of the first stage, whose sequences are half as long: no text is read
    again.
    """
    usual, calls = Engine.forward_backward, itertools.count(1)

    def forward_backward(self: Engine, micro_batches: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) in (6, 7):  # step 6, and then step 5 from the checkpoint of step 4
            micro_batches[0]["loss_mask"].fill_(float("nan"))
        return usual(self, micro_batches, *args, **kwargs)

    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    config = staged(
        tmp_path, tmp_path / "run", stages=[{"until": 4}, {"seq_length": 16}], on_bad_loss="rollback", max_bad_steps=1,
        train_data_paths=[str(write_numbered(tmp_path / "a", 0, 4000))], valid_data_paths=[], tokenizer_type="bytes",
        checkpoint_factor=2, keep_last_n_checkpoints=None,
    )  # fmt: skip
    lines = printed_with_large_vocabulary(config)
    assert [line.split("step_")[1][:7] for line in lines if "rolling back to" in line] == ["0000004", "0000002"]
    read = torch.cat(read_text())
    assert len(read) == 13 * 128 == len(read.unique())
    state = TrainerState.read(layout.resolve_checkpoint_path(tmp_path / "run"))
    # Skipped: the text of steps 3 to 7 in sequences of the first stage.
    assert (state.skipped_samples, state.rollbacks) == (5 * 16, 2)

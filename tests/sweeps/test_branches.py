"""Sweep with variants that branch from another variant's checkpoint: one trunk, several decays."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from megatron.checkpoint import layout
from megatron.config.load import read_config
from megatron.sweeps import member_run
from megatron.sweeps.check_sweep import check_sweep
from megatron.sweeps.remaining_work import find_finished_step, find_member_divergence
from megatron.sweeps.spec import compute_run_identity, read_sweep
from megatron.training.train import train
from megatron.utils.errors import RunError, UserError

from .conftest import BASE, Trainer, run, write

SCHEDULE = "    lr_decay_style: wsd\n    lr_decay_iters: 1000\n    lr_warmup_iters: 1\n"
TRUNK = (
    BASE.replace(
        "    sweep:\n", "    lr_decay_style: wsd\n    lr_decay_iters: 1000\n    lr_warmup_iters: 1\n    sweep:\n"
    )
    .replace("        rotary: {pos_emb: rotary}\n", "")
    .replace(
        "        mine: {pos_emb: alibi, score_processor: cdape, score_processor_options: {width: 4}}\n",
        "        late: {branch: {variant: early, step: 5}, train_iters: 8, lr_decay_iters: 8, stages: "
        "[{until: 6}, {lr: 5e-3}]}\n"
        "        early: {branch: {variant: trunk, step: 3}, train_iters: 5, lr_decay_iters: 5, lr_wsd_decay_iters: 2}\n"
        "        trunk: {pos_emb: rotary, train_batch_size: 8, train_micro_batch_size_per_gpu: 4}\n",
    )
)


def test_branches_follow_their_trunk_and_copy_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def train_here(configuration: Path, output: Path, metrics: Path, show_step: object) -> None:
        config = read_config(configuration)
        asked.append((configuration.parent.name, config.checkpoint.load))
        if configuration.parent.name == fails_at:
            raise RunError("the disk is full")
        train(config)

    monkeypatch.setattr(member_run, "train_in_subprocess", train_here)
    write(TRUNK)
    fails_at = "trunk"
    with pytest.raises(
        RunError, match=r"3 of 3 runs failed: trunk.*; early, seed 1234: failed: it branches from .*: trunk, seed"
    ):
        run()
    fails_at, asked[:] = None, []
    found, said = run()
    assert asked == [
        ("trunk", None),
        ("early", "out/trunk/seed_1234/checkpoints/step_0000003"),
        ("late", "out/early/seed_1234/checkpoints/step_0000005"),
    ]
    assert [(r.method, r.step) for r in found if r.length == 16] == [("trunk", 6), ("early", 5), ("late", 8)]
    names = {
        name: [path.name for path in layout.list_checkpoints(Path("out", name, "seed_1234"))]
        for name in ("trunk", "early", "late")
    }
    assert names == {
        "trunk": ["step_0000003", "step_0000006"], "early": ["step_0000005"], "late": ["step_0000006", "step_0000008"],
    }  # fmt: skip
    assert read_config(Path("out/late/seed_1234.yml")).position.pos_emb == "rotary"  # the trunk's keys
    asked.clear()
    again, said = run()
    assert again == found
    assert "nothing to do: 3 of 3 runs are complete" in said
    assert not asked


def test_a_finetuning_that_failed_resumes(trainer: Trainer) -> None:
    write(BASE.replace("mine: {", "mine: {branch: {variant: rotary, step: 6}, finetune: true, "))
    trainer.fails_at = "alibi"
    with pytest.raises(RunError, match=r"mine.*the disk is full"):
        run()
    asked = read_config(Path("out/mine/seed_1234.yml")).checkpoint
    assert (asked.load, asked.finetune) == ("out/rotary/seed_1234/checkpoints/step_0000006", True)
    trainer.fails_at = None
    out = io.StringIO()
    check_sweep(read_sweep(["sweep.yml"]), Console(file=out, width=200))
    assert "has a checkpoint of step 3 of 6" in out.getvalue()
    run()
    asked = read_config(Path("out/mine/seed_1234.yml")).checkpoint
    assert (asked.load, asked.finetune) == ("out/mine/seed_1234", False)


TUNED = TRUNK.replace(
    "        early:",
    "        tuned: {branch: {variant: trunk, step: 3}, train_iters: 5, lr_decay_iters: 5, lr_wsd_decay_iters: 2, "
    "finetune: true}\n        early:",
)


@pytest.mark.parametrize("runs", ["", "\n      runs: shared"])
def test_a_branch_and_a_finetuning_with_equal_keys_are_two_trainings(
    place: Path, monkeypatch: pytest.MonkeyPatch, runs: str
) -> None:
    """The former continues with all states, the latter with the weights alone."""
    monkeypatch.setattr(member_run, "train_in_subprocess", lambda file, *_: train(read_config(file)))
    write(TUNED.replace("output: out", f"output: out{runs}"))
    variants = {member.variant: member for member in read_sweep(["sweep.yml"]).members}
    tuned, early, trunk = (variants[name] for name in ("tuned", "early", "trunk"))
    assert tuned.config.get_training_fingerprint() == early.config.get_training_fingerprint()
    assert tuned.folder != early.folder
    if runs:  # other runs keep their names
        origin = (compute_run_identity(trunk.config), 3)
        assert early.folder.parent.name == f"rotary-{early.config.compute_training_digest(origin=origin)[:8]}"
    found, _ = run()
    assert run()[0] == found
    records = {record.method: record for record in found if record.length == 16}
    assert records["tuned"].value != records["early"].value
    assert records["tuned"].training_digest != records["early"].training_digest


def test_a_run_with_another_start_is_not_reused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(old: str, new: str) -> None:
        write(TUNED.replace(old, new))

    monkeypatch.setattr(member_run, "train_in_subprocess", lambda file, *_: train(read_config(file)))
    edit("", "")
    run()
    for old, new, name in (
        (", finetune: true", "", "tuned"),
        ("early: {", "early: {finetune: true, ", "early"),
        ("branch: {variant: trunk, step: 3}, train_iters: 5, lr_decay_iters: 5, lr_wsd_decay_iters: 2}",
         "train_iters: 5, lr_decay_iters: 5, lr_wsd_decay_iters: 2, pos_emb: rotary, train_batch_size: 8, "
         "train_micro_batch_size_per_gpu: 4}", "early"),
        ("tuned: {branch: {variant: trunk, step: 3}", "tuned: {branch: {variant: trunk, step: 6}", "tuned"),
    ):  # fmt: skip
        edit(old, new)
        problem = rf"out/{name}/seed_1234: contains a run with another start \(.*; remove .* another sweep.output"
        with pytest.raises(UserError, match=problem):
            run()
    shutil.rmtree("out/trunk")
    edit("", "")
    for member in read_sweep(["sweep.yml"]).members:
        if member.trunk is not None:
            assert find_finished_step(member) in (5, 8)  # the checkpoint that it started from need not be kept


def test_a_finetuning_that_diverged_does_not_count_for_a_branch(trainer: Trainer) -> None:
    diverging = BASE.replace("mine: {", "mine: {branch: {variant: rotary, step: 6}, finetune: true, ")
    write(diverging)
    trainer.diverges = "alibi"
    for _ in range(2):
        with pytest.raises(RunError, match=r"mine, seed 1234: failed at step 3: its loss is nan"):
            run()
    assert trainer.calls()[-1].startswith("alibi 1234 out/rotary"), "trained once"
    write(diverging.replace("finetune: true, ", ""))
    member = read_sweep(["sweep.yml"]).members[1]
    assert find_member_divergence(member) is None


def test_invalid_branches(place: Path) -> None:
    def problem(old: str, new: str) -> str:
        write(TRUNK.replace(old, new))
        with pytest.raises(UserError) as caught:
            read_sweep(["sweep.yml"])
        return str(caught.value)

    assert "branch.variant is 'trunc', not a variant; did you mean trunk?" in problem(
        "variant: trunk", "variant: trunc"
    )
    assert "it must be {variant: NAME, step: STEP}" in problem("step: 3", "step: 0")
    assert "early, late: these variants branch from each other" in problem("variant: trunk", "variant: late")
    assert "branch.step 7 of trunk is beyond its train_iters 6" in problem("step: 3", "step: 7")
    # Shared runs of sweeps are also identified by the run they branch from.
    write(TRUNK.replace("output: out", "output: out\n      runs: shared"))
    trunk, early, late = read_sweep(["sweep.yml"]).members
    assert early.config.checkpoint.load == str(trunk.folder / "checkpoints" / "step_0000003")
    own = compute_run_identity(early.config)
    assert early.folder.parent.name != own
    assert late.first_step == 5

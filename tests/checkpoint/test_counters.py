"""Counts of DeepSpeed's engine go into a checkpoint and come back, a moving loss scale too."""

import json
from types import SimpleNamespace

from megatron.checkpoint import engine_state


def engine(optimizer: object, steps: int = 0, skipped: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        optimizer=optimizer, global_steps=steps, skipped_steps=skipped, global_samples=0, micro_steps=0,
        train_batch_size=lambda: 8, gradient_accumulation_steps=lambda: 2,
    )  # fmt: skip


def zero(scale: float, *, dynamic: bool = True) -> SimpleNamespace:
    scaler = SimpleNamespace(cur_scale=scale, cur_iter=3, last_overflow_iter=1, cur_hysteresis=2, other="kept")
    return SimpleNamespace(loss_scaler=scaler, dynamic_loss_scale=dynamic)


def without_zero(scale: float) -> SimpleNamespace:
    config = SimpleNamespace(cur_scale=scale, cur_iter=9, last_overflow_iter=-1, dynamic_loss_scale=True)
    return SimpleNamespace(loss_scale_config=config)


def test_a_moving_loss_scale_comes_back_under_another_stage() -> None:
    told = json.loads(json.dumps(engine_state.capture_engine_counts(engine(zero(512.0), 7, 2))))
    other = engine(without_zero(4096.0))
    engine_state.restore_engine_counts(other, told, 7)
    assert vars(other.optimizer.loss_scale_config) == {
        "cur_scale": 512.0, "cur_iter": 3, "last_overflow_iter": 1, "dynamic_loss_scale": True
    }  # fmt: skip
    assert (other.global_steps, other.skipped_steps, other.global_samples, other.micro_steps) == (7, 2, 56, 14)
    back = engine(zero(1.0))
    engine_state.restore_engine_counts(back, engine_state.capture_engine_counts(other), 7)
    assert vars(back.optimizer.loss_scaler) == {
        "cur_scale": 512.0, "cur_iter": 3, "last_overflow_iter": 1, "cur_hysteresis": 2, "other": "kept"
    }  # fmt: skip


def test_a_fixed_scale_is_neither_kept_nor_replaced() -> None:
    told = engine_state.capture_engine_counts(engine(zero(1.0, dynamic=False)))
    assert told["loss_scale"] is None
    moving = engine(zero(64.0))
    engine_state.restore_engine_counts(moving, told, 1)
    assert moving.optimizer.loss_scaler.cur_scale == 64.0
    fixed = engine(zero(1.0, dynamic=False))
    engine_state.restore_engine_counts(fixed, engine_state.capture_engine_counts(moving), 1)
    assert fixed.optimizer.loss_scaler.cur_scale == 1.0
    bare = engine(SimpleNamespace())
    assert engine_state.capture_engine_counts(bare)["loss_scale"] is None
    engine_state.restore_engine_counts(bare, {}, 2)
    assert bare.global_steps == 2

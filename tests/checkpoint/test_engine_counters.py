"""Counters of DeepSpeed's engine, including a dynamic loss scale, are saved and restored."""

import json
from types import SimpleNamespace
from typing import Any

from megatron.checkpoint.engine_state import EngineCounters


def engine(optimizer: object, steps: int = 0, skipped: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        optimizer=optimizer, global_steps=steps, skipped_steps=skipped, global_samples=0, micro_steps=0,
        train_batch_size=lambda: 8, gradient_accumulation_steps=lambda: 2,
    )  # fmt: skip


def captured(engine: Any) -> dict[str, Any]:
    return json.loads(json.dumps(EngineCounters(engine).state_dict()))


def zero(scale: float, *, dynamic: bool = True) -> SimpleNamespace:
    scaler = SimpleNamespace(cur_scale=scale, cur_iter=3, last_overflow_iter=1, cur_hysteresis=2, other="kept")
    return SimpleNamespace(loss_scaler=scaler, dynamic_loss_scale=dynamic)


def without_zero(scale: float) -> SimpleNamespace:
    config = SimpleNamespace(cur_scale=scale, cur_iter=9, last_overflow_iter=-1, dynamic_loss_scale=True)
    return SimpleNamespace(loss_scale_config=config)


def test_a_dynamic_loss_scale_is_restored_under_another_stage() -> None:
    stored = captured(engine(zero(512.0), 7, 2))
    other = engine(without_zero(4096.0))
    EngineCounters(other).load_state_dict({"step": 7, **stored})
    assert vars(other.optimizer.loss_scale_config) == {
        "cur_scale": 512.0, "cur_iter": 3, "last_overflow_iter": 1, "dynamic_loss_scale": True
    }  # fmt: skip
    assert (other.global_steps, other.skipped_steps, other.global_samples, other.micro_steps) == (7, 2, 56, 14)
    back = engine(zero(1.0))
    EngineCounters(back).load_state_dict({"step": 7, **captured(other)})
    assert vars(back.optimizer.loss_scaler) == {
        "cur_scale": 512.0, "cur_iter": 3, "last_overflow_iter": 1, "cur_hysteresis": 2, "other": "kept"
    }  # fmt: skip


def test_a_fixed_scale_is_neither_kept_nor_replaced() -> None:
    stored = captured(engine(zero(1.0, dynamic=False)))
    assert stored["counts"]["loss_scale"] is None
    moving = engine(zero(64.0))
    EngineCounters(moving).load_state_dict({"step": 1, **stored})
    assert moving.optimizer.loss_scaler.cur_scale == 64.0
    fixed = engine(zero(1.0, dynamic=False))
    EngineCounters(fixed).load_state_dict({"step": 1, **captured(moving)})
    assert fixed.optimizer.loss_scaler.cur_scale == 1.0
    bare = engine(SimpleNamespace())
    assert captured(bare)["counts"]["loss_scale"] is None
    EngineCounters(bare).load_state_dict({"step": 2, "counts": None})
    assert bare.global_steps == 2

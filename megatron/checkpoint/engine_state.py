"""What DeepSpeed's engine counts: steps, and the loss scale of float16. Numbers only."""

from typing import Any

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def capture_engine_counts(engine: Any) -> dict[str, Any]:
    """The counts of an engine, as JSON can hold them."""
    scaler = _find_loss_scaler(engine)
    return {
        "skipped_steps": engine.skipped_steps,
        "loss_scale": None if scaler is None else {name: vars(scaler)[name] for name in _SCALE if name in vars(scaler)},
    }


def restore_engine_counts(engine: Any, counts: dict[str, Any], step: int) -> None:
    """Put captured counts back. A loss scale is left out where there is none, and the other way round."""
    engine.global_steps, engine.skipped_steps = step, int(counts.get("skipped_steps", 0))
    engine.global_samples = step * engine.train_batch_size()
    engine.micro_steps = step * engine.gradient_accumulation_steps()
    scaler, scale = _find_loss_scaler(engine), counts.get("loss_scale")
    if scaler is not None and scale is not None:
        vars(scaler).update({name: value for name, value in scale.items() if name in vars(scaler)})


def _find_loss_scaler(engine: Any) -> Any:
    """The object that holds a loss scale that moves; None if it is fixed."""
    optimizer = engine.optimizer
    for owner, scaler in (
        (optimizer, getattr(optimizer, "loss_scaler", None)),  # ZeRO
        (getattr(optimizer, "loss_scale_config", None), getattr(optimizer, "loss_scale_config", None)),
    ):
        if scaler is not None and getattr(owner, "dynamic_loss_scale", False):
            return scaler
    return None

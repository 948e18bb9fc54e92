"""Two processes on one machine train like one with the same global batch, within rounding.

Starting processes takes seconds, so all runs of two share one pair.
"""

from pathlib import Path

import pytest
from tiny_runs import losses, records, same_weights, tiny_config, train_with_processes, write_corpora

from megatron.checkpoint import layout
from megatron.checkpoint.run_folder import RunLock
from megatron.training.train import train
from tools.tolerances import compute_tolerance, count_gpt_sums

# Adam amplifies rounding only in parameters that do not affect the loss.
ROUNDING = compute_tolerance(*count_gpt_sums(32, layers=2))
HALVES = {"train_micro_batch_size_per_gpu": 2, "num_gpus": 2, "train_batch_size": 4}
QUARTERS = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "num_gpus": 2, "train_batch_size": 4}


def zero(stage: int, *offloaded: str) -> dict[str, object]:
    moved = {f"offload_{what}": {"device": "cpu"} for what in offloaded}
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **moved}}


WHOLE: dict[str, dict[str, object]] = {
    "whole data": {**HALVES, **zero(3)},
    "whole pipeline": {
        "num_gpus": 2,
        "pipe_parallel_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    },
    "whole context": {"num_gpus": 2, "context_parallel_size": 2},
}
"""Layouts that validate on the whole text, at several lengths."""


def test_two_processes_train_as_one(corpus: Path, tmp_path: Path) -> None:
    masked = {"eod_mask_loss": True, "eval_interval": 2, "score_processor": "dape"}
    alone = tmp_path / "alone"
    train(tiny_config(corpus, alone, **masked))
    whole = {"train_iters": 1, "eval_interval": 1, "eval_iters": None, "eval_lengths": "2x,4x"}
    train(tiny_config(corpus, tmp_path / "whole", **{**masked, **whole}))

    def two(name: str, **keys: object):  # type: ignore[no-untyped-def]
        return tiny_config(corpus, tmp_path / name, **masked, **keys)

    def rest(name: str, **keys: object):  # type: ignore[no-untyped-def]
        return two(name, load=str(tmp_path / name), **keys)

    short = {"train_iters": 2, "lr_decay_iters": 4}
    errors = train_with_processes(
        tmp_path / "job",
        [
            two("plain", **HALVES),
            two("accumulated", **QUARTERS, **zero(1)),
            two("zero2", **HALVES, **zero(2)),
            two("zero3", **HALVES, **zero(3), checkpoint_activations="selective"),
            two("stopped0", **HALVES, **short),
            two("stopped2", **HALVES, **zero(2), **short),
            rest("stopped2", **HALVES, **zero(2)),
            two("stopped3", **HALVES, **zero(3), **short),
            rest("stopped3", **HALVES, **zero(3)),
            two("offloaded3", **HALVES, **zero(3, "optimizer", "param")),
            tiny_config(corpus, None, **masked, **HALVES),  # nothing is saved, so the index is not in a run folder
            two("moved2", **HALVES, **zero(2), **short),
            rest("moved2", **HALVES, **zero(2, "optimizer")),
            two("moved3", **HALVES, **zero(3, "optimizer", "param"), **short),
            rest("moved3", **HALVES, **zero(3, "optimizer", "param")),
            two(
                "divided1",
                **{**HALVES, "train_micro_batch_size_per_gpu": 4},
                **zero(1, "optimizer"),
                model_parallel_size=2,
            ),
            *(tiny_config(corpus, tmp_path / name, **{**masked, **whole, **sizes}) for name, sizes in WHOLE.items()),
            two("bad", **HALVES, load=str(tmp_path / "nowhere")),
            two("endless", **HALVES, train_iters=100_000, log_interval=3),
        ],
        terminate=1,
    )
    *others, bad, endless = errors
    assert [*others, endless] == [None] * (17 + len(WHOLE))
    assert "nowhere" in (bad or "")

    # A signal to any process ends all of them after the same step, with its checkpoint.
    assert [(tmp_path / "job" / f"{17 + len(WHOLE)}.{rank}.code").read_text() for rank in (0, 1)] == ["143", "143"]
    stopped = layout.parse_step(layout.resolve_checkpoint_path(tmp_path / "endless"))
    assert stopped is not None
    assert 0 <= stopped - max(records(tmp_path / "endless")) < 3

    expected = losses(alone)
    assert expected[0] - expected[-1] > 0.02  # it has learned
    for name in ("plain", "accumulated", "zero2", "zero3", "offloaded3", "divided1"):
        assert losses(tmp_path / name) == pytest.approx(expected, rel=ROUNDING), name
        for kind in ("train", "valid"):
            one, both = records(alone, kind), records(tmp_path / name, kind)
            assert list(one) == list(both)
            assert all(both[step]["tokens"] == one[step]["tokens"] for step in one)
        assert [r["loss"] for r in records(tmp_path / name, "valid").values()] == pytest.approx(
            [r["loss"] for r in records(alone, "valid").values()], rel=ROUNDING
        )

    # The whole text once, at each length.
    for kind in ("valid", "valid/2x", "valid/4x"):
        (one,) = records(tmp_path / "whole", kind).values()
        assert one["tokens"] == records(tmp_path / "whole", "valid")[1]["tokens"] > 200
        for name in WHOLE:
            (both,) = records(tmp_path / name, kind).values()
            assert both["tokens"] == one["tokens"], (name, kind)
            assert both["loss"] == pytest.approx(one["loss"], rel=ROUNDING), (name, kind)

    # Resumed by the same number of processes: bit for bit, even if the optimizer moves to the CPU.
    assert losses(tmp_path / "stopped2") == losses(tmp_path / "zero2")
    assert losses(tmp_path / "stopped3") == losses(tmp_path / "zero3")
    for stopped_run, whole in (("moved2", "zero2"), ("moved3", "offloaded3")):
        assert losses(tmp_path / stopped_run) == losses(tmp_path / whole)
        assert same_weights(tmp_path / stopped_run, tmp_path / whole)

    # Resumed by fewer processes.
    train(rest("stopped0", **{**HALVES, "num_gpus": 1, "train_micro_batch_size_per_gpu": 4}))
    assert losses(tmp_path / "stopped0") == pytest.approx(expected, rel=ROUNDING)


def test_a_folder_that_another_run_has_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """Only the first rank takes the lock of a run's folder; if it fails, the others must not wait for it."""
    corpus = write_corpora(tmp_path)
    held = RunLock(tmp_path / "run")
    config = tiny_config(corpus, tmp_path / "run", num_gpus=2, train_micro_batch_size_per_gpu=2)
    try:
        (error,) = train_with_processes(tmp_path / "job", [config], timeout=60)
    finally:
        held.release()
    assert error is not None
    assert "another run is using this folder" in error

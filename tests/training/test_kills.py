"""However often and wherever a run is killed, the same command gives the weights of an undisturbed run.

FARFIELD_KILLS sets the number of kills of each layout; docs/log.md lists results of larger numbers.
"""

import json
import os
from pathlib import Path

import pytest
from forked import Forked
from tiny_runs import losses, records, same_weights, tiny_config, write_corpora

KILLS = int(os.environ.get("FARFIELD_KILLS", "4"))
SEED = int(os.environ.get("FARFIELD_KILLS_SEED", "0"))
LAYOUTS = {
    "one rank": {"train_micro_batch_size_per_gpu": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "data 2": {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "tensor 2": {"model_parallel_size": 2, "hidden_dropout": 0.1},
}  # fmt: skip
SCRIPT = Path(__file__).parents[1] / "support" / "killed_runs.py"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_runs_end_as_an_undisturbed_one(layout: str, tmp_path: Path) -> None:
    corpus, world = write_corpora(tmp_path / "corpus"), 1 if layout == "one rank" else 2
    config = tiny_config(
        corpus, tmp_path / "run", num_gpus=world, train_iters=12, checkpoint_factor=3, keep_last_n_checkpoints=2,
        log_interval=2, eval_interval=5, test_data_paths=[str(corpus / "test_text_document")], **LAYOUTS[layout],
    )  # fmt: skip
    config.save(tmp_path / "config.yml")
    done = Forked(SCRIPT, str(tmp_path), str(world), str(KILLS), str(SEED), output=tmp_path / "output.txt")
    assert done.wait(60 + 30 * KILLS) == 0, done.printed()[-3000:]
    reported = json.loads((tmp_path / "deaths.json").read_text())
    print(f"{layout}: {json.dumps(reported, indent=1)}")
    assert reported["kills"] == KILLS
    whole = tmp_path / "whole"
    for number in range(reported["runs"]):
        run = tmp_path / f"run_{number}"
        assert same_weights(run, whole)
        assert losses(run) == losses(whole)
        for kind in ("valid", "test"):
            one, other = ({s: r["loss"] for s, r in records(each, kind).items()} for each in (run, whole))
            assert one == other
        assert [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step_")] == []

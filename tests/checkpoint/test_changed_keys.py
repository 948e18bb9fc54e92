"""The effect of a changed key on a resumed run follows its policy, for every key."""

from typing import Any

import pytest
from tiny_runs import tiny_config, write_corpora

from megatron.checkpoint.resume import plan_resume
from megatron.config.schema import Config, ConfigKey, list_config_keys
from megatron.distributed.process_groups import ProcessGroups
from megatron.training.train import train
from megatron.utils.errors import UserError

BY_ROLE = {
    "architecture": "refused",
    "context": "refused",
    "initialization": "unread",
    "data": "said",
    "numerics": "said",
    "schedule": "said",
    "machine": "silent",
    "output": "silent",
}
# Values that the comparison itself reads; any other key may have an unknown value.
KNOWN = {
    "pos_emb": "rotary",
    "pos_emb_options": {"r1_start": 1.0},
    "score_processor": "cdape",
    "score_processor_options": {"width": 4},
    "attention_temperature": "llama4",
    "attention_temperature_options": {"length": 4},
    "optimizer.type": "AdamW",
    "train_iters": 7,
    "stages": [{"until": 1}, {"min_lr": 1e-3}],
}
ALONE = ProcessGroups()
COMPARED = ("load", "save", "finetune", "rollback")  # keys that select the checkpoints to compare


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("changed")
    run = folder / "run"
    config = tiny_config(
        write_corpora(folder), run, train_iters=1, score_processor="dape", attention_temperature="logn"
    )
    train(config)
    return config.replace(load=str(run))


def changed(config: Config, key: ConfigKey) -> Config:
    """Return the configuration with another value of one key, without validation."""
    value: Any = KNOWN.get(key.name, "another")
    outer = [getattr(config, key.section)]
    for name in key.path[:-1]:
        outer.append(getattr(outer[-1], name))
    for section, name in zip(reversed(outer), reversed(key.path), strict=True):
        value = section.model_copy(update={name: value})
    return config.model_copy(update={key.section: value})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    "key",
    [key for key in list_config_keys().values() if key.policy and key.name not in COMPARED],
    ids=lambda key: key.name,
)
def test_a_changed_key_follows_its_policy(trained: Config, key: ConfigKey) -> None:
    try:
        notes = plan_resume(changed(trained, key), ALONE).notes
    except UserError as error:
        found = "refused" if str(error).startswith(f"{key.name}: ") else str(error)
    else:
        output = [note for note in notes if note.startswith(f"{key.name}: ")]
        found = "silent" if not output else "unread" if "has no effect" in output[0] else "said"
    assert found == BY_ROLE[key.policy or ""]


def test_no_output_without_changes(trained: Config) -> None:
    assert [note for note in plan_resume(trained, ALONE).notes if ", now " in note or "no effect" in note] == []

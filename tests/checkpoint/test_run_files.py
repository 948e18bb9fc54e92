"""What somebody else put into a run's folder is never written over."""

from pathlib import Path

import pytest
from tiny_runs import tiny_config

from megatron.checkpoint.run_folder import LOCK, RESOLVED_CONFIG, get_config_path, refuse_foreign_run_files, save_config
from megatron.config.load import read_config
from megatron.utils.errors import UserError

OWN = "# my notes: lr from the paper's appendix\nnum_layers: 1   # small\n"


def test_a_configuration_of_somebody_keeps_its_name_and_its_comments(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, train_iters=7)
    own = tmp_path / "config.yml"
    own.write_text(OWN)
    told = save_config(config, tmp_path)
    assert (told or "").startswith(f"{own} was not written by a run and stays as it is")
    assert own.read_text() == OWN
    assert get_config_path(tmp_path) == tmp_path / RESOLVED_CONFIG
    assert read_config(get_config_path(tmp_path)).training.train_iters == 7
    save_config(config.replace(train_iters=9), tmp_path)  # as a resumed run does
    assert own.read_text() == OWN
    assert read_config(get_config_path(tmp_path)).training.train_iters == 9
    own.unlink()
    assert save_config(config, tmp_path) is None
    assert (get_config_path(tmp_path), (tmp_path / RESOLVED_CONFIG).exists()) == (own, False)


def test_a_run_replaces_what_a_run_wrote_unless_somebody_changed_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, train_iters=7)
    own = tmp_path / "config.yml"
    assert save_config(config, tmp_path) is save_config(config.replace(train_iters=9), tmp_path) is None
    assert read_config(own).training.train_iters == 9
    changed = own.read_text() + "# longer, as the reviewers asked\n"
    own.write_text(changed)
    save_config(config, tmp_path)
    assert own.read_text() == changed


@pytest.mark.parametrize("name", ["metrics.jsonl", RESOLVED_CONFIG])
def test_a_folder_with_files_of_others_takes_no_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine: true\n")
    with pytest.raises(UserError, match=f"save: .* holds {name}, which no run wrote"):
        refuse_foreign_run_files(tmp_path, ("metrics.jsonl",))
    (tmp_path / LOCK).touch()  # a run that was killed before its first checkpoint
    refuse_foreign_run_files(tmp_path, ("metrics.jsonl",))

"""Every file of a checkpoint is verified, and any damage is reported with the file name."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint import manifest
from megatron.utils.errors import RunError

FILES = (
    "config.yml", "progress.json", "model.safetensors", "deepspeed/one.pt", "deepspeed/two.pt", "random_states/0.pt",
)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Checkpoint-like folder with small files, two of them with equal lengths."""
    drawn, folder = random.Random(3), tmp_path / "run" / "checkpoints" / "step_0000004"
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn.randbytes(3000))
    entries: dict[str, manifest.FileChecksum] = {}
    for part in (FILES[:3], FILES[3:]):  # as two ranks do
        entries |= manifest.compute_checksums(folder, [folder / name for name in part])
    manifest.write_manifest(folder, entries)
    return folder


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_written_files_are_complete(checkpoint: Path) -> None:
    assert manifest.find_damage(checkpoint) is None
    assert manifest.find_damage(checkpoint, manifest.MODEL_FILES) is None
    assert manifest.find_latest_valid(checkpoint.parents[1]) == checkpoint
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert set(listed) == set(FILES)
    assert all(entry["bytes"] == 3000 for entry in listed.values())


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(checkpoint: Path, name: str) -> None:
    for bit in (0, 3000 * 8 - 1, *random.Random(name).sample(range(3000 * 8), 10)):
        flip(checkpoint / name, bit)
        assert f"{name} changed since it was written" in (manifest.find_damage(checkpoint) or "")
        flip(checkpoint / name, bit)
    assert manifest.find_damage(checkpoint) is None


def test_flipped_bits_of_the_manifest_are_noticed(checkpoint: Path) -> None:
    """Every bit flip in the manifest is detected, unless it changes whitespace or an unused name."""
    path = checkpoint / "manifest.json"
    before = path.read_bytes()
    for bit in range(0, len(before) * 8, 7):
        flip(path, bit)
        if manifest.find_damage(checkpoint) is None:
            now = json.loads(path.read_text())
            assert now["files"].keys() == json.loads(before)["files"].keys()
            assert now["files"] == json.loads(before)["files"]
        path.write_bytes(before)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda c: os.truncate(c / "model.safetensors", 2999), "has 2,999 bytes instead of 3,000"),
    "longer": (lambda c: (c / "progress.json").open("ab").write(b" "), "has 3,001 bytes"),
    "missing": (lambda c: (c / "deepspeed/two.pt").unlink(), "deepspeed/two.pt is missing"),
    "no model": (lambda c: (c / "model.safetensors").unlink(), "model.safetensors is missing"),
    "swapped": (
        lambda c: [
            (c / "deepspeed/one.pt").rename(c / "x"),
            (c / "deepspeed/two.pt").rename(c / "deepspeed/one.pt"),
            (c / "x").rename(c / "deepspeed/two.pt"),
        ],
        "deepspeed/one.pt changed since it was written",
    ),
    "another's": (
        lambda c: (c / "deepspeed/three.pt").write_bytes(b"?"),
        "deepspeed/three.pt is not listed in manifest",
    ),
    "a folder": (
        lambda c: [(c / "deepspeed/one.pt").unlink(), (c / "deepspeed/one.pt").mkdir()],
        "deepspeed/one.pt is missing",
    ),
    "no manifest": (lambda c: (c / "manifest.json").write_text(""), "manifest.json cannot be read"),
    "half a manifest": (lambda c: os.truncate(c / "manifest.json", 100), "manifest.json cannot be read"),
    "a list": (lambda c: (c / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    "no names": (
        lambda c: (c / "manifest.json").write_text('{"format": 1, "files": {}}'),
        "config.yml is not listed in manifest",
    ),
}


@pytest.mark.parametrize("what", list(DAMAGE))
def test_damage_is_named(checkpoint: Path, what: str) -> None:
    act, words = DAMAGE[what]
    act(checkpoint)
    assert words in (manifest.find_damage(checkpoint) or "")
    with pytest.raises(RunError, match=r"all checkpoints are damaged: .*step_0000004: .*choose another folder"):
        manifest.find_latest_valid(checkpoint.parents[1])


def test_an_older_complete_checkpoint_is_used(checkpoint: Path) -> None:
    newer = checkpoint.with_name("step_0000006")
    newer.mkdir()
    assert manifest.find_latest_valid(checkpoint.parents[1]) == checkpoint
    assert manifest.find_latest_valid(checkpoint) is None


def test_checkpoints_of_a_training_run_may_be_replaced(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that trains the run writes a new checkpoint and removes the one that is being read."""
    newer, find_damage = checkpoint.with_name("step_0000006"), manifest.find_damage

    def find_damage_late(path: Path) -> str | None:
        if not newer.exists():
            checkpoint.rename(newer)
        return find_damage(path)

    monkeypatch.setattr(manifest, "find_damage", find_damage_late)
    assert manifest.find_latest_valid(checkpoint.parents[1]) == newer


def test_unrelated_files_are_ignored(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("a good one")
    (checkpoint / "deepspeed" / ".DS_Store").write_text("")
    assert manifest.find_damage(checkpoint) is None


def test_only_data_to_be_read_is_checked(checkpoint: Path) -> None:
    flip(checkpoint / "deepspeed/one.pt", 5)
    assert manifest.find_damage(checkpoint, manifest.MODEL_FILES) is None
    flip(checkpoint / "config.yml", 5)
    assert manifest.find_damage(checkpoint, manifest.MODEL_FILES) is not None


def test_processes_share_the_work_and_miss_nothing(checkpoint: Path) -> None:
    for name in FILES:
        flip(checkpoint / name, 77)
        for world in (2, 3, 9):
            found = [manifest.find_damage(checkpoint, rank=rank, world_size=world) for rank in range(world)]
            assert sum(problem is not None for problem in found) == 1
        flip(checkpoint / name, 77)


def test_without_a_manifest_the_model_must_exist(checkpoint: Path) -> None:
    """Without a manifest, as in earlier versions, the model file must exist."""
    (checkpoint / "manifest.json").unlink()
    flip(checkpoint / "deepspeed/one.pt", 5)
    assert not manifest.has_checksums(checkpoint)
    assert manifest.find_damage(checkpoint) is None
    (checkpoint / "config.yml").unlink()
    assert manifest.find_damage(checkpoint) == "config.yml is missing"

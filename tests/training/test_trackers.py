"""A run that cannot report to a tracker is rejected before it starts."""

import importlib.util
from pathlib import Path

import pytest

from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.training.reporters import check_reporters
from megatron.utils.errors import UserError


def reporting(*keys: str) -> Config:
    shape = ("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_data_paths=[nowhere]")
    return load_config([], [*shape, *keys]).config


ONLINE = reporting("use_wandb=true", "wandb_mode=online")


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_only_online_runs_need_a_login() -> None:
    check_reporters(reporting())
    check_reporters(reporting("use_wandb=true"))
    with pytest.raises(UserError, match=r"^wandb_mode online: no login for api\.wandb\.ai: run `wandb login`"):
        check_reporters(ONLINE)


def test_a_key_or_a_netrc_is_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0\n")
    check_reporters(ONLINE)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(UserError, match=r"no login for wandb\.example\.org"):
        check_reporters(ONLINE)
    monkeypatch.setenv("WANDB_API_KEY", "0")
    check_reporters(ONLINE)


def test_trackio_uses_the_network_only_if_a_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    local, shared = reporting("use_trackio=true"), reporting("use_trackio=true", "trackio_space=me/runs")
    check_reporters(local)
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://example.org/?write_token=secret")
    with pytest.raises(UserError, match=r"^use_trackio: TRACKIO_SERVER_URL is set, so Trackio would send") as caught:
        check_reporters(local)
    assert "secret" not in str(caught.value)
    check_reporters(shared)
    with pytest.raises(UserError, match="trackio_space"):
        reporting("use_trackio=true", "trackio_space=https://example.org")


def test_the_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="use_wandb: wandb is not installed"):
        check_reporters(ONLINE)
    with pytest.raises(UserError, match="use_trackio: trackio is not installed"):
        check_reporters(reporting("use_trackio=true"))
    with pytest.raises(UserError, match="use_tensorboard: tensorboard is not installed"):
        check_reporters(reporting("use_tensorboard=true", "save=runs/a"))
    check_reporters(reporting("use_tensorboard=true"))  # no records from this reporter

"""A run that could not report to Weights & Biases is refused before it starts."""

import importlib.util
from pathlib import Path

import pytest

from megatron.options.training import LoggingOptions
from megatron.training.reporters import check_wandb_login
from megatron.utils.errors import UserError

ONLINE = LoggingOptions(use_wandb=True, wandb_mode="online")


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_only_online_runs_need_a_login() -> None:
    check_wandb_login(LoggingOptions())
    check_wandb_login(LoggingOptions(use_wandb=True))
    with pytest.raises(UserError, match=r"^wandb_mode online: no login for api\.wandb\.ai: run `wandb login`"):
        check_wandb_login(ONLINE)


def test_a_key_or_a_netrc_is_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0\n")
    check_wandb_login(ONLINE)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(UserError, match=r"no login for wandb\.example\.org"):
        check_wandb_login(ONLINE)
    monkeypatch.setenv("WANDB_API_KEY", "0")
    check_wandb_login(ONLINE)


def test_the_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="use_wandb: wandb is not installed"):
        check_wandb_login(ONLINE)

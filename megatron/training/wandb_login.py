"""Is there a login for Weights & Biases? Asked before a run starts, without the package and without the network."""

import importlib.util
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from megatron.options.training import LoggingOptions
from megatron.utils.errors import UserError


def check_wandb_login(options: LoggingOptions) -> None:
    """Refuse a run that could not report.

    Raises:
        UserError: the package is not installed, or an online run has no login.
    """
    if not options.use_wandb:
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError("use_wandb: wandb is not installed; pip install wandb, or set it false")
    if options.wandb_mode == "offline" or os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        known = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is None:
        raise UserError(
            f"wandb_mode online: no login for {host}: run `wandb login`, set WANDB_API_KEY, or take wandb_mode: offline"
        )

"""Models that this process holds whole."""

from typing import Any

from megatron.model import build
from megatron.model.gpt import GPT
from megatron.parallel.processes import alone


def build_model(*args: Any, **choices: Any) -> GPT:
    """`megatron.model.build.build_model` for one process."""
    return build.build_model(*args, processes=alone(), **choices)

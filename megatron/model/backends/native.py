"""Our C code for convolutional score processors on a CPU: memory linear in T, several times as fast as row blocks.

What it leaves out (other types and devices, padding, drawn positions, divided heads) goes to PyTorch's row blocks.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from kernels.cdape_attention import host
from megatron.model.backends import fused_processor
from megatron.model.backends.backend import Backend
from megatron.position.encoding import Encoding, Terms
from megatron.position.processor import Processor
from megatron.position.rows import Rows
from megatron.position.scores import table_for

logger = logging.getLogger(__name__)


class Native:
    """The C code of `kernels/cdape_attention`.

    Args:
        rest: computes what it leaves out.
        named: whether somebody asked for it, and is told what it leaves out.
    """

    def __init__(self, rest: Backend, *, named: bool) -> None:
        self.rest, self.named = rest, named

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return self.cannot(encoding, processor) or host.unavailable()

    @staticmethod
    def cannot(encoding: Encoding, processor: Processor | None) -> str | None:
        """Why it refuses, wherever the model will run."""
        if processor is None:
            return "it is for score processors"
        return fused_processor.refuses(encoding, processor, most_taps=host.MOST_TAPS)

    def __call__(self, rows: Rows) -> Tensor:
        why = _left_out(rows)
        if why is not None:
            if self.named:
                _say(why)
            return self.rest(rows)
        if host.unavailable() is not None:
            _say_unavailable()
            return self.rest(rows)
        table = table_for(rows.encoding, rows.query, rows.key, rows.q.device) or Terms()
        return fused_processor.attend(host.cdape_attention, rows, table.bias)


def _left_out(rows: Rows) -> str | None:
    if rows.q.device.type != "cpu":
        return "a model on a GPU"
    if rows.q.dtype != torch.float32:
        return str(rows.q.dtype)
    return fused_processor.left_out(rows)


@cache
def _say(why: str) -> None:
    """Once for each reason, not once for each layer and step."""
    logger.warning("attention_backend native: %s is left to PyTorch's row blocks", why)


@cache
def _say_unavailable() -> None:
    logger.warning("score processors take several times as long on this CPU as they could: %s", host.unavailable())

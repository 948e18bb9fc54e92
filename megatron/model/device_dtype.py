"""Device and data type of trained models, for evaluation and generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices, format_quantity

if TYPE_CHECKING:
    import torch

# torch is imported only when needed, so that invalid values are reported immediately.

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
NO_CUDA_DEVICE = "this machine has no CUDA device (or torch was built without CUDA)"


def parse_device(name: str) -> tuple[str, int]:
    """Return the type and index of a device named auto, cpu, cuda or cuda:1. Raises UserError for any other name."""
    kind, _, index = name.partition(":")
    if kind not in DEVICES or (index and not index.isdigit()) or (kind == "auto" and index):
        raise UserError(f"device is {name}; {format_choices(name, DEVICES)}")
    return kind, int(index or 0)


def resolve_device(name: str) -> torch.device:
    """Return the device named auto, cpu, cuda or cuda:1. Raises UserError if it does not exist."""
    import torch

    from megatron.distributed.process_groups import configure_cuda

    kind, index = parse_device(name)
    if kind == "cuda" and index >= torch.cuda.device_count():
        devices = format_quantity(torch.cuda.device_count(), "CUDA device")
        some = f"this machine has {devices}, numbered from 0"
        raise UserError(f"device is {name}, but {some if torch.cuda.device_count() else NO_CUDA_DEVICE}")
    if kind != "cpu":
        configure_cuda()
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def check_precision(precision: str, device: str) -> None:
    """Raise UserError if precision or device is unknown, or if they cannot be combined; auto is always valid."""
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision}; {format_choices(str(precision), PRECISIONS)}")
    if parse_device(device)[0] == "cpu" and precision == "fp16":
        raise UserError("precision is fp16, which needs a GPU; on a CPU choose fp32 or bf16")


def get_torch_dtype(precision: str) -> torch.dtype:
    """Return the data type that configurations call fp32, bf16 or fp16."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def resolve_dtype(precision: str, trained_precision: str | None, device: torch.device) -> torch.dtype:
    """Return the data type in which a trained model computes.

    Args:
        precision: fp32, bf16, fp16, or auto: fp32 on a CPU, the precision of the training on a GPU.
        trained_precision: precision of the training, if known.
        device: device of the model.

    Raises:
        UserError: if the device cannot compute in it.
    """
    if precision == "auto":
        precision = (trained_precision or "fp32") if device.type == "cuda" else "fp32"
    check_precision(precision, device.type)
    return get_torch_dtype(precision)

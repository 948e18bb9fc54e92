"""Bytes that exist: what autograd keeps of a forward pass, and all tensors that this process holds."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def kept_by_autograd(module: nn.Module, run: Callable[[], Any], *, arguments: bool = False) -> int:
    """Bytes of the storages that `run` leaves for its backward pass, the module's own weights left out.

    arguments: also of tensors that are held without autograd's knowledge, as arguments of what is to be recomputed;
        takes a second, for all objects of the process are looked at.
    """
    owned = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    before = storages() if arguments else {}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            found[storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    kept = {address: storage.nbytes() for address, storage in found.items()}
    if arguments:
        new = {address: size for address, size in storages().items() if address not in before}
        new.pop(output.untyped_storage().data_ptr())
        kept |= new
    return sum(kept.values())


def storages() -> dict[int, int]:
    """Address and bytes of every storage on the CPU that a tensor of this process shows."""
    gc.collect()
    tensors: Iterable[Tensor] = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    found = {}
    for tensor in tensors:
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.device.type == "cpu":
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found

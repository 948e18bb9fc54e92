"""Measured memory: bytes saved by autograd, bytes of all tensors of this process, and peaks."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STATE_HOLDERS = ("deepspeed.runtime", "megatron.training.zero_optimizer")
"""Modules whose objects store states of an engine."""


def kept_by_autograd(module: nn.Module, run: Callable[[], Any], *, arguments: bool = False) -> int:
    """Return the bytes of storages that `run` saves for its backward pass, without the module's own weights.

    Args:
        arguments: also count tensors that autograd does not know, as arguments of recomputation. This takes a second,
            because all objects of the process are visited.
    """
    owned = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    before = storages() if arguments else {}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            found[storage.data_ptr()] = storage  # keeps the address from being reused
        return tensor.detach()  # an operation that saves its own output would create a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    kept = {address: storage.nbytes() for address, storage in found.items()}
    if arguments:
        new = {address: size for address, size in storages().items() if address not in before}
        new.pop(output.untyped_storage().data_ptr())
        kept |= new
    return sum(kept.values())


def storages() -> dict[int, int]:
    """Return address and size of every CPU storage used by a tensor of this process."""
    gc.collect()
    # Only actual tensors, because tracing or compilation in other tests leaves tensors without memory.
    tensors: Iterable[Tensor] = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    found = {}
    for tensor in tensors:
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.device.type == "cpu":
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


def reached(*roots: Any) -> int:
    """Return the bytes of storages reachable from objects.

    The search follows containers, gradients and attributes of tensors, and attributes of optimizers. It ignores what a
    collective's thread still references temporarily.
    """
    found: dict[int, int] = {}
    todo, seen = list(roots), set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            todo += [thing.grad] if thing.is_leaf else []
            todo += vars(thing).values()
        elif isinstance(thing, dict):
            todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set):
            todo += thing
        elif type(thing).__module__.startswith(STATE_HOLDERS) and not isinstance(thing, nn.Module):
            todo += vars(thing).values() if hasattr(thing, "__dict__") else []
    return sum(found.values())


class Peak(TorchDispatchMode):
    """Peak and current bytes of tensors created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in given}
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage not in self._known and storage.data_ptr() not in old:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _free(self, size: int) -> None:
        self.now -= size

"""Bytes that exist: what autograd keeps of a forward pass, all tensors of this process, and the most at one time."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STATE_HOLDERS = ("deepspeed.runtime", "megatron.training.zero_optimizer")
"""Modules whose objects hold states of an engine."""


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
        return tensor.detach()  # an operation that keeps its own result would keep itself for ever

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
    # Only tensors proper: what other tests traced or compiled leaves some without memory.
    tensors: Iterable[Tensor] = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    found = {}
    for tensor in tensors:
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.device.type == "cpu":
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


def reached(*roots: Any) -> int:
    """Bytes of the storages that are found from some objects: through containers, tensors' gradients and attributes,
    and the attributes of optimizers. What a thread of a collective still holds for a moment is not among them.
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
    """The most bytes that tensors made inside had at one time, and what they have now."""

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

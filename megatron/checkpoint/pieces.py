"""Parameters in pieces: what every rank wrote of them, and any part of a whole put together again.

A *piece* is a fragment in a file: flat, under the name `kind/parameter`, with kinds such as `master` and `exp_avg`. The
file's header says which elements of the parameter it holds, and how tensor-parallel ranks divided that parameter, so
that ranks of any other layout find what they need, and read no more of it than they must.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.fragments import Fragment
from megatron.distributed.mesh import Axis
from megatron.distributed.parameters import Division, cut, division, join
from megatron.errors import RunError
from megatron.files import parse_json

METADATA = "pieces"


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of what one tensor-parallel rank held of a parameter."""

    start: int
    size: int
    shape: tuple[int, ...]
    """Of all that this rank held of the parameter."""
    index: int
    """Which of the tensor-parallel ranks it was; 0 if the parameter was not divided."""
    ranks: int
    """Among how many the parameter was divided."""
    dim: int
    strips: int
    """How it was divided, see `Division`."""
    step: float
    """Adam's count of steps."""

    @property
    def stop(self) -> int:
        return self.start + self.size


def described(fragments: Iterable[Fragment], tensor: Axis) -> dict[str, str]:
    """The metadata of a file that holds these fragments.

    tensor: which of the tensor-parallel ranks this one is.
    """
    pieces = {}
    for fragment in fragments:
        how = division(fragment.parameter)
        shape = getattr(fragment.parameter, "ds_shape", fragment.parameter.shape)  # under ZeRO 3 the data are elsewhere
        where = (0, 1, 0, 1) if how is None else (tensor.index, tensor.size, how.dim, how.strips)
        piece = Piece(fragment.start, fragment.master.numel(), tuple(shape), *where, float(fragment.step))
        pieces[fragment.name] = asdict(piece)
    return {METADATA: json.dumps(pieces)}


class Pieces:
    """What is in the files of all ranks. To be used in a `with` block, in which the files stay open.

    Raises (all methods):
        RunError: a file cannot be read or is not one of these, or no file has what is asked for.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._found: dict[str, list[tuple[Piece, Any]]] = {}
        self._open = ExitStack()

    def __enter__(self) -> "Pieces":
        for path in self._files:
            try:
                file = self._open.enter_context(safe_open(path, "pt"))
                for name, values in parse_json(file.metadata()[METADATA]).items():
                    piece = Piece(**{**values, "shape": tuple(values["shape"])})
                    self._found.setdefault(name, []).append((piece, file))
            except (OSError, SafetensorError, ValueError, TypeError, LookupError) as error:
                self._open.close()
                raise RunError(f"{path}: does not hold pieces of parameters ({error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> list[str]:
        """All parameters, in the order of the files."""
        return list(self._found)

    def step(self, name: str) -> float:
        """Adam's count of steps of a parameter."""
        return self._any(name).step

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        piece = self._any(name)
        return tuple(size * (piece.ranks if dim == piece.dim else 1) for dim, size in enumerate(piece.shape))

    def whole(self, kind: str, name: str) -> Tensor:
        """All of a parameter."""
        piece = self._any(name)
        parts = [self._flat(kind, name, index, 0, None).view(piece.shape) for index in range(piece.ranks)]
        return parts[0] if piece.ranks == 1 else join(parts, Division(piece.dim, piece.strips))

    def range(self, kind: str, name: str, how: Division | None, tensor: Axis, start: int, stop: int) -> Tensor:
        """Some elements, flat, of what one rank of another layout holds of a parameter.

        Args:
            kind, name: what and of which parameter.
            how: the way in which that layout's tensor-parallel ranks divide the parameter.
            tensor: which of these ranks asks.
            start, stop: the elements of what it holds.
        """
        piece = self._any(name)
        if piece.ranks == (tensor.size if how is not None else 1):
            return self._flat(kind, name, tensor.index if piece.ranks > 1 else 0, start, stop)
        whole = self.whole(kind, name)
        return (whole if how is None else cut(whole, how, tensor)).reshape(-1)[start:stop]

    def _any(self, name: str) -> Piece:
        if name not in self._found:
            raise RunError(f"{self._files[0].parent}: holds nothing of {name}")
        return self._found[name][0][0]

    def _flat(self, kind: str, name: str, index: int, start: int, stop: int | None) -> Tensor:
        """Elements of what the tensor-parallel rank `index` held; to the end if `stop` is None."""
        stop = torch.Size(self._any(name).shape).numel() if stop is None else stop
        found = torch.empty(stop - start)
        there = start
        for piece, file in sorted((p for p in self._found[name] if p[0].index == index), key=lambda p: p[0].start):
            low, high = max(there, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            if low > there:
                break
            try:
                part = file.get_slice(f"{kind}/{name}")[low - piece.start : high - piece.start]
            except SafetensorError as error:
                raise RunError(f"{self._files[0].parent}: {kind} of {name} cannot be read ({error})") from None
            found[low - start : high - start] = part
            there = high
        if there < stop:
            raise RunError(f"{self._files[0].parent}: holds no {kind} of element {there} of {name}")
        return found

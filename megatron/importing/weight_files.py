"""Files of tensors that others wrote: safetensors, and torch's own without running what is in them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint import manifest, tensor_files
from megatron.errors import RunError, UserError, reason
from megatron.files import parse_json
from megatron.formats.farfield import CHECKSUMS

KINDS = (("model.safetensors", "safetensors"), ("pytorch_model.bin", "torch"))
"""Names of a folder's weights, and how they are read; the first that is there is taken."""


class Tensors:
    """Tensors by name, each read when it is asked for."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Path, Callable[[], Tensor]]] = {}

    def add(self, name: str, path: Path, read: Callable[[], Tensor]) -> None:
        """Another tensor. Raises RunError if there is one of this name."""
        if name in self._read:
            raise RunError(f"{path}: holds {name}, and so does {self._read[name][0]}")
        self._read[name] = (path, read)

    @property
    def names(self) -> list[str]:
        """In the order of the files."""
        return list(self._read)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._read[name][0]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor. Raises RunError: its file is damaged."""
        path, read = self._read[name]
        try:
            return read()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise RunError(f"{path}: {name} cannot be read ({_line(error)})") from None


@contextmanager
def open_folder(folder: Path) -> Iterator[Tensors]:
    """The weights of a folder as Hugging Face's libraries write it: one file, or shards with their index.

    Raises:
        UserError: there are none.
        RunError: a file is missing or damaged, or holds more than tensors.
    """
    _check_export(folder)
    paths, kind = _files(folder)
    with ExitStack() as stack:
        tensors = Tensors()
        for path in paths:
            if kind == "safetensors":
                _add_safetensors(tensors, path, stack)
            else:
                _add_torch(tensors, path)
        yield tensors


def _files(folder: Path) -> tuple[list[Path], str]:
    for name, kind in KINDS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name], kind
        if index.is_file():
            return _shards(index), kind
    looked = ", ".join(f"{name} or its .index.json" for name, _ in KINDS)
    raise UserError(f"{folder}: holds no weights; looked for {looked}")


def _shards(index: Path) -> list[Path]:
    """The files that an index names."""
    try:
        files = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
            raise ValueError("it names no files beside itself")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{index}: not the index of shards ({_line(error)})") from None
    for name in files:
        if not (index.parent / name).is_file():
            raise RunError(f"{index.parent / name}: is missing; {index.name} names it")
    return [index.parent / name for name in files]


def _check_export(folder: Path) -> None:
    """Compare the weights of an export of this project with what was written. Raises RunError if they are not that."""
    listed = folder / CHECKSUMS
    if not listed.is_file():
        return
    entries = manifest.read(listed)
    if entries is None or any(Path(name).name != name for name in entries):
        raise RunError(f"{listed}: cannot be read; export the model again")
    if (problem := manifest.difference(folder, entries)) is not None:
        raise RunError(f"{folder}: {problem}; export the model again, or delete {CHECKSUMS} if you changed the weights")


def _add_safetensors(tensors: Tensors, path: Path, stack: ExitStack) -> None:
    try:
        file = stack.enter_context(safe_open(path, "pt"))
        names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({_line(error)})") from None
    for name in names:
        tensors.add(name, path, lambda name=name: file.get_tensor(name))  # type: ignore[misc]


def _add_torch(tensors: Tensors, path: Path) -> None:
    add_mapping(tensors, path, read_torch(path))


def read_torch(path: Path, *, classes: Sequence[Any] = ()) -> Any:
    """What is in a file of torch.save, its tensors mapped and not read where the format allows it."""
    return tensor_files.read(path, classes=classes, mapped=True)


def add_mapping(tensors: Tensors, path: Path, content: Any, prefix: str = "") -> None:
    """The tensors of a mapping that a file holds. Raises RunError if it is none."""
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no names of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RunError(f"{path}: {name!r} is no tensor")
        tensors.add(f"{prefix}{name}", path, lambda tensor=tensor: tensor)  # type: ignore[misc]


def _line(error: BaseException) -> str:
    if isinstance(error, OSError):
        return reason(error)
    return (str(error).strip() or type(error).__name__).splitlines()[0]

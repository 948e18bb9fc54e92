"""Files of tensors that others wrote: safetensors, and torch's own without running what is in them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint import manifest, tensor_files
from megatron.conversion.families.farfield import CHECKSUMS_FILE
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, UserError, describe_cause

WEIGHT_FORMATS = (("model.safetensors", "safetensors"), ("pytorch_model.bin", "torch"))
"""Names of a folder's weights, and how they are read; the first that is there is taken."""


class LazyTensors:
    """Tensors by name, each read when it is asked for."""

    def __init__(self) -> None:
        self._readers: dict[str, tuple[Path, Callable[[], Tensor]]] = {}

    def add(self, name: str, path: Path, read: Callable[[], Tensor]) -> None:
        """Another tensor. Raises RunError if there is one of this name."""
        if name in self._readers:
            raise RunError(f"{path}: holds {name}, and so does {self._readers[name][0]}")
        self._readers[name] = (path, read)

    @property
    def names(self) -> list[str]:
        """In the order of the files."""
        return list(self._readers)

    def get_file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._readers[name][0]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor. Raises RunError: its file is damaged."""
        path, read = self._readers[name]
        try:
            return read()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise RunError(f"{path}: {name} cannot be read ({_first_line(error)})") from None


@contextmanager
def open_hf_weights(folder: Path) -> Iterator[LazyTensors]:
    """The weights of a folder as Hugging Face's libraries write it: one file, or shards with their index.

    Raises:
        UserError: there are none.
        RunError: a file is missing or damaged, or holds more than tensors.
    """
    _verify_export(folder)
    paths, file_format = _find_weight_files(folder)
    with ExitStack() as stack:
        tensors = LazyTensors()
        for path in paths:
            if file_format == "safetensors":
                _add_safetensors(tensors, path, stack)
            else:
                _add_torch_file(tensors, path)
        yield tensors


def _find_weight_files(folder: Path) -> tuple[list[Path], str]:
    for name, file_format in WEIGHT_FORMATS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name], file_format
        if index.is_file():
            return _list_shards(index), file_format
    expected_files = ", ".join(f"{name} or its .index.json" for name, _ in WEIGHT_FORMATS)
    raise UserError(f"{folder}: holds no weights; looked for {expected_files}")


def _list_shards(index: Path) -> list[Path]:
    """The files that an index names."""
    try:
        files = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
            raise ValueError("it names no files beside itself")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{index}: not the index of shards ({_first_line(error)})") from None
    for name in files:
        if not (index.parent / name).is_file():
            raise RunError(f"{index.parent / name}: is missing; {index.name} names it")
    return [index.parent / name for name in files]


def _verify_export(folder: Path) -> None:
    """Compare the weights of an export of this project with what was written. Raises RunError if they are not that."""
    checksums_path = folder / CHECKSUMS_FILE
    if not checksums_path.is_file():
        return
    checksums = manifest.read_manifest(checksums_path)
    if checksums is None or any(Path(name).name != name for name in checksums):
        raise RunError(f"{checksums_path}: cannot be read; export the model again")
    if (problem := manifest.find_difference(folder, checksums)) is not None:
        raise RunError(
            f"{folder}: {problem}; export the model again, or delete {CHECKSUMS_FILE} if you changed the weights"
        )


def _add_safetensors(tensors: LazyTensors, path: Path, stack: ExitStack) -> None:
    try:
        file = stack.enter_context(safe_open(path, "pt"))
        names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({_first_line(error)})") from None
    for name in names:
        tensors.add(name, path, lambda name=name: file.get_tensor(name))  # type: ignore[misc]


def _add_torch_file(tensors: LazyTensors, path: Path) -> None:
    add_state_dict(tensors, path, load_torch_file(path))


def load_torch_file(path: Path, *, classes: Sequence[Any] = ()) -> Any:
    """What is in a file of torch.save, its tensors mapped and not read where the format allows it."""
    return tensor_files.read_torch_file(path, classes=classes, mapped=True)


def add_state_dict(tensors: LazyTensors, path: Path, state_dict: Any, prefix: str = "") -> None:
    """The tensors of a mapping that a file holds. Raises RunError if it is none."""
    if not isinstance(state_dict, dict):
        raise RunError(f"{path}: holds no names of tensors")
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RunError(f"{path}: {name!r} is no tensor")
        tensors.add(f"{prefix}{name}", path, lambda tensor=tensor: tensor)  # type: ignore[misc]


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError):
        return describe_cause(error)
    return (str(error).strip() or type(error).__name__).splitlines()[0]

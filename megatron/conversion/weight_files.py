"""Reader for weight files of other projects: safetensors, and torch files without running code from them."""

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
"""Names and formats of a folder's weight files; the first match is used."""


class LazyTensors:
    """Tensors by name, read on demand."""

    def __init__(self) -> None:
        self._readers: dict[str, tuple[Path, Callable[[], Tensor]]] = {}

    def add(self, name: str, path: Path, read: Callable[[], Tensor]) -> None:
        """Add a tensor. Raises RunError if the name exists."""
        if name in self._readers:
            raise RunError(f"{path}: contains {name}, which is also in {self._readers[name][0]}")
        self._readers[name] = (path, read)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._readers)

    def get_file(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self._readers[name][0]

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor. Raises RunError if its file is damaged."""
        path, read = self._readers[name]
        try:
            return read()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise RunError(f"{path}: {name} cannot be read ({_first_line(error)})") from None


@contextmanager
def open_hf_weights(folder: Path) -> Iterator[LazyTensors]:
    """Open the weights of a Hugging Face model folder: one file, or shards with an index.

    Raises:
        UserError: there are no weights.
        RunError: a file is missing or damaged, or contains more than tensors.
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
    raise UserError(f"{folder}: contains no weights; looked for {expected_files}")


def _list_shards(index: Path) -> list[Path]:
    """Return the files listed in an index."""
    try:
        files = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
            raise ValueError("it lists no files in its folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{index}: not an index of shards ({_first_line(error)})") from None
    for name in files:
        if not (index.parent / name).is_file():
            raise RunError(f"{index.parent / name}: not found, but listed in {index.name}")
    return [index.parent / name for name in files]


def _verify_export(folder: Path) -> None:
    """Compare the weights of this project's export with their recorded checksums. Raises RunError if they differ."""
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
    """Load a torch.save file; tensors are memory-mapped if the format supports it."""
    return tensor_files.read_torch_file(path, classes=classes, mapped=True)


def add_state_dict(tensors: LazyTensors, path: Path, state_dict: Any, prefix: str = "") -> None:
    """Add the tensors of a mapping in a file. Raises RunError if it is not a mapping of tensors."""
    if not isinstance(state_dict, dict):
        raise RunError(f"{path}: contains no named tensors")
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RunError(f"{path}: {name!r} is not a tensor")
        tensors.add(f"{prefix}{name}", path, lambda tensor=tensor: tensor)  # type: ignore[misc]


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError):
        return describe_cause(error)
    return (str(error).strip() or type(error).__name__).splitlines()[0]

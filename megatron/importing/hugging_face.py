"""A folder of Hugging Face's libraries: config.json, weights, and a tokenizer's files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.schema import Config
from megatron.errors import RunError, UserError, reason
from megatron.files import parse_json
from megatron.formats.families import family_of
from megatron.formats.family import EMBEDDING, FILE, OUTPUT, Family, Weight
from megatron.formats.keys import Keys
from megatron.importing.source import Source

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.importing.weight_files import Tensors


def hugging_face(folder: Path) -> Source:
    """What a folder says that it holds.

    Raises UserError: it is no such folder, or its model is none that ours can be, naming the key.
    """
    path = folder / FILE
    values = _json(path)
    family = family_of(values.get("model_type"), str(path))
    keys = Keys(values, str(path), family.code)
    ours = family.read(keys)
    rows = keys.number("vocab_size")
    notes: tuple[str, ...] = ()
    if unread := keys.unread():
        notes = (f"{path}: {', '.join(unread)}: no {family.name} model has such keys; passed over",)
    return Source(folder, family.name, ours, partial(_opened, folder, family, rows), folder, notes)


def _json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({reason(error)})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no keys")
    return values


@contextmanager
def _opened(folder: Path, family: Family, rows: int, config: Config) -> "Iterator[FamilyWeights]":
    from megatron.importing.weight_files import open_folder

    with open_folder(folder) as tensors:
        yield FamilyWeights(folder, family, rows, config, tensors)


class FamilyWeights:
    """The weights of a family's files, by our names."""

    def __init__(self, folder: Path, family: Family, rows: int, config: Config, tensors: "Tensors") -> None:
        self.folder, self.family, self.rows, self.tensors = folder, family, rows, tensors
        self.tied = not config.model.no_weight_tying
        self.table = {weight.ours: weight for weight in family.weights(config)}
        self._names = set(tensors.names)

    def _there(self, theirs: str) -> str | None:
        """The name that a tensor has in these files."""
        names = (theirs, theirs.removeprefix(self.family.base), self.family.synonyms.get(theirs, theirs))
        return next((name for name in names if name in self._names), None)

    def check(self, names: list[str]) -> None:
        if wrong := set(names) ^ self.table.keys():
            raise RuntimeError(f"the table of {self.family.name} and the model differ in {sorted(wrong)[0]}")
        used = set()
        for theirs in (each for weight in self.table.values() for each in weight.theirs):
            found = self._there(theirs)
            if found is None:
                raise RunError(f"{self.folder}: holds no {theirs}, which {FILE} asks for")
            used.add(found)
        ignored = re.compile(self.family.ignored)
        rest = [name for name in self.tensors.names if name not in used and not ignored.fullmatch(name)]
        outputs = {"lm_head.weight", *self.family.synonyms, *self.family.synonyms.values()}
        if self.tied and rest and set(rest) <= outputs:
            self._check_tied(rest)
        elif rest:
            more = f", and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise RunError(
                f"{self.tensors.file(rest[0])}: holds {rest[0]}{more}, which a {self.family.name} model with this "
                f"{FILE} has not; it would be dropped"
            )

    def _check_tied(self, outputs: list[str]) -> None:
        """Files may hold a tied matrix twice, but not two matrices."""
        import torch

        embedding = self.tensors[self._there(self.table[EMBEDDING].theirs[0]) or ""]
        for name in outputs:
            if not torch.equal(self.tensors[name], embedding):
                raise RunError(
                    f"{self.tensors.file(name)}: {name} is not the embedding, although {FILE} says "
                    "tie_word_embeddings: true; set it to false if the two belong together"
                )

    def __call__(self, name: str) -> "Tensor":
        weight: Weight = self.table[name]
        parts = [self.tensors[self._there(theirs) or theirs] for theirs in weight.theirs]
        for theirs, part in zip(weight.theirs, parts, strict=True):
            if not part.is_floating_point():
                kind = str(part.dtype).removeprefix("torch.")
                raise RunError(f"{self.folder}: {theirs} is of type {kind}; quantized weights are not read")
        try:
            found = weight.transform.to_ours(parts)
        except (RuntimeError, ValueError, IndexError):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise RunError(f"{self.folder}: {', '.join(weight.theirs)}: {shapes} do not fit {FILE}") from None
        if name in (EMBEDDING, OUTPUT) and found.shape[0] != self.rows:
            raise RunError(f"{self.folder}: {weight.theirs[0]} has {found.shape[0]} rows, {FILE} says {self.rows}")
        return found

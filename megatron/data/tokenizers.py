"""Tokenizers, which convert text to token ids and back, and define the end-of-document token.

There are four types, with GPT-NeoX's names where available:

| type               | files                      | description                                                    |
|--------------------|----------------------------|----------------------------------------------------------------|
| `bytes`            | none                       | 256 UTF-8 byte values and end-of-document: 257 tokens, no      |
|                    |                            | training, no unknown text                                      |
| `HFTokenizer`      | `tokenizer.json`           | any Hugging Face tokenizer (GPT-NeoX-20B's, Pythia's, or from  |
|                    |                            | `train_bpe`)                                                   |
| `GPT2BPETokenizer` | `vocab.json`, `merges.txt` | GPT-2's byte-level BPE                                         |
| `SPMTokenizer`     | `tokenizer.model`          | SentencePiece                                                  |

A corpus folder contains a copy of its tokenizer's files with a checksum, so that it can be moved and read anywhere. So
does a run's folder (`load_tokenizer.py`). A tokenizer's `name` contains that checksum: two corpora are compatible
if and only if their tokenizers have the same name.

Some tokenizers add a token before every text (Llama's `<s>`, OPT's `</s>`). Whether to do so is decided once, when a
corpus is prepared or a model is imported: by the tokenizer's own files, or by `add_bos`. The decision is stored with
the corpus and the run (`bos`). It applies wherever text becomes tokens: corpus documents, scored texts, prompts,
lm-evaluation-harness, and an export's tokenizer.
"""

import hashlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import tokenizers as hf

from megatron.data.corpus_metadata import TokenizerMetadata
from megatron.options.data import MAX_VOCAB_SIZE, TokenizerType
from megatron.utils.errors import UserError, check_reachable
from megatron.utils.formatting import format_choices, suggest_names

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOS>", "[EOS]", "<eod>", "<|end|>")
"""Common names of the end-of-document token, most common first."""

BEGINNING_OF_TEXT = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "<BOS>", "[BOS]")
"""Common names of the beginning-of-text token."""


class Tokenizer(ABC):
    """Tokenizer that converts text to token ids and back.

    All ids are in [0, vocab_size). `eod` is the id written after each document; `bos` is the id added before each text,
    or None.
    """

    type: ClassVar[TokenizerType]
    vocab_size: int
    eod: int
    bos: int | None = None
    end_token: str | None = None
    """Name of `eod`, if it is not one of the common names."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.checksum = _compute_checksum(self.type, files)

    @property
    def name(self) -> str:
        """Identity of the tokenizer: its type and the checksum of its files, independent of their location."""
        return f"{self.type}-{self.checksum[:12]}" if self.files else self.type

    @property
    def metadata(self) -> TokenizerMetadata:
        """Description of this tokenizer, as stored with a corpus or a run."""
        return TokenizerMetadata(
            type=self.type,
            name=self.name,
            vocab_size=self.vocab_size,
            eod=self.eod,
            files=list(self.files),
            checksum=self.checksum,
            bos=self.bos,
            end_token=self.end_token,
        )

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""

    def encode_with_bos(self, text: str) -> list[int]:
        """Return the token ids of a text, preceded by `bos` if the tokenizer has one."""
        return [*([] if self.bos is None else [self.bos]), *self.encode(text)]

    def get_prefix_tokens(self) -> list[int]:
        """Return the tokens that the tokenizer's own files add before a text."""
        return []

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a named token, or None if it does not exist."""
        return None

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids.

        End-of-document is rendered in the tokenizer's notation (nothing for `bytes`).
        """

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one integer array per text. Faster than `encode` if the library supports batches."""
        return [np.asarray(self.encode(text), dtype=np.int64) for text in texts]

    def copy_files(self, folder: Path) -> None:
        """Copy the tokenizer's files to a folder, under the names that `load_tokenizer_from_files` expects."""
        for name, path in self.files.items():
            shutil.copyfile(path, folder / name)


class ByteTokenizer(Tokenizer):
    """UTF-8 byte tokenizer. Invalid UTF-8, which a model may generate, decodes to U+FFFD."""

    type = "bytes"
    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        super().__init__({})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer from a `tokenizer.json`. Special tokens in the text become their ids, as in GPT-NeoX."""

    type = "HFTokenizer"

    def __init__(self, vocab_file: Path, *, end_token: str | None = None) -> None:
        super().__init__({"tokenizer.json": vocab_file})
        try:
            self._tokenizer = hf.Tokenizer.from_file(str(vocab_file))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{vocab_file}: not a Hugging Face tokenizer.json: {_get_first_line(error)}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._has_regex = b'"Regex"' in vocab_file.read_bytes()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = _check_vocab_size(ids, vocab_file)
        self.eod, self.end_token = _find_eod(ids, vocab_file, end_token), end_token

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def get_prefix_tokens(self) -> list[int]:
        if self._tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
            return []
        for text in ("a", "0", " ", *islice(self._tokenizer.get_vocab(), 20)):
            try:
                plain, complete = (self._tokenizer.encode(text, add_special_tokens=add).ids for add in (False, True))
            except Exception:  # raised if the library has no token for a text
                continue
            for start in range(len(complete) if plain else 0):
                if complete[start : start + len(plain)] == plain:
                    return complete[:start]
        return []

    def encode(self, text: str) -> list[int]:
        with self._catch_regex_panics():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        with self._catch_regex_panics():
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _catch_regex_panics(self) -> AbstractContextManager[None]:
        """Return a context that handles panics if the file has regular expressions.

        They may exceed the library's limits.
        """
        return _translate_panics(self.files["tokenizer.json"]) if self._has_regex else nullcontext()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._catch_regex_panics():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


@contextmanager
def _translate_panics(file: Path) -> Iterator[None]:
    """Convert a panic of the Rust library into a one-line UserError that names the tokenizer's file.

    A panic writes a report to file descriptor 2 and raises an exception that is not an Exception.
    """
    with tempfile.TemporaryFile() as captured:
        stderr, panicked = os.dup(2), False
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            if panicked:
                raise UserError(
                    f"{file}: cannot apply its regular expressions to a text: {_get_first_line(error)}"
                ) from None
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            if not panicked and (other_output := captured.read()):
                os.write(2, other_output)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`. Special tokens in the text are not parsed."""

    type = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path, *, end_token: str | None = None) -> None:
        super().__init__({"vocab.json": vocab_file, "merges.txt": merge_file})
        try:
            ids, merges = hf.models.BPE.read_file(str(vocab_file), str(merge_file))
            self._tokenizer = hf.Tokenizer(hf.models.BPE(ids, merges))
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"{vocab_file}, {merge_file}: not GPT-2 vocab and merges: {_get_first_line(error)}"
            ) from None
        self._tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = hf.decoders.ByteLevel()
        self.vocab_size = _check_vocab_size(ids, vocab_file)
        self.eod, self.end_token = _find_eod(ids, vocab_file, end_token), end_token

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in self._tokenizer.encode_batch_fast(list(texts))]


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer from a SentencePiece `.model`. Its normalization applies, so decoding may change white space."""

    type = "SPMTokenizer"

    def __init__(self, vocab_file: Path, *, end_token: str | None = None) -> None:
        import sentencepiece

        super().__init__({"tokenizer.model": vocab_file})
        try:
            self._tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(vocab_file))
        except Exception as error:  # RuntimeError or OSError, depending on the damage
            raise UserError(f"{vocab_file}: not a SentencePiece model: {_get_first_line(error)}") from None
        self.vocab_size = self._tokenizer.get_piece_size()
        pieces = {self._tokenizer.id_to_piece(i): i for i in range(self.vocab_size)}
        eos, self._pieces = self._tokenizer.eos_id(), pieces
        use_eos = end_token is None and eos >= 0
        self.eod, self.end_token = eos if use_eos else _find_eod(pieces, vocab_file, end_token), end_token

    def token_to_id(self, token: str) -> int | None:
        return self._pieces.get(token)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    cls.type: cls for cls in (ByteTokenizer, HuggingFaceTokenizer, GPT2Tokenizer, SentencePieceTokenizer)
}


def load_tokenizer_from_files(
    type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    *,
    end_token: str | None = None,
    bos: bool | str | None = None,
) -> Tokenizer:
    """Load a tokenizer of a given type from its files.

    Args:
        end_token: end-of-document token, if it does not have one of the common names.
        bos: token added before every text: as in the tokenizer's files (None), none (False), the one with a common name
            (True), or the one with the given name.

    Raises:
        UserError: a file or option is invalid, missing or unused.
    """
    if type not in TOKENIZERS:
        raise UserError(f"tokenizer: unknown value {type!r}; {format_choices(type, TOKENIZERS)}")
    required = {
        "HFTokenizer": ("tokenizer.json", None),
        "GPT2BPETokenizer": ("vocab.json", "merges.txt"),
        "SPMTokenizer": (".model", None),
    }.get(type, (None, None))
    files = []
    for key, name, needed in zip(("vocab_file", "merge_file"), (vocab_file, merge_file), required, strict=True):
        if needed is None and name is not None:
            raise UserError(f"{key}: {name}: tokenizer {type} has no such file")
        if needed is not None:
            if name is None:
                raise UserError(f"{key}: tokenizer {type} needs its {needed} file")
            path = Path(name)
            if not path.is_file():
                check_reachable(path)
                problem = "is a folder" if path.is_dir() else "no such file"
                raise UserError(f"{key}: {path}: {problem}; tokenizer {type} needs its {needed} file")
            files.append(path)
    if end_token is not None and not files:
        raise UserError(f"end_token: {end_token!r}: tokenizer {type} has a fixed end token")
    tokenizer = TOKENIZERS[type](*files) if end_token is None else TOKENIZERS[type](*files, end_token=end_token)
    tokenizer.bos = _find_bos(tokenizer, bos)
    return tokenizer


def _find_bos(tokenizer: Tokenizer, bos: bool | str | None) -> int | None:
    """Return the token to add before every text (see `load_tokenizer_from_files`)."""
    if bos is False:
        return None
    if bos is None:
        prefix = tokenizer.get_prefix_tokens()
        if len(prefix) > 1:
            raise UserError(
                f"add_bos: the file of tokenizer {tokenizer.name} adds {len(prefix)} tokens before a text, but at most "
                "one is supported; use false for none"
            )
        return prefix[0] if prefix else None
    names = BEGINNING_OF_TEXT if bos is True else (bos,)
    if bos is True and (prefix := tokenizer.get_prefix_tokens()):
        return prefix[0]
    for name in names:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise UserError(
        f"add_bos: tokenizer {tokenizer.name} has no beginning-of-text token; looked for {', '.join(names)}"
    )


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on texts and write its tokenizer.json.

    The same texts produce the same file.

    All 256 byte values are tokens, so every text can be encoded and decodes to itself. `vocab_size` includes them and
    <|endoftext|>; a small text may yield fewer tokens.
    """
    min_size = 257
    if vocab_size < min_size:
        raise UserError(f"vocab_size: {vocab_size} is too small; the 256 byte values and <|endoftext|> need {min_size}")
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT[0]],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # raises Python's own errors


def _find_eod(ids: dict[str, int], path: Path, end_token: str | None) -> int:
    if end_token is not None:
        if end_token not in ids:
            raise UserError(
                f"end_token: {path} has no token {end_token!r}; {suggest_names(end_token, ids)}".rstrip("; ")
            )
        return ids[end_token]
    for name in END_OF_DOCUMENT:
        if name in ids:
            return ids[name]
    raise UserError(
        f"{path}: no end-of-document token found; looked for {', '.join(END_OF_DOCUMENT)}; set it with end_token "
        "(--end-token)"
    )


def _check_vocab_size(ids: dict[str, int], path: Path) -> int:
    """Return the largest id plus 1; ids may have gaps."""
    size = max(ids.values(), default=-1) + 1
    if size > MAX_VOCAB_SIZE:
        raise UserError(f"{path}: a token has id {size - 1}; at most {MAX_VOCAB_SIZE:,} tokens are supported")
    return size


def _compute_checksum(type: str, files: dict[str, Path]) -> str:
    digest = hashlib.sha256(type.encode())
    for name, path in files.items():
        try:
            digest.update(name.encode() + b"\0" + path.read_bytes())
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _get_first_line(error: BaseException) -> str:
    return " ".join(str(error).split())

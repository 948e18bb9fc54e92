"""Tokenizers: text to integers and back, and the one integer that ends a document.

Four kinds, under GPT-NeoX's names where it has one:

| type | files | what it is |
|---|---|---|
| `bytes` | none | the 256 values of a UTF-8 byte, and end-of-document: 257 tokens, no training, no unknown text |
| `HFTokenizer` | `tokenizer.json` | any of Hugging Face's library (GPT-NeoX-20B's, Pythia's, one by `train_bpe`) |
| `GPT2BPETokenizer` | `vocab.json`, `merges.txt` | GPT-2's byte-level BPE |
| `SPMTokenizer` | `tokenizer.model` | SentencePiece |

A corpus folder holds a copy of its tokenizer's files, with a checksum, so that it can be moved and read anywhere.
So does a run's folder (`load_tokenizer.py`).
A tokenizer's `name` contains that checksum: two corpora fit together exactly if their tokenizers' names are equal.

Some tokenizers put a token before every text (Llama's `<s>`, OPT's `</s>`). Whether that is done is decided once, when
a corpus is prepared or a model imported: as the tokenizer's own files say, or as `add_bos` does. The decision is stored
with the corpus and the run (`bos`), and all that turns text into tokens follows it: documents of a corpus, texts that
are scored, prompts, lm-evaluation-harness, and an export's tokenizer.
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
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices, suggest_names

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOS>", "[EOS]", "<eod>", "<|end|>")
"""Names under which tokenizers know the end of a document, the most usual first."""

BEGINNING_OF_TEXT = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "<BOS>", "[BOS]")
"""Names under which tokenizers know the beginning of a text."""


class Tokenizer(ABC):
    """Text to token ids and back. Every id is in [0, vocab_size); `eod` is the id written after each document, `bos`
    the one that stands before each text, None if there is none."""

    type: ClassVar[TokenizerType]
    vocab_size: int
    eod: int
    bos: int | None = None
    end_token: str | None = None
    """The name of `eod`, if it is not one of the usual ones."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.checksum = _checksum(self.type, files)

    @property
    def name(self) -> str:
        """The identity: type and checksum of the files, wherever they lie."""
        return f"{self.type}-{self.checksum[:12]}" if self.files else self.type

    @property
    def metadata(self) -> TokenizerMetadata:
        """The description of this tokenizer that is stored with a corpus or a run."""
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
        """Token ids of a text, with nothing added at its ends."""

    def encode_with_bos(self, text: str) -> list[int]:
        """Token ids of a text as a model reads it: after the token that stands before each text, if there is one."""
        return [*([] if self.bos is None else [self.bos]), *self.encode(text)]

    def added_prefix(self) -> list[int]:
        """What the tokenizer's own files put before a text."""
        return []

    def token_to_id(self, token: str) -> int | None:
        """The id of a token that is named; None if there is no such token."""
        return None

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; end-of-document is rendered as the tokenizer writes it (nothing for `bytes`)."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array per text; faster than `encode` where the library works on many texts at once."""
        return [np.asarray(self.encode(text), dtype=np.int64) for text in texts]

    def copy_files(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder, under the names that `tokenizer_from_files` reads."""
        for name, path in self.files.items():
            shutil.copyfile(path, folder / name)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes. Bytes that are not UTF-8, as a model may write, decode to U+FFFD."""

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
    """A `tokenizer.json`. Special tokens that stand in the text become their ids, as in GPT-NeoX."""

    type = "HFTokenizer"

    def __init__(self, vocab_file: Path, *, end_token: str | None = None) -> None:
        super().__init__({"tokenizer.json": vocab_file})
        try:
            self._tokenizer = hf.Tokenizer.from_file(str(vocab_file))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{vocab_file}: not a tokenizer.json of Hugging Face's: {_first_line(error)}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._has_regex = b'"Regex"' in vocab_file.read_bytes()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = _check_vocab_size(ids, vocab_file)
        self.eod, self.end_token = _find_eod(ids, vocab_file, end_token), end_token

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def added_prefix(self) -> list[int]:
        if self._tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
            return []
        for text in ("a", "0", " ", *islice(self._tokenizer.get_vocab(), 20)):
            try:
                plain, complete = (self._tokenizer.encode(text, add_special_tokens=add).ids for add in (False, True))
            except Exception:  # the library raises plain Exception where it has no token for a text
                continue
            for start in range(len(complete) if plain else 0):
                if complete[start : start + len(plain)] == plain:
                    return complete[:start]
        return []

    def encode(self, text: str) -> list[int]:
        with self._regex_errors():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        with self._regex_errors():
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _regex_errors(self) -> AbstractContextManager[None]:
        """A regular expression of a foreign file may need more steps than the library allows."""
        return _translate_panics(self.files["tokenizer.json"]) if self._has_regex else nullcontext()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._regex_errors():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


@contextmanager
def _translate_panics(file: Path) -> Iterator[None]:
    """Describe in a line a panic of the library, which is written in Rust: a report on descriptor 2, and an exception
    that is no Exception.

    Raises UserError that names the tokenizer's file.
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
                    f"{file}: its regular expressions cannot be applied to a text: {_first_line(error)}"
                ) from None
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            if not panicked and (other_output := captured.read()):
                os.write(2, other_output)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`. Text is text: no special token is parsed in it."""

    type = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path, *, end_token: str | None = None) -> None:
        super().__init__({"vocab.json": vocab_file, "merges.txt": merge_file})
        try:
            ids, merges = hf.models.BPE.read_file(str(vocab_file), str(merge_file))
            self._tokenizer = hf.Tokenizer(hf.models.BPE(ids, merges))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{vocab_file}, {merge_file}: not GPT-2 vocab and merges: {_first_line(error)}") from None
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
    """A SentencePiece `.model`. Its own normalisation applies, so decoding may differ from the text in white space."""

    type = "SPMTokenizer"

    def __init__(self, vocab_file: Path, *, end_token: str | None = None) -> None:
        import sentencepiece

        super().__init__({"tokenizer.model": vocab_file})
        try:
            self._tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(vocab_file))
        except Exception as error:  # RuntimeError or OSError, by what is wrong with the file
            raise UserError(f"{vocab_file}: not a SentencePiece model: {_first_line(error)}") from None
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


def tokenizer_from_files(
    type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    *,
    end_token: str | None = None,
    bos: bool | str | None = None,
) -> Tokenizer:
    """The tokenizer of a type, from its files.

    Args:
        end_token: the token that ends a document, if it has none of the usual names.
        bos: does a token stand before every text? As its files say (None), none (False), one of the usual names
            (True), or that of a name.

    Raises:
        UserError: a file or choice is wrong, missing or unused; it is named.
    """
    if type not in TOKENIZERS:
        raise UserError(f"tokenizer: {type!r} is unknown; {format_choices(type, TOKENIZERS)}")
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
                problem = "is a folder" if path.is_dir() else "no such file"
                raise UserError(f"{key}: {path}: {problem}; tokenizer {type} needs its {needed} file")
            files.append(path)
    if end_token is not None and not files:
        raise UserError(f"end_token: {end_token!r}: tokenizer {type} has an end of its own")
    tokenizer = TOKENIZERS[type](*files) if end_token is None else TOKENIZERS[type](*files, end_token=end_token)
    tokenizer.bos = _find_bos(tokenizer, bos)
    return tokenizer


def _find_bos(tokenizer: Tokenizer, bos: bool | str | None) -> int | None:
    """The token that stands before every text, see `tokenizer_from_files`."""
    if bos is False:
        return None
    if bos is None:
        prefix = tokenizer.added_prefix()
        if len(prefix) > 1:
            raise UserError(
                f"add_bos: the file of tokenizer {tokenizer.name} puts {len(prefix)} tokens before a text, and at most "
                "one is offered; false puts none there"
            )
        return prefix[0] if prefix else None
    names = BEGINNING_OF_TEXT if bos is True else (bos,)
    if bos is True and (prefix := tokenizer.added_prefix()):
        return prefix[0]
    for name in names:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise UserError(
        f"add_bos: tokenizer {tokenizer.name} has no token that begins a text; looked for {', '.join(names)}"
    )


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on texts and write its tokenizer.json. The same texts give the same file.

    Byte level: all 256 byte values are tokens, so every text can be written and decodes to itself. `vocab_size` counts
    them and <|endoftext|>; a small text may yield fewer tokens.
    """
    min_size = 257
    if vocab_size < min_size:
        raise UserError(f"vocab_size: {vocab_size} is too small; the 256 byte values and <|endoftext|> make {min_size}")
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
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # with Python's errors


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
        f"{path}: no token ends a document; looked for {', '.join(END_OF_DOCUMENT)}; name it with end_token "
        "(--end-token)"
    )


def _check_vocab_size(ids: dict[str, int], path: Path) -> int:
    """One more than the largest id; ids may have gaps."""
    size = max(ids.values(), default=-1) + 1
    if size > MAX_VOCAB_SIZE:
        raise UserError(f"{path}: a token has id {size - 1}; at most {MAX_VOCAB_SIZE:,} tokens are supported")
    return size


def _checksum(type: str, files: dict[str, Path]) -> str:
    digest = hashlib.sha256(type.encode())
    for name, path in files.items():
        try:
            digest.update(name.encode() + b"\0" + path.read_bytes())
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())

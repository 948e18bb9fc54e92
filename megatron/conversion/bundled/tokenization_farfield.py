"""SentencePiece tokenizer for transformers, identical to the one used in training.

No class in transformers reads a SentencePiece file without changing the tokens of some texts.
"""

import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import PreTrainedTokenizer

VOCAB_FILE = "tokenizer.model"


class FarfieldTokenizer(PreTrainedTokenizer):
    """SentencePiece tokenizer.

    Adds the beginning-of-text token if training did. Special and added tokens in a text are not parsed, unless
    `split_special_tokens` is False.

    Args:
        vocab_file: the SentencePiece model.
        add_bos_token: True to add the beginning-of-text token before a text; `farfield_add_bos_token` if None.
        farfield_add_bos_token: the same under a name that transformers 5 keeps when it saves a tokenizer.
    """

    vocab_files_names = {"vocab_file": VOCAB_FILE}  # noqa: RUF012 (transformers' own form)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self, vocab_file: str, add_bos_token: bool | None = None, farfield_add_bos_token: bool = False, **kwargs: Any
    ) -> None:
        self.vocab_file = vocab_file
        self.add_bos_token = farfield_add_bos_token if add_bos_token is None else add_bos_token
        self.sp_model = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        kwargs.setdefault("split_special_tokens", True)
        super().__init__(add_bos_token=self.add_bos_token, farfield_add_bos_token=farfield_add_bos_token, **kwargs)

    @property
    def farfield_add_bos_token(self) -> bool:
        """Value that transformers writes when it saves the tokenizer."""
        return self.add_bos_token

    @property
    def vocab_size(self) -> int:
        """Number of pieces in the SentencePiece model, without added tokens."""
        return int(self.sp_model.get_piece_size())

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all pieces and added tokens. transformers numbers further tokens from its length on."""
        return {self.sp_model.id_to_piece(i): i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self.sp_model.id_to_piece(i) for i in self.sp_model.encode(text, out_type=int)]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        bos = [self.bos_token_id] if self.add_bos_token else []
        return bos + token_ids_0 + (bos + token_ids_1 if token_ids_1 is not None else [])

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.sp_model.piece_to_id(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.sp_model.id_to_piece(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of tokens. Added tokens, which the SentencePiece model does not have, stay as they are."""
        added = {token for token, index in self.added_tokens_encoder.items() if index >= self.vocab_size}
        runs = groupby(tokens, key=lambda token: token in added)
        return "".join("".join(run) if is_added else self._decode_pieces(run) for is_added, run in runs)

    def _decode_pieces(self, pieces: Iterable[str]) -> str:
        return str(self.sp_model.decode([self.sp_model.piece_to_id(piece) for piece in pieces]))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        target = Path(save_directory) / (f"{filename_prefix}-{VOCAB_FILE}" if filename_prefix else VOCAB_FILE)
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)

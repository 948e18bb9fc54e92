"""A SentencePiece tokenizer for transformers, exactly as the training used it.

None of transformers' own classes reads a SentencePiece file without changing what some texts become.
"""

import shutil
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import PreTrainedTokenizer

FILE = "tokenizer.model"


class FarfieldTokenizer(PreTrainedTokenizer):
    """Pieces of a SentencePiece model, after the token that stands before each text, where the training had one; no
    special token is looked for in a text."""

    vocab_files_names = {"vocab_file": FILE}  # noqa: RUF012 (transformers' own form)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, add_bos_token: bool = False, **kwargs: Any) -> None:
        self.vocab_file, self.add_bos_token = vocab_file, add_bos_token
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        kwargs["split_special_tokens"] = True
        super().__init__(add_bos_token=add_bos_token, **kwargs)

    @property
    def vocab_size(self) -> int:
        return int(self.pieces.get_piece_size())

    def get_vocab(self) -> dict[str, int]:
        return {self.pieces.id_to_piece(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self.pieces.id_to_piece(i) for i in self.pieces.encode(text, out_type=int)]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        begin = [self.bos_token_id] if self.add_bos_token else []
        return begin + token_ids_0 + (begin + token_ids_1 if token_ids_1 is not None else [])

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.pieces.piece_to_id(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.pieces.id_to_piece(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return str(self.pieces.decode([self.pieces.piece_to_id(token) for token in tokens]))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        target = Path(save_directory) / (f"{filename_prefix}-{FILE}" if filename_prefix else FILE)
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)

"""Small tokenizers of each kind, trained on a few sentences."""

from pathlib import Path

import sentencepiece
import tokenizers as hf

from megatron.data.tokenizers import Tokenizer, load_tokenizer_from_files, train_bpe

SAMPLE = ["def encode(text):\n    return list(text.encode('utf-8'))\n", "Grüße, 東京!\n", "the the then there\n" * 9]


def write_tokenizers(folder: Path) -> Path:
    """Write tokenizer.json, vocab.json and merges.txt, and spm.model into a folder; return the folder."""
    train_bpe(SAMPLE, 300, folder / "tokenizer.json")
    hf.Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))  # vocab.json, merges.txt
    (folder / "text").write_text("\n".join(SAMPLE * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "spm"),
        vocab_size=80,
        hard_vocab_limit=False,
        minloglevel=9,
    )
    return folder


def open_tokenizers(files: Path) -> dict[str, Tokenizer]:
    """Open the tokenizers written by `write_tokenizers`, and `bytes`, by type."""
    return {
        "bytes": load_tokenizer_from_files("bytes"),
        "HFTokenizer": load_tokenizer_from_files("HFTokenizer", files / "tokenizer.json"),
        "GPT2BPETokenizer": load_tokenizer_from_files("GPT2BPETokenizer", files / "vocab.json", files / "merges.txt"),
        "SPMTokenizer": load_tokenizer_from_files("SPMTokenizer", files / "spm.model"),
    }

"""Preparing a corpus: sources of text become a folder of indexed datasets with their tokenizer.

`prepare` does the whole; `recipe` is what decides the result. `sources` lists files and reads documents from them
(`file_readers`, `hub_dataset`), `documents` says which of them go to which split, `tokenize_worker` turns them into
tokens and `writer` writes these.
"""

"""Corpus preparation: turn text sources into a folder of indexed datasets with their tokenizer.

`prepare` runs the whole pipeline; `recipe` collects everything that determines the result. `sources` lists files and
reads documents (with `file_readers` and `hub_dataset`), `documents` assigns documents to splits, `tokenize_worker`
tokenizes them, and `writer` writes the tokens.
"""

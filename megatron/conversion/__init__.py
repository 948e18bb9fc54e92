"""Conversion of models: Hugging Face families, GPT-NeoX checkpoints, and this project's own exports.

A family (`model_family.py`, one file each in `families/`) defines how its config.json is read and written, which of our
configurations it can represent exactly, and how its weights map to ours: one table, used in both directions.
`import_model.py` converts an external checkpoint to a run folder that the rest of the project treats like any other.
`export_model.py` writes a folder that transformers loads, natively or with the code in `bundled/` that is included in
the export.
"""

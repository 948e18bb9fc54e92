"""Models from and to other projects: Hugging Face's families, GPT-NeoX's checkpoints, and our own exports.

A family (`model_family.py`, one file each in `families/`) says how its config.json is read and written, which of our
configurations it can express exactly, and how each weight is made of its own: one table, read in both directions.
`import_model.py` makes a run folder of a foreign checkpoint, after which nothing in the project knows where it came
from. `export_model.py` makes a folder that transformers reads, natively or by the code in `bundled/` that travels with
it.
"""

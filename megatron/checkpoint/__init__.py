"""Checkpoints: where they lie, how they are written, what resuming from them restores.

`save.py` writes one, `resume.py` continues a run from one, `load_model.py` reads the model out of one for evaluation
(safetensors and text only, never a pickle), `folder.py` knows names and places, `manifest.py` whether a checkpoint is
what was written.
"""

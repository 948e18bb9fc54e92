"""Checkpoints: where they lie, how they are written, what resuming from them restores.

`saver.py` writes one, `resume.py` continues a run from one, `load_model.py` reads the model out of one for evaluation
(safetensors and text only, never a pickle), `layout.py` knows names and paths, `manifest.py` whether a checkpoint is
what was written, `stored_config.py` what an older format means today. `run_folder.py` keeps the run's folder.
"""

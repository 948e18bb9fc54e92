"""Checkpoints: layout on disk, writing, verification, and resuming.

`saver.py` writes checkpoints, `resume.py` resumes a run from one, and `load_model.py` loads a model for evaluation
(only safetensors and text, never a pickle). `layout.py` defines names and paths; `manifest.py` detects damaged files
and migrates older formats. `run_folder.py` manages a run's folder.
"""

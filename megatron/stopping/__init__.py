"""How a process comes to its end, other than by finishing.

`signals.py`: a first signal lets a training step end and be saved, and ends everything else in good order, with its
temporary files removed. `output.py`: what a run prints can no longer be written. `parent.py`: a process must not
outlive the one that started it. `command.py`: whatever happened becomes one line and an exit code.
"""

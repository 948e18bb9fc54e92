"""The training loop around the DeepSpeed engine.

`loop.py` is the way in: `train(config, console)` runs one process of a run. Around it stand, each in a file of its own,
the optimizer with its bounds, the schedule, the engine, the processes, validation, and what is measured and reported.
"""

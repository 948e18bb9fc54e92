"""The training loop around the DeepSpeed engine.

`trainer.py` is the way in: `train_resolved` runs one process of a run. Around it stand, each in a file of its own, how
a run is built, the engine, the optimizer with its bounds and schedule, the guard of the loss, validation, and what is
measured and reported.
"""

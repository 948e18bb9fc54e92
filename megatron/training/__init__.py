"""Training loop around the DeepSpeed engine.

`train.py` is the entry point: `train_resolved` runs one process of a run with the loop of `trainer.py`. The other files
build the run, the engine, and the optimizer with its bounds and schedule, guard the loss, validate, and measure and
report.
"""

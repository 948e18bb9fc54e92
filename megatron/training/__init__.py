"""Training loop around the DeepSpeed engine.

`trainer.py` is the entry point: `train_resolved` runs one process of a run. The other files build the run, the engine,
and the optimizer with its bounds and schedule, guard the loss, validate, and measure and report.
"""

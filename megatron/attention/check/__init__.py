"""The self-check by which `auto` takes a backend on a GPU: the run's own attention by each backend that can do it, held
to the rounding of its type, and timed.

    problem.py           one layer's attention at the run's shapes, and the part of it that float64 computes too
    fused_reference.py   the formula with the gradient that fused kernels take
    trials.py            runs, judges and times each backend
    evidence.py          what came of it, as files keep it
    machine.py           what a result is true of: card, driver, versions, sources

`megatron/model/backend_choice.py` asks for it when a model is built, and has all ranks agree.
"""

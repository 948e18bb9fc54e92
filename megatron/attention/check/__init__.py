"""Self-check with which `auto` selects a backend on a GPU.

The run's own attention is computed by each backend that supports it, compared with float64 within the rounding of its
type, and timed.

    problem.py            one layer's attention at the run's shapes, and the part of it that is also computed in float64
    float64_reference.py  the rows of that part, their documents, and the formula with the gradient of kernels
    trials.py             runs, compares and times each backend
    check_result.py       the results, as stored in files with their conditions: card, driver, versions, sources

`megatron/model/backend_choice.py` runs it when a model is built, and makes all ranks agree.
"""

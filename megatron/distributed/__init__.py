"""Who this process is among those of a run, and what they tell each other.

`mesh.py` is arithmetic alone: the coordinates of a rank and the members of its groups. `launcher_environment.py` reads
from the environment which rank this is, `hardware.py` what the machine has to compute on; none of them imports torch.
`process_groups.py` joins the processes and holds their groups, `collectives.py` moves tensors between ranks, `rng.py`
says who draws the same random numbers, `sharding.py` who holds which part of parameters, layers and sequences.
Nothing else in the project asks torch.distributed or megatron-core's parallel state; a test keeps it so.
"""

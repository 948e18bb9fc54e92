"""Rank of this process in a run, and communication between the processes.

`mesh.py` computes the coordinates of a rank and the members of its groups. `launcher_environment.py` reads the rank
from the environment, and `hardware.py` detects the machine's hardware; none of the three imports torch.
`process_groups.py` initializes the processes and their groups. `sharding.py` defines which parameters are
sharded, and moves tensors between ranks. `rng.py` defines which ranks draw the same random numbers. A test checks that
no other package uses torch.distributed or megatron-core's parallel state.
"""

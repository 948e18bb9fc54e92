"""Who this process is among those of a run, and what they tell each other.

`mesh.py` is arithmetic alone: the coordinates of a rank and the members of its groups. `place.py` reads from the
environment which rank this is, `devices.py` what the machine has to compute on; none of them imports torch.
`processes.py` joins the processes and holds their groups, `collectives.py` moves tensors between tensor-parallel ranks,
`seeds.py` says who draws the same random numbers, `parameters.py` which weights are held in how many copies.
Nothing else in the project asks torch.distributed or megatron-core's parallel state; a test keeps it so.
"""

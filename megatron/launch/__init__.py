"""Starting work: `dispatch.py` decides where a training runs.

`local_launcher.py` trains on this machine, with one process or several; `rank_group.py` starts, watches and ends these,
and `worker.py` is what each of them runs. `ssh_launcher.py` does so on the machines of a hostfile, and `slurm.py` hands
the work to SLURM. `console.py` keeps third parties' noise off the user's console, `run_status.py` says how runs are.
"""

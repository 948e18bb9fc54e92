"""Launching: start training on this machine, over ssh or with SLURM, and follow it while it runs.

`dispatch.py` chooses where to train. `local_launcher.py` trains on this machine with one or more processes;
`rank_group.py` starts, monitors and stops these, and `worker.py` is their entry point. `ssh_launcher.py` does the same
on the hosts of a hostfile, and `slurm.py` submits jobs. `run_status.py` shows the status of runs, and `live_server.py`
serves the report, with training curves as they grow, as a page that refreshes itself; both never import torch.
"""

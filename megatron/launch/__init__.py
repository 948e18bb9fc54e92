"""Starting work on this machine: `local.py` trains, with one process or several.

`console.py` keeps third parties' noise off the user's console, `worker.py` is what each process runs, `processes.py`
starts, watches and ends them, `parent.py` keeps any from outliving its parent.
"""

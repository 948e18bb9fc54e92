"""Command line, a file per group of commands. `app.py` lists them; heavy modules are imported inside the commands."""

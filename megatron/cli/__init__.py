"""Command line, with one file per command. `app.py` lists them; heavy modules are imported inside the commands."""

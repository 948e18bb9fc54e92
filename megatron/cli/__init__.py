"""The command line: one file per verb. `app.py` lists them; everything heavy is imported inside the commands."""

"""What published families call things: keys of their config.json and names of their tensors, in ours and back.

`families.py` lists them. A family says how its configuration is read and written, which of ours it can express exactly,
and how each weight is made of its own: one table, read in both directions.
"""

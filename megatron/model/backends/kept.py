"""How long score maps are kept for the backward pass. Neither torch nor pydantic, for whoever counts memory."""

MAX_KEYS_KEPT = 1024
"""`auto` keeps training's score maps up to this many keys: faster than computing them again while they are small."""

MIN_ROWS_KEPT = 128
"""Rows per block that is kept, at least, where no processor works on them: smaller ones cost more than they save."""

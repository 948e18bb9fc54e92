"""Keys of every configuration file and command, one section per file.

This is the lowest layer: it imports pydantic and its own modules, never torch. The command line can therefore validate
a configuration at once, and every package reads its section from here.
"""

"""The keys of every configuration file and command, one section a file.

They are the ground floor of the house: they import pydantic and each other, never torch, so that the command line can
check a configuration at once, and every part reads its own section from here.
"""

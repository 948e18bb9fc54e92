"""Probes: evaluations on synthetic text, which need no corpus. Each probe has its own file and is listed in
`targets.py`.
"""

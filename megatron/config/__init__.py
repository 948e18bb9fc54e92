"""Configuration: YAML files and `key=value` overrides in, one frozen, checked `Config` out. Never imports torch.

`load.py` is the way in. `schema.py` gathers the sections of `megatron/options`; `yaml_files.py` reads YAML with line
numbers; `neox.py` knows GPT-NeoX's, KERPLE's and DAPE's vocabulary; `settings.py` merges and remembers who set what;
`checks.py` looks across sections; `ranks.py` fits the batch to the processes; `reference.py` writes the documentation
of all keys.
"""

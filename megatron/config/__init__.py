"""Configuration: YAML files and `key=value` overrides in, one frozen, checked `Config` out. Never imports torch.

`load.py` is the way in. `schema.py` gathers the sections of `megatron/options`; `yaml_files.py` reads YAML with line
numbers; `config_layers.py` merges and remembers who set what; `neox_keys.py` holds GPT-NeoX's, KERPLE's and DAPE's
vocabulary, of rules as `neox_rules.py` defines them; `validation.py` looks across sections; `parallelism.py` fits the
batch to the processes; `validation_errors.py` says what pydantic found; `reference.py` writes the documentation of all
keys.
"""

"""Configuration: merges YAML files and `key=value` overrides into one frozen, validated `Config`, without torch.

`load.py` is the entry point. `schema.py` collects the sections of `megatron/options`, and formats pydantic's errors;
`yaml_files.py` reads YAML with line numbers; `config_layers.py` merges layers and records where each key was set;
`neox_keys.py` lists the keys of GPT-NeoX, KERPLE and DAPE, and `neox_unsupported.py` those without effect, with rules
defined in `neox_rules.py` and `neox_deferred_rules.py`; `validation.py` checks keys against each other;
`execution.py` derives the mesh and batch sizes, and decides whether keys allow CUDA graphs; `reference.py` generates
the reference of all keys.
"""

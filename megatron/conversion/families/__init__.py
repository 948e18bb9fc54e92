"""One file per published family of models, and one for our own exports: tables of configuration keys and tensors."""

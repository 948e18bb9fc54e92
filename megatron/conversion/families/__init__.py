"""Published model families, one per file, and this project's own exports: tables of configuration keys and tensors."""

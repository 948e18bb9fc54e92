"""One file for each task; `megatron.tasks.registry` finds them by name."""

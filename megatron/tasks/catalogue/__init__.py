"""Tasks, one per file; `megatron.tasks.task_config` finds them by name."""

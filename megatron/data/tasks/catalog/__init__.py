"""Tasks, one per file; `megatron.data.tasks.task_config` finds them by name."""

"""One file for each task; `megatron.tasks.task_config` finds them by name."""

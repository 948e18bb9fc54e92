"""From a run's checkpoint to a folder that others read: transformers, by code that travels with it, or natively."""

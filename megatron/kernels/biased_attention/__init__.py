"""Causal flash attention with a learned bias and weight per distance; the gradients are deterministic."""

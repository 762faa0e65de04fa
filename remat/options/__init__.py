"""The options of stages: which saved tensors to keep, recompute or offload. Planners choose from these."""

"""Measuring the memory and time of one stage of a model, and restoring the model afterwards."""

"""Estimates of a model's memory and time on a device that is not needed: fake tensors, and a table of devices."""

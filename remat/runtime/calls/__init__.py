"""Calls of modules that can be made again: what they were given, and what else they depend on."""

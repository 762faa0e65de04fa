"""Which module calls of a model can be the stages of a chain."""

"""Finding chains in models that are no `nn.Sequential`."""

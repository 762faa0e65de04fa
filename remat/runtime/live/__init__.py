"""DTR on running PyTorch programs: every operator goes past the policy core of `remat.runtime.dtr`."""

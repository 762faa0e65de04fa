"""`python -m remat.check`: checks remat's guarantees on this machine's device, and measures its overhead there.

It needs only torch, numpy and numba. Each result is written at once, so a second call continues where the first
stopped.
"""

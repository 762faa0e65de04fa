"""Whether remat keeps its promises on this machine's device, and what it costs there: `python -m remat.check`.

It needs torch, numpy and numba alone. What was found is written after each check, so a second call goes on where the
first was stopped.
"""

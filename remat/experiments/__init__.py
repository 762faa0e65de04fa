"""The DTR paper's experiments have moved to `benchmarks/papers` of the repository; found here for one release."""

from remat.utils.moved import moved

_papers = moved("remat.experiments", "benchmarks.papers")
__path__ = list(_papers.__path__)  # its modules too, by their old names
globals().update({name: getattr(_papers, name) for name in _papers.__all__})

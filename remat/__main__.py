"""`python -m remat`."""

from remat.cli import main

main()

"""What remat finds on a machine: optional packages, a compiler, a terminal."""

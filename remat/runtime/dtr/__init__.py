"""Dynamic tensor rematerialisation (Kirisame et al., ICLR 2021): policy core, heuristics, traces, simulator."""

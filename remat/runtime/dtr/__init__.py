"""Dynamic tensor rematerialisation (Kirisame et al., ICLR 2021): the policy core, its heuristics, traces, the simulator."""

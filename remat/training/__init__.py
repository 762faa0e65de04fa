"""Training within a memory limit: `fit`, and the engine that `fit` and `rotor.Checkpointable` share.

`Setup` holds the options of a request, `Planned` a measured model with its plan, and `PlansByInput` chooses the plan
for each call. `fit` is the entry point.
"""

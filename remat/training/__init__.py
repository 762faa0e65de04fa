"""What makes a model train within a memory limit: `fit`, and the engine behind it and behind `rotor.Checkpointable`.

`Setup` is what was asked for, `Planned` a model that is measured and planned for, `PlansByInput` which plan serves a
call of it, `fit` the door.
"""

"""What runs a training step within a budget: one engine, driven by a plan or by the policy of DTR.

A *step* runs *calls* in a *context*; *saved tensors* wait in autograd's graph for *storages*; a *plan*, or where there
is none the *policy*, drops storages; a *recomputation* makes them again from what is known of the call's *graph*; the
*accounting* judges.

- Step: a training step being run. `planned.forward_run.Run` by a schedule, `live.units.calls.BlockCalls` under DTR.
- Call: one call of a module, or of several that make a stage, that can be made again (`calls.call.Call`), with what it
  was passed (`calls.passed.Passed`).
- Context: all that a call depends on besides (`calls.environment.FirstRun`): generators, autocast, flags, hooks,
  attributes, buffers, versions of parameters.
- Saved tensor: what stands in autograd's graph for a tensor, full or empty (`calls.saved.Saved`).
- Storage: memory that a call has made and that outlives it, there or away (`live.units.pieces.Piece`).
- Graph: the operators of a call, the storages that they make, what is saved (`calls.tape.Tape`); its parts that may be
  kept or dropped are found by a minimum cut (`calls.hull`).
- Recomputation: a call made again, in part or as a whole (`Call.again`, `calls.partial`, `calls.recompute`).
- Plan: what to drop and to make again, and when. `planned.program.Program` of a schedule, `live.units.plans.BlockPlan`
  of what the policy core has decided on paper.
- Policy: the core of `dtr`, with its heuristics; it decides what is not planned.
- Accounting: bytes in use now (`live.units.account.Account`), and on paper (the core again).

Rules, to which the code points back:

1. The graph is PyTorch's own. A first run builds it once, and every backward is done by the very nodes that plain
   PyTorch would run: hooks, DDP, tied weights and accumulation see nothing new.
2. What stays in memory runs with nothing in between, or with a hook that only looks on.
3. Where something may be dropped, a `Saved` takes the place of each tensor that autograd saves (`saved_tensors_hooks`),
   and lives as long as autograd would hold the tensor. A recomputation is the same call once more, whose saved tensors
   fill the empty ones.
4. The backward of a call begins when the node of its output is about to run. Just before, all that is planned up to
   there is done: what is to go goes, and what is to be there is made.
5. A recomputation repeats the first run: the context that it met, whoever has changed that since, inputs, and buffers
   from before it. What autograd saves must come in
   the same number, shapes and dtypes, else it is an error. In part it is compared with the graph operator by operator,
   and where it differs, all of the call is made again. Where nobody needs its output, it ends with the last tensor that
   is waited for.
6. State belongs to one step. It hangs on that step's graph and dies with it.
7. What goes to the host leaves the device when the operation behind it has run, and comes back while the backward of
   the next stage runs.
8. What cannot be right raises: a second backward of a stage, an input, a parameter, a buffer or a kept tensor changed
   in place since. What takes more than the budget says so.
9. A plan holds as long as the step does what the plan was made for, call for call, with a backward of the same kind.
   From the first call that differs on, a schedule gives way to plain autograd, and a plan of DTR to the policy, which
   first hears what was done so far.
"""

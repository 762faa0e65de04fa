"""Random modules for `benchmarks.module_fuzz`: a stack of blocks, each of fragments that people write in a forward.

`fragments` says what a fragment is; the modules beside it hold them, one idea a file. `program` puts them together,
`holding` looks at all that a step leaves behind, `training` trains plainly and within limits, `judging` compares.
"""

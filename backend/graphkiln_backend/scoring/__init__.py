"""Score whole data sets: each row of an input is answered exactly once, on one machine or on a Ray cluster.

    source -> plan (units) -> driver -> workers (rows -> batches -> answers) -> destination (one commit per unit)

A unit is a range of the input, about a thousand rows. Its id is a digest of its input and of everything that changes an
answer, and its result is committed under that id in one step: a second attempt cannot add a second result, and the same
command resumes an interrupted run.

Read in this order: `driver`, `messages`, `sources.base`, `plan`, `schedule`, `fleet`, `local_machine` (or
`ray_cluster`), `worker`, `scorer`, `destinations.base` and `destinations.lock`; `verify` reads results back. The caller
is `graphkiln.scoring.running`.
"""

"""Whole data sets: each row of an input answered exactly once, on one machine or on a cluster.

    source -> plan (units) -> driver -> workers (rows -> batches -> answers) -> destination (a commit per unit)

A unit is a range of the input, about a thousand rows. Its id is a digest of what it reads and of everything that
changes an answer, and its result is committed under that id in one step: an attempt that was made twice leaves one
result, and the same command goes on where it was interrupted. Ray places and starts the workers; only `cluster` and
`fleet` import it.

To be read in this order: `driver`, `sources.base` (units of files: `sources.names`), `plan`, `schedule`, `fleet`,
`worker`, `scorer`, `destinations.base` and `.lock`; `verify` reads contents back where it is asked for. The caller is
`graphkiln.scoring.running`, which looks for mistakes in the request first and writes the record of the run at its end.
"""

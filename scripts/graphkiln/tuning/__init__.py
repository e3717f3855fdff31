"""`graphkiln tune`: from a target to the configuration that was proven to meet it.

A space of candidates (`space`) is searched (`search`) with measurements (`trials`), each of which is journaled
(`journal`). `statistics` holds bounds on quantiles and intervals of throughput.
"""

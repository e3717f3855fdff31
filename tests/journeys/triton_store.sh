# title: Serve a store of Triton's
# page: how-to/drop-in.md
# given: A store as Triton's C++ backend serves it, with a configuration and without one.
graphkiln serve --model-store store
graphkiln models
graphkiln bench --model configured --concurrency 4 --duration 2
graphkiln bench --model bare --duration 2

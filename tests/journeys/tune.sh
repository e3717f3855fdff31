# title: Tune to a latency
# page: tutorial.md
# given: A converted version of the same model.
graphkiln tune models/digits --p99 50ms --rate 50/s --dry-run
graphkiln tune models/digits --p99 50ms --rate 50/s --only spin --budget 1m --apply
graphkiln serve --model-store models --model-control-mode=poll --repository-poll-secs=1 --page
graphkiln bench --model digits --concurrency 1,4 --duration 2

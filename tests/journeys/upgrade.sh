# title: Upgrade a version under load
# page: how-to/serve.md
# given: A model in a store, and a new version of it.
graphkiln serve --model-store models --model-control-mode=poll --repository-poll-secs=1
graphkiln bench --model digits --rate 20 --duration 20 &
cp -r models/digits/1 models/.new
mv models/.new models/digits/2
graphkiln models

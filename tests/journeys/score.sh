# title: Score a folder of images
# page: scoring.md
# given: A version in a model store, and a folder of images.
graphkiln score photos --model model_repository/digits --out answers
graphkiln score --verify answers

# title: int8 with your own images
# page: tutorial.md
# given: The same model and images, and 300 others to calibrate with.
graphkiln convert python:digits.py:net --weights digits.pth --shape 1x32x32 --name digits --model-store models --preprocess '{"resize": [32, 32], "color": "L"}' --labels labels.txt --samples images --softmax --precision int8 --calibration calibration
graphkiln inspect models/digits
graphkiln serve --model-store models --model-control-mode=poll --repository-poll-secs=1 --page
graphkiln classify images/seven --model digits --top-k 3

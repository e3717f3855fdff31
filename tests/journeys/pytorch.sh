# title: Convert and serve a PyTorch model
# page: tutorial.md
# given: A module in `digits.py`, its trained weights, labels, and 300 images in folders named after them.
graphkiln convert python:digits.py:net --weights digits.pth --shape 1x32x32 --name digits --model-store models --preprocess '{"resize": [32, 32], "color": "L"}' --labels labels.txt --samples images --softmax
graphkiln serve --model-store models --model-control-mode=poll --repository-poll-secs=1 --page
graphkiln classify images/seven --model digits --top-k 3

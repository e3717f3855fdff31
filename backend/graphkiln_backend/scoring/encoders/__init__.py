"""From a model's outputs to columns: a module for each kind of answer, chosen in `choice`.

    classes      the best classes of each row, with their names
    scores       the scores of all classes
    detections   boxes, classes and scores of what is found, with masks and keypoints where there are any
    class_maps   which pixels belong to which class
    vectors      embeddings
    tensors      outputs as they are: maps of features, texts

A new kind is a module with a class as `base` describes it and a line in `choice`.
"""

"""From a model's outputs to columns: a module for each kind of answer, chosen in `choice`.

    classes   the best classes of each row, with their names
    scores    the scores of all classes
    tensors   outputs as they are: embeddings, maps of features, texts

A new kind (boxes, masks) is a module with a class as `base` describes it and a line in `choice`.
"""

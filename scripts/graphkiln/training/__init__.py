"""Trains the weights that come with the project: the example model's, and those of the story. Needs the extra `dev`."""

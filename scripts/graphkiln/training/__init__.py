"""Training of the weights that come with the project: the examples', and those of the story. Needs the extra `dev`."""

"""The acceleration story: a model as its team found it, made faster step by step, each step proven and measured."""

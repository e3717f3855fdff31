"""Importers of models that other frameworks saved into a model repository."""

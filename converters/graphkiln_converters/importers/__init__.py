"""What other frameworks saved into a model repository, as the backend imports it when it is served."""

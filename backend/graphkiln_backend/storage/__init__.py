"""Object stores, OCI registries and the Hugging Face hub, by fsspec, oras and huggingface_hub."""

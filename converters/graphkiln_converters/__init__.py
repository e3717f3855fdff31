"""Convert source models to proven version folders."""

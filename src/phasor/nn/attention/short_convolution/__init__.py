"""Gated short convolution: what a layer keeps are the last few inputs."""

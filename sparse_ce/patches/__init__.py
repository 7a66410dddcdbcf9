"""Applies the changes that importing the package makes in PyTorch."""

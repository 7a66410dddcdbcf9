"""What importing the package changes in PyTorch and accelerate."""

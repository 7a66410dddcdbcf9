"""What a machine with a GPU runs."""

"""Contains the programs that run on a machine with a GPU."""

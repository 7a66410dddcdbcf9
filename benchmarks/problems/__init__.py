"""Contains the problems that run.py measures: their sizes, the calls of sparse_ce and its peers, and the goals."""

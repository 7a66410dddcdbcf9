"""Supports classes sharded over a process group: the range of each rank, collectives and consistency checks."""

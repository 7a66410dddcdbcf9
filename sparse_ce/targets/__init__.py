"""Implements ``SparseTarget`` and the functions that build one."""

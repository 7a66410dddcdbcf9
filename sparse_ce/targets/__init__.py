"""``SparseTarget`` and everything that makes one."""

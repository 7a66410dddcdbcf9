"""What run.py measures: the sizes of each problem, ours and the peers, and the goals."""

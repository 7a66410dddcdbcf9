"""Classes sharded over a process group: who holds which, collectives, consistency checks."""

"""Training loops. Nothing here is imported by ``import sparse_ce``; each module needs the library of its name."""

"""Identifies the sources of a measurement: the tree of csrc in git, and a digest for machines without git."""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[2]


def csrc_tree(root: Path = ROOT) -> Optional[str]:
    """Returns ``git rev-parse HEAD:csrc``, with a mark if files differ from it. SPARSE_CE_CSRC_TREE replaces it without
    git."""
    given = os.environ.get("SPARSE_CE_CSRC_TREE")
    if given:
        return given
    tree = _git(root, "rev-parse", "HEAD:csrc")
    return tree + " + changes" if tree and _git(root, "status", "--porcelain", "csrc") else tree


def csrc_digest(root: Path = ROOT) -> str:
    """Returns a digest of the names and contents of all files in csrc."""
    digest = hashlib.sha256()
    for path in sorted(path for path in (root / "csrc").rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> Optional[str]:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

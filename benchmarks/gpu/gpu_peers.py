"""Packs wheels of other implementations (peers) for a machine without a network, and installs them there:
``gpu_peers.py FOLDER SITE``.

FOLDER is gpu-peers/, which ``make gpu-kit`` writes. Its numbered folders are copied one at a time if a copy is limited
in size. SITE gets the contents of each wheel that is complete. An import that then fails is a peer that is not run.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import List
from zipfile import ZipFile

# In the order of their folders. The machine has torch, triton and transformers, and the dependencies of torch.
PEERS = (
    "liger-kernel", "cut-cross-entropy", "unsloth", "unsloth_zoo",
    # QuACK and Liger's `cutedsl`. The last of these has 90 MiB.
    "quack-kernels", "apache-tvm-ffi<0.2", "torch-c-dlpack-ext", "einops", "protobuf", "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu13",
    # Liger's `cutile`. The last three are its compiler, which must be of one version, and have 160 MiB.
    "cuda-tile", "nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm",
)


def download(python: str, to: Path) -> List[Path]:
    """Returns the wheels for a version of Python. A peer that the index lacks is left out."""
    found: List[Path] = []
    for name in PEERS:
        before = set(to.iterdir())
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                               "--python-version", python, "-d", to, name], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"left out: {name}: {done.stderr.strip().splitlines()[-1]}")
        found += sorted(set(to.iterdir()) - before)
    return found


def pack(wheels: List[Path], folder: Path, limit: int) -> None:
    """Fills folders 1, 2, ... up to the limit. A wheel that does not fit goes on in the next folder."""
    part, left = 0, 0
    for wheel in wheels:
        rest = wheel.read_bytes()
        while rest:
            if not left:
                part, left = part + 1, limit
                (folder / str(part)).mkdir(parents=True)
            (folder / str(part) / f"{wheel.name}.{part}").write_bytes(rest[:left])
            rest, left = rest[left:], max(0, left - len(rest))


def install(folder: Path, site: Path) -> None:
    """Joins the pieces of wheels and extracts the wheels, of which some may be missing or of another version."""
    site.mkdir(parents=True, exist_ok=True)
    for part in sorted(folder.iterdir(), key=lambda path: int(path.name)):
        for piece in part.iterdir():
            with (site / piece.stem).open("ab") as whole:
                whole.write(piece.read_bytes())
    for wheel in sorted(site.glob("*.whl")):
        try:
            with ZipFile(wheel) as archive:
                for member in archive.infolist():
                    path = archive.extract(member, site)
                    if member.external_attr >> 16 & 0o111:
                        os.chmod(path, 0o755)
            print(f"installed: {wheel.name}", flush=True)
        except Exception as error:  # pieces are missing
            print(f"incomplete: {wheel.name}: {error}", flush=True)
        wheel.unlink()


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path(sys.argv[2]))

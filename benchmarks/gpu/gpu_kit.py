"""Packs the files for gpu_acceptance.py on a machine with a GPU and without a network: ``make gpu-kit``.

It writes to gpu-kit/, which git ignores:

    sparse_ce-*.whl     CPU and CUDA kernels, for Python 3.10 and newer and torch 2.11 and newer
    *_device            the kernels' cases of tests/emulation and one_pass_bench.cu, compiled by nvcc
    expecttest, setuptools, ninja   wheels for the tests' samples and for a build from source
    sources.json        the csrc that the kit was built from

and the wheels of other implementations to gpu-peers/, in folders that each fit beside the repository. It needs nvcc,
but no GPU. Environment:

    GPU_ARCHITECTURES   e.g. "9.0 10.0" (default: 9.0)
    GPU_PYTHON          the machine's version of Python, for those wheels (default: 3.12)
    PYTHON_WITH_TORCH   a Python with any build of torch, setuptools and ninja (default: the one that runs this)
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "emulation")]
import build  # noqa: E402
from gpu.gpu_peers import download, pack  # noqa: E402
from harness.sources import csrc_digest, csrc_tree  # noqa: E402

TOOLS = ("expecttest", "setuptools>=77", "ninja")
LIMIT = 54 << 20  # bytes; the repository is transferred too, and the total limit is 64 MiB


def build_wheel(folder: Path, architectures: tuple) -> None:
    python = os.environ.get("PYTHON_WITH_TORCH", sys.executable)
    subprocess.run([python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT],
                   check=True, env={**os.environ, "SPARSE_CE_CUDA": "1",
                                    "TORCH_CUDA_ARCH_LIST": ";".join(architectures)})


def sources() -> dict:
    return {"csrc": csrc_tree(), "digest": csrc_digest()}


def check_size(folder: Path) -> None:
    """Prints the size of each file, and exits if their sum exceeds the limit."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    total = sum(sizes.values())
    if total > LIMIT:
        sys.exit(f"{folder.name} must be at most {LIMIT >> 20} MiB, got {total / 2**20:.1f}: fewer GPU_ARCHITECTURES?")
    print(f"{total / 2**20:6.1f} MiB of at most {LIMIT >> 20}")


def main() -> int:
    architectures = tuple(os.environ.get("GPU_ARCHITECTURES", "9.0").replace(";", " ").split())
    folder = ROOT / "gpu-kit"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    before = sources()
    with ThreadPoolExecutor() as pool:  # the threads wait for compiler processes
        programs = pool.submit(build.build_device, architectures, folder)
        build_wheel(folder, architectures)
        for program in programs.result():
            subprocess.run(["strip", program], check=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder,
                    *TOOLS], check=True)
    if sources() != before:
        sys.exit(f"csrc changed while {folder.name} was built from it: run this again")
    (folder / "sources.json").write_text(json.dumps({**before, "architectures": architectures}, indent=1) + "\n")
    check_size(folder)
    shutil.rmtree(ROOT / "gpu-peers", ignore_errors=True)
    with TemporaryDirectory() as wheels:
        pack(download(os.environ.get("GPU_PYTHON", "3.12"), Path(wheels)), ROOT / "gpu-peers", LIMIT)
    return 0


if __name__ == "__main__":
    sys.exit(main())

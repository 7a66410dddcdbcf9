"""Writes a kernel for the Hugging Face Hub, from the sources of this package.

    python .ci/hub_kernel.py repository FOLDER    a repository that kernel-builder can build
    python .ci/hub_kernel.py variant FOLDER       a kernel for CPUs, for get_local_kernel; does not need kernel-builder

``repository`` writes sources only. Commit the folder to a Git repository of its own, because kernel-builder names the
kernel by the commit. ``variant`` reuses the objects of ``make kernels`` or ``pip install .`` and compiles only the
files that name the namespace.
"""

import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parent.parent
HUB = ROOT / "hub"
# A kernel may import only PyTorch and the standard library. The integrations that are kept are imported on request. The
# builder generates _ops.py.
LEFT_OUT = ("_ops.py", "__main__.py", "__pycache__", "*.so")
INTEGRATIONS = {"__init__.py", "accelerate.py", "data_parallel.py"}
# These sources name the namespace of the ops.
NAMED = ("csrc/torch/schema.cpp", "csrc/torch/bindings_cpu.cpp", "hub/torch_binding.cpp")
OPS = '''import torch
from . import {name}
ops = torch.ops.{name}

def add_op_namespace_prefix(op_name: str):
    return f"{name}::{{op_name}}"
'''


def matching(pattern: str) -> List[str]:
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.is_file())
    if not found:
        sys.exit(f"sparse_ce: patterns of hub/build.toml must match files, got {pattern}")
    return found


def build_toml() -> str:
    """Returns hub/build.toml with the files that its patterns match."""
    return re.sub(r'"([^"\n]*\*[^"\n]*)"', lambda pattern: ", ".join(f'"{name}"' for name in matching(pattern[1])),
                  (HUB / "build.toml").read_text())


def copy_package(folder: Path) -> None:
    shutil.copytree(ROOT / "sparse_ce", folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for path in (folder / "integrations").glob("*.py"):
        if path.name not in INTEGRATIONS:
            path.unlink()


def repository(folder: Path) -> None:
    for name in ("torch-ext", "csrc"):
        shutil.rmtree(folder / name, ignore_errors=True)
    copy_package(folder / "torch-ext" / "sparse_ce")
    shutil.copy(HUB / "torch_binding.cpp", folder / "torch-ext")
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for path in (HUB / "CARD.md", HUB / "flake.nix", ROOT / "LICENSE"):
        shutil.copy(path, folder)
    (folder / "build.toml").write_text(build_toml())


def built_objects() -> Path:
    """Returns the newest folder in which setup.py has compiled the kernels."""
    folders = sorted((ROOT / "build").glob("temp*/build.ninja"), key=lambda path: path.stat().st_mtime)
    if not folders:
        sys.exit("sparse_ce: the kernels for CPUs must be compiled to assemble a variant, got no build/temp*: run "
                 "SPARSE_CE_CUDA=0 make kernels")
    return folders[-1].parent


def library(name: str, out: Path) -> None:
    """Builds the library of a kernel whose ops have the namespace ``name``."""
    built, own = built_objects(), out.parent / "objects"
    text = (built / "build.ninja").read_text()
    compiler = shlex.split(re.search("^cxx = (.+)$", text, re.M)[1])
    rules = re.findall(r"^build (\S+/sparse_ce\._C/\S+): cxx .*\n  flags = (.+)$", text, re.M)
    objects = [path for path, _ in rules if not path.endswith(tuple(f"{source}.o" for source in NAMED))]
    # Compiles only what has changed.
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja is None:
        sys.exit("sparse_ce: ninja must be installed to assemble a variant, got none on the PATH: install ninja")
    subprocess.run([ninja, "--quiet", "-f", built / "build.ninja", *objects], check=True)
    flags = shlex.split(rules[0][1])
    own.mkdir()
    compilers = []
    for source in NAMED:
        objects.append(str(own / f"{Path(source).stem}.o"))
        compilers.append(subprocess.Popen(
            [*compiler, *flags, "-isystem", sysconfig.get_path("include"), f"-DTORCH_EXTENSION_NAME={name}",
             "-DSPARSE_CE_NAMESPACE=TORCH_EXTENSION_NAME", "-c", ROOT / source, "-o", objects[-1]]))
    if any([compiler.wait() for compiler in compilers]):
        sys.exit("sparse_ce: the sources of the kernel must compile, got the errors above")
    subprocess.run([*compiler, "-shared", *objects, "-o", out, "-Wl,--no-as-needed", built / "libtorch_cpu.so"],
                   check=True)
    shutil.rmtree(own)


def digest() -> str:
    found = hashlib.sha1()
    for path in sorted([*(ROOT / "csrc").rglob("*"), *(ROOT / "sparse_ce").rglob("*.py"), *HUB.iterdir()]):
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()[:7]


def variant(folder: Path) -> None:
    name = f"_sparse_ce_cpu_{digest()}"
    out = folder / f"torch-stable-abi211-cpu-{platform.machine()}-{platform.system().lower()}"
    if out.exists():
        shutil.rmtree(out)
    copy_package(out)
    library(name, out / f"{name}.abi3.so")
    (out / "_ops.py").write_text(OPS.format(name=name))
    (out / "metadata.json").write_text(json.dumps(
        {"id": name, "name": "sparse-ce", "version": 0, "license": "bsd-3-clause", "python-depends": [],
         "backend": {"type": "cpu"}}))
    print(out)


def main() -> None:
    commands = {"repository": repository, "variant": variant}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](Path(sys.argv[2]).resolve())


if __name__ == "__main__":
    main()

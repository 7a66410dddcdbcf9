"""Builds the modules of tests/native, which only tests use, once for each content of their sources.

pybind11's headers come with torch. One module is loaded several times, each time from a separate file, so that each
copy uses the instruction set that SPARSE_CE_CPU names when it is first used.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import List

import flavours

HERE = flavours.TESTS / "native"
ROOT = flavours.ROOT
BUILD = ROOT / "build" / "native"
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fopenmp-simd", "-fno-math-errno",
         "-fno-trapping-math"]


def includes() -> List[str]:
    import torch
    return ["-isystem", str(Path(torch.__file__).parent / "include"), "-isystem", sysconfig.get_path("include")]


def built(name: str, *arguments: str, also: tuple = ()) -> Path:
    """Returns the library of a module, compiled again if the module or its includes have changed."""
    digest = flavours.digest_of(HERE, ROOT / "csrc", *also)[:16]
    out = BUILD / digest / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with flavours.alone(name):
        if not out.exists():
            for old in BUILD.glob("*"):
                if old.name != digest:
                    shutil.rmtree(old)
            out.parent.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(["g++", *FLAGS, *includes(), str(HERE / f"{name}.cpp"), *arguments, "-o",
                                   str(out.with_suffix(".part"))], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            out.with_suffix(".part").rename(out)
    return out


def load(path: Path) -> ModuleType:
    """Loads a module under a name that contains its folder, because pybind11 returns an existing module of the same
    name."""
    spec = util.spec_from_file_location(f"{path.parent.name}.{path.name.split('.')[0]}", path)
    assert spec and spec.loader
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels(instruction_set: str, folder: Path) -> ModuleType:
    """Returns the CPU kernels on an instruction set that this machine supports."""
    copy = folder / instruction_set / "kernels.so"
    copy.parent.mkdir()
    sources = [str(ROOT / "csrc/cpu/simd/tile.cpp"), str(ROOT / "csrc/cpu/memory/nontemporal.cpp")]
    shutil.copy(built("kernels", *sources), copy)
    module, before = load(copy), os.environ.get("SPARSE_CE_CPU")
    os.environ["SPARSE_CE_CPU"] = instruction_set
    try:
        assert module.instruction_set() == instruction_set
    finally:
        os.environ.pop("SPARSE_CE_CPU")
        if before is not None:
            os.environ["SPARSE_CE_CPU"] = before
    return module


def planning() -> ModuleType:
    """Returns the planning code of the CUDA kernels, linked with the emulator instead of a driver."""
    sys.path.insert(0, str(flavours.TESTS / "emulation"))
    import build
    layer = build.LAYER
    return load(built("planning", "-fno-strict-aliasing", "-Wno-unknown-pragmas", f"-I{layer}", "-isystem",
                      f"{build.cuda_home()}/include", *map(str, build.DEVICE), "-x", "c++",
                      str(HERE / "masked_mean_planning.cpp"), str(ROOT / "csrc/cuda/cross_entropy.cu"),
                      *map(str, sorted((ROOT / "csrc/cuda").glob("one_pass*.cu"))), "-x", "none",
                      str(layer / "coc_runtime.cpp"), also=(build.HERE,)))

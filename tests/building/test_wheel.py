"""Tests that ``.ci/audit`` finds what would break a wheel under another torch or CUDA."""

import importlib.machinery
import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "sparse_ce-0.1.0-cp310-abi3-manylinux_2_34_x86_64.whl"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def audit():
    loader = importlib.machinery.SourceFileLoader("audit_of_sparse_ce", str(ROOT / ".ci" / "audit"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def link(path, needed, code="", *flags):
    """Builds a library that needs others, which are empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stubs = []
    for name in needed:
        stubs.append(path.parent.parent / "stubs" / name)
        stubs[-1].parent.mkdir(exist_ok=True)
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", stubs[-1], f"-Wl,-soname,{name}"], check=True)
    source = path.with_suffix(".cpp")
    source.write_text(code)
    subprocess.run(["g++", "-shared", "-fPIC", "-fno-gnu-unique", source, "-o", path, "-Wl,--no-as-needed", *stubs,
                    *flags], check=True)
    source.unlink()


def problems_of(audit, tmp_path, name=NAME, code="", needed=("libtorch_cpu.so", "libtorch_cuda.so"), flags=(),
                without=()):
    package = tmp_path / "package" / "sparse_ce"
    link(package / "_C.so", ["libtorch_cpu.so"])
    link(package / "_C_cuda.so", needed, code, *flags)
    for path in without:
        (package / path).unlink()
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for path in package.iterdir():
            wheel.write(path, f"sparse_ce/{path.name}")
    return list(audit.problems(tmp_path / name, tmp_path / "extracted"))


@needs_compiler
def test_a_wheel_that_needs_torch_alone_passes(audit, tmp_path):
    assert problems_of(audit, tmp_path) == []


@needs_compiler
@pytest.mark.parametrize("broken, message", [
    ({"needed": ("libtorch_cpu.so", "libtorch_cuda.so", "libcudart.so.13")}, "got ['libcudart.so.13', 'libtorch_cpu"),
    ({"needed": ("libtorch_cpu.so",)}, "must need ['libtorch_cpu.so', 'libtorch_cuda.so']"),
    ({"code": 'extern "C" int cudaMalloc(void**, unsigned long); int f() { return cudaMalloc(nullptr, 1); }'},
     "hide the CUDA runtime, got U cudaMalloc"),
    ({"code": "namespace c10 { int f(); } static int x = c10::f();"}, "stable ABI and hide the CUDA runtime, got U"),
    ({"code": 'extern "C" void PyErr_Clear(); static int x = (PyErr_Clear(), 1);'}, "got U PyErr_Clear"),
    ({"code": "int visible() { return 1; }"}, "must hide its symbols, got T _Z7visiblev"),
    ({"flags": ["-Wl,-rpath,/opt"]}, "must not have a search path"),
    ({"without": ["_C_cuda.so"]}, "must contain ['_C', '_C_cuda'], got ['_C.so']"),
    ({"name": "sparse_ce-0.1.0+cu130-cp310-abi3-linux_x86_64.whl"}, "must have a public version"),
    ({"name": "sparse_ce-0.1.0-cp311-cp311-linux_x86_64.whl"}, "the tag cp310-abi3")])
def test_a_wheel_that_would_not_load_elsewhere_fails(audit, tmp_path, broken, message):
    found = problems_of(audit, tmp_path, **broken)
    assert found and any(message in problem for problem in found), found


@needs_compiler
def test_a_wheel_that_an_index_refuses_fails(audit, tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "LARGEST", 0.001)
    assert ["smaller than 0.001 MB" in problem for problem in problems_of(audit, tmp_path)] == [True]

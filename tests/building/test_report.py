"""Tests the report of ``python -m sparse_ce``: it has all that a bug report needs, and no error prevents it."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sparse_ce
import sparse_ce.__main__ as report

ROWS = ["sparse_ce", "origin", "libraries", "variables", "python", "torch", "cpu", "cpu kernels", "gpu", "gpu driver",
        "cuda kernels", "clients"]


def rows_of(text):
    lines = text.splitlines()
    width = len(lines[0]) - len(lines[0].partition(" ")[2].lstrip())
    return {line[:width].rstrip(): line[width:] for line in lines}


def test_the_report_names_versions_kernels_libraries_and_variables(tmp_path):
    given = {"SPARSE_CE_CPU": "default", "OMP_NUM_THREADS": "1", "HF_TOKEN": "secret"}
    done = subprocess.run([sys.executable, "-m", "sparse_ce"], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, **given})
    assert done.returncode == 0 and done.stderr == ""
    rows = rows_of(done.stdout)
    assert list(rows)[:len(ROWS)] == ROWS and all(rows[name] for name in ROWS)
    assert rows["sparse_ce"] == f"{sparse_ce.__version__}, {Path(sparse_ce.__file__).resolve().parent}{os.sep}"
    for library in Path(sparse_ce.__file__).parent.glob("_C*.so"):
        assert f"{library.name} {library.stat().st_size / 1e6:.1f} MB (" in rows["libraries"]
    assert "OMP_NUM_THREADS=1" in rows["variables"] and "SPARSE_CE_CPU=default" in rows["variables"]
    assert "secret" not in done.stdout
    assert rows["torch"].startswith(torch.__version__) and platform.python_version() in rows["python"]
    assert rows["cpu kernels"] == "default, 1 threads" and f"of {os.cpu_count()} processors" in rows["cpu"]
    assert "op forward" in rows


def test_an_error_ends_its_row_and_not_the_report(monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("a reason\nof two lines")

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(torch, "get_num_threads", fails)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    monkeypatch.setattr(platform, "platform", fails)
    monkeypatch.setattr(report, "_library", fails)
    monkeypatch.setattr(metadata, "version", fails)
    report.main()
    rows = rows_of(capsys.readouterr().out)
    assert list(rows)[:len(ROWS)] == ROWS and "op forward" in rows
    for name in ("libraries", "python", "cpu kernels", "gpu", "clients"):
        assert rows[name] == "RuntimeError: a reason of two lines"
    assert rows["cpu"].startswith("AttributeError: ")


def test_gpus_have_their_architecture_and_memory(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    assert report._gpus() == "NVIDIA H100 (sm_90, 80 GiB); NVIDIA H100 (sm_90, 80 GiB)"


def test_without_a_gpu_a_torch_with_cuda_gives_the_reason(monkeypatch):
    def init():
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert report._gpus() == "none visible"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert report._safely(report._gpus) == "RuntimeError: Found no NVIDIA driver"


@pytest.mark.parametrize("text, version", [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n"
     "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n", "535.54.03"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n",
     "580.159.04"),
    ("", "none")])
def test_the_driver_is_that_of_the_kernel_module(text, version, monkeypatch):
    monkeypatch.setattr(report, "_text", lambda path: text)
    assert report._driver() == version


def test_a_library_has_its_compilers(tmp_path):
    library = tmp_path / "_C.so"
    library.write_bytes(b"\x7fELF" + b"\0" * 10**5 + b"GCC: (GNU) 8.5.0\0GCC: (GNU) 14.2.1\0GCC: (GNU) 8.5.0\0"
                        b"clang version 18.1.3\0\0\1symbols\0")
    assert report._library(library) == "_C.so 0.1 MB (GCC: (GNU) 8.5.0, GCC: (GNU) 14.2.1, clang version 18.1.3)"
    library.write_bytes(b"\x7fELF")
    assert report._library(library) == "_C.so 0.0 MB (compiler unknown)"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Returns the folder of an empty package, which the report takes for its own."""
    monkeypatch.setattr(report, "_PACKAGE", tmp_path / "sparse_ce")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "sparse_ce"


def test_the_origin_of_a_wheel(package):
    info = package.parent / f"sparse_ce-{sparse_ce.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: sparse_ce\nVersion: 3.1.4\n")
    (info / "INSTALLER").write_text("uv\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp310-abi3-manylinux_2_28_x86_64\n")
    assert report._origin() == "uv, cp310-abi3-manylinux_2_28_x86_64, from an index"
    source = {"url": "https://localhost/sparse_ce", "vcs_info": {"vcs": "git", "commit_id": "01234567"}}
    (info / "direct_url.json").write_text(json.dumps(source))
    assert report._origin() == "uv, cp310-abi3-manylinux_2_28_x86_64, https://localhost/sparse_ce, 01234567"


def test_the_origin_of_a_copy_and_of_a_source_tree(package):
    assert report._origin() == "a copy that was not installed"
    git = ["git", "-C", str(package.parent), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "-c", "commit.gpgsign=false", "commit", "--quiet", "--allow-empty", "-m", "a commit"],
                   check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert report._origin() == f"git {head.strip()}"


def test_a_reader_that_has_seen_enough_ends_the_report_without_a_traceback(tmp_path):
    process = subprocess.Popen([sys.executable, "-m", "sparse_ce"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               cwd=tmp_path)
    process.stdout.close()  # long before any output
    assert process.stderr.read() == b"" and process.wait() == 0

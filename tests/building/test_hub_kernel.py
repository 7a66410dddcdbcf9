"""Tests the kernel for the Hugging Face Hub: its build configuration, and that it works beside the installed package.

kernel-builder needs Nix, so the tests assemble a build variant without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hub_client

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "hub_kernel.py"
PROCESS = ROOT / "tests" / "support" / "processes" / "hub_process.py"

needs_kernels = pytest.mark.skipif(not hub_client.there(), reason="kernels is in .venv/hub")


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    done = subprocess.run([sys.executable, SCRIPT, "variant", folder], capture_output=True, text=True)
    if "run SPARSE_CE_CUDA=0 make kernels" in done.stderr and "CI" not in os.environ:
        pytest.skip("the objects of a build are missing")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run([sys.executable, SCRIPT, "repository", folder], check=True)
    return folder


@needs_kernels
@pytest.mark.parametrize("order", ["installed", "kernel", "enabled"])
def test_a_kernel_and_the_installed_package_do_not_affect_each_other(variant, order):
    done = subprocess.run([sys.executable, PROCESS, variant, order], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_no_symbol_is_shared_between_two_kernels(variant):
    library, = variant.glob("*/*.so")
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    kinds = {name: kind for _, kind, name in (line.split() for line in symbols.splitlines())}
    assert "u" not in kinds.values(), "the dynamic linker shares unique symbols between libraries"
    assert [name for name, kind in kinds.items() if kind == "T"] == [f"PyInit_{library.name.split('.')[0]}",
                                                                      "sparse_ce_small_cross_entropy"]


def test_the_repository_has_every_source_and_only_relative_imports(repository):
    config = pytest.importorskip("tomllib").loads((repository / "build.toml").read_text())
    backends = config["general"]["backends"]
    assert config["general"]["edition"] == 5 and set(config["torch"]["stable-abi"]) == set(backends)
    for backend in backends:
        parts = [config["torch"], *(part for part in config["kernel"].values() if part["backend"] == backend)]
        listed = [name for part in parts for name in part["src"]]
        assert len(set(listed)) == len(listed) and all((repository / name).is_file() for name in listed)
        expected = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
        if backend == "cpu":
            expected = {name for name in expected if "/cuda/" not in name and "bindings_cuda" not in name}
        assert set(listed) == expected | {"torch-ext/torch_binding.cpp"}
    package = repository / "torch-ext" / "sparse_ce"
    assert (package / "layers.py").exists() and not (package / "_ops.py").exists()
    for path in package.rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not line.startswith(("import sparse_ce", "from sparse_ce")), f"{path}: {line}"
            assert "torch.ops.sparse_ce" not in line or "``" in line, f"{path}: {line}"


@needs_kernels
def test_the_kernels_library_accepts_the_build_configuration(repository):
    program = (f"import sys; sys.path.append({str(ROOT / 'tests' / 'support')!r}); import hub_client\n"
               "hub_client.make_importable()\nfrom pathlib import Path\nfrom kernels._rust import Build\n"
               f"print(Build.open(Path({str(repository)!r})).general.backends)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=repository)
    assert "CPU" in done.stdout and "CUDA" in done.stdout, done.stderr

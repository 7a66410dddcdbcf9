"""Tests what ``pip install`` of the source tree requires, and that it ends with one sentence if a requirement is
missing."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sparse_ce

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TORCH = """
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
import sys
sys.meta_path.insert(0, NoTorch())
"""


@pytest.fixture
def tree(tmp_path):
    """Returns a copy of the build's inputs, because a build leaves files behind."""
    for name in ("setup.py", "build_backend.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("sparse_ce", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def python(tree, program, **env):
    env = {**{key: value for key, value in os.environ.items() if key not in ("UV", "CXX", "PYTHONPATH")}, **env}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tree, env=env)


def backend(hook, before=""):
    return f"{before}\nimport sys\nsys.path.insert(0, '')\nimport build_backend\nprint(build_backend.{hook})"


def assert_one_sentence(done, *words):
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sparse_ce: ") and not [word for word in words if word not in last], last


def test_metadata_and_source_distribution_need_no_torch_and_no_compiler(tree):
    program = BLOCK_TORCH + "sys.path.insert(0, '')\nimport build_backend as b\n" + "\n".join((
        "assert b.get_requires_for_build_sdist() == []", "b.prepare_metadata_for_build_wheel('.')",
        "b.prepare_metadata_for_build_editable('.')", "b.build_sdist('.')"))
    done = python(tree, program, PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    names = set(subprocess.run(["tar", "-tzf", *tree.glob("sparse_ce-*.tar.gz")], capture_output=True, text=True)
                .stdout.split())
    for path in (ROOT / "csrc").rglob("*.*"):
        assert f"sparse_ce-{sparse_ce.__version__}/{path.relative_to(ROOT)}" in names
    assert f"sparse_ce-{sparse_ce.__version__}/build_backend.py" in names
    metadata = next(tree.glob("*.dist-info/METADATA")).read_text()
    assert f"Version: {sparse_ce.__version__}\n" in metadata and "text/markdown" in metadata
    assert "# sparse_ce\n" in metadata and not re.search(r"\]\((?!https?:)", metadata), "a link to a file of the tree"


def test_no_torch_is_asked_for_beside_an_installed_one(tree):
    assert python(tree, backend("get_requires_for_build_wheel()")).stdout.strip() == "[]"


def hide_torch(made_by_uv):
    """Returns code that hides torch from the backend, optionally in an environment that uv has created."""
    uv = "build_backend.open = lambda _: io.StringIO('home = /usr/bin\\nuv = 0.9\\n')" if made_by_uv else ""
    return ("import io, sys, types\nsys.path.insert(0, '')\nimport build_backend\n"
            f"build_backend.PathFinder = types.SimpleNamespace(find_spec=lambda *_: None)\n{uv}")


def test_pip_gets_torch_where_there_is_none_and_uv_gets_the_command_that_finds_yours(tree):
    wheel = "get_requires_for_build_wheel()"
    downloads = "['torch>=2.11']"
    assert python(tree, backend(wheel, hide_torch(made_by_uv=False)), UV="uv").stdout.strip() == downloads
    assert python(tree, backend(wheel, hide_torch(made_by_uv=True))).stdout.strip() == downloads
    for hook in (wheel, "get_requires_for_build_editable()"):
        done = python(tree, backend(hook, hide_torch(made_by_uv=True)), UV="uv")
        assert_one_sentence(done, "torch", f"uv pip install --no-build-isolation {tree}")


@pytest.mark.parametrize("hook", ["build_wheel('.')", "build_editable('.')"])
def test_without_torch_or_compiler_a_build_ends_with_one_sentence(tree, hook):
    assert_one_sentence(python(tree, backend(hook, BLOCK_TORCH)), "torch 2.11", "got none")
    assert_one_sentence(python(tree, backend(hook), PATH="/nowhere"), "C++ compiler", "g++", "CXX")
    assert_one_sentence(python(tree, backend(hook), CXX="/nowhere/g++ -m64"), "C++ compiler", "CXX=/nowhere/g++ -m64")
    old = "import torch\ntorch.__version__ = '2.10.1'"
    assert_one_sentence(python(tree, backend(hook, old)), "torch must be 2.11 or newer", "2.10.1")


@pytest.mark.parametrize("hook", ["prepare_metadata_for_build_wheel('.')", "build_wheel('.')", "build_editable('.')"])
def test_a_read_only_source_tree_ends_with_one_sentence(tree, hook):
    done = python(tree, backend(hook, "import os\nos.access = lambda path, mode: mode != os.W_OK"))
    assert_one_sentence(done, "writable", str(tree), "copy")


def test_old_python_and_setuptools_end_with_one_sentence(tree):
    old = "import sys\nsys.version_info = (3, 9, 18)"
    assert_one_sentence(python(tree, backend("get_requires_for_build_wheel()", old)), "Python must be 3.10", "3.9")
    for version in ("65.5.0", None):
        found = f"lambda name: {version!r}" if version else "lambda name: (_ for _ in ()).throw(m.PackageNotFoundError)"
        done = python(tree, backend("build_wheel('.')", f"from importlib import metadata as m\nm.version = {found}"))
        assert_one_sentence(done, "setuptools must be 77", version or "none", "ninja")


@pytest.fixture
def setup_file(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    spec = importlib.util.spec_from_file_location("sparse_ce_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_gpus(*capabilities):
    compiled = ["sm_80", "sm_90", "sm_120", "compute_120"]
    return SimpleNamespace(cuda=SimpleNamespace(
        is_available=lambda: bool(capabilities), device_count=lambda: len(capabilities),
        get_device_capability=lambda i: capabilities[i], get_arch_list=lambda: compiled))


def test_architectures_are_those_asked_for_or_of_this_machine(setup_file, monkeypatch):
    assert setup_file.architectures(with_gpus((9, 0))) == "9.0+PTX"
    assert setup_file.architectures(with_gpus((12, 0), (8, 0), (12, 0))) == "8.0;12.0+PTX"
    assert setup_file.architectures(with_gpus((13, 0))) == "12.0+PTX"  # newer than this torch and its nvcc
    assert setup_file.architectures(with_gpus()) == setup_file.DEFAULT_ARCHITECTURES
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "release")
    assert setup_file.architectures(with_gpus((9, 0))) == setup_file.RELEASE_ARCHITECTURES
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert setup_file.architectures(with_gpus((9, 0))) == "8.6"


def flags_of_extension(setup_file, torch, monkeypatch):
    """Returns all flags for architectures with which the CUDA kernels are compiled."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setup_file, "why_no_cuda", lambda torch, home: None)
    monkeypatch.setattr(setup_file, "static_runtime", lambda home: home)
    cuda = setup_file.extensions(torch, "/nowhere")[1]
    assert cuda.name == "sparse_ce._C_cuda"
    return [flag for flag in cuda.extra_compile_args["nvcc"] if "gencode" in flag]


def without_gpu():
    return SimpleNamespace(**vars(with_gpus()), __version__="2.11", version=SimpleNamespace(cuda="13.0"))


@pytest.mark.parametrize("given, images, intermediate, versions", [
    ("release", {75, 80, 86, 89, 90, 100, 120}, {80, 100}, (75, 80, 90, 100)),
    (None, {75, 80, 90, 100, 120}, {90}, (75, 80, 90))])
def test_a_build_without_a_gpu_serves_every_gpu_from_7_5_on(given, images, intermediate, versions, setup_file,
                                                            monkeypatch):
    """Checks the number of PTX versions as well, because nvcc's front half runs once for each."""
    if given:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    flags = flags_of_extension(setup_file, without_gpu(), monkeypatch)
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == given
    made_from = [re.fullmatch(r"-gencode=arch=compute_(\d+),code=(sm|compute)_(\d+)", flag).groups() for flag in flags]
    assert {int(gpu) for _, kind, gpu in made_from if kind == "sm"} == images
    assert {int(gpu) for _, kind, gpu in made_from if kind == "compute"} == intermediate
    assert {int(ptx) for ptx, *_ in made_from} == set(versions)
    assert all(int(ptx) == max(version for version in versions if version <= int(gpu)) for ptx, _, gpu in made_from)
    for gpu in (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121, 130):
        same_major = [number for number in images if number // 10 == gpu // 10 and number <= gpu]
        assert same_major or min(intermediate) <= gpu, gpu


def test_a_wheel_for_others_has_all_architectures_of_a_release(setup_file):
    """Checks the recipe that the release workflow runs, and the kernel of the Hugging Face Hub."""
    recipe = subprocess.run(["make", "-n", "wheel"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-release}" in recipe
    hub = re.search(r"cuda-capabilities = \[(.*)\]", (ROOT / "hub" / "build.toml").read_text())[1]
    assert re.findall(r"[\d.]+", hub) == re.findall(r"[\d.]+", setup_file.RELEASE_ARCHITECTURES)


def test_the_longest_sources_compile_first(setup_file):
    paths = sorted(str(path) for folder in ("cpu", "cuda") for path in (ROOT / "csrc" / folder).rglob("*.c*")
                   if path.suffix in (".cpp", ".cu"))
    names = [os.path.basename(path) for path in setup_file.longest_first(paths)]
    assert names[:len(setup_file.LONGEST)] == setup_file.LONGEST and len(names) == len(paths)


@pytest.mark.parametrize("given", ["8.6", "8.0;8.6+PTX", "7.5;8.0+PTX;8.6;8.9;9.0;10.0+PTX;12.0"])
def test_torch_alone_interprets_the_architectures_that_are_asked_for(given, setup_file, monkeypatch):
    from torch.utils.cpp_extension import _get_cuda_arch_flags
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    assert flags_of_extension(setup_file, without_gpu(), monkeypatch) == _get_cuda_arch_flags()


def test_the_oldest_torch_is_the_same_in_all_files(setup_file):
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'dependencies = \["(torch>=(\d+)\.(\d+))"\]', project)
    assert f'["{oldest[1]}"]' in (ROOT / "build_backend.py").read_text()
    assert f"=0x{int(oldest[2]):02x}{int(oldest[3]):02x}0000" in setup_file.STABLE_ABI


@pytest.mark.parametrize("known", [True, False])
def test_flags_of_g_plus_plus_are_passed_only_to_compilers_that_know_them(known, setup_file, tmp_path, monkeypatch):
    """Uses a stand-in for clang, for which the first flag is an error and the other one a warning."""
    compiler = tmp_path / "clang++"
    refused = 'case "$*" in *-fno-gnu-unique*|*-Werror*--param=*) exit 1 ;; esac'
    compiler.write_text(f"#!/bin/sh\n{'' if known else refused}\n")
    compiler.chmod(0o755)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CXX", f"{compiler} -m64")
    monkeypatch.setenv("SPARSE_CE_CUDA", "0")
    monkeypatch.setenv("SPARSE_CE_SANITIZE", "address")
    flags = setup_file.extensions(without_gpu(), None)[0].extra_compile_args["cxx"]
    of_gcc = [flag for flag in flags if flag == "-fno-gnu-unique" or flag.startswith("--param")]
    assert len(of_gcc) == (2 if known else 0)
    assert {"-O3", "-fvisibility=hidden", "-fno-trapping-math", "-fsanitize=address"} <= set(flags)


@pytest.mark.parametrize("wish, cuda, nvcc, reason", [
    ("0", "13.0", 13, "SPARSE_CE_CUDA=0"), (None, "13.0", None, "nvcc was not found"), (None, None, 13, "a CPU build"),
    (None, "13.0", 13, None), (None, "13.0", 12, None), (None, "12.8", 13, "nvcc has CUDA 13, torch has CUDA 12.8"),
    ("1", None, 13, None), ("1", "12.8", 13, None)])
def test_cuda_kernels_are_built_if_the_driver_of_torch_can_run_them(wish, cuda, nvcc, reason, setup_file, monkeypatch):
    monkeypatch.delenv("SPARSE_CE_CUDA", raising=False)
    if wish:
        monkeypatch.setenv("SPARSE_CE_CUDA", wish)
    monkeypatch.setattr(setup_file, "nvcc_major", lambda home: nvcc)
    torch = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda))
    found = setup_file.why_no_cuda(torch, nvcc and "/cuda")
    assert found == reason or reason and reason in found


def test_requested_cuda_kernels_without_nvcc_or_its_static_runtime_end_with_one_sentence(tree, setup_file, tmp_path):
    no_nvcc = "import shutil, os\nos.environ.pop('CUDA_HOME', 0)\nfound = shutil.which\n" \
              "shutil.which = lambda name, *_: None if name == 'nvcc' else found(name)"
    done = python(tree, backend("build_wheel('.')", no_nvcc), SPARSE_CE_CUDA="1")
    assert_one_sentence(done, "requires nvcc", "CUDA_HOME")
    with pytest.raises(SystemExit, match=r"sparse_ce: .*libcudart_static\.a, got none in"):
        setup_file.static_runtime(str(tmp_path))


def test_a_failed_compilation_and_a_missing_ninja_end_with_one_sentence(tree):
    (tree / "csrc" / "cpu" / "loss_mean.cpp").write_text("#error broken\n")
    broken = python(tree, backend("build_wheel('.')"), SPARSE_CE_CUDA="0", MAX_JOBS="1", CXXFLAGS="-fsyntax-only")
    assert_one_sentence(broken, "compiler's messages above", "MAX_JOBS=1")
    hidden = "import shutil\nfound = shutil.which\n" \
             "shutil.which = lambda name, *a, **o: None if name == 'ninja' else found(name, *a, **o)"
    assert_one_sentence(python(tree, backend("build_wheel('.')", hidden), SPARSE_CE_CUDA="0"), "ninja", "PATH")


def test_a_build_leaves_no_library_of_an_earlier_one(setup_file, tmp_path, monkeypatch):
    from setuptools import Distribution
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPARSE_CE_CUDA", "0")
    package = tmp_path / "sparse_ce"
    package.mkdir()
    for name in ("_C.abi3.so", "_C_cuda.abi3.so", "ops.py"):
        (package / name).touch()
    command = setup_file.compilation()["cmdclass"]["build_ext"](Distribution())
    command.build_lib, command.extensions = str(tmp_path), []
    command.run()
    assert [path.name for path in package.iterdir()] == ["ops.py"]


@pytest.mark.parametrize("platform, folder", [
    ("linux-x86_64", "targets/x86_64-linux/lib"), ("linux-aarch64", "targets/sbsa-linux/lib"),
    ("linux-ppc64le", "lib64"),
])
def test_the_static_runtime_is_that_of_the_wheels_machine(platform, folder, setup_file, tmp_path, monkeypatch):
    for name in ("targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib64"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "libcudart_static.a").touch()
    monkeypatch.setattr(setup_file.sysconfig, "get_platform", lambda: platform)
    assert setup_file.static_runtime(str(tmp_path)) == str(tmp_path / folder)


def test_a_build_writes_only_into_its_folder(setup_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "c++")
    work = tmp_path / "a folder"
    work.mkdir()
    empty = setup_file.Extension("_C", [], libraries=["torch_cpu"], extra_compile_args={})
    (work / "build.ninja").write_text(setup_file.ninja_file([(empty, str(work / "_C.so"))], "include", None, str(work)))
    setup_file.run_ninja(str(work / "build.ninja"))
    assert (work / "_C.so").exists() and [path.name for path in tmp_path.iterdir()] == ["a folder"]

"""Defines the test configurations ("flavours"). SPARSE_CE_FLAVOUR selects one; without it the installed package is
tested.

    SPARSE_CE_FLAVOUR=baseline python -m pytest             a whole flavour
    SPARSE_CE_FLAVOUR=emulated python -m pytest tests/softmax_mean/test_masked_mean.py -k layout
    python tests/flavours.py                                the flavours that `make test-all` adds on this machine
    python tests/flavours.py --without slow                 the same except one

A flavour consists of environment variables, the tests that it selects, and for some flavours another build of the
package. tests/conftest.py enters it. A slow test also runs if the command line names it (by file::name or -k).
Without a flavour, the files and folders that the command line names run, whatever their flavour.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
BUILD = ROOT / "build" / "flavours"
PLAIN = "plain"

# Tests that depend on the CPU or CUDA kernels; NO_KERNELS lists the matching files that do not, or only as other tests
# do.
KERNELS = ("test_binary_*", "test_candidates*", "test_cross_entropy_*", "test_dense_divergence",
           "test_dense_divergence_exact", "test_linear_*", "test_masked_mean*", "test_select_*", "test_row_*",
           "test_sparse_softmax*", "test_target_*", "test_topk*", "test_flavour*")
NO_KERNELS = ("test_cross_entropy_compile*", "test_select_compile", "test_linear_compile",
              "test_cross_entropy_data_parallel",
              "test_target_validation_cuda", "test_target_arrays", "test_target_collate", "test_target_tensorlike",
              "test_cross_entropy_small")
# Tests of compilers, transforms and other processes, whose results do not depend on the kernels.
COMPILED = ("compile_once", "compile_twice", "op_compiles", "compiled_function", "compiled_with",
            "constant_of_the_graph", "the_example_shows")
SAME_FOR_EVERY_KERNEL = (*COMPILED, "opcheck", "gradcheck", "never_there_at_once")
PRODUCTS = ("test_linear_values", "test_linear_gradients", "test_linear_chunks", "test_linear_failures",
            "test_linear_scaling", "test_linear_rounding", "test_linear_borrowed", "test_linear_by_classes",
            "test_linear_binary", "test_linear_dense_divergence", "test_linear_blocks*", "test_flavour*")
# Tests of Python code whose calls of the kernels other tests make, too.
SAME_CALLS = ("test_cross_entropy_history", "test_cross_entropy_opinfo", "test_linear_positions",
              "test_linear_sharded")
OF_THE_CPU = ("test_linear_memory", "test_linear_binary_memory", "test_linear_bfloat16", "test_cross_entropy_large",
              "test_cross_entropy_tiles")
# What the instruction sets of the CPU implement differently: values, shapes, tiles and limits.
EACH_SET = ("test_binary_values", "test_candidates", "test_cross_entropy_exact", "test_cross_entropy_limits",
            "test_cross_entropy_shapes", "test_cross_entropy_softcap", "test_cross_entropy_strided",
            "test_cross_entropy_tiles", "test_cross_entropy_values", "test_dense_divergence",
            "test_dense_divergence_exact", "test_flavour", "test_linear_exact", "test_linear_values",
            "test_masked_mean", "test_row_scales", "test_select_exact", "test_select_rank", "test_select_values",
            "test_sparse_softmax", "test_topk")
# Tests of the training libraries, and of programs that train.
CLIENTS = ("test_axolotl", "test_dense_divergence_parity", "test_examples*", "test_liger",
           "test_placements_transformers", "test_trainer_*", "test_training_*", "test_trl_*")
# Whole files of tests of compilers and transforms.
COMPILERS = ("test_cross_entropy_compile*", "test_every_loss*", "test_linear_compile", "test_select_compile",
             "test_symbolic_sizes")
# Tests that start several processes, each with its own classes.
SHARDED = ("test_linear_sharded", "test_placements", "test_sharded_*")
PROGRAMS = ("test_emulation*",)
BUILDS = ("test_build", "test_gpu_acceptance", "test_hub_kernel", "test_install", "test_launch_calls",
          "test_native_kernels")


# These files take more than ten seconds. They start first, so that parallel processes do not wait for the largest file
# last.
LONGEST = ("test_axolotl", "test_every_loss", "test_every_loss_compiled", "test_binary_values",
           "test_examples_training", "test_examples", "test_native_kernels", "test_linear_compile",
           "test_cross_entropy_compile", "test_cross_entropy_compile_sizes", "test_linear_chunks", "test_benchmarks",
           "test_linear_values", "test_masked_mean", "test_cross_entropy_values", "test_data_caches",
           "test_linear_memory", "test_sharded_logits", "test_collection", "test_trainer_distributed",
           "test_training_distributed", "test_training_policies", "test_trl_sft", "test_trl_distillation",
           "test_trl_policies", "test_trl_distributed", "test_trainer_steps", "test_training_loops", "test_docs",
           "test_stock_import", "test_gpu_acceptance", "test_hub_kernel")


@dataclass(frozen=True)
class Flavour:
    files: Tuple[str, ...]  # patterns of the stems
    but: Tuple[str, ...] = ()
    at_least: int = 1  # minimum number of tests of a full run, against patterns that match nothing
    only: Tuple[str, ...] = ()  # parts of test names, at least one of which must match
    without: Tuple[str, ...] = ()  # parts of test names, none of which may match
    slow: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    build: Optional[Callable[[Path], None]] = None  # builds folder/sparse_ce/_C*.so
    sources: Tuple[str, ...] = ("csrc",)  # sources of the library
    sanitizes: bool = False
    in_pieces: bool = False  # tests of a file share no costly state: any process runs any test

    def has_file(self, stem: str) -> bool:
        return any(fnmatch(stem, p) for p in self.files) and not any(fnmatch(stem, p) for p in self.but)

    def has_test(self, name: str, slow: bool) -> bool:
        return (slow == self.slow and (not self.only or any(part in name for part in self.only))
                and not any(part in name for part in self.without))


def build_emulated(folder: Path) -> None:
    subprocess.run([sys.executable, TESTS / "emulation" / "build.py", "--package", folder], check=True, stdout=2)


def build_kernels(folder: Path, **environment: str) -> None:
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp",
                    folder.with_name(folder.name + "-objects")], check=True, cwd=ROOT, stdout=2,
                   env={**os.environ, "SPARSE_CE_CUDA": "0", **environment})


def build_sanitized(folder: Path) -> None:
    build_kernels(folder, SPARSE_CE_SANITIZE="address,undefined")


def build_with_clang(folder: Path) -> None:
    build_kernels(folder, CXX="clang++-14", CXXFLAGS="-Wall -Wextra -Werror")


FLAVOURS = {
    PLAIN: Flavour(("test_*",), BUILDS + CLIENTS + COMPILERS + PROGRAMS + SHARDED, at_least=6000),
    "compilers": Flavour(COMPILERS, at_least=200),
    "clients": Flavour(CLIENTS, at_least=400),
    "sharded": Flavour(SHARDED, at_least=400),
    # The compiler's baseline instruction set, and AVX2, between it and AVX-512. Small calls also go through the
    # dispatcher. Non-temporal stores require AVX2.
    "baseline": Flavour(EACH_SET, at_least=3000, without=SAME_FOR_EVERY_KERNEL,
                        environment={"SPARSE_CE_CPU": "default", "SPARSE_CE_TEST_OPS": "1"}),
    "avx2": Flavour(EACH_SET, at_least=3000, without=SAME_FOR_EVERY_KERNEL,
                    environment={"SPARSE_CE_CPU": "avx2", "SPARSE_CE_TEST_OPS": "1"}),
    # The two implementations of bfloat16 GEMMs. Tests that cover all dtypes at once use PyTorch's default instead.
    "float32": Flavour(PRODUCTS, only=("bfloat16", "flavour"), without=("at_once",), at_least=200,
                       environment={"SPARSE_CE_CPU_BFLOAT16": "float32"}),
    "native": Flavour(PRODUCTS, only=("bfloat16", "flavour"), without=("at_once",), at_least=200,
                      environment={"SPARSE_CE_CPU_BFLOAT16": "native"}),
    # The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
    "sanitized": Flavour(("test_binary_values", "test_binary_large", "test_cross_entropy_values",
                          "test_cross_entropy_shapes", "test_cross_entropy_errors",
                          "test_cross_entropy_tiles", "test_dense_divergence", "test_linear_sharded",
                          "test_linear_binary", "test_linear_rounding", "test_masked_mean", "test_row_loss",
                          "test_topk", "test_raw_calls", "test_select_empty_rows",
                          "test_select_values", "test_select_shards", "test_flavour*"),
                         at_least=300, build=build_sanitized,
                         sources=("csrc", "setup.py"), sanitizes=True, environment={
                             "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
                             "UBSAN_OPTIONS": "print_stacktrace=1"}),
    # The CPU kernels, compiled by the oldest clang that is supported; .ci/clang runs this flavour.
    "clang": Flavour((*EACH_SET, "test_raw_calls"), at_least=3000, without=SAME_FOR_EVERY_KERNEL,
                     build=build_with_clang, sources=("csrc", "setup.py")),
    # The CUDA kernels' source on a CPU, bindings included: the CUDA ops serve CPU tensors. OMP_NUM_THREADS is 1,
    # because the GEMMs of the emulated linear head differ in bits with two threads. Tests of the CPU kernels are left
    # out, and slow tests that resemble others: random labels (labels of one class drift most), 16-bit with float32
    # (16-bit throughout stays), float32 samples (float64 stays), and one test with three processes.
    "emulated": Flavour((*KERNELS, "test_batch_invariance", "test_divergence_values"),
                        NO_KERNELS + OF_THE_CPU + SAME_CALLS, at_least=4000, build=build_emulated,
                        without=(*COMPILED, "instruction_set", "many_rows", "number_of_threads",
                                 "gradients_keep_their_memory", "too_large_for_the_caches",
                                 "-random-1024 chunks", "-random-blocks of classes",
                                 "module_db-torch.float32",
                                 "torch.float32)-one class-blocks of classes"),
                        sources=("csrc", "tests/emulation"),
                        environment={"SPARSE_CE_VALIDATE": "1", "OMP_NUM_THREADS": "1"}),
    # The same kernels as standalone programs: against float64, in any order of threads, under sanitizers.
    "programs": Flavour(PROGRAMS, at_least=20, in_pieces=True),
    # Compilation of the sources, and a dry run of the tests for machines with a GPU.
    "builds": Flavour(BUILDS, at_least=20),
    "slow": Flavour(("test_*",), slow=True, at_least=10),
}


def place(stem: str) -> int:
    """Returns the position of a file in the order of a run."""
    return LONGEST.index(stem) if stem in LONGEST else len(LONGEST)


def processor() -> set:
    path = Path("/proc/cpuinfo")
    return set(re.findall(r"\w+", path.read_text())) if path.exists() else set()


def available_instruction_sets() -> List[str]:
    """Returns the instruction sets of the CPU kernels that this machine supports; the last one is the default."""
    flags, sets = processor(), ["default"]
    if {"avx2", "fma", "bmi2"} <= flags:
        sets.append("avx2")
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"} <= flags:
            sets.append("avx512")
    return sets


def others() -> List[str]:
    """Returns the flavours that cover what the plain flavour does not cover on this machine."""
    names = {"default": "baseline", "avx2": "avx2"}
    sets = [names[name] for name in available_instruction_sets()[:-1]]
    products = ["float32" if "avx512_bf16" in processor() else "native"]
    cuda = ["emulated", "programs"] if shutil.which("nvcc") or "CI" in os.environ else []
    return ["compilers", "clients", "sharded", *sets, *products, "sanitized", *cuda, "builds", "slow"]


def named() -> str:
    name = os.environ.get("SPARSE_CE_FLAVOUR") or PLAIN
    if name not in FLAVOURS:
        sys.exit(f"sparse_ce: SPARSE_CE_FLAVOUR must be one of {', '.join(FLAVOURS)}, got {name}")
    return name


def is_ignored(path: Path, arguments: Sequence[str]) -> bool:
    """Returns True if a file of tests is not part of this run.

    If no flavour is selected, all files are part of it that the arguments of pytest name, or whose folder they name.
    """
    if named() == PLAIN:
        given = {Path(os.path.abspath(argument.partition("::")[0])) for argument in arguments} - {TESTS, ROOT}
        if not given.isdisjoint((path, *path.parents)):
            return False
    return not FLAVOURS[named()].has_file(path.stem)


def preload() -> str:
    """Returns the value of LD_PRELOAD for a sanitizer: its runtime and libstdc++.

    The runtime looks up the real __cxa_throw when it starts, before Python has loaded any library.
    """
    return " ".join(subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True,
                                   check=True).stdout.strip() for name in ("libasan.so", "libstdc++.so.6"))


def starts_again() -> bool:
    return FLAVOURS[named()].sanitizes and "libasan" not in os.environ.get("LD_PRELOAD", "")


def start_again(config) -> None:
    """Replaces the process by the same command with the sanitizer's runtime, which must be loaded before Python."""
    config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    # The runtime also reads its options when it starts.
    os.execve(sys.executable, sys.orig_argv,
              {**os.environ, **FLAVOURS[named()].environment, "LD_PRELOAD": preload()})


def enter() -> None:
    """Sets the environment and the import path for this process and its children; called before torch or sparse_ce is
    imported."""
    name = named()
    flavour = FLAVOURS[name]
    if starts_again():
        return
    os.environ.update(flavour.environment)
    if flavour.build:
        folder = str(prepared(name, flavour))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Holds the build lock of a flavour, because all processes of a run enter the flavour at about the same time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepared(name: str, flavour: Flavour) -> Path:
    """Returns the folder with a flavour's package; rebuilds its library if the sources have changed."""
    folder = BUILD / name
    package, stamp = folder / "sparse_ce", folder / "digest"
    with alone(name):
        digest = digest_of(*(ROOT / source for source in flavour.sources))
        if not stamp.exists() or stamp.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"building the flavour {name}", file=sys.stderr)
            # LD_PRELOAD is removed, because the compiler's own leaks must not fail the build.
            before = os.environ.pop("LD_PRELOAD", None)
            flavour.build(folder)
            if before is not None:
                os.environ["LD_PRELOAD"] = before
            stamp.write_text(digest)
        mirror_python(ROOT / "sparse_ce", package)
    return folder


def mirror_python(source: Path, package: Path) -> None:
    """Copies the .py files below ``source`` to ``package``, and deletes all others there."""
    wanted = {path.relative_to(source): path for path in source.rglob("*") if path.suffix in (".py", ".typed")}
    for path in package.rglob("*.py"):
        if path.relative_to(package) not in wanted:
            path.unlink()
    for relative, path in wanted.items():
        copy = package / relative
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def digest_of(*paths: Path, below: Path = ROOT) -> str:
    """Returns a digest of the names and contents of source files, and of the version of torch."""
    from importlib import metadata
    digest = hashlib.sha256(metadata.version("torch").encode())
    for path in sorted(p for root in paths for p in ([root] if root.is_file() else root.rglob("*"))):
        if path.is_file() and "build" not in path.relative_to(below).parts and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(below).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--without", nargs="*", default=[], choices=sorted(FLAVOURS), help="none of these")
    unwanted = options.parse_args().without
    print(*(name for name in others() if name not in unwanted))

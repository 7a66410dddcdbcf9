"""Compiles the CUDA kernels' source for a CPU (plain, sanitizers) and, with nvcc, the same cases for the device.

    python tests/emulation/build.py [plain asan tsan] [OP ...] | --device [ARCHITECTURE ...] | --package DIR

The programs are <op>_<flavour> in build/, one for each .cpp next to this file; names select some of them. An
ARCHITECTURE is e.g. 9.0; without one --device compiles for the GPU of this machine. --device also compiles
benchmarks/gpu/one_pass_bench.cu.

--package DIR creates a copy of the Python package in which the emulated CUDA kernels serve CPU tensors, so that the
whole Python suite runs on them.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LAYER = HERE / "runtime"
BUILD = HERE / "build"
# A host compiler needs these definitions, which nvcc gives to csrc/.
DEVICE = ["-DSCE_CUDA", "-include", HERE / "device" / "launch.cuh"]
# The flags that affect numbers are those of setup.py and CMakeLists.txt: see multiply_add in csrc/core/scalar_math.h.
ROUNDING = ["-fmad=false"]
# PyTorch's builds of kernels set the last flag.
NVCC = ["-std=c++17", "-O2", *ROUNDING, "-lineinfo", "--expt-relaxed-constexpr"]
OPS = sorted(path.stem for path in HERE.glob("*.cpp"))
BENCH = ROOT / "benchmarks" / "gpu" / "one_pass_bench.cu"
FLAVOURS = {
    "plain": ["-O1"],  # with -O2, compilation takes more time than the runs save
    "asan": ["-Og", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "tsan": ["-Og", "-fno-omit-frame-pointer", "-fsanitize=thread"],
}


def cuda_home() -> str:
    """Returns the toolkit's root as reported by nvcc, because the nvcc on the PATH may be a wrapper script."""
    if "CUDA_HOME" in os.environ:
        return os.environ["CUDA_HOME"]
    plan = subprocess.run(["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    return os.path.realpath(re.search(r"^#\$ TOP=(.*)$", plan, re.M).group(1))


def flags() -> list:
    return ["g++", "-std=c++17", "-g1", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas",
            "-Wno-unused-function", f"-I{LAYER}", "-isystem", f"{cuda_home()}/include"]


def newer(output: Path, *folders: Path) -> bool:
    """Returns True if `output` is newer than every source."""
    sources = [p for folder in folders for p in folder.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp", ".py")
               and BUILD not in p.parents]
    return output.exists() and output.stat().st_mtime > max(p.stat().st_mtime for p in sources)


def run(command: list) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def runtime() -> Path:
    """Builds the emulation's scheduler, always without sanitizers."""
    out = BUILD / "runtime.o"
    if not newer(out, LAYER):
        BUILD.mkdir(exist_ok=True)
        run(flags() + ["-O2", "-fno-omit-frame-pointer", "-c", LAYER / "coc_runtime.cpp", "-o", out])
    return out


def program(op: str, flavour: str) -> Path:
    return BUILD / f"{op}_{flavour}"


def build_program(op: str, flavour: str) -> Path:
    out = program(op, flavour)
    if not newer(out, ROOT / "csrc", HERE):
        run(flags() + ["-DSCE_CUDA"] + FLAVOURS[flavour] + [HERE / f"{op}.cpp", runtime(), "-o", out])
    return out


@contextmanager
def alone():
    """Holds the build lock, because two test processes may build the same programs at once."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_programs(names: list) -> list:
    """Builds the selected ops and flavours, or all if none is named."""
    wanted = [(op, flavour) for flavour in [n for n in names if n in FLAVOURS] or FLAVOURS
              for op in [n for n in names if n in OPS] or OPS]
    with alone(), ThreadPoolExecutor(2) as pool:
        runtime()
        return list(pool.map(lambda pair: build_program(*pair), wanted))


def sources_of_bench() -> list:
    """Returns the benchmark and the kernels that it measures."""
    return [BENCH, *sorted(path for kernels in ("cross_entropy", "one_pass")
                           for path in (ROOT / "csrc" / "cuda").glob(f"{kernels}*.cu"))]


def emulated_object(source: Path) -> Path:
    """Compiles a .cu file for the emulation. Two processes may do so at once."""
    out = BUILD / f"{source.stem}.o"
    if not newer(out, ROOT / "csrc", HERE, source.parent):
        part = out.with_suffix(f".{os.getpid()}.o")
        run(flags() + ["-O1", *DEVICE, "-x", "c++", "-c", source, "-o", part])
        part.replace(out)
    return out


def build_bench() -> Path:
    """Builds the benchmark for the emulation."""
    out = program(BENCH.stem, "plain")
    with alone():
        objects = [runtime()]
    with ThreadPoolExecutor(2) as pool:
        objects += pool.map(emulated_object, sources_of_bench())
    run(["g++", *objects, "-o", out])
    return out


def build_device(architectures: tuple = (), folder: Path = BUILD) -> list:
    """Builds the same cases and the benchmark for GPUs, e.g. ("8.0", "9.0"); by default for the GPU of this machine.
    The benchmark also contains PTX, for newer GPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = [architecture.replace(".", "") for architecture in architectures]

    def code(kinds: str) -> list:
        return [flag for n in digits for flag in ("-gencode", f"arch=compute_{n},code={kinds.format(n=n)}")] or [
            "-arch=native"]

    def compile_to(out: Path, source: Path, *options: str) -> None:
        run(["nvcc", *NVCC, "-Xfatbin", "-compress-all", *options, "-x", "cu", source, "-o", out])

    outputs = [folder / f"{name}_device" for name in [*OPS, BENCH.stem]]
    with TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = {Path(objects) / f"{source.stem}.o": source for source in sources_of_bench()}
        jobs = [pool.submit(compile_to, out, HERE / f"{op}.cpp", *code("sm_{n}")) for op, out in zip(OPS, outputs)]
        jobs += [pool.submit(compile_to, out, source, *code("[compute_{n},sm_{n}]"), "-c")
                 for out, source in parts.items()]
        for job in jobs:
            job.result()
        run(["nvcc", *code("[compute_{n},sm_{n}]"), *parts, "-o", outputs[-1]])
    return outputs


def build_package(folder: Path) -> Path:
    """Builds a package `sparse_ce` under `folder` with the emulated kernels as its compiled library."""
    from torch.utils.cpp_extension import include_paths, library_paths
    package = folder / "sparse_ce"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "sparse_ce", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    common = flags() + ["-O1", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    common += [part for path in include_paths() for part in ("-isystem", path)]
    csrc = ROOT / "csrc"
    sources = {"bindings": [*DEVICE, "-include", HERE / "device" / "cuda_device.h",
                            csrc / "torch" / "bindings_cuda.cpp"],
               "schema": [csrc / "torch" / "schema.cpp"]}
    with alone():
        objects = [runtime()]
    for name in sources:
        objects.append(BUILD / f"{name}.o")
    with ThreadPoolExecutor(2) as pool:
        kernels = pool.map(emulated_object, sorted((csrc / "cuda").glob("*.cu")))
        list(pool.map(lambda item: run(common + ["-c", *item[1], "-o", BUILD / f"{item[0]}.o"]), sources.items()))
        objects += kernels
    run(["g++", "-shared", *objects, "-o", package / "_C.so", *[f"-L{path}" for path in library_paths()], "-ltorch",
         "-ltorch_cpu", "-lc10"])
    return package


if __name__ == "__main__":
    if "--device" in sys.argv:
        print(*build_device(tuple(sys.argv[sys.argv.index("--device") + 1:])), sep="\n")
    elif "--package" in sys.argv:
        print(build_package(Path(sys.argv[sys.argv.index("--package") + 1])))
    else:
        print(*build_programs(sys.argv[1:]), sep="\n")

"""Builds the compiled libraries: ``_C`` (schemas and CPU kernels) and, if possible, ``_C_cuda``.

Environment:
    SPARSE_CE_CUDA        0: CPU only. 1: fail if CUDA kernels cannot be built. Unset: build CUDA kernels if torch has
                          CUDA and nvcc is installed.
    TORCH_CUDA_ARCH_LIST  GPU architectures, as for any PyTorch extension. Unset: those of this machine's GPUs, or
                          all architectures of a release if there is no GPU.
    CXX                   the C++ compiler.
    SPARSE_CE_SANITIZE    e.g. "address,undefined": builds the CPU kernels with sanitizers, for tests.

Both libraries use libtorch's stable ABI: one build works with torch 2.11 and newer, and with Python 3.10 and newer.
torch is imported only for compilation, so metadata and source distributions do not need it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob

from setuptools import setup

# PTX of 8.0 covers GPU 8.7, and PTX of 10.0 all others from 10.0 on.
RELEASE_ARCHITECTURES = "7.5;8.0+PTX;8.6;8.9;9.0;10.0+PTX;12.0"
# A release makes machine code from the newest of these PTX versions that a GPU supports. nvcc's front half takes most
# of the time and runs once per version. 8.0 adds bfloat16, and 9.0 adds clusters. From PTX of 9.0, the kernel that
# reads logits once has 9 % more instructions on 10.0. Versions 8.6, 8.9 and 12.0 would change no instruction.
RELEASE_PTX = (75, 80, 90, 100)
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11
COMPILING = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}


def cuda_home():
    """Returns the toolkit of the nvcc on the PATH. nvcc may be a wrapper script, so nvcc itself is run to print its
    toolkit."""
    given = os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")
    nvcc = given if os.path.exists(given) else shutil.which("nvcc")
    if nvcc is None:
        return None
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", plan.stderr, re.M)
    home = os.path.realpath(top.group(1)) if top else None
    return home if home and os.path.exists(os.path.join(home, "include", "cuda_runtime_api.h")) else None


def nvcc_major(home):
    version = subprocess.run([os.path.join(home, "bin", "nvcc"), "--version"], capture_output=True, text=True).stdout
    return re.search(r"release (\d+)", version).group(1)


def require_compiler():
    given = os.environ.get("CXX", "").strip()
    found = next(filter(shutil.which, shlex.split(given)[:1] or ["c++", "g++", "clang++"]), None)
    if found is None:
        got = f"CXX={given}" if given else "no c++, g++ or clang++ on the PATH"
        sys.exit(f"sparse_ce: a C++ compiler must be installed to build, got {got}: install g++ 9 or newer, or set CXX")
    os.environ["CXX"] = given or found  # torch itself only tries c++


def require_torch():
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.exit("sparse_ce: torch must be installed to build without isolation, got none: install torch 2.11 or newer "
                 "first")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
        sys.exit(f"sparse_ce: torch must be 2.11 or newer, got {torch.__version__}: upgrade torch first")
    return torch


def why_no_cuda(torch, home):
    if os.environ.get("SPARSE_CE_CUDA") == "0":
        return "SPARSE_CE_CUDA=0"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if home is None:
        return "nvcc was not found"
    if nvcc_major(home) != torch.version.cuda.split(".")[0]:
        return f"nvcc has CUDA {nvcc_major(home)}, torch has CUDA {torch.version.cuda}"
    return None


def release_flags():
    """Returns nvcc's flags for a release. torch adds no flags of its own if these name architectures."""
    flags = []
    for architecture in RELEASE_ARCHITECTURES.split(";"):
        number = int(re.sub(r"\D", "", architecture))
        ptx = max(version for version in RELEASE_PTX if version <= number)
        flags.append(f"-gencode=arch=compute_{ptx},code=sm_{number}")
        if architecture.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def architectures(torch):
    given = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if given:
        return given
    if not torch.cuda.is_available():
        return RELEASE_ARCHITECTURES
    # A GPU newer than torch and nvcc needs PTX of the newest architecture that this torch was compiled for, which its
    # nvcc therefore supports.
    known = [divmod(int(number), 10) for number in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    own = {min(torch.cuda.get_device_capability(i), max(known)) for i in range(torch.cuda.device_count())}
    return ";".join("%d.%d" % capability for capability in sorted(own)) + "+PTX"


def extensions(torch, home):
    from torch.utils.cpp_extension import CppExtension, CUDAExtension
    sanitize = os.environ.get("SPARSE_CE_SANITIZE")
    # Python's own flags contain -fwrapv, which makes label smoothing take 1.15 times as long (g++ 12).
    cxx = ["-std=c++17", "-O3", "-fno-wrapv", "-fvisibility=hidden", "-fopenmp-simd", "-fno-math-errno",
           "-fno-trapping-math", "-g0", STABLE_ABI]
    link = []
    if sanitize:
        # Address checks are calls, and object-size checks are disabled: together this cuts the compile time by a third.
        cxx += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined", "-fno-sanitize=object-size",
                "--param=asan-instrumentation-with-call-threshold=0", "-fno-omit-frame-pointer", "-g1", "-O1"]
        link += [f"-fsanitize={sanitize}"]
    cuda_binding = os.path.join("csrc", "torch", "bindings_cuda.cpp")
    found = [CppExtension("sparse_ce._C", sorted(set(glob("csrc/**/*.cpp", recursive=True)) - {cuda_binding}),
                          py_limited_api=True, extra_compile_args={"cxx": cxx}, extra_link_args=link)]
    reason = why_no_cuda(torch, home)
    if reason is not None:
        if os.environ.get("SPARSE_CE_CUDA") == "1":
            sys.exit(f"sparse_ce: SPARSE_CE_CUDA=1 requires CUDA kernels, but {reason}")
        print(f"sparse_ce: building CPU kernels only ({reason}), against torch {torch.__version__}: takes minutes")
        return found
    chosen = architectures(torch)
    release = chosen == RELEASE_ARCHITECTURES and not os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not release:
        os.environ["TORCH_CUDA_ARCH_LIST"] = chosen
    print(f"sparse_ce: building CPU and CUDA kernels, toolkit {home}, architectures {chosen}, against torch "
          f"{torch.__version__}: takes minutes per architecture")
    # -fmad=false: see multiply_add in csrc/core/scalar_math.h.
    nvcc = ["-std=c++17", "-O3", "-fmad=false", "--threads=2", "-Xcompiler=-fvisibility=hidden",
            "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
            STABLE_ABI, *(release_flags() if release else [])]
    found.append(CUDAExtension(
        "sparse_ce._C_cuda", [*sorted(glob("csrc/cuda/*.cu")), cuda_binding], py_limited_api=True,
        extra_compile_args={"cxx": cxx + ["-DUSE_CUDA", f'-DSPARSE_CE_CUDA_ARCHITECTURES="{chosen}"'], "nvcc": nvcc}))
    return found


def long_description():
    """Returns README.md for a package index, which has no other files of the repository.

    Links to files of the repository are replaced by their text, and images are removed.
    """
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


def compilation():
    """Returns the arguments of setup() that need torch and a compiler."""
    require_compiler()
    home = cuda_home()
    if home:
        os.environ["CUDA_HOME"] = home  # must precede the import of cpp_extension, which guesses otherwise
    torch = require_torch()
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        def get_export_symbols(self, ext):
            return []  # torch.ops.load_library loads the library, so there is no PyInit to export

        def run(self):
            # A wheel contains every file in the build folder, even CUDA kernels of an earlier build for another torch.
            for library in glob(os.path.join(self.build_lib, "sparse_ce", "_C*.so")):
                os.remove(library)
            super().run()

    return {"ext_modules": extensions(torch, home), "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
            "cmdclass": {"build_ext": Build.with_options(no_python_abi_suffix=True)}}


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown",
          **(compilation() if COMPILING & set(sys.argv) else {}))

"""Builds the compiled libraries: ``_C`` (schemas and CPU kernels) and, where possible, ``_C_cuda``.

Environment:
    SPARSE_CE_CUDA        0: CPU only. 1: fail rather than build without CUDA. Unset: CUDA where torch has it and nvcc is
                          there.
    TORCH_CUDA_ARCH_LIST  GPU architectures, as for any PyTorch extension.
    SPARSE_CE_SANITIZE    e.g. "address,undefined": the CPU kernels under sanitizers, for tests.

Both libraries use libtorch's stable ABI: one build serves every torch from 2.11 on and every Python from 3.10 on.
"""

import os
import re
import shutil
import subprocess
import sys
from glob import glob

from setuptools import setup

RELEASE_ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11


def cuda_home():
    """The toolkit of the nvcc on the PATH, which may be a wrapper script: nvcc itself knows."""
    given = os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")
    nvcc = given if os.path.exists(given) else shutil.which("nvcc")
    if nvcc is None:
        return None
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", plan.stderr, re.M)
    home = os.path.realpath(top.group(1)) if top else None
    return home if home and os.path.exists(os.path.join(home, "include", "cuda_runtime_api.h")) else None


HOME = cuda_home()
if HOME:
    os.environ["CUDA_HOME"] = HOME  # before cpp_extension is imported, which guesses
import torch  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


def nvcc_major():
    version = subprocess.run([os.path.join(HOME, "bin", "nvcc"), "--version"], capture_output=True, text=True).stdout
    return re.search(r"release (\d+)", version).group(1)


def why_no_cuda():
    if os.environ.get("SPARSE_CE_CUDA") == "0":
        return "SPARSE_CE_CUDA=0"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if HOME is None:
        return "nvcc was not found"
    if nvcc_major() != torch.version.cuda.split(".")[0]:
        return f"nvcc is of CUDA {nvcc_major()}, torch of CUDA {torch.version.cuda}"
    return None


def extensions():
    sanitize = os.environ.get("SPARSE_CE_SANITIZE")
    cxx = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
           "-g0", STABLE_ABI]
    link = []
    if sanitize:
        cxx += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1"]
        link += [f"-fsanitize={sanitize}"]
    found = [CppExtension("sparse_ce._C", sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")), py_limited_api=True,
                          extra_compile_args={"cxx": cxx}, extra_link_args=link)]
    reason = why_no_cuda()
    if reason is not None:
        if os.environ.get("SPARSE_CE_CUDA") == "1":
            sys.exit(f"sparse_ce: SPARSE_CE_CUDA=1 asks for CUDA kernels, but {reason}")
        print(f"sparse_ce: building CPU kernels only ({reason}), against torch {torch.__version__}")
        return found
    if torch.cuda.is_available():
        own = sorted({"%d.%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ";".join(own))
    architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", RELEASE_ARCHITECTURES)
    print(f"sparse_ce: building CPU and CUDA kernels, toolkit {HOME}, architectures {architectures}, against torch "
          f"{torch.__version__}")
    nvcc = ["-std=c++17", "-O3", "--threads=2", "-Xcompiler=-fvisibility=hidden", "-U__CUDA_NO_HALF_CONVERSIONS__",
            "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", STABLE_ABI]
    found.append(CUDAExtension(
        "sparse_ce._C_cuda", sorted(glob("csrc/cuda/*.cpp") + glob("csrc/cuda/*.cu")), py_limited_api=True,
        extra_compile_args={"cxx": cxx + ["-DUSE_CUDA", f'-DSPARSE_CE_CUDA_ARCHITECTURES="{architectures}"'], "nvcc": nvcc}))
    return found


class Build(BuildExtension):
    def get_export_symbols(self, ext):
        return []  # loaded by torch.ops.load_library: there is no PyInit to export


setup(ext_modules=extensions(), cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=True)},
      options={"bdist_wheel": {"py_limited_api": "cp310"}})

"""Builds the compiled libraries: ``_C`` (schemas and CPU kernels) and, if possible, ``_C_cuda``.

Environment:
    SPARSE_CE_CUDA        0: CPU only. 1: fail if CUDA kernels cannot be built. Unset: build CUDA kernels if torch has
                          CUDA and nvcc is installed.
    TORCH_CUDA_ARCH_LIST  GPU architectures, as for any PyTorch extension, or "release". Unset: those of this machine's
                          GPUs, or DEFAULT_ARCHITECTURES if there is no GPU.
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
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# PTX of 8.0 covers GPU 8.7, and PTX of 10.0 all others from 10.0 on.
RELEASE_ARCHITECTURES = "7.5;8.0+PTX;8.6;8.9;9.0;10.0+PTX;12.0"
# Without a GPU, a build takes a quarter less time than a release, and every GPU from 7.5 on has machine code: that of
# 8.0 runs on 8.6 to 8.9, that of 10.0 on 10.3, and that of 12.0 on 12.1. PTX of 9.0 covers all others.
DEFAULT_ARCHITECTURES = "7.5;8.0;9.0+PTX;10.0;12.0"
# Both make machine code from the newest of these PTX versions that a GPU supports. nvcc's front half takes most of the
# time and runs once per version. 8.0 adds bfloat16, and 9.0 adds clusters. From PTX of 9.0, the kernel that reads
# logits once has 9 % more instructions on 10.0. Versions 8.6, 8.9 and 12.0 would change no instruction.
PTX = {RELEASE_ARCHITECTURES: (75, 80, 90, 100), DEFAULT_ARCHITECTURES: (75, 80, 90)}
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11
LONGEST = ["dense_divergence.cu", "binary_cross_entropy.cu", "select_half.cu", "sparse_softmax.cu",
           "select_bfloat16.cu", "cross_entropy.cu", "one_pass_half.cu", "one_pass_bfloat16.cu", "tile.cpp",
           "strided_rows.cpp", "select_float.cu", "select_double.cu", "one_pass_float.cu"]  # by time to compile
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
    return int(re.search(r"release (\d+)", version).group(1))


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
    """Returns why CUDA kernels are not built, or None. With SPARSE_CE_CUDA=1 only nvcc is required: the kernels do not
    depend on torch's CUDA, whose driver need not know the CUDA of a newer nvcc."""
    wish = os.environ.get("SPARSE_CE_CUDA")
    if wish == "0":
        return "SPARSE_CE_CUDA=0"
    if home is None:
        if wish == "1":
            sys.exit("sparse_ce: SPARSE_CE_CUDA=1 requires nvcc, got none on the PATH: install a CUDA toolkit, or set "
                     "CUDA_HOME")
        return "nvcc was not found"
    if wish == "1":
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if nvcc_major(home) > int(torch.version.cuda.split(".")[0]):
        return f"nvcc has CUDA {nvcc_major(home)}, torch has CUDA {torch.version.cuda}"
    return None


def shared_ptx_flags(chosen):
    """Returns nvcc's flags for RELEASE_ARCHITECTURES or DEFAULT_ARCHITECTURES."""
    flags = []
    for architecture in chosen.split(";"):
        number = int(re.sub(r"\D", "", architecture))
        ptx = max(version for version in PTX[chosen] if version <= number)
        flags.append(f"-gencode=arch=compute_{ptx},code=sm_{number}")
        if architecture.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def architectures(torch):
    given = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if given:
        return RELEASE_ARCHITECTURES if given == "release" else given
    if not torch.cuda.is_available():
        return DEFAULT_ARCHITECTURES
    # A GPU newer than torch and nvcc needs PTX of the newest architecture that this torch was compiled for, which its
    # nvcc therefore supports.
    known = [divmod(int(number), 10) for number in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    own = {min(torch.cuda.get_device_capability(i), max(known)) for i in range(torch.cuda.device_count())}
    return ";".join("%d.%d" % capability for capability in sorted(own)) + "+PTX"


def architecture_flags(chosen):
    """Returns nvcc's flags for architectures as in TORCH_CUDA_ARCH_LIST."""
    from torch.utils.cpp_extension import _get_cuda_arch_flags
    if chosen in PTX and os.environ.get("TORCH_CUDA_ARCH_LIST") != chosen:
        return shared_ptx_flags(chosen)
    os.environ["TORCH_CUDA_ARCH_LIST"] = chosen  # torch's function has no argument for it
    return _get_cuda_arch_flags()


def static_runtime(home):
    """Returns the folder of the toolkit's static CUDA runtime, for the machine that the wheel is for."""
    machine = sysconfig.get_platform().split("-", 1)[-1]
    machines = ["sbsa", "aarch64"] if machine == "aarch64" else [machine]  # NVIDIA calls servers with aarch64 sbsa
    for folder in (*(os.path.join("targets", f"{name}-linux", "lib") for name in machines), "lib64", "lib"):
        if os.path.exists(os.path.join(home, folder, "libcudart_static.a")):
            return os.path.join(home, folder)
    sys.exit(f"sparse_ce: the CUDA toolkit must contain libcudart_static.a, got none in {home}: install the toolkit's "
             "cudart development package")


def longest_first(sources):
    """Returns the sources, with those first that a build would wait for at its end."""
    def place(path):
        name = os.path.basename(path)
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), path
    return sorted(sources, key=place)


def accepted(flags):
    """Returns those of the flags that the C++ compiler knows."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    return [flag for flag in flags if subprocess.run(
        [*compiler, "-Werror", flag, "-fsyntax-only", "-x", "c++", os.devnull], capture_output=True).returncode == 0]


def extensions(torch, home):
    """Returns the libraries. Their `extra_compile_args` are the flags of each rule, "cxx" and "nvcc"."""
    sanitize = os.environ.get("SPARSE_CE_SANITIZE")
    # Only g++ makes unique symbols, which would be shared by all copies of the library that a process loads.
    cxx = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", *accepted(["-fno-gnu-unique"]), "-fopenmp-simd",
           "-fno-math-errno", "-fno-trapping-math", STABLE_ABI]
    link = []
    if sanitize:
        # Address checks are calls, and object-size checks are disabled: together this cuts the compile time by a third.
        cxx += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined", "-fno-sanitize=object-size",
                *accepted(["--param=asan-instrumentation-with-call-threshold=0"]), "-fno-omit-frame-pointer", "-g1",
                "-O1"]
        link += [f"-fsanitize={sanitize}"]
    cuda_binding = os.path.join("csrc", "torch", "bindings_cuda.cpp")
    sources = set(glob("csrc/**/*.cpp", recursive=True)) - {cuda_binding}
    found = [Extension("sparse_ce._C", longest_first(sources), libraries=["torch_cpu"],
                       extra_compile_args={"cxx": cxx}, extra_link_args=link)]
    reason = why_no_cuda(torch, home)
    if reason is not None:
        print(f"sparse_ce: building CPU kernels only ({reason}), against torch {torch.__version__}: takes a minute or "
              "two")
        return found
    chosen = architectures(torch)
    print(f"sparse_ce: building CPU and CUDA kernels, toolkit {home}, architectures {chosen}, against torch "
          f"{torch.__version__}: takes minutes; TORCH_CUDA_ARCH_LIST=9.0, for example, builds for one GPU only")
    # -fmad=false: see multiply_add in csrc/core/scalar_math.h.
    nvcc = ["-std=c++17", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "--threads=2",
            "-Xcompiler=-fPIC,-fvisibility=hidden", STABLE_ABI, *architecture_flags(chosen)]
    include = os.path.join(home, "include")
    found.append(Extension(
        "sparse_ce._C_cuda", [*longest_first(glob("csrc/cuda/*.cu")), cuda_binding],
        libraries=["torch_cpu", "torch_cuda"],
        extra_compile_args={"cxx": [*cxx, "-DUSE_CUDA", "-isystem", include,
                                    f'-DSPARSE_CE_CUDA_ARCHITECTURES="{chosen}"'], "nvcc": nvcc},
        # A static runtime works with every torch. Hidden, it does not call into the shared runtime of torch.
        extra_link_args=[f"-L{static_runtime(home)}", "-Wl,--exclude-libs,ALL", "-l:libcudart_static.a", "-ldl", "-lrt",
                         "-pthread"]))
    return found


NINJA_RULES = """
rule cxx
  command = $cxx $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule nvcc
  command = $nvcc $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule stub
  command = echo | $cxx -shared -x c++ - -o $out -Wl,-soname,$soname -nostdlib
rule link
  command = $cxx -shared $in -o $out -Wl,--no-as-needed $stubs -Wl,--as-needed $flags
"""


def ninja_file(libraries, include, home, work):
    """Returns the content of a build.ninja for (extension, path) pairs.

    Libraries of torch are replaced by empty ones of the same names when linking. The result then needs the same
    libraries whatever torch is installed, and compilers for another machine have libraries to link with.
    """
    def quoted(flags):
        return " ".join(map(shlex.quote, flags)).replace("$", "$$")

    def path_of(path):
        return re.sub(r"([ :$])", r"$\1", path)

    given = shlex.split(os.environ.get("CXXFLAGS", ""))
    nvcc = os.path.join(home or "", "bin", "nvcc")
    lines = [f"builddir = {path_of(work)}", f"cxx = {os.environ['CXX']}", f"nvcc = {shlex.quote(nvcc)}", NINJA_RULES]
    for name in sorted({name for extension, _ in libraries for name in extension.libraries}):
        lines += [f"build {path_of(os.path.join(work, f'lib{name}.so'))}: stub", f"  soname = lib{name}.so"]
    for extension, path in libraries:
        objects = []
        for source in extension.sources:
            rule = "nvcc" if source.endswith(".cu") else "cxx"
            objects.append(path_of(os.path.join(work, extension.name, source + ".o")))
            flags = [*extension.extra_compile_args[rule], *(["-isystem", include, *given] if rule == "cxx" else [])]
            lines += [f"build {objects[-1]}: {rule} {path_of(os.path.abspath(source))}", f"  flags = {quoted(flags)}"]
        stubs = [os.path.join(work, f"lib{name}.so") for name in extension.libraries]
        flags = [*extension.extra_link_args, *shlex.split(os.environ.get("LDFLAGS", ""))]
        lines += [f"build {path_of(path)}: link {' '.join(objects)} | {' '.join(map(path_of, stubs))}",
                  f"  stubs = {quoted(stubs)}", f"  flags = {quoted(flags)}"]
    return "\n".join(lines) + "\n"


def run_ninja(file):
    # The environment of this Python need not be activated.
    ninja = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    if ninja is None:
        sys.exit("sparse_ce: ninja must be installed to build without isolation, got none on the PATH: install ninja")
    jobs = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
    if subprocess.run([ninja, "-f", file, *jobs]).returncode != 0:
        sys.exit("sparse_ce: the compiler's messages above say why the build failed; MAX_JOBS=1 needs the least memory")


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
    torch = require_torch()

    class Build(build_ext):
        def get_ext_filename(self, name):
            return os.path.join(*name.split(".")) + ".so"  # torch.ops.load_library loads it, not Python

        def run(self):
            # A wheel contains every file in the build folder, even CUDA kernels of an earlier build for another torch.
            for library in glob(os.path.join(self.build_lib, "sparse_ce", "_C*.so")):
                os.remove(library)
            super().run()

        def build_extensions(self):
            libraries = [(each, os.path.abspath(self.get_ext_fullpath(each.name))) for each in self.extensions]
            include = os.path.join(os.path.dirname(torch.__file__), "include")
            work = os.path.abspath(self.build_temp)
            os.makedirs(work, exist_ok=True)
            file = os.path.join(work, "build.ninja")
            with open(file, "w") as out:
                out.write(ninja_file(libraries, include, home, work))
            run_ninja(file)

    return {"ext_modules": extensions(torch, home), "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
            "cmdclass": {"build_ext": Build}}


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown",
          **(compilation() if COMPILING & set(sys.argv) else {}))

"""Prints the versions, kernels and devices that a bug report needs: ``python -m sparse_ce``."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Callable, List, Tuple

import torch

from . import __version__, ops
from ._ops import add_op_namespace_prefix
from .ops.registration import has_kernel

_PACKAGE = Path(__file__).resolve().parent
# Variables that change results, speed or memory. They contain no secrets.
_VARIABLES = re.compile("SPARSE_CE_|OMP_|GOMP_|KMP_|MKL_|CUDA_|NCCL_|TORCH|PYTORCH_|MALLOC_|GLIBC_TUNABLES$|"
                        "THP_MEM_ALLOC_ENABLE$|LD_PRELOAD$")


def _text(path: str) -> str:
    """Returns the text of a file, or "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _origin() -> str:
    """Returns where this copy of the package comes from."""
    if (_PACKAGE.parent / ".git").exists():
        return "git " + subprocess.run(["git", "-C", str(_PACKAGE.parent), "describe", "--always", "--dirty"],
                                       capture_output=True, text=True, timeout=10).stdout.strip()
    found = next(iter(metadata.distributions(name="sparse_ce")), None)
    if found is None or Path(str(found.locate_file("sparse_ce"))).resolve() != _PACKAGE:
        return "a copy that was not installed"
    source = json.loads(found.read_text("direct_url.json") or "{}")
    return ", ".join(filter(None, [
        (found.read_text("INSTALLER") or "").strip(), *re.findall("^Tag: (.+)$", found.read_text("WHEEL") or "", re.M),
        source.get("url", "from an index"), source.get("vcs_info", {}).get("commit_id")]))


def _library(path: Path) -> str:
    """Returns the name of a library, its size, and the compilers that its section .comment names."""
    contents = path.read_bytes()
    start = contents.find(b"GCC: (")  # the C library's startup code, which comes first, has this comment, too
    comment = re.match(rb"(?:[ -~]+\0)*", contents[max(start, 0):])
    compilers = ", ".join(dict.fromkeys(comment[0].decode().split("\0")[:-1])) if comment and start >= 0 else ""
    return f"{path.name} {len(contents) / 1e6:.1f} MB ({compilers or 'compiler unknown'})"


def _cpu() -> str:
    model = re.search(r"^model name\s*: (.+)$", _text("/proc/cpuinfo"), re.M)
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    huge_pages = re.search(r"\[(\w+)\]", _text("/sys/kernel/mm/transparent_hugepage/enabled"))
    return (f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} "
            f"processors, memory nodes: {nodes}, huge pages: {huge_pages[1] if huge_pages else 'unknown'}")


def _variables() -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)) or "none"


def _kernels() -> List[Tuple[str, str]]:
    prefix = add_op_namespace_prefix("")
    names = sorted({name.removeprefix(prefix).split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                    if name.startswith(prefix)})
    keys = {"CPU": "CPU", "CUDA": "CUDA", "CompositeExplicitAutograd": "any", "AutogradCPU": "autograd"}
    return [(name, ", ".join(label for key, label in keys.items() if has_kernel(name, key))) for name in names]


def _driver() -> str:
    version = re.search(r"\s(\d+\.[\d.]+)\s", _text("/proc/driver/nvidia/version"))
    return version[1] if version else "none"


def _gpus() -> str:
    found = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        found.append(f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)")
    if not found and torch.version.cuda is not None:
        torch.cuda.init()  # raises the reason
    return "; ".join(found) or "none visible"


# Libraries that use targets; their versions are printed if they are installed.
_CLIENTS = ("numpy", "scipy", "transformers", "accelerate", "trl", "peft", "lightning", "datasets", "lm_eval",
            "axolotl", "deepspeed", "liger-kernel", "torchao", "bitsandbytes", "triton",
            "pyarrow", "safetensors")


def _clients() -> str:
    found = []
    for name in _CLIENTS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            pass
    return ", ".join(found) or "none"


def _safely(value: Callable[[], str]) -> str:
    """Returns the value, or the error that it raises, because the rest of the report is still needed."""
    try:
        return value()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    rows = [(name, _safely(value)) for name, value in [
        ("sparse_ce", lambda: f"{__version__}, {_PACKAGE}{os.sep}"),
        ("origin", _origin),
        ("libraries", lambda: ", ".join(map(_library, sorted(_PACKAGE.glob("_C*.so"))))),
        ("variables", _variables),
        ("python", lambda: f"{platform.python_version()}, {platform.platform()}"),
        ("torch", lambda: f"{torch.__version__}, built for CUDA {torch.version.cuda}"),
        ("cpu", _cpu),
        ("cpu kernels", lambda: f"{ops.instruction_set()}, {torch.get_num_threads()} threads"),
        ("gpu", _gpus),
        ("gpu driver", _driver),
        ("cuda kernels",
         lambda: ops.cuda_architectures() if ops.why_no_cuda is None else f"not loaded: {ops.why_no_cuda}"),
        ("clients", _clients),
    ]] + [(f"op {name}", kernels) for name, kernels in _kernels()]
    width = max(len(name) for name, _ in rows)
    try:
        sys.stdout.writelines(f"{name:<{width}}  {value}\n" for name, value in rows)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader, such as `head`, has exited. The exit must not flush to the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

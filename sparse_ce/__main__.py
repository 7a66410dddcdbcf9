"""Prints the versions, kernels and devices that a bug report needs: ``python -m sparse_ce``."""

import os
import platform
import sys
from importlib import metadata
from typing import List, Tuple

import torch

from . import __version__, ops
from ._ops import add_op_namespace_prefix
from .ops.registration import has_kernel


def _kernels() -> List[Tuple[str, str]]:
    prefix = add_op_namespace_prefix("")
    names = sorted({name.removeprefix(prefix).split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                    if name.startswith(prefix)})
    keys = {"CPU": "CPU", "CUDA": "CUDA", "CompositeExplicitAutograd": "any", "AutogradCPU": "autograd"}
    return [(name, ", ".join(label for key, label in keys.items() if has_kernel(name, key))) for name in names]


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none visible"
    return "; ".join(f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
                     for i in range(torch.cuda.device_count()))


# Libraries that use targets; their versions are printed if they are installed.
_CLIENTS = ("numpy", "scipy", "transformers", "accelerate", "trl", "peft", "lightning", "datasets", "lm_eval",
            "timm", "torchvision", "axolotl", "liger-kernel", "torchao", "bitsandbytes")


def _clients() -> str:
    found = []
    for name in _CLIENTS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            pass
    return ", ".join(found) or "none"


def main() -> None:
    rows = [
        ("sparse_ce", f"{__version__}, {ops.__file__.rsplit('ops', 1)[0]}"),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, built for CUDA {torch.version.cuda}"),
        ("cpu kernels", f"{ops.instruction_set()}, {torch.get_num_threads()} threads"),
        ("cuda kernels", ops.cuda_architectures() if ops.why_no_cuda is None else f"not loaded: {ops.why_no_cuda}"),
        ("gpu", _gpus()),
        ("clients", _clients()),
    ] + [(f"op {name}", kernels) for name, kernels in _kernels()]
    width = max(len(name) for name, _ in rows)
    try:
        sys.stdout.writelines(f"{name:<{width}}  {value}\n" for name, value in rows)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader, such as `head`, has exited. The exit must not flush to the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

"""Loads the compiled libraries and names the namespace of their ops.

In a Hugging Face kernel, the builder replaces this file by one that imports the library as a Python module. Both define
``ops`` and ``add_op_namespace_prefix``, from which all other files get the namespace.
"""

import glob
import os
from typing import Optional, Tuple

import torch

from ._core.errors import fail

ops = torch.ops.sparse_ce


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the name by which the dispatcher knows an op."""
    return f"sparse_ce::{op_name}"


def _load(name: str) -> Tuple[str, Optional[str]]:
    """Loads a library of the package. Returns its path, and why it could not be loaded, or None."""
    path = next(iter(glob.glob(os.path.join(os.path.dirname(__file__), name + ".*so"))), "")
    if not path:
        return path, f"{name} was not built"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return path, str(error)
    return path, None


cpu_library, _reason = _load("_C")
if _reason:
    fail(f"the compiled library must be loadable under torch {torch.__version__}, got: {_reason}. Install it (pip "
         "install .) and run from outside of the source tree, which hides the installed package.", ImportError)
why_no_cuda = (f"torch {torch.__version__} is a build without CUDA" if torch.version.cuda is None
               else _load("_C_cuda")[1])
"""None if the CUDA kernels are loaded, else the reason why they are not."""

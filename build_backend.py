"""Implements a PEP 517 backend: setuptools, building against the torch that is already installed.

pip builds in an isolated environment that hides the installed torch. It would download another torch and build the
kernels against that one. This backend therefore searches the environment that pip installs into, and requires torch
only if it is missing there. uv hides that environment too, so with uv the backend raises an error instead of
downloading torch. Metadata and source distributions do not need torch.
"""

import os
import sys
import sysconfig
from importlib import metadata
from importlib.machinery import PathFinder

if sys.version_info < (3, 10):
    sys.exit("sparse_ce: Python must be 3.10 or newer, got %d.%d: use an environment with a newer Python"
             % sys.version_info[:2])
try:
    _FOUND = metadata.version("setuptools")
except metadata.PackageNotFoundError:
    _FOUND = "none"
if _FOUND == "none" or int(_FOUND.split(".")[0]) < 77:  # without isolation the frontend installs no requirements
    sys.exit(f"sparse_ce: setuptools must be 77 or newer to build without isolation, got {_FOUND}: install "
             "'setuptools>=77' and ninja first")

from setuptools import build_meta  # noqa: E402

_SITE = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _made_by_uv():
    """Returns True if uv runs this backend in an isolated environment that it has created."""
    try:
        with open(os.path.join(sys.prefix, "pyvenv.cfg")) as file:
            return "UV" in os.environ and any(line.partition("=")[0].strip() == "uv" for line in file)
    except OSError:
        return False


def _requirements(config_settings=None):
    if PathFinder.find_spec("torch", sys.path + _SITE):
        return []
    if _made_by_uv():
        sys.exit("sparse_ce: torch must be visible to the build, got an isolated environment of uv: in the environment "
                 f"that has torch, run  uv pip install --no-build-isolation {os.getcwd()}")
    return ["torch>=2.11"]


def _nothing(config_settings=None):
    return []


def _seeing_torch(hook):
    def run(*args, **kwargs):
        if not os.access(os.curdir, os.W_OK):
            sys.exit("sparse_ce: the source tree must be writable to build, got the read-only %s: copy it, and install "
                     "the copy" % os.getcwd())
        sys.path += [path for path in _SITE if path not in sys.path]  # after the isolated environment's own paths
        return hook(*args, **kwargs)
    return run


get_requires_for_build_wheel = get_requires_for_build_editable = _requirements
get_requires_for_build_sdist = _nothing
prepare_metadata_for_build_wheel = _seeing_torch(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _seeing_torch(build_meta.prepare_metadata_for_build_editable)
build_wheel = _seeing_torch(build_meta.build_wheel)
build_editable = _seeing_torch(build_meta.build_editable)
build_sdist = build_meta.build_sdist

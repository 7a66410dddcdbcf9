"""PEP 517 backend: setuptools, building against the torch that is already installed.

pip builds in an isolated environment, where the installed torch cannot be seen: another torch would be downloaded, and
the kernels built against that one. So this backend looks into the environment that pip serves, and asks for torch only
where there is none.
"""

import sys
import sysconfig
from importlib.machinery import PathFinder

from setuptools import build_meta

_SITE = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _requirements(config_settings=None):
    return [] if PathFinder.find_spec("torch", sys.path + _SITE) else ["torch>=2.11"]


def _seeing_torch(hook):
    def run(*args, **kwargs):
        sys.path += [path for path in _SITE if path not in sys.path]  # behind the isolated environment's own
        return hook(*args, **kwargs)
    return run


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = _requirements
prepare_metadata_for_build_wheel = _seeing_torch(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _seeing_torch(build_meta.prepare_metadata_for_build_editable)
build_wheel = _seeing_torch(build_meta.build_wheel)
build_editable = _seeing_torch(build_meta.build_editable)
build_sdist = _seeing_torch(build_meta.build_sdist)

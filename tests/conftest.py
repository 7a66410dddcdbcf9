"""Makes the tests import the installed package, gives them their helper modules, and runs each on every device."""

import os
import sys
from glob import glob

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(TESTS)

# `python -m pytest` puts the repository first on the path. Unless the libraries were built in place (an editable
# install), the package in there has none and would hide the installed one.
if not glob(os.path.join(ROOT, "sparse_ce", "_C.*so")):
    sys.path[:] = [p for p in sys.path if os.path.realpath(p or os.getcwd()) != os.path.realpath(ROOT)]
if TESTS not in sys.path:  # --import-mode=importlib leaves it out
    sys.path.insert(0, TESTS)

import torch  # noqa: E402

import cases  # noqa: E402
from sparse_ce import foresight  # noqa: E402

torch.sparse.check_sparse_tensor_invariants.disable()  # PyTorch's default, said aloud: it warns where nobody chose


@pytest.fixture(params=cases.devices())
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def no_forecast():
    """Otherwise it would hang on the test before whether forward makes the gradient."""
    foresight._upstream.clear()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20250601)


torch.set_num_threads(1)  # small tensors: waking a second thread costs more than it brings


@pytest.fixture
def threads():
    """Sets the number of threads for the length of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

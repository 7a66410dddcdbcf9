"""Selects the package under test (installed or of a test configuration), extends the import path by the helper modules,
and defines shared fixtures."""

import gc
import os
import sys
from glob import glob

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(TESTS)

# `python -m pytest` puts the repository first on the path. Unless the extension was built in place (an editable
# install), the package there has no library and hides the installed one.
if not glob(os.path.join(ROOT, "sparse_ce", "_C.*so")):
    sys.path[:] = [p for p in sys.path if os.path.realpath(p or os.getcwd()) != os.path.realpath(ROOT)]
# --import-mode=importlib does not put these folders on the path: shared helpers, and the programs among them.
for folder in ("support/processes", "support", ""):
    sys.path.insert(0, os.path.normpath(os.path.join(TESTS, folder)))

# Inductor's caches know the names of ops, but not the shapes of their results. After a change of these, a graph from
# the cache would fail.
os.environ.update(TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_AUTOGRAD_CACHE="0")

import flavours  # noqa: E402

flavours.enter()

import torch  # noqa: E402

import cases  # noqa: E402
import sparse_ce  # noqa: E402
from sparse_ce.ops import expected_grad  # noqa: E402
from sparse_ce.ops.logits import small_calls as small_calls  # noqa: E402

if os.environ.get("SPARSE_CE_TEST_OPS"):
    small_calls.LOGITS = 0
torch.sparse.check_sparse_tensor_invariants.disable()  # PyTorch's default, set explicitly to avoid its warning


@pytest.fixture(params=cases.devices())
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def no_expected_grad():
    """Clears the expected ``grad_output`` values: otherwise the preceding test decides whether forward computes the
    gradient."""
    expected_grad._expected.clear()
    expected_grad._unused.clear()


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Resets Dynamo after each test (0.02 ms), because a function that failed to compile in one test is not compiled in
    the next."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20250601)


torch.set_num_threads(1)  # the tensors are small: a second thread costs more time than it saves


@pytest.fixture
def threads():
    """Returns ``torch.set_num_threads`` and restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler(monkeypatch):
    """Disables Inductor's check for vector instructions, which compiles and runs programs for half a minute."""
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_configure(config):
    if flavours.starts_again():
        flavours.start_again(config)
    if flavours.FLAVOURS[flavours.named()].in_pieces and getattr(config.option, "dist", "no") == "loadfile":
        config.option.dist = "worksteal"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freezes the garbage collector's view of the collected items.

    The imports create more than a million permanent objects. Without ``gc.freeze`` Python scans them repeatedly during
    collection, and in each test that triggers a garbage collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header():
    return f"flavour: {flavours.named()}, kernels: {sparse_ce.ops.instruction_set()}, of {sparse_ce.__file__}"


def pytest_ignore_collect(collection_path, config):
    """Ignores the files of other test configurations before they are imported, because a sanitizer cannot run some of
    their imports."""
    if collection_path.suffix == ".py" and collection_path.stem.startswith("test_"):
        return flavours.is_ignored(collection_path, config.args) or None


def pytest_collection_modifyitems(config, items):
    flavour = flavours.FLAVOURS[flavours.named()]
    by_name = bool(config.option.keyword or config.option.markexpr) or any("::" in arg for arg in config.args)
    kept: list = []
    left_out: list = []
    for item in items:
        chosen = flavour.has_test(item.name, flavour.slow if by_name else "slow" in item.keywords)
        (kept if chosen else left_out).append(item)
    items[:] = sorted(kept, key=lambda item: flavours.place(item.path.stem))
    config.hook.pytest_deselected(items=left_out)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not by_name
    if whole and len(kept) < flavour.at_least:
        raise pytest.UsageError(f"the flavour must have at least {flavour.at_least} tests, got {len(kept)}")

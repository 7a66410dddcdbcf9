"""Tests how other implementations reach a machine without a network and how they are called, with stand-ins for their
packages."""

import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile, ZipInfo

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import run  # noqa: E402
from gpu import gpu_peers  # noqa: E402
from harness import peers  # noqa: E402
from problems import linear_problems  # noqa: E402

ROWS, VOCAB, WIDTH = 4, 10, 3
NO_PATCHES = "raise RuntimeError('this changes the process')"
LIGER = """
import torch.nn.functional as F
class LigerCrossEntropyFunction:
    apply = staticmethod(lambda x, y, weight: ({factor} * F.cross_entropy(x, y, weight), None, None, None))
class LigerFusedLinearCrossEntropyFunction:
    apply = staticmethod(lambda x, w, y: ({factor} * F.cross_entropy(x @ w.T, y), None, None, None))
"""
# Each stand-in multiplies its loss by a factor of its own.
STAND_INS = {
    "liger_kernel/ops/__init__.py": "",
    "liger_kernel/ops/cutedsl/ops.py": LIGER.format(factor=2),
    "liger_kernel/ops/cutile/ops.py": LIGER.format(factor=3),
    "liger_kernel/functional.py": """
import torch.nn.functional as F
def fused_linear_cross_entropy(x, w, y, *, impl=None):
    assert impl == "nvidia-cutedsl"
    return 5 * F.cross_entropy(x @ w.T, y), None, None, None""",
    "unsloth/__init__.py": NO_PATCHES,
    "unsloth/kernels/__init__.py": NO_PATCHES,
    "unsloth/kernels/cross_entropy_loss.py": """
import torch.nn.functional as F
from unsloth_zoo.loss_utils import FACTOR
def fast_cross_entropy_loss(x, y):
    batch, length, classes = x.shape
    return FACTOR * F.cross_entropy(x.view(-1, classes), y.view(-1))""",
    "unsloth_zoo/__init__.py": NO_PATCHES,
    "unsloth_zoo/loss_utils.py": "from . import DEVICE_TYPE\nFACTOR = {'cuda': 7}[DEVICE_TYPE]",
    "unsloth_zoo/temporary_patches/__init__.py": NO_PATCHES,
    "unsloth_zoo/temporary_patches/common.py": "FACTOR = 11",
    "unsloth_zoo/fused_losses/__init__.py": "",
    "unsloth_zoo/fused_losses/cross_entropy_loss.py": """
import torch.nn.functional as F
from unsloth_zoo.temporary_patches.common import FACTOR
def unsloth_fused_ce_loss(trainer, x, w, bias, y, shift_labels=True):
    assert trainer is None and bias is None and not shift_labels
    return FACTOR * F.cross_entropy(x @ w.T, y)""",
    "quack/cross_entropy.py": """
import torch.nn.functional as F
def cross_entropy(x, y, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False):
    return (17 if inplace_backward else 13) * F.cross_entropy(x, y)""",
}
FACTORS = {
    "liger-kernel with cutedsl, class index, in place": 2, "liger-kernel with cutile, class index, in place": 3,
    "unsloth, class index": 7, "quack-kernels, class index": 13, "quack-kernels, class index, in place": 17,
}
FACTORS_OF_HEADS = {
    "liger-kernel with cutedsl, class index": 2, "liger-kernel with cutile, class index": 3,
    "liger-kernel with the loss of cutedsl, class index": 5, "unsloth, class index": 11,
}


@pytest.fixture
def no_peers(monkeypatch, tmp_path):
    """Removes installed peers, and forgets those that the test imports."""
    names = {path.partition("/")[0] for path in STAND_INS}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)

    def find_spec(name, path=None, target=None):
        if name in names and not (tmp_path / name).exists():
            raise ModuleNotFoundError(f"No module named {name!r}")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


@pytest.fixture
def stand_ins(no_peers, monkeypatch, tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def on_a_gpu():
    """Returns the peers of logits and of heads on a GPU, with CPU tensors, and the losses to expect."""
    indices = torch.arange(2 * ROWS).view(ROWS, 2)
    problem = SimpleNamespace(device=torch.device("cuda"), labels=indices[:, 0].contiguous(), indices=indices,
                              values=torch.rand(ROWS, 2), shape=None)
    logits, x, w = torch.randn(ROWS, VOCAB), torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH)
    problem.gradients = lambda loss: loss(x, w)
    return ({peer.name: lambda peer=peer: peer.loss(logits) for peer in peers.peers(problem)},
            linear_problems._peers(problem), F.cross_entropy(logits, problem.labels),
            F.cross_entropy(x @ w.T, problem.labels))


def test_each_peer_is_called_as_its_package_declares(stand_ins):
    """Checks that each backend of Liger is its own, and that unsloth's packages are not initialized."""
    logits, heads, loss, loss_of_head = on_a_gpu()
    for name, factor in FACTORS.items():
        torch.testing.assert_close(logits[name](), factor * loss, msg=name)
    for name, factor in FACTORS_OF_HEADS.items():
        torch.testing.assert_close(heads[name](), factor * loss_of_head, msg=name)


def test_a_peer_that_is_not_installed_says_so(no_peers):
    logits, heads, _, _ = on_a_gpu()
    for calls in ({name: logits[name] for name in FACTORS}, {name: heads[name] for name in FACTORS_OF_HEADS}):
        for name, call in calls.items():
            package = name.split()[0].rstrip(",").replace("-kernels", "").replace("-", "_")
            with pytest.raises(ImportError, match=f"No module named '{package}"):
                call()


def make_wheel(folder, name, size):
    """Creates a wheel with a module, a program and a .pth file."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        program = ZipInfo(f"{name}/bin/program")
        program.external_attr = 0o755 << 16
        archive.writestr(program, "#!/bin/sh\necho runs")
        archive.writestr(f"{name}/below/module_of_{name}.py", "#" * size)
        archive.writestr(f"{name}.pth", f"import sys; sys.path.insert(0, {str(folder)!r} + '/{name}/below')")
        archive.writestr(f"{name}-1.0.dist-info/METADATA",
                         f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: torch\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return path


def test_wheels_travel_in_folders_of_limited_size(tmp_path, capsys):
    limit = 600
    wheels = [make_wheel(tmp_path, name, size) for name, size in (("small", 10), ("large", 5000), ("last", 10))]
    folder, site = tmp_path / "gpu-peers", tmp_path / "site-packages"
    gpu_peers.pack(wheels, folder, limit)
    sizes = {int(part.name): sum(path.stat().st_size for path in part.iterdir()) for part in folder.iterdir()}
    assert sorted(sizes) == list(range(1, len(sizes) + 1)) and len(sizes) > 10
    assert all(size == limit for part, size in sizes.items() if part < len(sizes)) and sizes[len(sizes)] <= limit
    gpu_peers.install(folder, site)
    assert capsys.readouterr().out.count("installed: ") == 3 and not list(site.glob("*.whl"))
    assert (site / "large" / "below" / "module_of_large.py").read_text() == "#" * 5000
    assert (site / "last" / "bin" / "program").stat().st_mode & 0o100
    assert not (site / "last" / "below" / "module_of_last.py").stat().st_mode & 0o100
    for piece in (folder / "5").iterdir():  # a folder that was not copied
        piece.unlink()
    gpu_peers.install(folder, tmp_path / "part")
    shown = capsys.readouterr().out
    assert "installed: small" in shown and "installed: last" in shown and "incomplete: large" in shown


def test_a_peer_that_the_index_lacks_is_left_out(tmp_path, monkeypatch, capsys):
    make_wheel(tmp_path, "there", 10)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_peers, "PEERS", ("missing", "there<2"))
    (tmp_path / "found").mkdir()
    found = gpu_peers.download("3.12", tmp_path / "found")
    assert [path.name for path in found] == ["there-1.0-py3-none-any.whl"]
    assert "left out: missing: ERROR: No matching distribution" in capsys.readouterr().out
    assert not {"torch", "triton"} & set(gpu_peers.PEERS)


def test_installed_peers_are_found_by_the_benchmark(tmp_path, monkeypatch):
    """Checks that they come before other versions and that their .pth files are read, as CuTe DSL needs."""
    gpu_peers.pack([make_wheel(tmp_path, "peer", 10)], tmp_path / "gpu-peers", 1 << 20)
    site = tmp_path / "site-packages"
    gpu_peers.install(tmp_path / "gpu-peers", site)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--peers", str(site), "--only", "nothing", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--only must be part"):
        run.main()
    assert sys.path[0] == str(site) and f"{tmp_path}/peer/below" in sys.path

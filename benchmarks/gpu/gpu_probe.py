"""Provides small programs for gpu_acceptance.py: the environment, the correctness of a loss, and work for a
profiler."""

import argparse
import importlib.metadata
import json
import sys

import torch

PACKAGES = ("torch", "triton", "numpy", "setuptools", "ninja", "pytest", "pytest-xdist", "expecttest", "transformers",
            "accelerate", "peft", "lightning", "liger-kernel", "quack-kernels", "cut-cross-entropy")


def environment(device: str) -> int:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "cpu", "packages": {}}
    for name in PACKAGES:
        try:
            found["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found["packages"][name] = None
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found.update(device=about.name, architecture=f"{about.major}.{about.minor}",
                     memory_gib=about.total_memory / 2**30, multiprocessors=about.multi_processor_count,
                     l2_mib=about.L2_cache_size / 2**20)
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    print(f"{found['device']}, {versions}")
    print("not there: " + ", ".join(name for name, version in found["packages"].items() if not version))
    print(json.dumps(found))
    return 0


def target_of(rows: int, vocab: int, entries: int, device: str):
    """Returns classes, distinct within a row, and weights."""
    generator = torch.Generator().manual_seed(rows + vocab)
    indices = torch.rand(rows, entries, generator=generator).mul(vocab // entries).long()
    indices += torch.arange(entries) * (vocab // entries)
    return indices.to(device), torch.rand(rows, entries, generator=generator).to(device)


def first(device: str) -> int:
    """Checks loss and gradient against float64, for a few rows of each length that the kernels handle differently."""
    import sparse_ce
    if device == "cuda" and sparse_ce.ops.why_no_cuda is not None:
        print(f"the CUDA kernels were not loaded: {sparse_ce.ops.why_no_cuda}")
        return 1
    good = bad = 0
    for rows, vocab in ((1, 11), (5, 1000), (300, 1000), (7, 50257), (2, 128256)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            generator = torch.Generator().manual_seed(1)
            x = (3 * torch.randn(rows, vocab, generator=generator)).to(device, dtype).requires_grad_()
            indices, values = target_of(rows, vocab, 5, device)
            loss = sparse_ce.cross_entropy(x, (indices, values))
            grad, = torch.autograd.grad(loss, x)
            exact_x = x.detach().cpu().double().requires_grad_()
            exact = -(torch.log_softmax(exact_x, 1).gather(1, indices.cpu()) * values.cpu().double()).sum() / rows
            exact_grad, = torch.autograd.grad(exact, exact_x)
            error = (loss.detach().cpu().double() - exact.detach()).abs().item() / abs(exact.item())
            grad_error = ((grad.cpu().double() - exact_grad).abs().max() / exact_grad.abs().max()).item()
            eps, grad_eps = torch.finfo(loss.dtype).eps, torch.finfo(dtype).eps
            ok = error <= 24 * eps and grad_error <= grad_eps + 24 * eps  # False for NaN
            good, bad = good + ok, bad + (not ok)
            print(f"{'ok   ' if ok else 'WRONG'} {rows} x {vocab} {str(dtype)[6:]}: loss {loss.item():.6g} off by "
                  f"{error:.1e}, gradient off by {grad_error:.1e}", flush=True)
    print(f"{good} ok, {bad} wrong")
    return bad != 0


def profile(device: str) -> int:
    """Runs two steps for each target. In the first no grad_output is expected, so loss and gradient are computed by
    separate kernels. In the second they are computed together, for the grad_output of the first."""
    import sparse_ce
    rows, vocab = (8192, 128256) if device == "cuda" else (128, 1000)
    x = torch.randn(rows, vocab, dtype=torch.bfloat16, device=device, requires_grad=True)
    soft = target_of(rows, vocab, 64, device)
    for target in (soft, soft[0][:, 0].contiguous()):
        sparse_ce.ops.expected_grad.take_for("cross_entropy", x)  # drops the one expected after the previous target
        for _ in range(2):
            torch.autograd.grad(sparse_ce.cross_entropy(x, target), x)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["environment", "first", "profile"])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    sys.exit({"environment": environment, "first": first, "profile": profile}[args.what](args.device))

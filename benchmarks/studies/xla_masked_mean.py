"""Counts compilations on XLA for ten masks of different count:
``python benchmarks/studies/xla_masked_mean.py [--out FILE]``.

``masked_select(...).mean()`` has a shape that depends on the mask, and is recompiled for each count. ``masked_mean`` is
compiled once. The study needs torch and torch_xla of the same version; their CPU runtime suffices. torch_xla ends at
2.9, and this package's library needs torch 2.11, so the package cannot be imported here. Instead the study runs the
composition that ``masked_mean`` runs on XLA devices, ``sparse_ce/reference/masked_mean.py``, without the rest of the
package.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict

os.environ.setdefault("PJRT_DEVICE", "CPU")
import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.debug.metrics as metrics  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHAPE, COUNTS = (64, 128), [800 * k + 1 for k in range(10)]


def composition() -> Callable:
    for name in ("sparse_ce", "sparse_ce.reference"):  # the real __init__ would load the library
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    masked_mean = import_module("sparse_ce.reference.masked_mean").masked_mean
    return lambda x, mask: masked_mean(x, mask, range(x.dim()))[0]


def compilations() -> int:
    found = metrics.metric_data("CompileTime")
    return 0 if found is None else found[0]


def measure(mean: Callable) -> Dict[str, object]:
    """Returns the number of compilations up to each of the masks, forward and backward, and the largest errors against
    float64."""
    device, generator = torch_xla.device(), torch.Generator().manual_seed(0)
    metrics.clear_all()
    after, error, gradient_error = [], 0.0, 0.0
    for count in COUNTS:
        x = torch.randn(SHAPE, generator=generator)
        mask = (torch.randperm(x.numel(), generator=generator) < count).view(SHAPE)
        grad_output = torch.randn((), generator=generator)
        leaf = x.to(device).requires_grad_()
        result = mean(leaf, mask.to(device))
        gradient, = torch.autograd.grad(result, leaf, grad_output.to(device))
        torch_xla.sync()
        after.append(compilations())
        exact = x.double()[mask].mean()
        exact_gradient = torch.where(mask, grad_output.double() / count, 0.0)
        error = max(error, abs(result.item() - exact.item()))
        gradient_error = max(gradient_error, float((gradient.cpu().double() - exact_gradient).abs().max()
                                                   / exact_gradient.abs().max()))
    return {"compilations_after_each_mask": after, "error": error, "relative_gradient_error": gradient_error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "torch_xla": torch_xla.__version__,
        "device": f"{os.environ['PJRT_DEVICE']}, {platform.machine()}", "shape": SHAPE, "counts": COUNTS,
        "masked_mean": measure(composition()),
        "masked_select(...).mean()": measure(lambda x, mask: torch.masked_select(x, mask).mean()),
    }
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if args.out:
        args.out.write_text(text)
    ours = found["masked_mean"]
    right = all(found[name]["error"] < 1e-6 and found[name]["relative_gradient_error"] < 1e-6
                for name in ("masked_mean", "masked_select(...).mean()"))
    return 0 if right and len(set(ours["compilations_after_each_mask"])) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())

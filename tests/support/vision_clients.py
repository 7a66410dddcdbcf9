"""Makes torchvision and timm importable from ``.venv/vision``, which ``make test`` fills, for processes that compare
with them.

They are not in the main environment, because transformers would find a torchvision that does not match its torch.
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "vision"
# The first line of a program that imports them.
PRELUDE = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import vision_clients\n"
PRELUDE += "vision_clients.make_importable()\n"


def there() -> bool:
    on_path = importlib.util.find_spec("torchvision") is not None
    return (FOLDER / "torchvision").exists() or on_path and importlib.util.find_spec("timm") is not None


def make_importable() -> None:
    """Makes torchvision importable next to a CPU build of torch.

    PyPI's torchvision is a CUDA build, so its library does not load there. Its import then fails when it registers a
    shape function for nms, whose schema is in the library. The transforms only need the two schemas, which this
    function defines. If torchvision matches torch, nothing is changed.
    """
    import torch
    if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("timm") is None:
        sys.path.insert(1, str(FOLDER))
    package, = importlib.util.find_spec("torchvision").submodule_search_locations
    try:
        for library in Path(package).glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

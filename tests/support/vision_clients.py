"""torchvision and timm, for the processes that compare with them: ``.venv/vision``, which ``make test`` fills.

They are not in the environment itself, where transformers would find a torchvision that does not fit its torch.
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "vision"
# Of a program that imports them.
PRELUDE = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import vision_clients\n"
PRELUDE += "vision_clients.make_importable()\n"


def there() -> bool:
    on_path = importlib.util.find_spec("torchvision") is not None
    return (FOLDER / "torchvision").exists() or on_path and importlib.util.find_spec("timm") is not None


def make_importable() -> None:
    """PyPI's torchvision is a CUDA build: beside a torch of the CPU its library does not load, and its import ends
    where it gives nms a shape function, for the schema is in there. Its transforms need none of that: the two
    schemas will do. Beside a torch that it fits there is nothing to do."""
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

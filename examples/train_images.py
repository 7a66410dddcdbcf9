"""Trains an image classifier with MixUp and CutMix from torchvision or timm: two weighted classes per row.

    python examples/train_images.py [--mix timm]
"""

import argparse
import random
from importlib.util import find_spec

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mix", choices=["torchvision", "timm", "none"], default="torchvision")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--quick", dest="epochs", action="store_const", const=1, help="one epoch")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--device", help="by default a GPU if there is one")
if __name__ == "__main__":
    mix = parser.parse_args().mix  # answers --help before the slow imports
    if mix != "none" and find_spec(mix) is None:
        parser.error(f"--mix {mix} needs {mix}: pip install {mix}; --mix none needs neither library")

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

import sparse_ce

CLASSES = 10


def stripes(count: int, seed: int) -> TensorDataset:
    """Returns images (3, 16, 16) of noisy stripes; the class is their angle."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    phase = 2 * torch.pi * torch.rand(count, 1, 1, 1, generator=generator)
    angle = (labels * torch.pi / CLASSES)[:, None, None, None]
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    clean = torch.sin(x * angle.cos() + y * angle.sin() + phase)
    return TensorDataset(clean + 1.5 * torch.randn(count, 3, 16, 16, generator=generator), labels)


def network() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1),
                         nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    random.seed(0)

    if args.mix == "torchvision":
        from sparse_ce.integrations.torchvision import CutMix, MixUp  # in place of v2.CutMix, v2.MixUp
        choices = [CutMix(num_classes=CLASSES), MixUp(num_classes=CLASSES, alpha=0.2)]
    elif args.mix == "timm":
        from sparse_ce.integrations.timm import Mixup  # in place of timm.data.Mixup
        mixup_fn = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=CLASSES)

    def collate(samples):
        batch = default_collate(samples)
        return random.choice(choices)(*batch) if args.mix == "torchvision" else batch

    loader = DataLoader(stripes(2048, 1), 64, shuffle=True, collate_fn=collate, num_workers=args.workers)
    images, labels = (t.to(args.device) for t in stripes(1024, 2).tensors)
    model = network().to(args.device)
    criterion = sparse_ce.SoftTargetCrossEntropy()  # named like timm's; accepts labels, mixed and smoothed targets
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for x, target in loader:
            x, target = x.to(args.device), target.to(args.device, non_blocking=True)
            if args.mix == "timm":
                x, target = mixup_fn(x, target)
            loss = criterion(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            logits = model(images)
            held_out = criterion(logits, labels).item()  # plain labels
        accuracy = logits.argmax(-1).eq(labels).float().mean().item()
        print(f"epoch {epoch} loss {total / len(loader):.4f} held-out {held_out:.4f} accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

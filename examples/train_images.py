"""Trains an image classifier with MixUp and CutMix: two weighted classes per row.

    python examples/train_images.py [--mix none]
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mix", choices=["both", "mixup", "cutmix", "none"], default="both")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--quick", dest="epochs", action="store_const", const=1, help="one epoch")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--device", help="by default a GPU if there is one")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from torch.utils.data import DataLoader, TensorDataset

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


def mixed(images: torch.Tensor, labels: torch.Tensor, mix: str) -> tuple:
    """Returns images that are mixed with those of the next row, and their target."""
    share = torch.distributions.Beta(0.2, 0.2).sample().item() if mix == "mixup" else torch.rand(()).item()
    others = images.roll(1, 0)
    if mix == "mixup":
        images = torch.lerp(others, images, share)
    else:
        height, width = images.shape[-2:]
        h, w = round(height * (1 - share) ** 0.5), round(width * (1 - share) ** 0.5)
        top, left = (int(torch.randint(most + 1, ())) for most in (height - h, width - w))
        images = images.clone()
        images[..., top:top + h, left:left + w] = others[..., top:top + h, left:left + w]
        share = 1 - h * w / (height * width)
    weights = torch.tensor([share, 1 - share], device=labels.device).expand(len(labels), 2)
    pairs = torch.stack((labels, labels.roll(1)), 1)
    return images, sparse_ce.SparseTarget.from_topk(pairs, weights, num_classes=CLASSES)


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    kinds = {"both": ("mixup", "cutmix"), "none": ()}.get(args.mix, (args.mix,))
    loader = DataLoader(stripes(2048, 1), 64, shuffle=True, num_workers=args.workers)
    images, labels = (t.to(args.device) for t in stripes(1024, 2).tensors)
    model = network().to(args.device)
    criterion = sparse_ce.SparseCrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for x, target in loader:
            x, target = x.to(args.device), target.to(args.device)
            if kinds:
                x, target = mixed(x, target, kinds[int(torch.randint(len(kinds), ()))])
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

"""Shows PyTorch's own cross entropy with sparse labels: which calls fail, and which work after ``import sparse_ce``.

    python examples/stock_pytorch.py      # seconds, on the CPU

The training loop stays the same.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from torch import Tensor, nn

ROWS, FEATURES, CLASSES, PER_ROW = 64, 32, 1000, 8


def sparse_labels() -> Tensor:
    """Returns a COO tensor (ROWS, CLASSES) with PER_ROW weighted classes per row. The weights of a row sum to 1."""
    rows = torch.arange(ROWS).repeat_interleave(PER_ROW)
    classes = torch.cat([torch.randperm(CLASSES)[:PER_ROW] for _ in range(ROWS)])
    weights = torch.softmax(2 * torch.randn(ROWS, PER_ROW), 1).flatten()
    return torch.sparse_coo_tensor(torch.stack((rows, classes)), weights, (ROWS, CLASSES), check_invariants=True)


def train(inputs: Tensor, labels: Tensor, **options) -> str:
    """Runs an ordinary training loop. ``options`` are passed to ``nn.CrossEntropyLoss``."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    loss_fn, opt = nn.CrossEntropyLoss(**options), torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(50):
        loss = loss_fn(model(inputs), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def attempt(what: str, inputs: Tensor, labels: Tensor, **options) -> None:
    try:
        result = train(inputs, labels, **options)
    except (NotImplementedError, RuntimeError) as error:
        result = f"{type(error).__name__}: {str(error)[:60]}..."
    print(f"  {what:<22}{result}")


def main() -> None:
    torch.manual_seed(0)
    inputs, coo = torch.randn(ROWS, FEATURES), sparse_labels()
    csr = coo.to_sparse_csr()

    print(f"PyTorch {torch.__version__}:")
    attempt("dense labels", inputs, coo.to_dense())
    attempt("COO labels", inputs, coo)
    attempt("CSR labels", inputs, csr)

    import sparse_ce  # imported here to show PyTorch without it first

    print("after import sparse_ce:")
    attempt("COO labels", inputs, coo)
    attempt("CSR labels", inputs, csr)

    with sparse_ce.enable_stock():
        print("with enable_stock (fused kernels):")
        attempt("COO labels", inputs, coo)
        attempt("CSR labels", inputs, csr)
        attempt("COO, smoothing", inputs, coo, label_smoothing=0.1)
        attempt("dense, smoothing", inputs, coo.to_dense(), label_smoothing=0.1)


if __name__ == "__main__":
    main()

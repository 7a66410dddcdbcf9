"""Checks that an installed sparse_ce computes loss and gradient for a few target formats as the float64 formula does.

It needs only torch, and runs outside the source tree. It prints one line, or fails.
"""

import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")

import torch  # noqa: E402

import sparse_ce  # noqa: E402

ROWS, CLASSES, WIDTH = 5, 1000, 7
torch.manual_seed(1)
indices = torch.stack([torch.randperm(CLASSES)[:WIDTH] for _ in range(ROWS)])
values = torch.rand(ROWS, WIDTH)
dense = torch.zeros(ROWS, CLASSES, dtype=torch.float64).scatter_(1, indices, values.double())
grad_output = torch.randn(ROWS)
hidden, head = torch.randn(ROWS, 16), 4 * torch.randn(CLASSES, 16)


def exact(logits, target):
    """Computes loss and gradient of each row: lse * mass - <target, logits>, softmax * mass - target."""
    lse, mass = logits.logsumexp(1, keepdim=True), target.sum(1, keepdim=True)
    gradient = grad_output.double()[:, None] * (logits.softmax(1) * mass - target)
    return (lse * mass)[:, 0] - (target * logits).sum(1), gradient


def agree(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert expected.abs().max() > 1e-2  # zeros would not pass


def main():
    targets = {"top-k": (indices, values), "COO": dense.float().to_sparse(), "CSR": dense.float().to_sparse_csr(),
               "class indices": indices[:, 0]}
    for form, target in targets.items():
        one_hot = torch.nn.functional.one_hot(indices[:, 0], CLASSES).double()
        logits = torch.nn.functional.linear(hidden, head).requires_grad_()
        loss, gradient = exact(logits.detach().double(), one_hot if form == "class indices" else dense)
        found = sparse_ce.cross_entropy(logits, target, reduction="none")
        found.backward(grad_output)
        agree(found.detach(), loss)
        agree(logits.grad, gradient)
        x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        found = sparse_ce.linear_cross_entropy(x, w, target, reduction="none")
        found.backward(grad_output)
        agree(found.detach(), loss)
        agree(x.grad, gradient @ head.double())
        agree(w.grad, gradient.t() @ hidden.double())
    print(f"sparse_ce agrees with float64: {', '.join(targets)}; torch {torch.__version__}, "
          f"Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()

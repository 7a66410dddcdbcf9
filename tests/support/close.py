"""How far a result may be from float64: twice as far as PyTorch is in the same dtype, plus four ulp."""

from typing import Optional

import torch
from torch import Tensor


def assert_close_to_float64(ours: Tensor, peer: Tensor, exact: Tensor, terms: Optional[Tensor] = None,
                            arithmetic: Optional[torch.dtype] = None) -> None:
    """``peer`` is PyTorch's result in the arithmetic and storage dtypes of ``ours``, ``exact`` the one in float64.

    An error counts against the largest element of ``exact``. With ``terms`` (..., 1) it counts against the largest
    element of its own row, so that a row of small gradients cannot hide behind a row of large ones; ``terms`` is the
    size of what is subtracted in the row (p and 1, where p - 1 is the result), whose last bits nobody has. What is 0
    throughout must be 0. ``arithmetic``: where it is coarser than the dtype of ``ours``.
    """
    assert ours.shape == exact.shape, f"shape {list(ours.shape)}, expected {list(exact.shape)}"
    assert ours.dtype == peer.dtype, f"dtype {ours.dtype}, expected {peer.dtype}"
    assert exact.dtype == torch.float64
    if exact.numel() == 0:
        return
    dtype = ours.dtype
    ours, peer, exact = ours.detach().double(), peer.detach().double(), exact.detach()

    def largest(t: Tensor) -> Tensor:
        return t.abs().max() if terms is None else t.abs().amax(-1, keepdim=True)

    eps = max(_eps(dtype), _eps(arithmetic or dtype))
    scale = largest(exact)
    allowed = 2 * largest(peer - exact) + 4 * eps * scale + torch.finfo(dtype).smallest_normal * eps
    if terms is not None:
        allowed = allowed + 4 * min(eps, _eps(torch.float32)) * terms
    allowed = torch.where(scale == 0, 0.0, allowed)
    # With p within a few eps of 1 a row has no digits to check; three rows in four must have.
    assert (allowed <= 0.1 * scale).double().mean() >= 0.75, "vacuous: an all-zero result would pass"
    error = (ours - exact).abs()
    worst = int(torch.where(error.isnan(), torch.inf, error - allowed).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    assert (error <= allowed).all(), (
        f"error {error[at]:.3e} at {at}, allowed {allowed.expand_as(error)[at]:.3e}: "
        f"ours {ours[at]:.9e}, float64 {exact[at]:.9e}, PyTorch {peer[at]:.9e}")


def _eps(dtype: torch.dtype) -> float:
    return 2.5e-13 if dtype == torch.float64 else torch.finfo(dtype).eps  # float64 is compared with itself


def assert_bitwise_equal(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

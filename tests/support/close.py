"""Checks the error against float64: at most twice PyTorch's error in the same dtype, plus four ulp."""

from typing import Optional

import torch
from torch import Tensor


def assert_close_to_float64(ours: Tensor, peer: Tensor, exact: Tensor, terms: Optional[Tensor] = None,
                            arithmetic: Optional[torch.dtype] = None) -> None:
    """Checks ``ours`` against ``exact`` (float64); ``peer`` is PyTorch's result in the arithmetic and storage dtypes of
    ``ours``.

    An error is relative to the largest element of ``exact``. With ``terms`` (..., 1) it is relative to the largest
    element of its own row, so that large gradients in one row cannot hide errors in a row of small ones. ``terms`` is
    the size of the subtracted terms of a row (p and 1 for the result p - 1), whose last bits are always lost. A row or
    tensor that is all zeros must be exactly 0. ``arithmetic`` is the dtype of the computation if it is coarser than the
    dtype of ``ours``.
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
    # If p is within a few eps of 1, a row has no digits to check; three of four rows must have some.
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

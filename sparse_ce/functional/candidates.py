"""Computes the logits of a linear head at a few classes of each row. The formulas are in ``csrc/ops/candidates.h``."""

import math
from typing import Optional

import torch
from torch import Tensor

from .._core.arguments import Candidates, Head
from .._core.autocast import as_linear_multiplies
from .._core.flags import check_flags
from .._core.guesses import explained
from .._core.options import checked_options
from .._core.sizes import same_shape
from .._core.tensor_checks import check_head, check_input
from ..ops.head.candidates import candidate_logits as candidate_logits_op
from ..ops.head.candidates import cast
from ..ops.registration import check_kernels
from ..targets.convert import LossTarget, as_ids, check_target


@explained
def candidate_logits(
    input: Tensor,
    linear_weight: Tensor,
    indices: LossTarget,
    *,
    linear_bias: Optional[Tensor] = None,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    sparse_grad: bool = False,
) -> Tensor:
    """Computes the logits of a linear head at K classes of each row only.

    The result is ``F.linear(input, linear_weight, linear_bias)`` gathered at ``indices``. Neither the logits nor a copy
    ``linear_weight[indices]`` of N K D numbers is materialized. Use it if the softmax is taken over candidates instead
    of the vocabulary: replay of truncated sampling, distillation renormalized on a teacher's top-k, sampled softmax,
    draft vocabularies.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Arithmetic and result are
            float32 (float64 for float64).
        linear_weight: weight of the head (V, D), in the dtype of ``input``, or float32 if ``input`` has 16 bits. Under
            autocast, ``input`` and the head may have any dtype that ``F.linear`` accepts there. If the stride of the
            weight's columns is not 1, it is copied.
        indices: the classes, one of

            - an integer tensor of shape ``input.shape[:-1]``: one class per row
            - an integer tensor (..., K) with as many dimensions as ``input``: K classes per row
            - any target of :func:`sparse_ce.cross_entropy`. Its weights only mark padding.
              ``SparseTarget.from_jagged(indices, None, offsets)`` holds sets of any length.

            A class may be repeated.
        linear_bias: bias of the head (V,), with the dtype rules of ``linear_weight``.
        logit_scale, softcap: numbers. The result is ``softcap * tanh(logit_scale * logit / softcap)``, or
            ``logit_scale * logit`` without a softcap.
        sparse_grad: if True, the gradient for ``linear_weight`` is a coalesced sparse COO tensor instead of a dense (V,
            D). It has one row for each class with a gradient, at most min(N K, V).

            - On CUDA this synchronizes, in order to count these rows.
            - It is not supported under ``torch.compile`` and during the capture of a CUDA graph.
            - Under ``torch.func`` and with ``create_graph=True`` the gradient is dense.

    Returns:
        The logits, float32 (float64 for float64), differentiable any number of times, in the shape of ``indices``:
        ``input.shape[:-1]``, (..., K), or (entries,) for jagged targets, in the order of the entries (COO: by rows).

        Padding is an index of -100, an entry of weight 0 or log-probability -inf, and every entry of a masked row. Its
        logit is -inf, and it contributes no gradient. Neither does an entry whose ``grad_output`` is 0. If all entries
        of a row are padding, its ``input`` is not read.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value; raised before any computation.
        RuntimeError: if dtypes or devices do not match, or (CPU) an index is not in [0, V). On CUDA its logit is NaN
            instead, unless ``SPARSE_CE_VALIDATE=1`` is set. Also if ``sparse_grad`` is used during the capture of a
            CUDA graph.

    Examples:
        >>> hidden, head = torch.randn(2, 8, requires_grad=True), torch.nn.Linear(8, 100)
        >>> indices = torch.tensor([[3, 14, 15], [92, -100, -100]])
        >>> logits = sparse_ce.candidate_logits(hidden, head.weight, indices, linear_bias=head.bias)
        >>> torch.testing.assert_close(logits[0], head(hidden)[0, [3, 14, 15]])
        >>> logits.softmax(1)[1]  # over the candidates of a row
        tensor([1., 0., 0.], grad_fn=<SelectBackward0>)
    """
    check_input(input, "D")
    check_head(input, linear_weight, linear_bias, blocks=False)
    options = checked_options({"logit_scale": logit_scale, "softcap": softcap})
    check_flags(sparse_grad=sparse_grad)
    check_kernels(input)
    input, linear_weight, linear_bias = as_linear_multiplies(input, linear_weight, linear_bias,
                                                             cast if sparse_grad else Tensor.to)
    of_logits = torch.Size((*input.shape[:-1], linear_weight.shape[0]))
    target = as_ids(indices, of_logits, device=input.device)
    check_target(target, of_logits, input, None, "indices")
    shape = target.indices.shape
    flat = target.flatten()
    c = Candidates(flat.indices, flat.values, flat.offsets, flat.row_mask,
                   logprobs=flat.values_are == "log_probs", **options)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    logits = candidate_logits_op(Head(rows, linear_weight, linear_bias), c, sparse_grad)
    return logits if same_shape(logits.shape, shape) else logits.reshape(shape)

"""The logits of a linear head at a few ids of each row. Formulas: ``csrc/ops/candidates.h``."""

import math
from typing import Optional

import torch
from torch import Tensor

from .._core.arguments import Candidates
from .._core.autocast import as_linear_multiplies
from .._core.flags import check_flags
from .._core.options import checked_transform
from .._core.tensor_checks import check_head, check_input
from ..ops.candidates import candidate_logits as candidate_logits_op
from ..ops.candidates import cast
from ..ops.linear_cross_entropy import Head
from ..ops.registration import check_kernels
from ..targets.convert import Target, as_ids, check_target


def candidate_logits(
    input: Tensor,
    linear_weight: Tensor,
    indices: Target,
    *,
    linear_bias: Optional[Tensor] = None,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    sparse_grad: bool = False,
) -> Tensor:
    """The logits of a linear head at K ids of each row alone: ``F.linear(input, linear_weight, linear_bias)`` gathered
    at the ids, with neither the logits nor a copy ``linear_weight[ids]`` of N K D numbers.

    For what is normalized over candidates and not over the vocabulary: replay of truncated sampling, distillation
    renormalized on a teacher's top-k, sampled softmax, draft vocabularies.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Arithmetic and result are
            float32 (float64 for float64).
        linear_weight: the head's weight (V, D), of the dtype of ``input``, or float32 with an ``input`` of 16 bits.
            Under autocast both may be what ``F.linear`` takes there. A stride of its columns other than 1 costs a copy.
        indices: int64 or int32, (..., K) with as many dimensions as ``input``: K ids a row; or ``input.shape[:-1]``:
            one id a row; or a :class:`SparseTarget` of any form, whose weights say what is padding and no more (a
            jagged set of ids: ``SparseTarget.from_jagged(ids, None, offsets)``); or another target that
            :func:`cross_entropy` takes. Ids may repeat.
        linear_bias: (V,), dtype as for ``linear_weight``.
        logit_scale, softcap: the result is ``softcap * tanh(logit_scale * logit / softcap)``, or
            ``logit_scale * logit`` without a softcap. Numbers.
        sparse_grad: the gradient for ``linear_weight`` is a coalesced sparse COO tensor with a row for each id that has
            a gradient, at most min(N K, V), in place of a dense (V, D). CUDA is waited for to count them; not within
            the capture of a CUDA graph, nor under ``torch.compile``. Under ``torch.func`` and where the gradient is
            itself differentiated (``create_graph=True``) it is dense.

    Returns:
        float32 (float64 for float64), differentiable any number of times, in the shape of the ids: ``input.shape[:-1]``
        for one id a row, (..., K), or (entries,) for jagged targets, in their order (COO: by rows). Padding, which is
        an id of -100, an entry of weight 0 or log-probability -inf and each one of a masked row, gives -inf, and no
        gradient to anything; nor does an upstream gradient of 0. What ``input`` holds in rows of such alone is not
        read.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or value; raised before any work.
        RuntimeError: dtype or device do not fit, or (CPU) an id is not in [0, V). On CUDA its logit is NaN instead,
            unless ``SPARSE_CE_VALIDATE=1`` is set. ``sparse_grad`` within the capture of a CUDA graph.

    Examples:
        >>> hidden, head = torch.randn(2, 8, requires_grad=True), torch.nn.Linear(8, 100)
        >>> ids = torch.tensor([[3, 14, 15], [92, -100, -100]])
        >>> logits = sparse_ce.candidate_logits(hidden, head.weight, ids, linear_bias=head.bias)
        >>> torch.testing.assert_close(logits[0], head(hidden)[0, [3, 14, 15]])
        >>> logits.softmax(1)[1]  # over the candidates of a row
        tensor([1., 0., 0.], grad_fn=<SelectBackward0>)
    """
    check_input(input, "D")
    check_head(input, linear_weight, linear_bias)
    logit_scale, softcap = checked_transform(logit_scale, softcap)
    check_flags(sparse_grad=sparse_grad)
    check_kernels(input)
    input, linear_weight, linear_bias = as_linear_multiplies(input, linear_weight, linear_bias,
                                                             cast if sparse_grad else Tensor.to)
    of_logits = torch.Size((*input.shape[:-1], linear_weight.shape[0]))
    target = as_ids(indices, of_logits)
    check_target(target, of_logits, input, None)
    shape = target.indices.shape
    flat = target.flatten()
    c = Candidates(flat.indices, flat.values, flat.offsets, flat.row_mask, logprobs=flat.kind == "logprobs",
                   logit_scale=logit_scale, softcap=softcap)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    logits = candidate_logits_op(Head(rows, linear_weight, linear_bias), c, sparse_grad)
    return logits if logits.shape == shape else logits.reshape(shape)

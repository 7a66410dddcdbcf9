"""One read of the logits in a compiled step, by a pass over the graphs that Inductor compiles.

The gradient for the logits can be made beside the loss where the upstream gradient is known by then. In a graph that
holds loss and backward it may be: ``one_pass`` puts ``forward_with_gradient`` where ``forward_with_residual``,
``loss_mean`` and ``backward`` were, for the same bits. Where backward is a graph of its own the upstream gradient is an
input of that one, and nothing is changed.
"""

import operator
from typing import Any, Dict, Iterable, NamedTuple, Optional, Tuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from .ops.registration import ops

_aten = torch.ops.aten


class _OnePass(CustomGraphPass):

    def __call__(self, graph: Graph) -> None:
        for backward in graph.find_nodes(op="call_function", target=ops.backward.default):
            step = _step_of(backward)
            if step is not None and _move_before(step.forward, step.given.values()):
                _join(step)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


one_pass = _OnePass()
"""For ``torch.compile(step, options={"post_grad_custom_pre_pass": one_pass})``: a scalar
:func:`sparse_ce.cross_entropy` whose backward is in the same graph reads its logits once. Results keep their bits, but
on CUDA where Triton's division of the upstream gradient rounds otherwise than ours."""


class _Step(NamedTuple):
    """The calls of a mean and of its gradient for the logits, and the arguments of the call that makes both."""

    forward: Node
    mean: Node
    backward: Node
    given: Dict[str, Any]


def _step_of(backward: Node) -> Optional[_Step]:
    """None where ``backward`` is not that of a mean, or its forward has more gradients."""
    of_backward = _arguments(backward)
    share, row_weight = _unweighted(of_backward["grad_loss"])
    if not _calls(share, _aten.expand.default) or not _calls(share.args[0], _aten.div.Tensor):
        return None
    grad_mean, divisor = share.args[0].args
    mean = _maker(divisor, ops.loss_mean.default, 1)
    of_mean = {} if mean is None else _arguments(mean)
    forward = _maker(of_mean.get("loss"), ops.forward_with_residual.default, 0)
    if mean is None or forward is None or of_backward["grad_lse"] is not None:
        return None
    if grad_mean.meta["val"].dim() != 0 or backward.meta["val"].device.type not in ("cpu", "cuda"):
        return None
    given = {"row_weight": row_weight, **_arguments(forward)}
    same = all(other[name] == value for other in (of_mean, of_backward) for name, value in given.items()
               if name in other)
    saved = all(_maker(of_backward[name], ops.forward_with_residual.default, at) is forward
                for name, at in (("lse", 1), ("lse_residual", 2)))
    if not same or not saved:
        return None
    return _Step(forward, mean, backward, {**given, "grad_mean": grad_mean, "normalizer": of_mean["normalizer"]})


def _unweighted(grad_loss: Any) -> Tuple[Any, Any]:
    """The gradient for the losses without the rows' weights, see ``times`` in guarded.py, and those or None."""
    if _calls(grad_loss, _aten.where.self):
        dead, zero, product = grad_loss.args
        if (_calls(product, _aten.mul.Tensor) and _calls(dead, _aten.eq.Scalar) and dead.args == (product.args[0], 0)
                and _calls(zero, _aten.full.default) and zero.args[1] == 0):
            return product.args[0], product.args[1]
    return grad_loss, None


def _calls(value: Any, op: Any) -> bool:
    return isinstance(value, Node) and value.target is op


def _maker(value: Any, op: Any, at: int) -> Optional[Node]:
    """The call of ``op`` whose result ``at`` is ``value``."""
    if not _calls(value, operator.getitem) or value.args[1] != at or not _calls(value.args[0], op):
        return None
    node: Node = value.args[0]
    return node


def _arguments(call: Node) -> Dict[str, Any]:
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in schema}
    given.update(zip(given, call.args))
    return {**given, **call.kwargs}


def _move_before(node: Node, values: Iterable[Any]) -> bool:
    """Moves what ``values`` are made of before ``node``; False, and nothing is moved, where it cannot be."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    late, found = set(), [v for v in values if isinstance(v, Node)]
    while found:
        n = found.pop()
        if order[n] < order[node] or n in late:
            continue
        if n is node or n.is_impure():
            return False
        late.add(n)
        found += n.all_input_nodes
    for n in sorted(late, key=order.__getitem__):
        node.prepend(n)
    return True


def _join(step: _Step) -> None:
    """``forward_with_gradient`` returns what ``loss_mean`` does, ``forward_with_residual``, and ``backward``."""
    forward, mean, backward, given = step
    graph, op = forward.graph, ops.forward_with_gradient.default
    with graph.inserting_before(forward):
        joined = graph.call_function(op, tuple(given[a.name] for a in op._schema.arguments))
    joined.meta["val"] = (*mean.meta["val"], *forward.meta["val"], backward.meta["val"])
    for call, first in ((mean, 0), (forward, len(mean.meta["val"]))):
        for result in list(call.users):
            at: Any = result.args[1]
            result.args = (joined, first + at)
    backward.target, backward.args, backward.kwargs = operator.getitem, (joined, len(joined.meta["val"]) - 1), {}
    for call in (mean, forward):
        graph.erase_node(call)

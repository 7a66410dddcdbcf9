"""Contains helpers for the tests of compilers: arguments of the ops, targets with a varying number of entries,
graphs."""

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from cases import Draw
from sparse_ce import SparseTarget


def op_arguments(kind, requires_grad, device, dtype=torch.float32):
    draw = Draw(device)
    logits = draw.normal(4, 7).to(dtype).requires_grad_(requires_grad)
    values = draw.uniform(4, 3).requires_grad_(requires_grad)
    indices, weight = draw.integers(7, 4, 3), draw.uniform(7)
    mask = torch.tensor([True, True, False, True], device=device)
    target = {
        "labels": (indices[:, 0], None, None, None, None),
        "topk": (indices.int(), values, None, weight, mask),
        "csr": (indices.view(-1), values.detach().view(-1).requires_grad_(requires_grad),
                torch.tensor([0, 3, 3, 9, 12], device=device), weight, None),
        "ranges": (indices.view(-1), None, torch.tensor([[0, 3], [5, 5], [6, 9], [9, 12]], device=device), None, mask),
    }[kind]
    return logits, target, draw.normal(4).requires_grad_(requires_grad)


def jagged(nnz, draw, rows=6, classes=11):
    owner = draw.integers(rows, nnz).sort().values
    offsets = torch.searchsorted(owner, torch.arange(rows + 1, device=draw.device))
    return SparseTarget.from_jagged(draw.integers(classes, nnz), draw.uniform(nnz), offsets, num_classes=classes)


def coo(nnz, draw, rows=6, classes=11):
    positions = torch.stack([draw.integers(rows, nnz), draw.integers(classes, nnz)])
    return SparseTarget.from_coo(torch.sparse_coo_tensor(positions, draw.uniform(nnz), (rows, classes)))


DYNAMIC = {
    "jagged": jagged, "coo": coo,
    "topk": lambda n, draw: SparseTarget.from_topk(draw.integers(11, 6, n), draw.uniform(6, n)),
    "tuple": lambda n, draw: (draw.integers(11, 6, n), draw.uniform(6, n)),
    "masked": lambda n, draw: SparseTarget.from_topk(draw.integers(11, 6, n), draw.uniform(6, n),
                                                    row_mask=draw.uniform(6) > 0.5),
}


def dirty_allocator(device):
    for n in (120, 120 * 1001):
        blocks = [torch.full((n,), 1e30, device=device) for _ in range(4)]
        del blocks


def recording(graphs):
    """Returns a backend that runs and records the graphs that Inductor would compile, after its joint passes."""
    def compiler(module, inputs):
        joint_graph_passes(module)
        graphs.append(module.graph)
        return make_boxed_func(module)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table,
                        partition_fn=min_cut_rematerialization_partition)


def ops_in(graph):
    """Returns the names of this package's ops in a graph, in order."""
    return [node.target._schema.name.split("::")[1] for node in graph.nodes if "sparse_ce" in str(node.target)]

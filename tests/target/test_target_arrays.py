"""Tests a ``SparseTarget`` of numpy arrays, as metrics receive it."""

import numpy as np
import pytest
import torch

from sparse_ce import SparseTarget

VOCAB = 5


def targets():
    labels = torch.tensor([1, 2, 4])
    return [SparseTarget.from_index(labels, num_classes=VOCAB),
            SparseTarget.from_topk(labels[:, None], torch.ones(3, 1), num_classes=VOCAB),
            SparseTarget.from_csr(torch.nn.functional.one_hot(labels, VOCAB).float().to_sparse_csr())]


def arrays(target):
    """Returns a batch's target as evaluation passes it to ``compute_metrics``."""
    return SparseTarget({name: t.numpy() for name, t in target.items()})


@pytest.mark.parametrize("target", targets() + [arrays(t) for t in targets()], ids=lambda t: t.form)
def test_it_is_no_array_and_says_what_to_do(target):
    predictions = np.array([1, 2, 3])
    asked = [lambda: np.asarray(target), lambda: np.array(target), lambda: np.array(target, dtype=np.int64),
             lambda: (predictions == target).mean(), lambda: (target == predictions).mean(),
             lambda: np.equal(predictions, target), lambda: np.mean(target), lambda: np.array([target, target])]
    for ask in asked:
        with pytest.raises(TypeError, match=r"sparse_ce: target must be dense to become an array, got a "
                                            r"SparseTarget.*\.to_dense\(\).*\.argmax\(-1\)"):
            ask()
    assert (predictions == target.to_dense().argmax(-1).numpy()).tolist() == [True, True, False]
    assert target.ne(-100).tolist() == [True] * 3

"""Classes are last here and second in F.cross_entropy: what fits only there is an error that names the way."""

import pytest
import torch
import torch.nn.functional as F

from cases import Draw
from refusals import assert_refused
from sparse_ce import SparseTarget, cross_entropy, linear_cross_entropy

MOVE = "input.movedim(1, -1)"


@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 5, 3, 4), (2, 5, 5, 4), (2, 5, 4, 5), (3, 2, 4, 5, 6)], ids=str)
def test_labels_of_logits_with_classes_second_name_movedim(shape, device):
    draw = Draw(device)
    x, labels = draw.normal(*shape), draw.integers(shape[1], shape[0], *shape[2:])
    for target in (labels, labels.int(), SparseTarget.from_index(labels)):
        assert_refused(lambda: cross_entropy(x, target), "target", list(labels.shape), MOVE, error=ValueError)
    head = draw.normal(9, shape[-1])
    assert_refused(lambda: linear_cross_entropy(x, head, labels % 9), "target", MOVE, error=ValueError)
    torch.testing.assert_close(cross_entropy(x.movedim(1, -1), labels), F.cross_entropy(x, labels))


def test_other_wrong_shapes_do_not_name_it(device):
    draw = Draw(device)
    for shape, wrong in (((4, 7), (3,)), ((2, 5, 4), (2, 3)), ((2, 5, 4), (2,)), ((2, 5, 3, 4), (2, 3, 5)),
                         ((7,), (1,))):
        with pytest.raises(ValueError) as caught:
            cross_entropy(draw.normal(*shape), draw.integers(4, *wrong))
        assert "movedim" not in str(caught.value)


def test_where_both_readings_fit_the_last_dimension_is_the_classes(device):
    """As documented: such a call cannot be told from one that means it."""
    draw = Draw(device)
    for shape in ((2, 5, 5), (2, 5, 5, 5)):
        x, labels = draw.normal(*shape), draw.integers(5, *shape[:-1])
        torch.testing.assert_close(cross_entropy(x, labels), F.cross_entropy(x.movedim(-1, 1), labels))
        assert (cross_entropy(x, labels) - F.cross_entropy(x, labels)).abs() > 1e-2

"""Tests that wrong arguments of divergences from a dense teacher are named."""

import math

import pytest
import torch

from sparse_ce import distillation_loss, linear_distillation_loss
from sparse_ce.functional import dense_inputs
from sparse_ce.functional.inputs import of_head

ops = torch.ops.sparse_ce
ROWS, CLASSES, WIDTH, OF_TEACHER = 3, 5, 4, 6
zeros = torch.zeros


def learned(*shape):
    return zeros(shape).requires_grad_()


OF_BOTH = [
    (dict(kind="kl"), ValueError, "kind must be one of 'forward_kl', .* got 'kl'"),
    (dict(kind="jsd", beta=0.0), ValueError, "beta must be a number between 0 and 1, got 0.0; TRL's 0 is kind="),
    (dict(kind="alpha_divergence", beta=1), ValueError, "beta must be a number between 0 and 1, got 1"),
    (dict(beta="half"), TypeError, "beta must be a number"),
    (dict(kind="tv", beta=0.5), ValueError, "beta must be None for kind='tv', which has no parameter, got 0.5"),
    (dict(softcap=0.0), ValueError, "softcap must be"),
    (dict(teacher_softcap=-1.0), ValueError, "teacher_softcap must be"),
    (dict(logit_scale=math.nan), ValueError, "logit_scale must be"),
    (dict(teacher_logit_scale=math.inf), ValueError, "teacher_logit_scale must be"),
    (dict(logit_scale=zeros(2)), ValueError, "logit_scale must be"),
    (dict(teacher_logit_scale=zeros(ROWS + 1)), ValueError, "teacher_logit_scale must be"),
    (dict(logit_scale=learned()), ValueError,
     "logit_scale must not require grad with a dense teacher, got a tensor that does; pass logit_scale.detach"),
    (dict(teacher_logit_scale=learned()), ValueError,
     "teacher_logit_scale must not require grad with a dense teacher, got a tensor that does; pass teacher_"),
    (dict(logit_scale=learned(ROWS)), ValueError, "logit_scale must not require grad"),
    (dict(row_mask=[True] * ROWS), TypeError, r"row_mask must be a bool tensor, got \[True, True, True\]"),
    (dict(row_mask=zeros(ROWS)), TypeError, r"row_mask must be a bool tensor, got a Tensor of shape \[3\]"),
    (dict(row_mask=zeros(2).bool()), ValueError, r"row_mask must be of the leading shape \[3\], got \[2\]"),
    (dict(row_mask=zeros(ROWS, device="meta").bool()), RuntimeError,
     "row_mask must be on the device of input, cpu, got meta"),
    (dict(row_weight=zeros(2)), ValueError, "row_weight must be"),
    (dict(reduction="average"), ValueError, "reduction must be"),
    (dict(reduction="sum", normalizer=2), ValueError, "normalizer"),
    (dict(num_classes=CLASSES + 1), ValueError, "num_classes|teacher must have at least 6 classes"),
    (dict(num_classes=0), ValueError, "num_classes must be"),
]
both = pytest.mark.parametrize("options, error, message", OF_BOTH, ids=[
    f"{i} {next(reversed(options))}" for i, (options, *_) in enumerate(OF_BOTH)])


def of_logits(**options):
    arguments = {**dict(input=zeros(ROWS, CLASSES), teacher_logits=zeros(ROWS, CLASSES)), **options}
    return distillation_loss(arguments.pop("input"), arguments.pop("teacher_logits"), **arguments)


def of_heads(**options):
    arguments = {**dict(input=zeros(ROWS, WIDTH), linear_weight=zeros(CLASSES, WIDTH),
                        teacher_input=zeros(ROWS, OF_TEACHER), teacher_weight=zeros(CLASSES, OF_TEACHER)), **options}
    first = [arguments.pop(name) for name in ("input", "linear_weight")]
    teacher = [arguments.pop(name, None) for name in ("teacher_input", "teacher_weight", "teacher_bias")]
    return linear_distillation_loss(*first, teacher, **arguments)


@both
def test_options_of_logits(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: .*{message}"):
        of_logits(**options)


@both
def test_options_of_heads(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: .*{message}"):
        of_heads(**options)


@pytest.mark.parametrize("options, error, message", [
    (dict(input=zeros(())), ValueError, r"input must be \(..., V\), got shape \[\]"),
    (dict(input=zeros(ROWS, CLASSES).long()), TypeError, "input must be"),
    (dict(input=zeros(ROWS, 0), teacher_logits=zeros(ROWS, 0)), ValueError, "input must have at least one class"),
    (dict(inplace=True), ValueError, "inplace must be False, 'backward' or 'forward', got True"),
    (dict(teacher_logits=None), TypeError, "teacher must be"),
    (dict(teacher_logits=zeros(())), ValueError, r"teacher must be \(..., V\), got shape \[\]"),
    (dict(teacher_logits=zeros(ROWS, CLASSES).int()), TypeError, "teacher must be class indices"),
    (dict(teacher_logits=learned(ROWS, CLASSES)), ValueError,
     "teacher must not require grad, got a tensor that does; run the teacher under torch.no_grad"),
    (dict(teacher_logits=zeros(ROWS, CLASSES, device="meta")), RuntimeError,
     "teacher must be on the device of input, cpu, got meta"),
    (dict(teacher_logits=zeros(2, CLASSES)), ValueError,
     r"teacher must be of the leading shape \[3\] and \(V,\), got \[2, 5\]"),
    (dict(teacher_logits=zeros(ROWS, 7)), ValueError,
     "teacher must have the classes of input, 5, got 7; pass num_classes if both models have padding"),
    (dict(teacher_logits=zeros(ROWS, 3), num_classes=4), ValueError,
     "teacher must have at least 4 classes, got 3"),
], ids=str)
def test_a_teacher_of_logits(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: .*{message}"):
        of_logits(**options)


@pytest.mark.parametrize("options, error, message", [
    (dict(linear_weight=zeros(CLASSES, 9)), ValueError, r"linear_weight must be \(V, 4\) to match input, got \[5, 9\]"),
    (dict(teacher_input=None), TypeError, "teacher must be a SparseTarget, .* or .teacher_input, teacher_weight"),
    (dict(teacher_weight=torch.nn.Linear(OF_TEACHER, CLASSES)), TypeError, "pass .teacher_input, head.weight, head."),
    (dict(teacher_input=learned(ROWS, OF_TEACHER)), ValueError,
     r"teacher_input must not require grad, got a tensor that does; (run|pass)"),
    (dict(teacher_input=zeros(ROWS, OF_TEACHER, device="meta")), RuntimeError,
     "teacher_input must be on the device of input, cpu, got meta"),
    (dict(teacher_input=zeros(2, OF_TEACHER)), ValueError,
     r"teacher_input must be of the leading shape \[3\] and \(D2,\), got \[2, 6\]"),
    (dict(teacher_weight=learned(CLASSES, OF_TEACHER)), ValueError,
     r"teacher_weight must not require grad, got a tensor that does; (run|pass)"),
    (dict(teacher_weight=zeros(CLASSES, 7)), ValueError,
     r"teacher_weight must be \(V, 6\) to match teacher_input, got \[5, 7\]"),
    (dict(teacher_weight=zeros(CLASSES, OF_TEACHER, device="meta")), RuntimeError,
     "teacher_weight must be on the device of teacher_input, cpu, got meta"),
    (dict(teacher_weight=zeros(8, OF_TEACHER)), ValueError,
     "teacher_weight must have the rows of linear_weight, 5, got 8; pass num_classes if both models have padding"),
    (dict(teacher_weight=zeros(3, OF_TEACHER), num_classes=4), ValueError,
     r"teacher_weight must have at least 4 rows \(num_classes\), got 3"),
    (dict(teacher_weight=zeros(0, OF_TEACHER), linear_weight=zeros(0, WIDTH)), ValueError,
     "linear_weight must have at least one class"),
    (dict(teacher_bias=learned(CLASSES)), ValueError,
     r"teacher_bias must not require grad, got a tensor that does; (run|pass)"),
    (dict(teacher_bias=zeros(4)), ValueError, r"teacher_bias must be \(5,\), got \[4\]"),
    (dict(alpha=-0.1), ValueError, r"alpha must be in \[0, 1\], got -0.1"),
    (dict(alpha=1.1), ValueError, r"alpha must be in \[0, 1\], got 1.1"),
    (dict(alpha=math.nan), ValueError, r"alpha must be in \[0, 1\], got nan"),
    (dict(alpha="1"), TypeError, r"alpha must be a number, got '1'"),
    (dict(alpha=0.5), ValueError, "labels must be given unless alpha is 1, got None and alpha=0.5"),
    (dict(alpha=0.5, labels=torch.tensor([0, 5, 1])), ValueError,
     r"labels must have indices in \[0, 5\) or ignore_index -100, got 5"),
    (dict(alpha=0.5, labels=torch.tensor([0, -1, 1]), ignore_index=-2), ValueError,
     r"labels must have indices in \[0, 5\) or ignore_index -2, got -1"),
    (dict(alpha=0.5, labels=torch.tensor([0, 4, 1]), num_classes=4), ValueError,
     r"labels must have indices in \[0, 4\) or ignore_index -100, got 4"),
    (dict(alpha=0.5, labels=zeros(ROWS).long(), ignore_index=0.5), TypeError, "ignore_index must be"),
    (dict(alpha=0.5, labels=zeros(2).long()), ValueError, "labels must"),
    (dict(chunk_rows=0), ValueError, "chunk_rows must be"),
    (dict(logits_dtype=torch.float16), ValueError, "logits_dtype must be"),
], ids=str)
def test_a_teacher_of_heads(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: .*{message}"):
        of_heads(**options)


def test_what_requires_grad_is_allowed_where_no_gradient_is_computed():
    options = dict(teacher_input=learned(ROWS, OF_TEACHER), teacher_weight=learned(CLASSES, OF_TEACHER),
                   teacher_bias=learned(CLASSES))
    with torch.no_grad():
        of_logits(teacher_logits=learned(ROWS, CLASSES))
        of_heads(**options)


def test_a_label_that_is_no_class_is_allowed_in_an_ignored_row():
    mask = torch.tensor([True, False, True])
    loss = of_heads(alpha=0.5, labels=torch.tensor([0, 99, 1]), row_mask=mask)
    torch.testing.assert_close(loss, torch.tensor(0.5 * math.log(CLASSES)))


# ------------------------------------------------------------------------------------------------------------ raw calls


def raw(**options):
    arguments = {**dict(logits=zeros(ROWS, CLASSES), teacher=zeros(ROWS, CLASSES)), **options}
    return ops.dense_divergence(arguments.pop("logits"), arguments.pop("teacher"), **arguments)


@pytest.mark.parametrize("options, message", [
    (dict(teacher=zeros(ROWS, 6)), r"teacher must have the classes of logits, 5, got \[3, 6\]"),
    (dict(teacher=zeros(ROWS, 3), num_classes=4), r"teacher must have the classes of logits, 4, got \[3, 3\]"),
    (dict(logits=zeros(ROWS, 0), teacher=zeros(ROWS, 0)), r"logits must have at least one class, got \[3, 0\]"),
    (dict(num_classes=6), r"num_classes must be in \[1, 5\] \(the columns of logits\), got 6"),
    (dict(num_classes=0), r"num_classes must be in \[1, 5\]"),
    (dict(first_class=0), "num_classes must be the number of classes of all shards if first_class is given"),
    (dict(first_class=-1, num_classes=9), "first_class must be in"),
    (dict(kind=9), r"kind must be in \[0, 8\], got 9"),
    (dict(kind=-1), r"kind must be in \[0, 8\], got -1"),
    (dict(beta=0.0), "beta must be between 0 and 1, got 0"),
    (dict(beta=math.nan), "beta must be between 0 and 1, got nan"),
    (dict(softcap=-1.0), "softcap must be"),
    (dict(teacher_logit_scale=math.nan), "logit_scale must be"),
    (dict(labels=torch.tensor([0, 5, -1])), r"labels must be in \[0, 5\) or negative, got 5 in row 1"),
], ids=str)
def test_raw_arguments(options, message):
    with pytest.raises(RuntimeError, match=message):
        raw(**options)


def test_what_may_not_be_overwritten():
    grad, memory = zeros(2, ROWS), zeros(ROWS, 2 * CLASSES)
    stats, sums = torch.ones(ROWS, 5), zeros(4, ROWS)

    def overwrite(logits, teacher, **options):
        of = {**dict(grad=grad, stats=stats, sums=sums), **options}
        ops.dense_divergence_with_gradient_(of["grad"], logits, teacher)
        ops.dense_divergence_backward_(of["grad"], of["stats"], of["sums"], logits, teacher)

    teacher = zeros(ROWS, CLASSES)
    overwrite(memory[:, :CLASSES], memory[:, CLASSES:].clone())
    with pytest.raises(RuntimeError, match="logits must have column stride 1 to be overwritten, got 2"):
        overwrite(memory[:, ::2], teacher)
    with pytest.raises(RuntimeError, match="logits must have non-overlapping rows to be overwritten, got row stride 0"):
        overwrite(zeros(1, CLASSES).expand(ROWS, -1), teacher)
    logits = zeros(ROWS, CLASSES)
    with pytest.raises(RuntimeError, match="teacher"):
        overwrite(logits, logits)
    whole = zeros(40)
    for name, *shape in (("grad", 2, 3), ("stats", 3, 5), ("sums", 4, 3)):
        view = whole[:math.prod(shape)].view(shape)
        with pytest.raises(RuntimeError, match=name):
            overwrite(whole[5:20].view(3, 5), teacher, **{name: view})


def test_a_teacher_computed_in_inference_mode_is_named():
    with torch.inference_mode():
        logits, hidden, weight = zeros(ROWS, CLASSES), zeros(ROWS, OF_TEACHER), zeros(CLASSES, OF_TEACHER)
    head = learned(ROWS, WIDTH), zeros(CLASSES, WIDTH)
    with pytest.raises(RuntimeError, match="teacher must not be an inference tensor"):
        distillation_loss(learned(ROWS, CLASSES), logits)
    with pytest.raises(RuntimeError, match="teacher_input must not be an inference tensor"):
        linear_distillation_loss(*head, (hidden, zeros(CLASSES, OF_TEACHER)))
    with pytest.raises(RuntimeError, match="teacher_weight must not be an inference tensor"):
        linear_distillation_loss(*head, (zeros(ROWS, OF_TEACHER), weight))
    with torch.no_grad():
        assert distillation_loss(zeros(ROWS, CLASSES), logits) == 0


def test_a_scale_is_learned_elsewhere_without_gradients():
    with torch.no_grad():
        assert distillation_loss(zeros(ROWS, CLASSES), zeros(ROWS, CLASSES), logit_scale=learned()) == 0


def test_labels_that_are_no_classes_make_the_loss_nan_if_they_cannot_be_read(monkeypatch):
    monkeypatch.setattr(dense_inputs, "readable", lambda *args, **kwargs: False)
    source = of_head(zeros(ROWS, WIDTH), zeros(CLASSES, WIDTH), None, None, None, None, None, None)
    labels = dense_inputs.class_labels(torch.tensor([0, CLASSES + 2, -5]), source, -100)
    assert labels.tolist() == [0, CLASSES, CLASSES]
    share = dense_inputs.shares(source, None, labels, 0.5, 0.5, None, "sum", None)
    assert share[0].tolist() == [0.5] * ROWS and share[1].isnan().tolist() == [False, True, True]

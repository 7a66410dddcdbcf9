"""Tests the answers to calls with unknown or missing arguments: they name the function, the argument and the fix."""

import inspect
import os
import subprocess
import sys
import types

import pytest
import torch

import sparse_ce
from refusals import FORM, assert_refused
from sparse_ce import SparseTarget
from sparse_ce._core import guesses

X, HIDDEN, WEIGHT, LABELS = torch.zeros(4, 7), torch.zeros(4, 5), torch.zeros(7, 5), torch.tensor([1, 2, 3, 4])
PAIR = LABELS[:, None], torch.ones(4, 1)
HEAD = torch.nn.Linear(5, 7)
FUNCTIONS = [f for f in (getattr(sparse_ce, name) for name in sparse_ce.functional.__all__) if inspect.isfunction(f)]
MODULES = [getattr(sparse_ce, name) for name in sparse_ce.modules.__all__]

GUESSES = {
    "cross_entropy": [
        ("temperature", "logit_scale=1 / temperature"), ("bias", "logits that contain the bias"),
        ("mask", "row_mask="), ("smoothing", "label_smoothing="),
        ("class_dim", "input.movedim(1, -1)"), ("dim", "input.movedim(1, -1)"), ("size_average", "reduction='mean'"),
        ("reduce", "reduction='none'"), ("labels", "target="), ("targets", "target="), ("logits", "input="),
        ("student_logits", "input="), ("weights", "weight="), ("head", "linear_"), ("chunk_size", "all logits exist"),
        ("num_chunks", "all logits exist"), ("return_z_loss", "return_lse=True"), ("lse_square_scale", "z_loss="),
        ("shift", "shift(1)"), ("softcapping", "softcap="), ("ignore_idx", "ignore_index="),
        ("num_items_in_batch", "normalizer="), ("sample_weight", "row_weight="), ("label_smothing", "label_smoothing="),
        ("epsilon", "label_smoothing="), ("values", "(indices, values) as target"),
        ("log_target", "values_are='log_probs'"), ("nothing_like_it", "its arguments are input, target, weight,")],
    "linear_cross_entropy": [
        ("bias", "linear_bias=bias"), ("head", "linear_weight=head.weight, linear_bias=head.bias"),
        ("lm_head_weight", "linear_weight="), ("chunk_size", "chunk_rows="), ("chunk_classes", "chunks of rows"),
        ("num_chunks", "chunk_rows=rows // num_chunks"), ("hidden_states", "input=")],
    "linear_binary_cross_entropy": [("chunk_rows", "blocks of classes"), ("pos_weights", "pos_weight=")],
    "selected_log_probs": [("target", "indices="), ("row_mask", "labels of ignore_index"), ("ids", "indices="),
                           ("return_lse", "lse is always a field")],
    "candidate_logits": [("temperature", "logit_scale=1 / temperature"), ("head", "linear_weight=head.weight")],
    "masked_mean": [("axis", "dim=")],
    "linear_distillation_loss": [("teacher_weight", "teacher=(teacher_hidden, teacher_weight)")],
    "distillation_loss": [("log_target", "values_are='log_probs'"), ("target", "teacher="), ("tau", "temperature=")],
    "SparseCrossEntropyLoss": [
        ("smoothing", "label_smoothing="), ("row_weight", "in the call of the module"), ("size_average", "reduction="),
        ("temperature", "logit_scale=1 / temperature")],
}


def refused(call, of, *words):
    with pytest.raises(TypeError) as caught:
        call()
    message = str(caught.value)
    assert FORM.search(message) and message.startswith("sparse_ce: arguments must be "), message
    for word in (of, *words):
        assert word in message, f"{word!r} is not in: {message}"


@pytest.mark.parametrize("of,name,fix", [(of, *guess) for of, guesses in GUESSES.items() for guess in guesses])
def test_a_guess_is_answered_with_the_fix(of, name, fix):
    refused(lambda: getattr(sparse_ce, of)(**{name: 3}), of, f"got {name}=3", fix)


@pytest.mark.parametrize("of", [*FUNCTIONS, *MODULES], ids=lambda of: of.__name__)
def test_everything_answers_unknown_arguments(of):
    refused(lambda: of(no_such_argument=3), of.__name__, "got no_such_argument=3", "its arguments are ")
    if of in FUNCTIONS:
        refused(lambda: of(), f"{of.__name__}(", "missing")
    assert "no_such_argument" not in str(inspect.signature(of)) and "args" not in inspect.signature(of).parameters


def test_arguments_in_the_wrong_place_are_answered():
    refused(lambda: sparse_ce.cross_entropy(X, LABELS, None, 0.1), "cross_entropy(input, target, weight)",
            "too many positional arguments", "by name: ignore_index, reduction, label_smoothing")
    refused(lambda: sparse_ce.linear_cross_entropy(HIDDEN, LABELS), "(input, linear_weight, target)", "'target'")
    refused(lambda: sparse_ce.cross_entropy(X, LABELS, input=X), "multiple values for argument 'input'")
    loss = sparse_ce.SparseCrossEntropyLoss()
    refused(lambda: loss(X, LABELS, label_smoothing=0.1), "the call of SparseCrossEntropyLoss",
            "label_smoothing to SparseCrossEntropyLoss(...)")
    refused(lambda: loss(X, labels=LABELS), "the call of SparseCrossEntropyLoss", "target=")
    refused(lambda: loss(X), "cross_entropy(input, target", "'target'")
    refused(lambda: sparse_ce.LinearSparseCrossEntropyLoss(HEAD), "LinearSparseCrossEntropyLoss", "by name: weight")


OUTPUT, PAIRS = types.SimpleNamespace(logits=X), LABELS.view(2, 2)
ORDER = "the order is input, linear_weight, "
MISPLACED = {  # description: (the call, what the message must contain)
    "a head": (lambda: sparse_ce.linear_cross_entropy(HIDDEN, HEAD, LABELS),
               "linear_weight=head.weight, linear_bias=head.bias"),
    "a binary head": (lambda: sparse_ce.linear_binary_cross_entropy(HIDDEN, HEAD, LABELS), "linear_weight=head.weight"),
    "a head of candidates": (lambda: sparse_ce.candidate_logits(HIDDEN, HEAD, LABELS), "linear_weight=head.weight"),
    "a head in a module": (lambda: sparse_ce.LinearSparseCrossEntropyLoss()(HIDDEN, HEAD, LABELS),
                           "linear_weight=head.weight"),
    "a head as bias": (lambda: sparse_ce.linear_cross_entropy(HIDDEN, WEIGHT, LABELS, linear_bias=HEAD),
                       "linear_bias=head.bias"),
    "the weight last": (lambda: sparse_ce.linear_cross_entropy(HIDDEN, LABELS, WEIGHT), "linear_weight", ORDER),
    "the weight first": (lambda: sparse_ce.linear_cross_entropy(WEIGHT, HIDDEN, LABELS), ORDER + "target"),
    "a transposed weight": (lambda: sparse_ce.linear_cross_entropy(HIDDEN, WEIGHT.T, LABELS), "linear_weight.T"),
    "labels first": (lambda: sparse_ce.cross_entropy(LABELS, X), "class indices as target"),
    "transposed logits": (lambda: sparse_ce.cross_entropy(X.T, LABELS), "input.T"),
    "classes second": (lambda: sparse_ce.cross_entropy(torch.zeros(2, 7, 3), LABELS[:3].expand(2, 3)), "movedim(1,"),
    "flat logits": (lambda: sparse_ce.cross_entropy(X, LABELS.view(2, 2)), "[2, 2]", "target.reshape(4)"),
    "flat labels": (lambda: sparse_ce.cross_entropy(X.view(2, 2, 7), LABELS), "[4]", "target.reshape(2, 2)"),
    "shifted labels": (lambda: sparse_ce.cross_entropy(X.view(2, 2, 7), LABELS.view(2, 2)[:, 1:]),
                       "input[..., :-1, :]"),
    "the output of a model": (lambda: sparse_ce.cross_entropy(OUTPUT, LABELS), "input.logits"),
    "logits of NumPy": (lambda: sparse_ce.cross_entropy(X.numpy(), LABELS), "torch.as_tensor(input)"),
    "class weights in a list": (lambda: sparse_ce.cross_entropy(X, LABELS, [1.0] * 7), "torch.as_tensor(weight)"),
    "integer weights of rows": (lambda: sparse_ce.cross_entropy(X, LABELS, row_weight=LABELS), "row_weight.float()"),
    "weights of rows in a list": (lambda: sparse_ce.cross_entropy(X, LABELS, row_weight=[1.0] * 4),
                                  "torch.tensor(row_weight)"),
    "an integer mask": (lambda: sparse_ce.binary_cross_entropy_with_logits(X, LABELS, row_mask=LABELS),
                        "row_mask.bool()"),
    "shared ids": (lambda: sparse_ce.candidate_logits(HIDDEN, WEIGHT, LABELS[:2]), "indices.expand(4, -1)"),
    "weights that all rows share": (lambda: sparse_ce.cross_entropy(X, (LABELS.view(2, 2), torch.tensor([0.3, 0.7]))),
                                    "values.expand(2, 2)"),
    "flat weights of rows": (lambda: sparse_ce.cross_entropy(X.view(2, 2, 7), PAIRS, row_weight=torch.ones(4)),
                             "row_weight.reshape(2, 2)"),
    "the weight of a module first": (lambda: sparse_ce.linear_cross_entropy(WEIGHT, HIDDEN, LABELS, linear_bias=X[0]),
                                     "linear_bias", "the order is input, linear_weight"),
    "a normalizer of a sum": (lambda: sparse_ce.cross_entropy(X, LABELS, reduction="sum", normalizer=4),
                              "a mean is the sum divided by it"),
    "batchmean": (lambda: sparse_ce.cross_entropy(X, LABELS, reduction="batchmean"), "pass 'mean'"),
    "inplace": (lambda: sparse_ce.cross_entropy(X, LABELS, inplace=True), "pass 'backward'"),
    "batch_mean": (lambda: sparse_ce.cross_entropy(X, LABELS, reduction="batch_mean"), "pass 'mean'"),
    "batch_mean of classes": (lambda: sparse_ce.binary_cross_entropy_with_logits(X, PAIR, reduction="batch_mean"),
                              "pass 'batchmean'"),
    "cross entropy as a kind": (lambda: sparse_ce.divergence(X, PAIR, kind="ce"), "call sparse_ce.cross_entropy"),
    "TRL's end of beta": (lambda: sparse_ce.distillation_loss(X, X, kind="jsd", beta=0.0), "0 is kind='forward_kl'"),
    "labels of another order": (lambda: sparse_ce.cross_entropy(X.view(1, 4, 7), LABELS[:, None].long().view(4, 1)),
                                "target.transpose(0, 1)"),
    "a head as two arguments": (lambda: sparse_ce.linear_distillation_loss(HIDDEN, WEIGHT, HIDDEN, WEIGHT), "labels",
                                "teacher=(hidden, weight)"),
    "the hidden states of a teacher": (lambda: sparse_ce.linear_distillation_loss(HIDDEN, WEIGHT, HIDDEN),
                                       "(hidden, weight)"),
    "a head as logits": (lambda: sparse_ce.distillation_loss((HIDDEN, WEIGHT), X), "the same name with linear_"),
    "offsets before values": (lambda: SparseTarget.from_jagged(LABELS, torch.tensor([0, 4]), torch.ones(4)),
                              "the order is indices, values, offsets"),
    "lists of different lengths": (lambda: sparse_ce.cross_entropy(X[:2], ([[1], [2, 3]], [[1.0], [0.5, 0.5]])),
                                   "SparseTarget.from_lists(rows, values)"),
    "a dict for each row": (lambda: sparse_ce.cross_entropy(X[:2], [{1: 1.0}, {2: 0.5}]), "SparseTarget.from_lists("),
    "a temperature of a cache": (lambda: sparse_ce.distillation_loss(X, PAIR, temperature=2.0),
                                 "pass logit_scale=1 / temperature instead"),
}


@pytest.mark.parametrize("kind", MISPLACED)
def test_a_misplaced_argument_is_answered_with_the_fix(kind):
    call, *words = MISPLACED[kind]
    assert_refused(call, *words)


def test_constructors_of_targets_answer_unknown_arguments():
    refused(lambda: SparseTarget.from_topk(*PAIR, vocab_size=7), "SparseTarget.from_topk", "num_classes=")
    refused(lambda: SparseTarget.from_topk(LABELS[:, None], logprobs=X), "values, values_are='log_probs'")
    refused(lambda: SparseTarget.from_topk(*PAIR, kind="logprobs"), "values_are=")
    refused(lambda: SparseTarget.from_jagged(LABELS, None, lengths=LABELS), "SparseTarget.from_jagged", "offsets=")
    refused(lambda: SparseTarget.from_lists(), "SparseTarget.from_lists(rows, values)")


def test_other_errors_of_types_are_unchanged():
    with pytest.raises(TypeError, match="input must be float16") as caught:
        sparse_ce.cross_entropy(X.long(), LABELS)
    assert caught.value.__cause__ is None

    def fn(q, rows):
        raise TypeError("an error of the caller's function")

    with pytest.raises(TypeError, match="an error of the caller's function"):
        sparse_ce.linear_row_loss(fn, HIDDEN, WEIGHT, LABELS)


def test_the_table_names_parameters_that_exist():
    parameters = {name for f in (*FUNCTIONS, SparseTarget.from_jagged) for name in inspect.signature(f).parameters}
    listed = {*guesses._NAMES, *(parameter for fixes in guesses._FIXES.values() for parameter, _ in fixes)}
    assert listed <= parameters


def test_compiled_calls_are_unchanged():
    def call(x, labels):
        return sparse_ce.cross_entropy(x, labels, label_smoothing=0.1)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(X, LABELS), call(X, LABELS))


def test_ranks_that_compare_their_arguments_answer_too(tmp_path):
    code = "import torch, sparse_ce; sparse_ce.cross_entropy(torch.zeros(2, 3), torch.zeros(2).long(), smoothing=0.1)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                         env={**os.environ, "SPARSE_CE_VALIDATE": "1"})
    assert "arguments must be those of cross_entropy, got smoothing=0.1; pass label_smoothing=" in run.stderr

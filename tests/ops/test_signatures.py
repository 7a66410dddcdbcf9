"""Compares the signatures of all functions: an argument has one default, one type and one place in the order."""

import collections
import inspect

import pytest

import sparse_ce

FUNCTIONS = {name: f for name in sparse_ce.__all__ if inspect.isfunction(f := getattr(sparse_ce, name))}
MODULES = {"SparseCrossEntropyLoss": "cross_entropy", "LinearSparseCrossEntropyLoss": "linear_cross_entropy",
           "SparseBCEWithLogitsLoss": "binary_cross_entropy_with_logits",
           "LinearSparseBCEWithLogitsLoss": "linear_binary_cross_entropy", "DistillationLoss": "distillation_loss",
           "LinearDistillationLoss": "linear_distillation_loss", "MaskedMean": "masked_mean"}
NAMES = {*"""input student k dim keepdim mask offsets index num_segments fn row_args has_aux
    target indices teacher labels linear_weight linear_bias weight pos_weight
    kind alpha beta tail floor teacher_log_tail temperature temperature_squared teacher_logit_scale teacher_softcap
    ignore_index reduction label_smoothing z_loss logit_scale logit_bias softcap gamma clip
    normalizer row_mask row_weight num_classes padding_value inplace sparse_grad group vocab_start samples
    return_lse return_log_tail return_entropy return_mean_logit return_argmax return_collision return_rank
    return_forward_kl return_reverse_kl return_jsd return_tv logits_dtype chunk_rows chunk_classes""".split()}
# Functions whose argument differs from that of the others, and why.
REASONS = {
    "target": {"linear_row_loss": "a row loss has a query, whose log-probabilities it receives, and no smoothing"},
    "weight": {"linear_cross_entropy": "it is positional in F.cross_entropy, and could be taken for linear_weight here",
               "linear_binary_cross_entropy": "as linear_cross_entropy"},
    "reduction": {"binary_cross_entropy_with_logits": "its mean divides by rows and classes, batchmean by rows alone",
                  "linear_binary_cross_entropy": "as binary_cross_entropy_with_logits"},
    "logit_scale": {"candidate_logits": "the scale of sampled logits has no gradient"},
    "linear_weight": {"candidate_logits": "it reads single rows of the weight, which blocks do not have"},
    "return_entropy": {"cross_entropy": "an entropy beside a loss may be detached, which saves its gradient",
                       "linear_cross_entropy": "as cross_entropy"},
    "teacher": {"linear_row_loss": "a teacher is optional there, and only a head has divergences in chunks",
                "divergence": "log-probabilities of a few classes have no dense teacher"},
    "dim": {"masked_mean": "as in torch.mean, it is optional; torch.sparse.log_softmax requires it"},
}


def kinds(values):
    """Returns the functions of each value, the most frequent value first."""
    found = collections.defaultdict(list)
    for function, value in values.items():
        found[value].append(function)
    return sorted(found.values(), key=len, reverse=True)


def differences():
    """Yields the argument, and the functions that differ from most, of each argument with several forms."""
    arguments = collections.defaultdict(dict)
    for name, function in FUNCTIONS.items():
        for p in inspect.signature(function).parameters.values():
            arguments[p.name][name] = (repr(p.default), str(p.annotation), p.kind)
    for argument, forms in arguments.items():
        yield from ((argument, function) for others in kinds(forms)[1:] for function in others)


def test_a_thing_has_one_name():
    """Checks the names of all arguments. A new one must not be a second name of a thing in the list."""
    assert {name for f in FUNCTIONS.values() for name in inspect.signature(f).parameters} == NAMES


def test_an_argument_has_one_default_and_one_type():
    found = {(argument, function) for argument, function in differences()}
    expected = {(argument, function) for argument, functions in REASONS.items() for function in functions}
    assert found == expected


def test_arguments_have_one_order():
    before = collections.defaultdict(set)
    for name, function in FUNCTIONS.items():
        names = [p.name for p in inspect.signature(function).parameters.values()]
        for at, first in enumerate(names):
            for second in names[at + 1:]:
                before[first, second].add(name)
    wrong = {pair for pair in before if pair[::-1] in before}
    assert wrong == {("linear_bias", "teacher"), ("teacher", "linear_bias")}  # the teacher of a row loss is optional


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_the_options_of_its_function(module):
    """Checks that what is not an option is an argument of ``forward``, and the order of tensors."""
    cls, function = getattr(sparse_ce, module), inspect.signature(FUNCTIONS[MODULES[module]]).parameters
    options, call = (inspect.signature(f).parameters for f in (cls, cls.forward))
    assert set(function) <= {*options, *call}
    for name, p in options.items():
        assert p.default == function[name].default and p.annotation == function[name].annotation, name
        assert p.kind == p.KEYWORD_ONLY or name == "weight" or module == "MaskedMean"
    positional = [name for name, p in call.items() if p.kind == p.POSITIONAL_OR_KEYWORD and name != "self"]
    assert positional == [name for name in function if name in positional]


def test_every_module_is_compared():
    assert set(MODULES) == {name for name in sparse_ce.modules.__all__}

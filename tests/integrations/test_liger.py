"""Tests ``install`` for Liger: its results against Liger's formulas in float64, and the places that it replaces."""

import functools
import inspect
import sys
from types import ModuleType

import pytest
import torch

import liger_client
import sparse_ce
from cases import sparsely
from sparse_ce.integrations import liger

FUNCTION = "liger_fused_linear_cross_entropy"
ALL = dict(lse_square_scale=1e-2, label_smoothing=0.1, softcap=3.0)
OPTIONS = {
    "plain": {}, "all": dict(ALL, ce_weight=True, ignore_index=2, accum_dtype=torch.float32),
    "weights": dict(ce_weight=True),
    "z-loss": dict(lse_square_scale=0.1), "index": dict(ignore_index=-1), "scaled": dict(use_token_scaling=True),
    "all, scaled": dict(ALL, ce_weight=True, use_token_scaling=True, chunk_mem_const=2),
}
RETURNS = "return_z_loss", "return_token_accuracy", "return_predicted_tokens"


@pytest.fixture(scope="module")
def functional():
    with liger_client.liger() as module:
        yield module


@pytest.fixture
def loss(functional):
    """Returns a function that calls Liger's function while it is replaced."""
    with liger.install():
        yield getattr(functional, FUNCTION)


def problem(n=63, d=11, v=41, dtype=torch.float32, bias=True, ignore_index=-100, ce_weight=False, **options):
    torch.manual_seed(n)
    hidden, head = torch.randn(n, d).to(dtype).requires_grad_(), torch.randn(v, d).to(dtype).requires_grad_()
    target = torch.randint(v, (n,))
    target[::3] = ignore_index
    if ce_weight:
        options["ce_weight"] = torch.rand(v)
    return dict(input=hidden, weight=head, target=target, ignore_index=ignore_index, **options,
                bias=torch.randn(v).to(dtype).requires_grad_() if bias else None)


def leaves(args):
    return [args[name] for name in ("input", "weight", "bias") if args[name] is not None]


def expected(input, weight, target, bias, ignore_index, ce_weight=None, lse_square_scale=0.0, label_smoothing=0.0,
             softcap=None, use_token_scaling=False, reduction="mean", **_):
    """Returns the fields of Liger's output, in float64. The rows are those that are not ignored."""
    logits = input.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    active = target.ne(ignore_index)
    z, y = logits[active], target[active, None]
    of_classes = torch.ones(z.shape[1]).double() if ce_weight is None else ce_weight.double()
    lost = z.logsumexp(1, keepdim=True) - z
    losses = (1 - label_smoothing) * (of_classes * lost).gather(1, y) + label_smoothing * (
        of_classes * lost).mean(1, keepdim=True)
    z_losses = lse_square_scale * z.logsumexp(1, keepdim=True) ** 2
    if reduction == "mean":
        losses, z_losses = losses / of_classes[y].sum(), z_losses / len(z)
    losses = losses + z_losses
    if use_token_scaling:
        scale = lost.gather(1, y).neg().exp().detach()
        losses, z_losses = losses * scale, z_losses * scale
    right = z.argmax(1, keepdim=True).eq(y).double()
    rows = [torch.zeros(len(target)).double().masked_scatter(active, t) for t in (losses, z_losses, right)]
    if reduction != "none":
        rows = [rows[0].sum(), rows[1].sum(), rows[2].sum() / len(z)]
    return [*rows, logits.argmax(1).where(active, -1)]


@pytest.mark.parametrize("dtype, reduction, options, bias", sparsely(
    2, [torch.float32, torch.bfloat16], ["mean", "sum", "none"], OPTIONS, [True, False]))
@pytest.mark.parametrize("shape", [(63, 11, 41), (4, 8, 8)])
def test_values_and_gradients_are_those_of_its_formulas(shape, dtype, reduction, options, bias, loss, functional):
    args = problem(*shape, dtype, bias, reduction=reduction, **OPTIONS[options])
    out = loss(**args, **dict.fromkeys(RETURNS, True))
    assert isinstance(out, functional.CrossEntropyOutput)
    fields = out.loss, out.z_loss, out.token_accuracy, out.predicted_tokens
    assert [t.dtype for t in fields] == [torch.float32, dtype, torch.float32, torch.int64]
    assert not any(t.requires_grad for t in fields[1:])
    dense = expected(**args)
    close = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for got, wanted in zip(fields[:2] if dtype == torch.bfloat16 else fields, dense):
        torch.testing.assert_close(got.double(), wanted.double(), **close)
    grad_output = torch.rand_like(out.loss)
    got, wanted = (torch.autograd.grad(t, leaves(args), grad_output.to(t.dtype)) for t in (out.loss, dense[0]))
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs, rtol=close["rtol"], atol=close["rtol"] * theirs.abs().max().item())
    alone = loss(**args)
    torch.testing.assert_close(alone, out.loss)


@pytest.mark.parametrize("requested", RETURNS)
def test_only_the_requested_outputs_are_there(requested, loss):
    out = loss(**problem(), **{requested: True})
    assert [name for name in ("z_loss", "token_accuracy", "predicted_tokens") if getattr(out, name) is not None] == [
        requested.removeprefix("return_")]


@pytest.mark.parametrize("options", OPTIONS)
def test_its_module_has_the_results_of_the_function(options, functional):
    args = problem(**OPTIONS[options])
    stored = {name: value for name, value in args.items() if name not in ("input", "weight", "target", "bias")}
    stored.pop("chunk_mem_const", None)
    module = sys.modules["liger_kernel.transformers.fused_linear_cross_entropy"].LigerFusedLinearCrossEntropyLoss(
        **stored, return_z_loss=True, return_predicted_tokens=True)
    with liger.install():
        out = module(args["weight"], args["input"], args["target"], args["bias"])
    dense = expected(**args)
    torch.testing.assert_close([out.loss.double(), out.z_loss.double()], dense[:2])
    assert out.predicted_tokens.equal(dense[3]) and out.token_accuracy is None


def test_a_loss_without_active_rows_is_zero(loss):
    args = problem(**OPTIONS["all"])
    out = loss(**{**args, "target": torch.full_like(args["target"], 2)}, return_z_loss=True)
    out.loss.backward()
    assert out.loss == 0 and not args["weight"].grad.any()


@pytest.mark.parametrize("dtype, wider", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_bias_may_have_another_dtype(dtype, wider, loss):
    args = {**problem(dtype=dtype), "bias": torch.randn(41, dtype=wider, requires_grad=True)}
    out, dense = loss(**args), expected(**args)[0]
    torch.testing.assert_close(out.double(), dense, rtol=1e-2, atol=0)
    out.backward()
    assert args["bias"].grad.dtype == wider


def test_class_weights_may_require_grad(loss):
    args = problem(**OPTIONS["weights"])
    args["ce_weight"].requires_grad_()
    loss(**args).backward()
    assert args["ce_weight"].grad is None


@pytest.mark.parametrize("unsupported", [
    dict(label_smoothing=1.5), dict(label_smoothing=-0.5), dict(lse_square_scale=-1e-4), dict(softcap=-30.0),
    dict(softcap=0.0), dict(reduction="batchmean"), dict(option_of_a_newer_release=1), dict(input=True)], ids=str)
def test_it_leaves_to_liger_what_the_kernels_lack(unsupported, functional, monkeypatch):
    calls = []

    @functools.wraps(getattr(functional, FUNCTION))
    def original(*args, **kwargs):
        calls.append((args, kwargs))
        return "Liger's"

    monkeypatch.setattr(functional, FUNCTION, original)
    if "input" in unsupported:
        unsupported = {"input": torch.empty(63, 11, device="meta")}
    args = {**problem(), **unsupported}
    with liger.install():
        assert getattr(functional, FUNCTION)(args.pop("input"), **args) == "Liger's"
    (positional, keywords), = calls
    assert len(positional) == 1 and keywords.keys() == args.keys()


@pytest.mark.parametrize("options", [{}, dict(ALL, ce_weight=True)], ids=["plain", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_target_may_be_sparse(options, reduction, loss):
    args = problem(reduction=reduction, **options)
    indices, values = torch.randint(41, (63, 3)), torch.rand(63, 3)
    target = sparse_ce.SparseTarget(indices, values)
    out = loss(**{**args, "target": target})
    weight = args.get("ce_weight")
    torch.testing.assert_close(out, sparse_ce.linear_cross_entropy(
        args["input"], args["weight"], target, linear_bias=args["bias"], weight=weight, reduction=reduction,
        z_loss=options.get("lse_square_scale", 0.0), label_smoothing=options.get("label_smoothing", 0.0),
        softcap=options.get("softcap")))
    returned = loss(**{**args, "target": (indices, values)}, return_z_loss=True)
    torch.testing.assert_close(returned.loss, out)
    for option in ("use_token_scaling", "return_token_accuracy"):
        with pytest.raises(TypeError, match="sparse_ce: target must be class indices for use_token_scaling"):
            loss(**{**args, "target": target}, **{option: True})


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("items", [None, torch.tensor(7)])
def test_models_reach_it(shifted, soft, items, functional):
    args = problem(24)
    tokens = args["target"].reshape(2, 12)
    labels = sparse_ce.SparseTarget.from_index(tokens) if soft else tokens
    compared = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].flatten()
    given = dict(labels=labels)
    if shifted:
        given["shift_labels"] = labels
        compared = tokens.flatten()
    utils = sys.modules.get("liger_kernel.transformers.model.loss_utils")
    with liger.install():
        hidden = torch.nn.functional.pad(args["input"].view(2, 12, 11), (0, 0, 1, 0))[:, 1:]  # as of logits_to_keep
        loss = utils.LigerForCausalLMLoss(hidden_states=hidden, lm_head_weight=args["weight"], hidden_size=11,
                                          num_items_in_batch=items, **given)
    dense = expected(args["input"], args["weight"], compared, None, -100, reduction="sum")[0]
    torch.testing.assert_close(loss.double(), dense / (compared.ne(-100).sum() if items is None else items))


@pytest.mark.skipif(not liger_client.there(), reason="Liger is in .venv/liger")
@pytest.mark.parametrize("form", ["labels", "topk"])
@pytest.mark.works("liger", "one process", "accumulation")
def test_its_flag_trains_in_the_steps_of_dense_losses(form, functional, tmp_path, monkeypatch):
    from transformers.integrations import liger as flag

    import tiny_lm
    monkeypatch.setattr(flag, "is_liger_kernel_available", lambda: True)
    options = dict(max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    own = None
    if form != "labels":
        from sparse_ce.integrations.transformers import causal_lm_loss
        own = causal_lm_loss()
    trained = []
    for flagged in (False, True):
        changes = dict(use_liger_kernel=True, liger_kernel_config=dict(rope=False, rms_norm=False, swiglu=False))
        with liger.install():
            trainer = tiny_lm.make_trainer(tmp_path / str(flagged), tiny_lm.make_model(), tiny_lm.Samples(form),
                                           compute_loss_func=None if flagged else own,
                                           **options, **(changes if flagged else {}))
            trainer.train()
        assert ("liger" in trainer.model.forward.__module__) == flagged
        trained.append(tiny_lm.recorded(trainer))
    for theirs, ours in zip(*trained):
        for parameter in theirs:
            torch.testing.assert_close(ours[parameter], theirs[parameter], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", ["plain", "all", "all, scaled"])
def test_it_compiles_as_one_graph(options, functional):
    args = problem(**OPTIONS[options])
    with liger.install():
        step = torch.compile(lambda **args: getattr(functional, FUNCTION)(**args), fullgraph=True, backend="aot_eager")
        loss = step(**args)
    torch.testing.assert_close(loss.double(), expected(**args)[0])
    torch.autograd.grad(loss, leaves(args))


def state(functional):
    module = sys.modules["liger_kernel.transformers.fused_linear_cross_entropy"].LigerFusedLinearCrossEntropyLoss
    utils = sys.modules["liger_kernel.transformers.model.loss_utils"]
    return getattr(functional, FUNCTION), module.forward, utils.LigerForCausalLMLoss


def test_its_handle_restores_every_place(functional, monkeypatch):
    before, early, late = state(functional), ModuleType("early"), ModuleType("late")
    for module in (early, late):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(early, FUNCTION, before[0])
    with liger.install() as first:
        during = state(functional)
        assert not set(before) & set(during) and vars(early)[FUNCTION] is during[0]
        assert inspect.signature(during[0]) == inspect.signature(before[0])
        setattr(late, FUNCTION, during[0])
        second = liger.install()
        assert state(functional) == during
        first.remove()
        assert state(functional) == during
        first.remove()
    assert state(functional) == during
    second.remove()
    assert state(functional) == before and vars(early)[FUNCTION] is vars(late)[FUNCTION] is before[0]
    with liger.install():
        assert state(functional) != before
    assert state(functional) == before


def test_a_release_without_its_output_is_refused(functional, monkeypatch):
    monkeypatch.delattr(functional, "CrossEntropyOutput")
    before = state(functional)
    with pytest.raises(RuntimeError, match="sparse_ce: liger_kernel must have CrossEntropyOutput"):
        liger.install()
    assert state(functional) == before


@pytest.mark.skipif(not liger_client.there(), reason="Liger is in .venv/liger")
def test_the_stand_in_has_the_interface_of_liger(functional):
    module = sys.modules["liger_kernel.transformers.fused_linear_cross_entropy"].LigerFusedLinearCrossEntropyLoss
    for theirs, ours in ((getattr(functional, FUNCTION), liger_client.liger_fused_linear_cross_entropy),
                         (functional.CrossEntropyOutput, liger_client.CrossEntropyOutput),
                         (module, liger_client.LigerFusedLinearCrossEntropyLoss),
                         (module.forward, liger_client.LigerFusedLinearCrossEntropyLoss.forward)):
        theirs, ours = ({name: p.default for name, p in inspect.signature(f).parameters.items()}
                        for f in (theirs, ours))
        assert theirs == ours

"""Tests output heads that torchao or bitsandbytes has quantized: the losses, and gradients of all that is trained,
equal those of the unfused model."""

import tiny_lm  # first: skips this module if transformers is missing

# isort: split
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_ce
from linear_cases import make_blocks_small
from quantization_clients import WAYS, quantized, required, to_4bit, to_int8, whole, with_plain_head
from sparse_ce import SparseTarget
from sparse_ce.integrations import quantization
from sparse_ce.integrations.heads import logits_of
from sparse_ce.integrations.quantization import weight_blocks
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
from tiny_lm import VOCAB, Samples, assert_gradients_close, collate, dense_labels, dense_loss, gradients, make_model


def defined(model, batch, items, dtype):
    """Returns loss and gradients by the model's own code, with its logits and dense labels, in ``dtype``."""
    model, labels = with_plain_head(model, dtype), dense_labels(batch["labels"])
    model.loss_function = lambda logits, labels, vocab_size, **_: dense_loss(logits, dense_labels(labels), items)
    loss = model(**batch).loss
    loss.backward()
    assert labels.any()
    return loss.detach(), gradients(model)


def batch_of(form="labels"):
    return collate(list(Samples(form)))


@pytest.mark.parametrize("form", ["labels", "topk"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma2, softcap", "phi, bias", "gpt2, tied"])
def test_loss_and_gradients_of_a_fused_head(name, way, form, monkeypatch):
    model, batch, items = quantized(make_model(name), way), batch_of(form), 13
    loss, exact = defined(model, batch, items, torch.float64)
    _, peer = defined(model, batch, items, torch.float32)
    make_blocks_small(monkeypatch, torch.empty(VOCAB, 16))
    handle = fuse_lm_head(model)
    output = model(**batch, num_items_in_batch=items)
    output.loss.backward()
    assert output.logits is None
    torch.testing.assert_close(output.loss.double(), loss, rtol=1e-5, atol=0)
    assert_gradients_close(gradients(model), peer, exact)
    handle.remove()
    assert model(**batch_of()).logits.shape[-1] == VOCAB


@pytest.mark.parametrize("way", ["torchao, int8", "torchao, integers", "torchao, float8"])
def test_the_loss_of_logits(way):
    model, batch = quantized(make_model(), way), batch_of()
    loss, exact = defined(model, batch, 13, torch.float64)
    _, peer = defined(model, batch, 13, torch.float32)
    labels = batch.pop("labels")
    ours = causal_lm_loss()(model(**batch), labels, num_items_in_batch=13)
    ours.backward()
    torch.testing.assert_close(ours.double(), loss, rtol=1e-5, atol=0)
    assert_gradients_close(gradients(model), peer, exact)


@pytest.mark.parametrize("way", ["torchao, int8", "bitsandbytes, nf4"])
def test_training_with_adapters_on_the_trunk(way, tmp_path):
    peft = pytest.importorskip("peft", minversion="0.21")
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = quantized(make_model(), way) if fused else with_plain_head(quantized(make_model(), way), torch.float32)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        if fused:
            fuse_lm_head(model, report_metrics=True)
        trainer = tiny_lm.make_trainer(tmp_path, model, Samples("labels"), learning_rate=0.1, max_steps=3,
                                       compute_loss_func=None if fused else causal_lm_loss())
        trainer.train()
        losses.append([step["loss"] for step in trainer.state.log_history if "loss" in step])
    assert losses[0] and losses[0][0] != losses[0][-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_metrics_weights_and_evaluation():
    model, batch = quantized(make_model()), {**batch_of(), "w": torch.rand(batch_of()["labels"].shape)}
    plain = with_plain_head(model, torch.float32)
    outputs = []
    for each in (model, plain):
        fuse_lm_head(each, report_metrics=True, row_weight="w", label_smoothing=0.1)
        outputs.append(each(**batch))
    for name in ("loss", "entropy", "token_accuracy", "num_items"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).logits, plain.eval()(**batch).logits, rtol=1e-4, atol=1e-4)


def test_a_compiled_model():
    model, batch = quantized(make_model()), batch_of()
    fuse_lm_head(model)
    expected = model(**batch).loss
    torch.testing.assert_close(torch.compile(model, backend="eager")(**batch).loss, expected)
    torch._dynamo.reset()


def test_the_top_k_of_a_teacher():
    teacher, batch = quantized(make_model()), batch_of()
    del batch["labels"]
    top = logits_of(teacher, batch).of_head(sparse_ce.linear_topk_log_probs, 3, 0.5)
    values, indices = (with_plain_head(teacher, torch.float32)(**batch).logits * 0.5).log_softmax(-1).topk(3)
    assert torch.equal(top.indices, indices)
    torch.testing.assert_close(top.values, values, rtol=1e-4, atol=1e-4)


def test_distillation_from_cached_candidates():
    model, batch = quantized(make_model()), batch_of("topk")
    plain = with_plain_head(model, torch.float32)
    for each in (model, plain):
        fuse_lm_head(each, distillation=dict(kind="forward_kl", tail="renormalize"))
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quantized_student", [False, True])
def test_distillation_from_all_classes_of_a_teacher(quantized_student, way, monkeypatch):
    teacher, batch = quantized(make_model("phi, bias", seed=1), way), batch_of()
    student = quantized(make_model(), way) if quantized_student else make_model()
    batch["teacher_hidden"] = torch.randn(*batch["labels"].shape, 16)
    make_blocks_small(monkeypatch, torch.empty(VOCAB, 16))
    results = []
    for plain in (False, True):
        model = with_plain_head(student, torch.float32) if plain and quantized_student else copy.deepcopy(student)
        head = (with_plain_head(teacher, torch.float32) if plain else teacher).get_output_embeddings()
        fuse_lm_head(model, distillation=dict(teacher_head=head, kind="jsd", alpha=0.7, temperature=1.5))
        loss = model(**batch).loss
        loss.backward()
        results.append([loss.detach(), *gradients(model).values()])
        if not quantized_student or "torchao" in way:  # bitsandbytes cannot pack this head for inference on a CPU
            with torch.no_grad():
                evaluated = model.eval()(**batch)
            assert evaluated.logits is not None
            results[-1].append(evaluated.loss)
    assert len(results[0]) == len(results[1]) > 10
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_a_head_outside_of_a_model(way, monkeypatch):
    head = quantized(make_model("phi, bias"), way).get_output_embeddings()
    weight, bias = weight_blocks(head), head.bias.detach()
    make_blocks_small(monkeypatch, whole(head.weight))
    assert tuple(weight.shape) == (VOCAB, 16) and weight.dtype == torch.float32
    for begin, end in ((0, VOCAB), (0, 1), (7, 23), (47, 48)):
        assert torch.equal(weight.block(begin, end), whole(head.weight)[begin:end])
    assert torch.equal(weight_blocks(head, torch.bfloat16).block(3, 5), whole(head.weight)[3:5].bfloat16())
    hidden, labels = torch.randn(9, 16, requires_grad=True), torch.randint(VOCAB, (9,))
    loss = sparse_ce.linear_cross_entropy(hidden, weight, labels, linear_bias=bias)
    logits = F.linear(hidden, whole(head.weight), bias)
    expected = F.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, hidden)[0] for each in (loss, expected)))
    top = sparse_ce.linear_topk_log_probs(hidden, weight, 3, linear_bias=bias)
    assert torch.equal(top.indices, logits.topk(3).indices)


@pytest.mark.parametrize("width, vocab", [(128, 515), (100, 77), (66, 101)])
@pytest.mark.parametrize("nested", [True, False])
def test_blocks_of_4_bits_do_not_depend_on_the_alignment_of_scales(nested, width, vocab):
    bitsandbytes = required("bitsandbytes")
    head = bitsandbytes.nn.Linear4bit(width, vocab, compress_statistics=nested, quant_type="fp4").to("cpu")
    weight, expected = weight_blocks(head.weight), whole(head.weight)
    for begin, end in ((0, vocab), (0, 16), (16, 48), (vocab - 3, vocab), (5, 6)):
        assert torch.equal(weight.block(begin, end), expected[begin:end])
    hidden, labels = torch.randn(4, width, requires_grad=True), torch.randint(vocab, (4,))
    losses = (sparse_ce.linear_cross_entropy(hidden, weight, labels, linear_bias=head.bias),
              F.cross_entropy(head(hidden), labels))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, hidden)[0] for loss in losses))


def test_a_compute_dtype_of_its_own():
    model, batch = to_4bit(make_model(), compute_dtype=torch.bfloat16), batch_of()
    plain = with_plain_head(model, torch.float32)
    expected = plain(**batch).loss
    fuse_lm_head(model)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    assert abs(loss - expected) > 1e-5 * expected  # the products are in bfloat16


# ------------------------------------------------------------------------------------------------------------- refusals

def test_heads_whose_inputs_are_quantized_too():
    model = to_int8(make_model(), "Int8DynamicActivationInt8WeightConfig")
    with pytest.raises(ValueError, match="head must be quantized in its weight only, got one with act_quant_kwargs"):
        fuse_lm_head(model)
    labels, batch = batch_of()["labels"], batch_of()
    assert causal_lm_loss()(model(**{**batch, "labels": None}), labels) > 0


def test_other_weights_of_torchao(monkeypatch):
    monkeypatch.setattr(quantization, "_OF_TORCHAO", ("Float8Tensor",))
    with pytest.raises(TypeError, match="head must have a torchao weight of type Float8Tensor, got Int8Tensor"):
        fuse_lm_head(quantized(make_model()))


@pytest.mark.parametrize("way", ["torchao, int8", "bitsandbytes, nf4"])
def test_adapters_on_a_quantized_head(way):
    peft = pytest.importorskip("peft", minversion="0.21")
    config = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(quantized(make_model(), way), config)
    with pytest.raises(TypeError, match="model must have a plain nn.Linear as its output head, got peft"):
        fuse_lm_head(model)


ROWS, LABELS = torch.ones(4, 16), torch.tensor([1, 2, -100, 3])
FUNCTIONS = {  # of a weight
    "linear_cross_entropy": lambda w: sparse_ce.linear_cross_entropy(ROWS, w, LABELS),
    "linear_selected_log_probs": lambda w: sparse_ce.linear_selected_log_probs(ROWS, w, LABELS),
    "linear_row_loss": lambda w: sparse_ce.linear_row_loss(lambda out, _: out.log_probs, ROWS, w, LABELS),
    "linear_distillation_loss": lambda w: sparse_ce.linear_distillation_loss(ROWS, w, LABELS),
    "linear_topk_log_probs": lambda w: sparse_ce.linear_topk_log_probs(ROWS, w, 2),
    "linear_topk_logits": lambda w: sparse_ce.linear_topk_logits(ROWS, w, 2),
    "linear_binary_cross_entropy": lambda w: sparse_ce.linear_binary_cross_entropy(ROWS, w, LABELS),
    "linear_dense_divergence": lambda w: sparse_ce.linear_distillation_loss(ROWS, w, (ROWS, torch.ones(VOCAB, 16))),
    "candidate_logits": lambda w: sparse_ce.candidate_logits(ROWS, w, LABELS),
    "teacher_weight": lambda w: sparse_ce.linear_distillation_loss(ROWS, torch.ones(VOCAB, 16), (ROWS, w)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("way", ["torchao, int8", "bitsandbytes, nf4"])
def test_functions_name_weight_blocks_if_they_get_a_quantized_weight(way, function):
    weight, name = quantized(make_model(), way).get_output_embeddings().weight, "linear_weight"
    if function == "teacher_weight":
        name = function
    fix = "a dequantized copy" if function == "candidate_logits" else (
        rf"sparse_ce.integrations.quantization.weight_blocks\({name}\)")
    with pytest.raises(TypeError, match=f"sparse_ce: {name} must be a plain tensor, got a quantized .*; pass {fix}$"):
        FUNCTIONS[function](weight)
    if function != "candidate_logits":
        assert FUNCTIONS[function](weight_blocks(weight)) is not None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_name_a_weight_that_zero_3_has_partitioned(function):
    weight = nn.Parameter(torch.empty(0), requires_grad=False)
    weight.ds_shape = torch.Size((VOCAB, 16))
    with pytest.raises(ValueError, match=rf"_weight must be gathered, got a parameter of shape \[{VOCAB}, 16\] that "
                       r"DeepSpeed ZeRO-3 has partitioned; .* deepspeed.zero.GatheredParameters\(\[.*_weight\]\)"):
        FUNCTIONS[function](weight)


def test_a_teacher_whose_inputs_are_quantized_too():
    dynamic = to_int8(make_model(), "Int8DynamicActivationInt8WeightConfig").lm_head
    with pytest.raises(ValueError, match="head must be quantized in its weight only"):
        fuse_lm_head(make_model(), distillation=dict(teacher_head=dynamic))


def test_what_is_not_a_quantized_head():
    with pytest.raises(TypeError, match="head must be quantized by torchao, or by bitsandbytes in 4 bits, got Param"):
        weight_blocks(nn.Linear(4, 5))
    bitsandbytes = required("bitsandbytes")
    with pytest.raises(ValueError, match="a weight that is not quantized yet; move it to its device"):
        weight_blocks(bitsandbytes.nn.Linear4bit(64, 8))
    head = bitsandbytes.nn.Linear4bit(64, 8).to("cpu")
    head.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="bitsandbytes packed for inference on a CPU; load the model again"):
        weight_blocks(head)


def test_a_soft_target_of_a_sparse_tensor():
    model, batch = quantized(make_model()), batch_of("coo")
    expected = with_plain_head(model, torch.float32)
    for each in (model, expected):
        fuse_lm_head(each)
    target = SparseTarget.from_dense(batch.pop("labels").to_dense())
    torch.testing.assert_close(*(each(**batch, labels=target).loss for each in (model, expected)))

"""Tests training steps of one process: accumulation, mixed precision, checkpointing, torch.compile, CUDA graphs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from cases import devices
from close import assert_close_to_float64
from loops import LENGTH, SEQUENCES, VOCAB, TinyLM, batch, gradients, reference_loss, reference_step
from sparse_ce import SparseTarget

HEADS = ["logits", "fused", "tied"]
FORMS = ["labels", "topk", "jagged"]


def counted(target: SparseTarget) -> int:
    return int(target.ne(-100).sum())


# ------------------------------------------------------------------------------------------------ the global normalizer


@pytest.mark.parametrize("padding", ["unequal", "half", "all"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.works("own", "one process", "accumulation")
def test_22_accumulated_gradients_are_those_of_the_whole_batch(head, form, padding, device):
    """Compares 1 x 8, 4 x 2 and 8 x 1 with unequal token counts (transformers#34191, #40799); 15: parts of padding
    alone."""
    exact_loss, exact = reference_step(head, form, padding, torch.float64)
    peer_loss, peer = reference_step(head, form, padding, torch.float32)
    tokens, target = (t.to(device) for t in batch(form, padding))
    for steps in (1, 4, 8):
        model, loss = TinyLM(head).to(device), 0.0
        rows = SEQUENCES // steps
        for begin in range(0, SEQUENCES, rows):
            part = model(tokens[begin:begin + rows], target[begin:begin + rows], counted(target))
            assert part.shape == ()
            part.backward()
            loss = loss + part.detach().cpu()
        assert_close_to_float64(loss, peer_loss, exact_loss)
        grads = gradients(model)
        assert sorted(grads) == sorted(exact)
        for name, grad in grads.items():
            assert_close_to_float64(grad, peer[name], exact[name])


NORMALIZERS = {
    "int": int, "float": float, "0-d": torch.tensor, "1": lambda n: torch.tensor([n]),
    "n_gpu": lambda n: torch.full((4,), n), "n_gpu-1": lambda n: torch.full((2, 1), n, dtype=torch.int32),
    "uint8": lambda n: torch.tensor(n, dtype=torch.uint8), "float64": lambda n: torch.tensor(n, dtype=torch.float64),
    "requires_grad": lambda n: torch.tensor(float(n), requires_grad=True),
}


@pytest.mark.parametrize("kind", NORMALIZERS)
@pytest.mark.parametrize("head", ["logits", "fused"])
def test_21_a_normalizer_of_any_type_leaves_a_scalar_that_may_be_scaled_in_place(head, kind, device):
    """Checks num_items_in_batch on the CPU with logits on any device; Trainers run ``loss *= n`` (unsloth#2435)."""
    tokens, target = (t.to(device) for t in batch())
    for number in (counted(target), 0):
        normalizer = NORMALIZERS[kind](number)
        model, other = TinyLM(head).double().to(device), TinyLM(head).double().to(device)
        loss = model(tokens, target, normalizer)
        assert loss.shape == ()
        loss *= 2
        loss.backward()
        expected = 2 * reference_loss(other, tokens, target, number)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(model), gradients(other))


# ------------------------------------------------------------------------------------------------------ mixed precision


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.works("own", "bfloat16")
def test_autocast_with_and_without_a_scaler(head, form, half, device):
    """Runs three steps, so that later ones expect a ``grad_output``, which the scaler then changes."""
    tokens, target = (t.to(device) for t in batch(form))
    models = [TinyLM(head).to(device) for _ in range(2)]
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2, enabled=half == torch.float16)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.0)
    exact_loss, exact = reference_step(head, form, "unequal", torch.float64)
    for _ in range(4):
        optimizer.zero_grad()
        models[1].zero_grad()
        with torch.autocast(device, half):
            loss = models[0](tokens, target, counted(target))
            peer = reference_loss(models[1], tokens, target, counted(target))
        assert loss.dtype == torch.float32
        scaler.scale(loss).backward()
        (1024.0 * peer).backward()
        scaler.unscale_(optimizer)
        assert_close_to_float64(loss.cpu(), peer.detach().cpu(), exact_loss, arithmetic=half)
        for name, grad in gradients(models[0]).items():
            assert_close_to_float64(grad, gradients(models[1])[name] / 1024.0, exact[name], arithmetic=half)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (4096.0 if scaler.is_enabled() else 1.0)


@pytest.mark.parametrize("head", HEADS)
def test_a_scaler_skips_the_step_whose_gradients_overflow(head, device):
    tokens, target = (t.to(device) for t in batch())
    model = TinyLM(head).to(device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = model(tokens, target, counted(target))
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        unchanged = [torch.equal(p, q) for p, q in zip(model.parameters(), before)]
        assert all(unchanged) if step == 0 else not any(unchanged)
        assert scaler.get_scale() == 1024.0
    assert losses[0] == losses[1] > losses[2]


# ----------------------------------------------------------------------------------------------- checkpointing, compile


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.works("own", "checkpointing")
def test_checkpointed_blocks_and_a_checkpointed_loss(head, whole, use_reentrant, device):
    tokens, target = (t.to(device) for t in batch())
    _, exact = reference_step(head, "topk", "unequal", torch.float64)
    model = TinyLM(head).double().to(device)
    for _ in range(2):  # the second one expects the ``grad_output``
        model.zero_grad()
        hidden = model.embedding(tokens)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)

        def loss(hidden):
            hidden = model.norm(hidden)
            if head == "logits":
                return model.loss(model.head(hidden), target, normalizer=counted(target))
            return model.loss(hidden, model.head.weight, target, linear_bias=model.head.bias,
                              normalizer=counted(target))

        (checkpoint(loss, hidden, use_reentrant=use_reentrant) if whole else loss(hidden)).backward()
        torch.testing.assert_close(gradients(model), exact)


def topk(entries: int, generator) -> SparseTarget:
    shape = SEQUENCES, LENGTH, entries
    values, row_mask = torch.rand(shape, generator=generator), torch.rand(shape[:2], generator=generator) < 0.7
    return SparseTarget.from_topk(torch.randint(VOCAB, shape, generator=generator), values, row_mask=row_mask,
                                  num_classes=VOCAB)


def jagged(entries: int, generator) -> SparseTarget:
    ends = torch.randint(entries + 1, (SEQUENCES * LENGTH,), generator=generator).sort().values
    ranges = torch.stack((torch.cat((ends.new_zeros(1), ends[:-1])), ends), -1).reshape(SEQUENCES, LENGTH, 2)
    return SparseTarget.from_jagged(torch.randint(VOCAB, (entries,), generator=generator),
                                    torch.rand(entries, generator=generator), ranges, num_classes=VOCAB)


@pytest.mark.parametrize("head,make,backend", [
    ("logits", topk, "aot_eager"), ("logits", jagged, "aot_eager"), ("fused", topk, "aot_eager"),
    ("fused", jagged, "aot_eager"), ("tied", topk, "aot_eager"),
    pytest.param("logits", jagged, "inductor", marks=pytest.mark.slow),
    pytest.param("fused", topk, "inductor", marks=pytest.mark.slow)])
@pytest.mark.works("own", "compile")
def test_a_compiled_step_with_its_backward(head, make, backend, device, monkeypatch):
    """Checks that model, loss and backward are one graph; a varying number of entries compiles one more and no
    others."""
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model, eager = TinyLM(head).to(device), TinyLM(head).to(device)

    def step(tokens, target, normalizer):
        loss = model(tokens, target, normalizer)
        loss.backward()
        return loss.detach()

    generator, tokens = torch.Generator().manual_seed(0), batch()[0].to(device)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, backend=counter, fullgraph=True)
        for entries in (3, 7, 90, 12, 40):
            target = make(entries, generator).to(device)
            model.zero_grad()
            eager.zero_grad()
            loss = compiled(tokens, target, target.ne(-100).sum())
            expected = eager(tokens, target, target.ne(-100).sum())
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(gradients(model), gradients(eager), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    assert counter.frame_count == 2


@pytest.mark.parametrize("wanted", [(True, True, False, False), (False, False, False, True), (False,) * 4], ids=str)
def test_no_two_gradients_of_a_head_are_one_tensor(wanted, device):
    """Checks that custom ops do not return one tensor twice, which torch.compile 2.14 warns about and will forbid."""
    x, weight, bias = (torch.randn(size, device=device) for size in ((6, 4), (9, 4), (9,)))
    target = torch.randint(9, (6, 2), device=device), torch.rand(6, 2, device=device)
    outputs = torch.ops.sparse_ce.linear_select_with_gradient(
        torch.ones(6, device=device), x, weight, bias, *target, loss=True, log_probs=False,
        **dict(zip(("input_grad", "weight_grad", "bias_grad", "scale_grad"), wanted)))
    assert len({id(output) for output in outputs}) == len(outputs) == 14
    assert [output.numel() > 0 for output in outputs[10:]] == list(wanted)


# -------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head", HEADS)
def test_a_whole_step_in_a_cuda_graph(head, form, gpu):
    """Captures one step, and replays it with tokens, targets and normalizers copied into the captured memory."""
    model = TinyLM(head).double().to(gpu)
    tokens, target = (t.to(gpu) for t in batch(form))
    normalizer = target.ne(-100).sum()

    def step():
        loss = model(tokens, target, normalizer)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")  # a synchronizing step cannot be captured; this shows its position
    try:
        with torch.cuda.stream(side):
            for _ in range(3):
                model.zero_grad()
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()  # to None: the capture allocates its own gradients, which replays overwrite
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    for padding in ("half", "unequal", "all"):
        _, other = batch(form, padding)
        for name in ("indices", "values", "offsets", "row_mask"):
            if getattr(target, name) is not None:
                getattr(target, name).copy_(getattr(other, name))
        normalizer.copy_(other.ne(-100).sum())
        graph.replay()
        exact_loss, exact = reference_step(head, form, padding, torch.float64)
        torch.testing.assert_close(loss.detach().cpu(), exact_loss)
        torch.testing.assert_close(gradients(model), exact)

"""Tests that the training loops of the examples agree with each other, with their resumed runs, and with the dense
computation."""

import math
import re
from typing import Dict, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_flatten

import sparse_ce
from cases import slow
from example_runs import EXAMPLES, TORCHRUN, run, run_two


class Said(NamedTuple):
    losses: Dict[int, float]
    held_out: Dict[str, float]  # loss, perplexity, accuracy, entropy


def train(*command, cwd, run=run) -> Said:
    """Returns what a loop of 20 steps prints."""
    said = run(*command, "--steps", 20, cwd=cwd)
    losses = re.findall(r"^step (\d+) loss (\S+)$", said, re.MULTILINE)
    held_out = re.findall(r" (\w+) (\d\S+)", "".join(re.findall(r"^held out(.+)$", said, re.MULTILINE)))
    return Said({int(step): float(loss) for step, loss in losses}, {name: float(value) for name, value in held_out})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def plain(folder):
    return train(EXAMPLES / "train_plain.py", "--dtype", "float32", "--save", folder, cwd=folder)


def assert_trained_alike(ours, plain, rel=1e-3):
    assert ours.losses == pytest.approx(plain.losses, rel=rel)
    assert list(ours.held_out) == list(plain.held_out) and ours.held_out == pytest.approx(plain.held_out, rel=rel)


def test_the_plain_loop_learns(plain):
    assert sorted(plain.losses) == [1, 10, 20]
    assert plain.losses[20] < 0.4 * plain.losses[1]
    assert list(plain.held_out) == ["loss", "perplexity", "accuracy", "entropy"]
    assert plain.held_out["loss"] < 0.4 * plain.losses[1] and plain.held_out["accuracy"] > 0.5


@pytest.mark.parametrize("command,tolerance", [
    (("train_plain.py", "--dtype", "float32", "--accumulate", "4"), 1e-3),
    *slow((("train_plain.py", "--dtype", "bfloat16"), 2e-2),
          (("train_plain.py", "--dtype", "float32", "--compile"), 1e-3), (("train_lightning.py",), 1e-3)),
    (("train_distributed.py", "--strategy", "ddp"), 1e-3),
    *slow((("train_distributed.py", "--strategy", "fsdp2", "--accumulate", "2"), 1e-3)),
    (("train_accelerate.py", "--accumulate", "4"), 1e-3),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
@pytest.mark.works("accelerate", "one process", "accumulation")
def test_every_loop_trains_as_the_plain_one(command, tolerance, plain, tmp_path):
    """Checks that the losses are equal for the same sequences per step, however they are divided."""
    needs(command[0])
    launcher = TORCHRUN if "fsdp2" in command else ()
    start = run_two if "ddp" in command else run
    ours = train(*launcher, EXAMPLES / command[0], *command[1:], cwd=tmp_path, run=start)
    if command[0] == "train_distributed.py":  # it does not evaluate
        ours = ours._replace(held_out=plain.held_out)
    assert_trained_alike(ours, plain, tolerance)


def needs(script):
    for library, version in ("accelerate", "1.15"), ("lightning", "2.5"):
        if library in script:
            pytest.importorskip(library, minversion=version)


def kept(checkpoint):
    """Returns (state of the model, state of its optimizer)."""
    if checkpoint.is_dir():
        load_file = pytest.importorskip("safetensors.torch").load_file
        return load_file(checkpoint / "model.safetensors"), torch.load(checkpoint / "optimizer.bin")
    state = torch.load(checkpoint)
    if "state_dict" in state:
        return state["state_dict"], state["optimizer_states"][0]
    return state["model"], state["optimizer"]


def mean_gradients(checkpoint):
    """Returns each parameter's gradient mean as kept by AdamW, because its step does not reveal the gradient's size."""
    return torch.cat([state["exp_avg"].reshape(-1) for state in kept(checkpoint)[1]["state"].values()])


@pytest.mark.parametrize("command,start,checkpoint,tolerance", [
    (("train_plain.py", "--dtype", "float16", "--accumulate", "2"), run, "step_{}.pt", 2e-2),
    pytest.param(("train_accelerate.py", "--accumulate", "2"), run_two, "step_{}", 1e-3, marks=pytest.mark.slow),
    pytest.param(("train_lightning.py", "--accumulate", "4"), run, "step={}.ckpt", 1e-3, marks=pytest.mark.slow),
], ids=["plain", "accelerate", "lightning"])
def test_a_run_that_goes_on_is_bit_for_bit_the_one_that_was_not_interrupted(command, start, checkpoint, tolerance,
                                                                            plain, folder, tmp_path):
    needs(command[0])
    whole = train(EXAMPLES / command[0], *command[1:], "--save", tmp_path / "whole", cwd=tmp_path, run=start)
    assert_trained_alike(whole, plain, tolerance)
    ours, exact = mean_gradients(tmp_path / "whole" / checkpoint.format(10)), mean_gradients(folder / "step_10.pt")
    assert (ours - exact).norm() < 10 * tolerance * exact.norm()
    rest = train(EXAMPLES / command[0], *command[1:], "--resume", tmp_path / "whole" / checkpoint.format(10),
                 "--save", tmp_path / "rest", cwd=tmp_path, run=start)
    assert rest == ({20: whole.losses[20]}, whole.held_out)
    (ours, names), (exact, exact_names) = (
        tree_flatten(kept(tmp_path / name / checkpoint.format(20))) for name in ("rest", "whole"))
    assert names == exact_names and len(ours) > 60
    for a, b in zip(ours, exact):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.slow
@pytest.mark.works("lightning", "DDP")
def test_two_processes_of_lightning_train_alike_and_leave_no_process_group(plain, tmp_path):
    """Checks that the process group is destroyed: one that is left occasionally ends a process with `terminate called
    without an active exception`."""
    program = tmp_path / "train.py"  # Lightning starts the other process with the same file
    program.write_text(f"""import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch.distributed, train_lightning
if __name__ == "__main__":
    train_lightning.main()
    assert not torch.distributed.is_initialized(), "a process group is left"
""")
    assert_trained_alike(train(program, "--devices", "2", "--accumulate", "2", cwd=tmp_path), plain)


# ------------------------------------------------------------------------------------------------ soft and hard labels


def dense_target(text, sample):
    """Returns (S, V) float64 of a sample, from its label or its teacher's four classes."""
    target = sample["target"]
    if target.form == "index":
        return torch.nn.functional.one_hot(target.indices, text.vocab).double()
    return torch.zeros(text.length, text.vocab, dtype=torch.float64).scatter_add(
        1, text.next[sample["tokens"]], text.probs[sample["tokens"]].double())


def test_a_batch_of_soft_and_hard_labels_is_the_dense_one(monkeypatch):
    """Compares loss, gradients and metrics in float64, with the model and batches of all loops."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from small_lm import MarkovText, SmallLM, metrics, token_sums

    text = MarkovText(7, vocab=97, length=16)
    samples = list(text)
    assert [sample["target"].form for sample in samples] == ["index", "topk", "topk"] * 2 + ["index"]
    for sample in samples:
        if sample["target"].form == "index":  # the label of the next token
            assert torch.equal(sample["target"].indices[:-1], sample["tokens"][1:])
    batch = sparse_ce.collate(samples)
    tokens, target = batch["tokens"], batch["target"]
    dense, counts = torch.stack([dense_target(text, sample) for sample in samples]), target.ne(-100)
    assert 0.3 < counts.double().mean() < 0.9

    torch.manual_seed(0)
    model = SmallLM(text.vocab, text.length, 16, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(8):  # until some predictions are right
        model(tokens, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    def by_definition():
        log_probs = model.head(model.hidden(tokens)).log_softmax(-1)
        return -(dense * log_probs).sum(-1)[counts], log_probs[counts]

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    divisor = 31
    torch.testing.assert_close(gradients(model(tokens, target, divisor)), gradients(by_definition()[0].sum() / divisor))
    torch.testing.assert_close(model(tokens, target), by_definition()[0].mean())

    with torch.no_grad():
        sums = token_sums(model(tokens, target, measure=True), target)
        losses, log_probs = by_definition()
        best = dense[counts].amax(-1, keepdim=True)
        right = (dense[counts] == best).gather(1, log_probs.argmax(1, keepdim=True))
    assert sums[0] == counts.sum() and 0 < right.sum() < len(right)
    loss = losses.mean().item()
    exact = {"loss": loss, "perplexity": math.exp(loss), "accuracy": right.double().mean().item(),
             "entropy": -(log_probs.exp() * log_probs).sum(-1).mean().item()}
    assert metrics(sums) == pytest.approx(exact, rel=1e-9)


def train_sharded(*options, cwd) -> Dict[int, float]:
    said = run_two(EXAMPLES / "train_tensor_parallel.py", "--steps", 10, *options, cwd=cwd)
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+) \(", said, re.MULTILINE)}


@pytest.fixture(scope="module")
def of_shared_logits(tmp_path_factory):
    return train_sharded(cwd=tmp_path_factory.mktemp("tensor"))


def test_a_head_that_is_shared_out_learns(of_shared_logits):
    assert sorted(of_shared_logits) == [1, 10] and of_shared_logits[10] < 0.7 * of_shared_logits[1]


@pytest.mark.parametrize("options", ["--head weight --sequence",
                                     *slow("--head weight", "--sequence", "--tensor 1")])
def test_a_head_that_is_shared_out_trains_alike_however(options, of_shared_logits, tmp_path):
    assert train_sharded(*options.split(), cwd=tmp_path) == pytest.approx(of_shared_logits, rel=1e-3)

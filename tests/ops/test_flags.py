"""Tests boolean options: other values raise an error that names the option, and are not converted."""

import inspect

import numpy as np
import pytest
import torch

import sparse_ce
from refusals import assert_refused
from sparse_ce import SparseTarget
from sparse_ce._core.flags import check_flags

Z, H, W, LABELS = torch.zeros(3, 5), torch.zeros(3, 4), torch.zeros(5, 4), torch.tensor([0, 1, 2])
TEACHER = torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)
CALLS = {
    "cross_entropy": lambda **flag: sparse_ce.cross_entropy(Z, LABELS, **flag),
    "linear_cross_entropy": lambda **flag: sparse_ce.linear_cross_entropy(H, W, LABELS, **flag),
    "selected_log_probs": lambda **flag: sparse_ce.selected_log_probs(Z, LABELS, **flag),
    "linear_selected_log_probs": lambda **flag: sparse_ce.linear_selected_log_probs(H, W, LABELS, **flag),
    "linear_row_loss": lambda **flag: sparse_ce.linear_row_loss(
        lambda out, _: (out.lse, {}) if flag.get("has_aux") else out.lse, H, W, LABELS, teacher=(H, W),
        **{"return_jsd": True, "return_tv": True, **flag}),  # a teacher needs a divergence
    "topk_log_probs": lambda **flag: sparse_ce.topk_log_probs(Z, 2, **flag),
    "linear_topk_log_probs": lambda **flag: sparse_ce.linear_topk_log_probs(H, W, 2, **flag),
    "candidate_logits": lambda **flag: sparse_ce.candidate_logits(H, W, LABELS, **flag),
    "distillation_loss": lambda **flag: sparse_ce.distillation_loss(Z, TEACHER, **flag),
    "linear_distillation_loss": lambda **flag: sparse_ce.linear_distillation_loss(H, W, TEACHER, **flag),
    "masked_mean": lambda **flag: sparse_ce.masked_mean(Z, Z == 0, **flag),
}
CALLS.update((name, getattr(sparse_ce, name)) for name in (
    "SparseCrossEntropyLoss", "LinearSparseCrossEntropyLoss", "DistillationLoss", "LinearDistillationLoss",
    "MaskedMean"))
LOSSES = "cross_entropy", "linear_cross_entropy", "SparseCrossEntropyLoss", "LinearSparseCrossEntropyLoss"
FLAGS = [(name, p.name) for name in sparse_ce.__all__ if callable(getattr(sparse_ce, name))
         and getattr(sparse_ce, name) is not SparseTarget
         for p in inspect.signature(getattr(sparse_ce, name)).parameters.values()
         if isinstance(p.default, bool) and p.name != "inplace"]


@pytest.mark.parametrize("name, flag", FLAGS)
def test_a_flag_is_a_bool(name, flag):
    for value in ("yes", "no", "", 1, 0, None, 1.0, torch.tensor(True), np.int64(1)):
        of_loss = flag == "return_entropy" and name in LOSSES
        assert_refused(lambda: CALLS[name](**{flag: value}),
                       f"{flag} must be {'False, True or ' if of_loss else 'a bool'}",
                       "shape []" if isinstance(value, torch.Tensor) else repr(value),
                       error=ValueError if of_loss and isinstance(value, str) else TypeError)
    for value in (True, False, np.True_, np.False_):
        CALLS[name](**{flag: value})


@pytest.mark.parametrize("name", [name for name, flag in FLAGS if flag == "return_entropy"])
def test_the_losses_alone_detach_their_entropy(name):
    if name in LOSSES:
        CALLS[name](return_entropy="detached")
    else:
        assert_refused(lambda: CALLS[name](return_entropy="detached"), "return_entropy must be a bool",
                       "cross_entropy and linear_cross_entropy", error=TypeError)


def test_the_flags_of_targets():
    for make in (lambda **flag: SparseTarget.from_topk(*TEACHER, **flag),
                 lambda **flag: SparseTarget.from_jagged(LABELS, None, torch.tensor([0, 1, 3]), **flag),
                 lambda **flag: SparseTarget.from_coo(torch.eye(3).to_sparse(), **flag),
                 lambda **flag: SparseTarget.from_csr(torch.eye(3).to_sparse_csr(), **flag),
                 lambda **flag: SparseTarget.from_dense(torch.eye(3), **flag),
                 lambda **flag: SparseTarget.from_dense(torch.eye(3), 2, **flag)):
        make(ignore_empty=True)
        assert_refused(lambda: make(ignore_empty="no"), "ignore_empty must be a bool", "'no'", error=TypeError)


def test_the_flags_of_caches(tmp_path):
    from sparse_ce.data import CacheWriter, DistillKitCache, TeacherCache

    for name, make in (("verify", lambda **flag: TeacherCache(tmp_path, **flag)),
                       ("verify", lambda **flag: DistillKitCache(tmp_path, **flag)),
                       ("resume", lambda **flag: CacheWriter(tmp_path / "cache", num_classes=9, **flag))):
        assert_refused(lambda: make(**{name: "no"}), f"{name} must be a bool", "'no'", error=TypeError)


def test_the_flags_of_transformers():
    pytest.importorskip("transformers")
    from sparse_ce.integrations.transformers import TopKCollator, causal_lm_loss, fuse_lm_head

    for name, make in (("shift", causal_lm_loss), ("report_metrics", causal_lm_loss),
                       ("fill_with_labels", TopKCollator), ("hard_labels", TopKCollator),
                       ("eval_logits", lambda **flag: fuse_lm_head(None, **flag)),
                       ("report_metrics", lambda **flag: fuse_lm_head(None, **flag)),
                       ("temperature_squared", lambda **flag: fuse_lm_head(None, distillation=flag))):
        assert_refused(lambda: make(**{name: 1}), f"{name} must be a bool", "got 1", error=TypeError)


def test_compiled_code_follows_them(fresh_compiler):
    def f(z, wanted):
        check_flags(return_entropy=wanted)
        out = sparse_ce.selected_log_probs(z, LABELS, return_entropy=wanted, return_argmax=z.shape[0] > 2)
        return out.entropy if hasattr(out, "entropy") else out.lse

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for wanted in (True, False):
        torch.testing.assert_close(compiled(Z, wanted), f(Z, wanted))

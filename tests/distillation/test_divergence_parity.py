"""Compares values and gradients with the distillation losses of other frameworks, written anew in plain PyTorch. Tests
the correct result where one of them fails. docs/recipes.md lists the equivalent calls. Each formula names its
source by the commit that was read."""

import math
from dataclasses import dataclass, replace
from typing import Callable, Dict

import pytest
import torch
from torch import Tensor

from cases import Draw
from sparse_ce import (
    SparseTarget,
    cross_entropy,
    distillation_loss,
    divergence,
    linear_distillation_loss,
    topk_log_probs,
)

ROWS, CLASSES, K = 24, 41, 6
INF = math.inf


@dataclass(frozen=True)
class Problem:
    """Holds rows from flat to so peaked that 1e-5 is left outside the ids. In the last row the student is independent
    of the teacher."""

    logits: Tensor  # (N, V), of the student
    teacher_logits: Tensor  # (N, V)
    ids: Tensor  # (N, K); 0 if there is no entry
    log_probs: Tensor  # (N, K), of the teacher, over all classes; -inf if there is no entry
    valid: Tensor  # (N, K) bool
    counts: Tensor  # (N,) bool

    def where_rows_count(self) -> "Problem":
        """Returns the active rows in float64, which the other formulas receive."""
        rows = self.counts
        return Problem(self.logits[rows].double(), self.teacher_logits[rows].double(), self.ids[rows],
                       self.log_probs[rows].double(), self.valid[rows], rows[rows])

    def target(self, form: str, log_probs: Tensor) -> SparseTarget:
        values = log_probs.to(self.logits.dtype)
        if form == "topk":
            return SparseTarget.from_topk(self.ids, values, mask=self.valid,
                                          values_are="log_probs", row_mask=self.counts)
        offsets = torch.cat((self.counts.new_zeros(1, dtype=torch.int64), self.valid.sum(1).cumsum(0)))
        return SparseTarget.from_jagged(self.ids[self.valid], values[self.valid], offsets, values_are="log_probs",
                                        row_mask=self.counts)

    def log_tail(self) -> Tensor:
        return (1 - self.log_probs.double().exp().sum(1)).log()

    def known_tail(self) -> Dict[str, Tensor]:
        """Returns the teacher's tail as an argument in float32, where 1 minus the sum has few digits."""
        return {} if self.logits.dtype == torch.float64 else {"teacher_log_tail": self.log_tail().float()}


def make(device, dtype, ragged=False, of_student=False, k=K, seed=0):
    draw = Draw(device, seed)
    teacher = 2 * draw.normal(ROWS, CLASSES, dtype=torch.float64)
    peaks = torch.linspace(0, 13, ROWS, dtype=torch.float64, device=device)[:, None]
    teacher.scatter_add_(1, teacher.argmax(1, keepdim=True), peaks)
    logits = 0.8 * teacher + draw.normal(ROWS, CLASSES, dtype=torch.float64)
    logits[-1] = 2 * draw.normal(CLASSES, dtype=torch.float64)
    logits, teacher = logits.to(dtype), teacher.to(dtype)
    ids = (logits if of_student else teacher).topk(k).indices
    log_probs = teacher.double().log_softmax(1).gather(1, ids).to(dtype)
    valid, counts = torch.ones_like(ids, dtype=torch.bool), torch.ones(ROWS, dtype=torch.bool, device=device)
    if ragged:
        valid = torch.arange(k, device=device) < 1 + draw.integers(k, ROWS, 1)
        counts[[3, 17]] = False
        valid[17] = False
        logits[3] = torch.nan
    ids, log_probs = torch.where(valid, ids, 0), torch.where(valid, log_probs, -INF)
    return Problem(logits, teacher, ids, log_probs, valid, counts)


# ---------------------------------------------------------------------------------------------- parts of the formulas


def kl(log_a, log_b, valid=None):
    """Returns KL(a, b) over the last dimension. Entries that are not ``live`` are left out."""
    if valid is None:
        valid = torch.ones_like(log_a, dtype=torch.bool)
    a, b = torch.where(valid, log_a, 0.0), torch.where(valid, log_b, 0.0)
    return torch.where(valid, a.exp() * (a - b), 0.0).sum(-1)


def mixed(log_a, log_b, share_of_b):
    return torch.logaddexp(log_a + math.log(1 - share_of_b), log_b + math.log(share_of_b))


def generalized_jsd(log_q, log_p, beta, valid=None):
    """Returns TRL's divergence: 0 is KL(p, q), 1 is KL(q, p), and between them beta weighs the teacher, in the mixture
    and outside of it."""
    if beta in (0, 1):
        return kl(log_q, log_p, valid) if beta else kl(log_p, log_q, valid)
    valid = torch.ones_like(log_p, dtype=torch.bool) if valid is None else valid
    middle = mixed(torch.where(valid, log_q, 0.0), torch.where(valid, log_p, 0.0), beta)
    return beta * kl(log_p, middle, valid) + (1 - beta) * kl(log_q, middle, valid)


def of_beta(beta):
    """Returns the equivalent arguments of sparse_ce."""
    return {0: dict(kind="forward_kl"), 1: dict(kind="reverse_kl")}.get(beta, dict(kind="jsd", beta=beta))


def normalized(log_x, valid=None):
    log_x = log_x if valid is None else torch.where(valid, log_x, -INF)
    return log_x - log_x.logsumexp(-1, keepdim=True)


def student(z, p, temperature=1.0):
    return (z / temperature).log_softmax(1).gather(1, p.ids)


# -------------------------------------------------------------------------------------------------- one formula each


def trl_gkd(beta, temperature):
    """Returns the formula of huggingface/trl f2cd577, experimental/gkd/gkd_trainer.py, generalized_jsd_loss: all
    classes, no T^2."""
    def theirs(z, p):
        return generalized_jsd((z / temperature).log_softmax(1), (p.teacher_logits / temperature).log_softmax(1), beta)

    def ours(z, p, form):
        everything = replace(p, ids=torch.arange(CLASSES, device=z.device).expand(ROWS, -1),
                             valid=p.counts[:, None].expand(-1, CLASSES))
        return distillation_loss(z, everything.target(form, p.teacher_logits.log_softmax(1)), tail="renormalize",
                                 temperature=temperature, reduction="none", **of_beta(beta))

    return theirs, ours


def trl_tail(log_x, valid=None):
    """Returns the (K+1)-vector of TRL's add_tail_bucket."""
    log_x = log_x if valid is None else torch.where(valid, log_x, -INF)
    inside = log_x.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat((log_x, torch.log(-torch.expm1(inside))), -1)


def trl_topk(beta, add_tail):
    """Returns the formula of huggingface/trl f2cd577: experimental/sdpo/loss_utils.py and its copy in sdft on the
    student's top-k, and experimental/server_distillation/server_distillation_trainer.py on a server's. Both use one
    bucket or normalize both sides."""
    def theirs(z, p):
        widen = (lambda log_x: trl_tail(log_x, p.valid)) if add_tail else (lambda log_x: normalized(log_x, p.valid))
        valid = torch.cat((p.valid, torch.ones_like(p.valid[:, :1])), 1) if add_tail else p.valid
        return generalized_jsd(widen(student(z, p)), widen(p.log_probs), beta, valid)

    def ours(z, p, form):
        tail = dict(tail="bucket", **p.known_tail()) if add_tail else dict(tail="renormalize")
        return divergence(z, p.target(form, p.log_probs), reduction="none", **tail, **of_beta(beta))

    return theirs, ours


def verl_forward(z, p):
    """Computes verl-project/verl 1dda039, trainer/distillation/fsdp/losses.py, compute_forward_kl_topk with
    ``log_prob_min_clamp: null``: the teacher's top-k unchanged. The tests of bug 28 cover the clamps."""
    return kl(p.log_probs, student(z, p), p.valid)


def ours_forward(z, p, form):
    return divergence(z, p.target(form, p.log_probs), tail="zero", reduction="none")


def verl_recipe_jsd(beta):
    """Returns the formula of verl-project/verl-recipe 48ea0a7, gkd/megatron/megatron_distill_losses.py, JSD: the
    teacher is 0 outside its top-k, whose probabilities are used unchanged."""
    def theirs(z, p):
        log_q = student(z, p)
        middle = mixed(log_q, p.log_probs, beta)
        outside = 1 - log_q.exp().sum(1)
        return beta * kl(p.log_probs, middle) + (1 - beta) * (kl(log_q, middle) - outside * math.log(1 - beta))

    return theirs, lambda z, p, form: divergence(z, p.target(form, p.log_probs), kind="jsd", beta=beta,
                                                 tail="zero", reduction="none")


def verl_recipe_rkl(z, p):
    """Computes RKL of the same file."""
    return kl(normalized(student(z, p)), normalized(p.log_probs))


def ours_renormalized(kind):
    return lambda z, p, form: divergence(z, p.target(form, p.log_probs), kind=kind, tail="renormalize",
                                         reduction="none")


def verl_recipe_both(share):
    """Returns the formula of KL_RKL of the same file, which takes two calls of sparse_ce."""
    def theirs(z, p):
        return (1 - share) * verl_forward(z, p) + share * verl_recipe_rkl(z, p)

    def ours(z, p, form):
        return (1 - share) * ours_forward(z, p, form) + share * ours_renormalized("reverse_kl")(z, p, form)

    return theirs, ours


def nemo_rl(kind, zero_outside_topk, weight=0.3):
    """Returns the formula of NVIDIA-NeMo/RL 7ea279a, algorithms/loss/loss_functions.py, DistillationLossFn. The
    teacher's logits are always normalized over its top-k. With ``zero_outside_topk`` the student covers all classes,
    and the teacher has e^-100 outside its top-k."""
    def theirs(z, p):
        log_p, all_q = normalized(p.log_probs), z.log_softmax(1)
        log_q = all_q.gather(1, p.ids)
        if not zero_outside_topk:
            log_q = normalized(log_q)
        forward, backward = kl(log_p, log_q), kl(log_q, log_p)
        if zero_outside_topk:
            tail = (all_q.exp() * all_q).sum(1) - (log_q.exp() * log_q).sum(1)
            backward = backward + tail + 100 * (1 - log_q.exp().sum(1))
        return {"forward": forward, "reverse": backward, "mixed": weight * forward + (1 - weight) * backward}[kind]

    def ours(z, p, form):
        teacher = p.target(form, normalized(p.log_probs.double()))
        of_tail = [dict(tail="zero"), dict(tail="floor")] if zero_outside_topk else 2 * [dict(tail="renormalize")]
        forward, backward = (lambda: divergence(z, teacher, kind="forward_kl", reduction="none", **of_tail[0]),
                             lambda: divergence(z, teacher, kind="reverse_kl", reduction="none", **of_tail[1]))
        if kind == "mixed":
            return weight * forward() + (1 - weight) * backward()
        return forward() if kind == "forward" else backward()

    return theirs, ours


def distillkit(kind, missing, temperature):
    """Returns the formula of arcee-ai/DistillKit a61c2e7, lossfuncs/common.py, kl.py, jsd.py, tvd.py, all multiplied by
    T^2. "zero" normalizes the teacher over its entries, also at T = 1, and "symmetric_uniform" over its entries and the
    remainder as one more."""
    def with_bucket(log_x, log_tail):
        return torch.cat((log_x, log_tail[:, None]), 1)

    def theirs(z, p):
        log_q = student(z, p, temperature)
        outside = 1 - log_q.exp().sum(1)
        if missing == "zero":
            log_p = normalized(p.log_probs / temperature)
        else:
            log_p = normalized(with_bucket(p.log_probs, p.log_tail()) / temperature)
            log_q = with_bucket(log_q, outside.log())
        middle = mixed(log_q, log_p, 0.5)
        left = outside if missing == "zero" else 0
        return temperature ** 2 * {
            "kl": lambda: kl(log_p, log_q),
            "jsd": lambda: (kl(log_p, middle) + kl(log_q, middle) + left * math.log(2)) / 2,
            "tvd": lambda: ((log_p.exp() - log_q.exp()).abs().sum(1) + left) / 2}[kind]()

    def ours(z, p, form):
        named = dict(kind={"kl": "forward_kl", "jsd": "jsd", "tvd": "tv"}[kind], reduction="none")
        if missing == "zero" and temperature == 1:
            return distillation_loss(z, p.target(form, normalized(p.log_probs.double())), tail="zero", **named)
        if missing == "zero":
            return distillation_loss(z, p.target(form, p.log_probs), tail="zero", temperature=temperature,
                                     temperature_squared=True, **named)
        both = normalized(with_bucket(p.log_probs.double(), p.log_tail()) / temperature)
        return temperature ** 2 * distillation_loss(
            z, p.target(form, both[:, :-1]), tail="bucket", logit_scale=1 / temperature,
            teacher_log_tail=both[:, -1].to(z.dtype), **named)

    return theirs, ours


def axolotl_forward(temperature):
    """Returns the formula of axolotl-ai-cloud/axolotl 067b021, integrations/kd/topk_logprob/forward_kl.py, on a teacher
    from its chat_template.py: normalized over its entries at the temperature, and not multiplied by T^2."""
    def theirs(z, p):
        return kl(normalized(p.log_probs / temperature, p.valid), student(z, p, temperature), p.valid)

    return theirs, lambda z, p, form: distillation_loss(z, p.target(form, p.log_probs), tail="zero",
                                                        temperature=temperature, reduction="none")


def axolotl_fused(beta, temperature):
    """Returns the formula of kernels/liger.py with kd_normalize_topk, same repository, for the value. The test of bug 5
    covers its gradient."""
    def theirs(z, p):
        log_p, log_q = normalized(p.log_probs / temperature), normalized(student(z, p, temperature))
        return temperature ** 2 * generalized_jsd(log_q, log_p, beta)

    return theirs, lambda z, p, form: distillation_loss(
        z, p.target(form, p.log_probs), tail="renormalize", temperature=temperature, temperature_squared=True,
        reduction="none", **of_beta(beta))


def megatron_ghost(z, p):
    """Computes NVIDIA/Megatron-LM c99881a, megatron/training/distillation/cached_logits_loss.py, topk_kl_div with its
    ghost token. An entry of log-probability -1000 is padding."""
    log_q = student(z, p)
    of_student = (1 - torch.where(p.valid, log_q.exp(), 0.0).sum(1)).clamp(min=1e-8).log()
    of_teacher = (1 - p.log_probs.exp().sum(1)).clamp(min=1e-8).log()
    return kl(p.log_probs, log_q, p.valid) + of_teacher.exp() * (of_teacher - of_student)


def ours_ghost(z, p, form):
    return divergence(z, p.target(form, p.log_probs), tail="bucket", reduction="none", **p.known_tail())


def modelopt_topk(reverse, temperature):
    """Returns the formula of NVIDIA/Model-Optimizer a2fbac7, torch/distill/plugins/megatron.py, TopKLogitsKLLoss. If it
    is not reversed, it is KL(teacher, student), although its docstring says otherwise."""
    def theirs(z, p):
        log_p, log_q = normalized(p.log_probs / temperature), normalized(student(z, p, temperature))
        return kl(log_q, log_p) if reverse else kl(log_p, log_q)

    return theirs, lambda z, p, form: distillation_loss(
        z, p.target(form, p.log_probs), kind="reverse_kl" if reverse else "forward_kl", tail="renormalize",
        temperature=temperature, reduction="none")


def ms_swift(beta, temperature):
    """Returns the formula of modelscope/ms-swift 3602360, rlhf_trainers/gkd_loss.py with gkd_logits_topk."""
    def theirs(z, p):
        at_ids = z.gather(1, p.ids) / temperature
        return generalized_jsd(at_ids.log_softmax(1), (p.log_probs / temperature).log_softmax(1), beta)

    return theirs, lambda z, p, form: distillation_loss(
        z, p.target(form, p.log_probs), tail="renormalize", temperature=temperature, reduction="none", **of_beta(beta))


def tinker_cross_entropy(z, p):
    """Computes tinker-docs.thinkingmachines.ai/tinker/losses/cross-entropy with (N, K) weights, a sum, not a mean. In
    tinker-cookbook 9dfcc3a, distillation/sdft.py, they are the teacher's normalized top-k, and weight 0 at id 0 is
    padding."""
    weights = torch.where(p.valid, normalized(p.log_probs, p.valid).exp(), 0.0)
    return -(weights * student(z, p)).sum(1)


def ours_tinker(z, p, form):
    return cross_entropy(z, p.target(form, normalized(p.log_probs.double(), p.valid)), reduction="none")


def tinker_reverse(z, p):
    """Computes reverse_kl_custom_loss of the same file, which has the divergence's gradient because the weights sum to
    1."""
    log_p, log_q = normalized(p.log_probs, p.valid), normalized(student(z, p), p.valid)
    advantage = torch.where(p.valid, log_q - log_p, 0.0).detach()
    return (torch.where(p.valid, log_q, -INF).exp() * advantage).sum(1)


def sampled(temperature, draws=30):
    """Returns the formula of random sampling KD, arXiv:2503.16870: ids drawn from p^t, with weights p / p^t that sum to
    1 in a row. At t = 1 the weights are the counts of the draws. The loss is that of a target which is 0 elsewhere,
    minus the target's entropy. The call of sparse_ce takes each draw as an entry of its own."""
    def drawn(p):
        generator = torch.Generator().manual_seed(7)
        log_p = p.teacher_logits.double().log_softmax(1)
        ids = torch.multinomial((log_p * temperature).softmax(1).cpu(), draws, True, generator=generator).to(p.ids)
        return ids, (log_p.gather(1, ids) * (1 - temperature)).softmax(1)

    def theirs(z, p):
        ids, weights = drawn(p)
        w = torch.zeros_like(z).scatter_add(1, ids, weights)
        return (torch.xlogy(w, w) - w * z.log_softmax(1)).sum(1)

    def ours(z, p, form):
        ids, weights = drawn(p)
        everywhere = replace(p, ids=ids, valid=p.counts[:, None].expand_as(ids))
        return divergence(z, everywhere.target(form, weights.log()), tail="zero", reduction="none")

    return theirs, ours


@dataclass(frozen=True)
class Peer:
    theirs: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    ragged: bool = False  # supports padding within a row, and ignored rows
    of_student: bool = False  # the ids are the student's most likely classes


PEERS: Dict[str, Peer] = {
    **{f"trl gkd, beta {b}, T {t}": Peer(*trl_gkd(b, t)) for b in (0, 0.3, 0.5, 1) for t in (1.0, 2.0)},
    **{f"trl sdpo and sdft, alpha {b}, {'tail' if tail else 'no tail'}": Peer(*trl_topk(b, tail), of_student=True)
       for b in (0, 0.5, 1) for tail in (True, False)},
    **{f"trl server, beta {b}, {'tail' if tail else 'no tail'}": Peer(*trl_topk(b, tail), ragged=True)
       for b in (0, 0.3, 1) for tail in (True, False)},
    "verl forward_kl_topk": Peer(verl_forward, ours_forward, ragged=True),
    "verl-recipe rkl": Peer(verl_recipe_rkl, ours_renormalized("reverse_kl")),
    "verl-recipe kl_rkl": Peer(*verl_recipe_both(0.1)),
    "verl-recipe jsd": Peer(*verl_recipe_jsd(0.3)),
    **{f"nemo-rl {kind}{', zero_outside_topk' if zero else ''}": Peer(*nemo_rl(kind, zero))
       for kind in ("forward", "reverse", "mixed") for zero in (False, True)},
    **{f"distillkit {kind}, {missing}, T {t}": Peer(*distillkit(kind, missing, t))
       for kind in ("kl", "jsd", "tvd") for missing in ("zero", "symmetric_uniform") for t in (1.0, 2.0)},
    **{f"axolotl forward_kl, T {t}": Peer(*axolotl_forward(t), ragged=True) for t in (1.5, 2.0)},
    **{f"axolotl fused, beta {b}": Peer(*axolotl_fused(b, 2.0)) for b in (0, 0.5, 1)},
    "megatron-lm ghost token": Peer(megatron_ghost, ours_ghost, ragged=True),
    **{f"model-optimizer top-k{', reverse' if r else ''}": Peer(*modelopt_topk(r, 2.0)) for r in (False, True)},
    **{f"ms-swift, beta {b}, T {t}": Peer(*ms_swift(b, t)) for b in (0, 0.5, 1) for t in (1.0, 2.0)},
    "tinker cross_entropy": Peer(tinker_cross_entropy, ours_tinker, ragged=True),
    "tinker sdft reverse kl": Peer(tinker_reverse, ours_renormalized("reverse_kl"), ragged=True),
    **{f"random sampling, t {t}": Peer(*sampled(t)) for t in (1.0, 0.8)},
}


def assert_equal(ours, exact, dtype):
    """Checks to 1e-9 of the largest value in float64, and in float32 to 1e-6 of it or of 1, the size of its
    probabilities."""
    assert exact.isfinite().all()
    error, size = (ours.double() - exact).abs().max(), exact.abs().max()
    allowed = 1e-9 * size if dtype == torch.float64 else 1e-6 * size.clamp(min=1)
    assert error <= allowed, f"error {error:.2e}, {allowed:.2e} allowed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["topk", "jagged"])
@pytest.mark.parametrize("name", PEERS)
def test_40_values_and_gradients_of_a_peer(name, form, dtype, device):
    peer = PEERS[name]
    p = make(device, dtype, peer.ragged, peer.of_student)
    tail = torch.where(torch.zeros_like(p.logits).scatter(1, p.ids, 1) > 0, 0.0, p.logits.softmax(1)).sum(1)
    assert tail[p.counts].min() < 1e-4 and tail[p.counts].max() > 0.3
    leaf, seen = p.logits.clone().requires_grad_(), p.where_rows_count()
    exact_leaf = seen.logits.clone().requires_grad_()
    exact, ours = peer.theirs(exact_leaf, seen), peer.ours(leaf, p, form)
    assert ours.dtype == dtype and (ours[~p.counts] == 0).all()
    assert_equal(ours[p.counts].detach(), exact.detach(), dtype)
    grad_output = Draw(device, 1).normal(ROWS, dtype=torch.float64)
    exact_grad, = torch.autograd.grad(exact, exact_leaf, grad_output[p.counts])
    grad, = torch.autograd.grad(ours, leaf, grad_output.to(dtype))
    assert (grad[~p.counts] == 0).all()
    assert_equal(grad[p.counts], exact_grad, dtype)


# --------------------------------------------------------------------------------------------- bugs of other frameworks


def gradient(value, leaf):
    return torch.autograd.grad(value, leaf, torch.ones_like(value), retain_graph=True)[0]


def test_4_a_teacher_whose_sum_is_not_1(device):
    """Guards against verl-recipe's gkd, KL: backward returns q - p for the sum of p (log p - log q) over a top-k. The
    derivative is s q - p, with s the sum of p."""
    p = make(device, torch.float64)
    leaf = p.logits.clone().requires_grad_()
    exact, ours = (gradient(f, leaf) for f in (verl_forward(leaf, p), ours_forward(leaf, p, "topk")))
    assert_equal(ours, exact, torch.float64)
    q, weights = leaf.detach().softmax(1), p.log_probs.exp()
    theirs = q.scatter_add(1, p.ids, -weights)
    wrong = (theirs - exact).abs().amax(1)
    assert (wrong[weights.sum(1) > 1 - 1e-5] < 1e-5).all() and (wrong[weights.sum(1) < 0.8] > 0.01).all()


def test_5_the_square_of_the_temperature_is_in_the_gradient_where_it_is_in_the_loss(device):
    """Guards against axolotl's fused loss, which multiplies the value by T^2 after it has taken the gradients."""
    temperature = 2.0
    theirs, ours = axolotl_fused(0, temperature)
    p = make(device, torch.float64)
    leaf = p.logits.clone().requires_grad_()
    exact, ours = theirs(leaf, p), ours(leaf, p, "topk")
    assert_equal(ours.detach(), exact.detach(), torch.float64)
    assert_equal(gradient(ours, leaf), gradient(exact, leaf), torch.float64)
    of_theirs = gradient(exact / temperature ** 2, leaf)  # the gradient that axolotl computes
    without = distillation_loss(leaf, p.target("topk", p.log_probs), tail="renormalize", temperature=temperature,
                                reduction="none")
    assert_equal(gradient(without, leaf), of_theirs, torch.float64)


def test_3_padding_has_no_part_in_the_normalizer_of_the_student(device):
    """Guards against axolotl's fused loss, which normalizes the student over all K entries of a row and masks
    afterwards. If batches of different K are padded with id 0, class 0 is part of the normalizer. Without padding it is
    correct."""
    p = make(device, torch.float64, ragged=True)
    p.logits[:, 0] += 5  # a class that appears only as padding may be likely
    seen = p.where_rows_count()
    z = seen.logits
    log_p = normalized(seen.log_probs, seen.valid)
    theirs = kl(log_p, normalized(student(z, seen)), seen.valid)
    exact = kl(log_p, normalized(student(z, seen), seen.valid), seen.valid)
    ours = ours_renormalized("forward_kl")(p.logits, p, "topk")[p.counts]
    assert_equal(ours, exact, torch.float64)
    whole = seen.valid.all(1)
    assert whole.any() and (theirs - exact)[whole].abs().max() < 1e-12
    assert ((theirs - exact)[~whole].abs() > 0.05).double().mean() > 0.3


def test_28_rows_where_the_student_has_more_than_the_teacher_keep_their_gradient(device):
    """Guards against verl, which clamps each row's forward_kl_topk at 0. It is negative if the student's sum Q over the
    top-k is far enough above the teacher's s. Its derivative there is s q - p. A bucket makes it a divergence."""
    p = make(device, torch.float64)
    p = replace(p, logits=p.logits.scatter_add(1, p.ids, torch.full_like(p.log_probs, 3.0)))
    leaf = p.logits.clone().requires_grad_()
    exact = verl_forward(leaf, p)
    negative = exact < 0
    assert negative.sum() >= 4
    q, weights = leaf.detach().softmax(1), p.log_probs.exp()
    assert (q.gather(1, p.ids).sum(1) > weights.sum(1))[negative].all()
    clamped = gradient(exact.clamp(min=0), leaf)
    assert (clamped[negative] == 0).all()
    ours = ours_forward(leaf, p, "topk")
    assert_equal(ours.detach(), exact.detach(), torch.float64)
    expected = (weights.sum(1, keepdim=True) * q).scatter_add(1, p.ids, -weights)
    assert_equal(gradient(ours, leaf), expected, torch.float64)
    assert_equal(gradient(ours, leaf)[~negative], clamped[~negative], torch.float64)
    with_tail = ours_ghost(leaf, p, "topk")
    assert (with_tail >= 0).all() and (gradient(with_tail, leaf)[negative].abs().amax(1) > 1e-5).all()


def test_28_a_class_that_the_student_does_not_expect_keeps_its_gradient(device):
    """Guards against verl's log_prob_min_clamp (-10 by default), which removes the gradient of classes that the student
    gives less than e^-10. Its loss_max_clamp (10) removes whole rows. Otherwise the two agree."""
    p = make(device, torch.float64)
    lowered = torch.zeros_like(p.log_probs)
    lowered[::2, 0] = -40.0
    p = replace(p, logits=p.logits.scatter_add(1, p.ids, lowered))
    leaf = p.logits.clone().requires_grad_()
    log_q = student(leaf, p)
    missed = log_q < -10
    assert missed[::2, 0].all()
    theirs = gradient(kl(p.log_probs.clamp(min=-10), log_q.clamp(min=-10)), leaf).gather(1, p.ids)
    loss = ours_forward(leaf, p, "topk")
    assert_equal(loss.detach(), verl_forward(leaf, p).detach(), torch.float64)
    ours = gradient(loss, leaf).gather(1, p.ids)
    assert (theirs[missed] >= 0).all() and (ours[::2, 0] < -0.9 * p.log_probs[::2, 0].exp()).all()
    high = loss > 10
    assert high.any() and (gradient(ours_forward(leaf, p, "topk").clamp(max=10), leaf)[high] == 0).all()
    whole = ~missed.any(1) & (p.log_probs > -10).all(1)
    assert whole.any()
    assert_equal(ours[whole], theirs[whole], torch.float64)


def test_29_the_reverse_divergence_from_a_teacher_without_a_tail_is_refused(device):
    """Guards against a loss that verl has removed and axolotl's fused loss still has (kd_beta 1 without
    kd_normalize_topk). Summed over the top-k alone it falls without bound as the student leaves the top-k, while the
    divergence rises."""
    p = make(device, torch.float64)
    target, head = p.target("topk", p.log_probs), torch.zeros(CLASSES, 3, dtype=torch.float64, device=device)
    truncated, whole = [], []
    for step in (0.0, 2.0, 4.0):
        z = p.logits.scatter_add(1, p.ids, torch.full_like(p.log_probs, -step))
        truncated.append(kl(student(z, p), p.log_probs).mean())
        whole.append(kl(z.log_softmax(1), p.teacher_logits.log_softmax(1)).mean())
        for tail in ("renormalize", "bucket", "floor", "uniform"):
            assert divergence(z, SparseTarget.from_topk(p.ids, p.log_probs, values_are="log_probs"), kind="reverse_kl",
                              tail=tail).isfinite()
    assert truncated[0] > truncated[1] > truncated[2] - 1e-12 and truncated[1] < 0 and whole[0] < whole[1] < whole[2]
    for refused in (lambda: divergence(p.logits, target, kind="reverse_kl", tail="zero"),
                    lambda: distillation_loss(p.logits, target, kind="reverse_kl", tail="zero"),
                    lambda: linear_distillation_loss(p.logits[:, :3], head, target, kind="reverse_kl", tail="zero")):
        with pytest.raises(ValueError, match="tail='zero'.*infinite.*tail='floor', 'bucket' or 'renormalize'"):
            refused()


@pytest.mark.parametrize("gap", [9.0, 15.0, 18.0, 21.0, 24.0])
def test_30_what_both_have_off_the_ids_is_right_however_little_it_is(gap, device):
    """Guards against TRL, Megatron-LM and DistillKit, which subtract from 1 and clamp: a tail of 1e-7 or less has no
    digits and no gradient. DistillKit's clamp at 1 - 1e-8 is 1 in float32, so a teacher that sums to 1 gives NaN."""
    draw = Draw(device)
    ids = torch.stack([torch.randperm(4000, generator=draw.generator)[:32] for _ in range(8)]).to(device)
    boost = torch.zeros(8, 4000, device=device).scatter_(1, ids, gap)
    z, t = draw.normal(8, 4000) + boost, draw.normal(8, 4000) + boost
    teacher, teacher_tail = topk_log_probs(t, 32, return_log_tail=True)
    leaf, exact_leaf = z.clone().requires_grad_(), z.double().requires_grad_()
    off = torch.ones_like(z, dtype=torch.bool).scatter(1, teacher.indices, False)

    def with_tail(x):
        log_x = x.log_softmax(1)
        return torch.cat((log_x.gather(1, teacher.indices),
                          torch.where(off, log_x, -INF).logsumexp(1, keepdim=True)), 1)

    log_q, log_p = with_tail(exact_leaf), with_tail(t.double())
    for beta in (0, 0.4, 1):
        ours = divergence(leaf, teacher, tail="bucket", teacher_log_tail=teacher_tail, reduction="none",
                          **of_beta(beta))
        exact = generalized_jsd(log_q, log_p, beta)
        assert (ours - exact).abs().max() < 2e-6 * (kl(log_p, log_q) + kl(log_q, log_p) + 1).max()
        exact_grad = gradient(exact, exact_leaf)
        grad = gradient(ours, leaf)
        assert (grad - exact_grad).abs().max() < 2e-6
        # The gradient outside the ids is very small, so it is compared relative to itself.
        error = torch.where(off, (grad - exact_grad).abs(), 0.0).amax(1)
        assert (error < 2e-5 * torch.where(off, exact_leaf.softmax(1) * (1 + exact_grad.abs()), 0.0).amax(1)).all()

    in_float32 = z.log_softmax(1).gather(1, teacher.indices)
    total = in_float32.exp().sum(1)
    theirs = {"trl": trl_tail(in_float32)[:, -1], "megatron-lm": (1 - total).clamp(min=1e-8).log(),
              "distillkit": torch.log1p(-total.clamp(min=1e-8, max=1 - 1e-8))}
    for name, log_tail in theirs.items():
        wrong = (log_tail - log_q[:, -1].detach()).abs().max()
        assert gap in (15, 18) or (wrong < 0.01 if gap == 9 else wrong > 0.1), name


def test_34_a_sampled_token_that_stands_before_the_top_k_is_one_class(device):
    """Checks a token that a server puts first whether or not the top-k has it. TRL's server_distillation masks it if it
    equals the top-1. In sparse_ce entries of one class add up, so a repeated entry must be masked, unless it was drawn
    twice."""
    p = make(device, torch.float64, k=3)
    both = torch.cat((p.ids[:, :1], p.ids), 1)
    both[::2, 0] = 7
    log_p = p.teacher_logits.log_softmax(1)
    repeated = (both[:, :1] == both[:, 1:]).any(1)
    assert repeated.any() and not repeated.all()
    mask = torch.ones_like(both, dtype=torch.bool)
    mask[:, 0] = ~repeated
    values = log_p.gather(1, both)
    for tail in ("zero", "renormalize", "bucket"):
        ours = divergence(p.logits, SparseTarget.from_topk(both, values, mask=mask, values_are="log_probs"), tail=tail,
                          reduction="none")
        for row in range(ROWS):
            distinct = both[row].unique()
            once = SparseTarget.from_topk(distinct[None], log_p[row, distinct][None], values_are="log_probs")
            assert_equal(ours[row], divergence(p.logits[row:row + 1], once, tail=tail), torch.float64)
    # If the entry counts twice, the teacher has twice its probability there.
    twice = divergence(p.logits, SparseTarget.from_topk(both, values, values_are="log_probs"), tail="zero",
                       reduction="none")
    weights = torch.zeros_like(log_p).scatter_add(1, both, values.exp())
    assert_equal(twice, (torch.xlogy(weights, weights) - weights * p.logits.log_softmax(1)).sum(1), torch.float64)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_35_padding_of_minus_infinity(beta, device):
    """Guards against ms-swift, which fills missing entries with -inf. It drops rows without entries, but rows that are
    padded in part are NaN, from 0 times -inf."""
    p = make(device, torch.float64, ragged=True)
    seen = p.where_rows_count()
    log_p = torch.where(seen.valid, seen.log_probs, -INF).log_softmax(1)
    log_q = student(seen.logits, seen).log_softmax(1)
    theirs = (log_p.exp() * (log_p - log_q)).sum(1)
    partly = ~seen.valid.all(1)
    assert partly.any() and theirs[partly].isnan().all() and theirs[~partly].isfinite().all()
    for tail in ("renormalize", "bucket"):
        leaf, exact_leaf = p.logits.clone().requires_grad_(), seen.logits.clone().requires_grad_()
        ours = divergence(leaf, SparseTarget.from_topk(p.ids, p.log_probs, values_are="log_probs", row_mask=p.counts),
                          tail=tail, reduction="none", **of_beta(beta))
        exact = trl_topk(beta, tail == "bucket")[0](exact_leaf, seen)
        assert_equal(ours[p.counts].detach(), exact.detach(), torch.float64)
        grad = gradient(ours, leaf)
        assert (grad[~p.counts] == 0).all()
        assert_equal(grad[p.counts], gradient(exact, exact_leaf), torch.float64)

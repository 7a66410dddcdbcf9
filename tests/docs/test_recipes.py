"""Tests the functions of docs/recipes.md, and those of the pages that it links to: values and gradients against the
published formulas, in plain PyTorch on all logits in float64.

``info_nce`` and ``siglip_over_processes`` are tested in test_sharded_recipes.py, on several processes.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from close import assert_close_to_float64
from recipes import lines, recipes

RECIPES = recipes()
LINKED = {**recipes("log-probabilities"), **recipes("distillation")}
IN_PROCESSES = {"info_nce", "siglip_over_processes"}
WITHOUT_GRADIENT = {"filtered_ranks", "ranking_metrics", "ranks_in_catalogue"}
CASES = {}
B, S, V, D = 4, 7, 40, 6


def case(*names):
    """Registers a function that returns the tensors that require grad, and two losses of them: the recipe and the
    formula."""
    def register(make):
        CASES[make.__name__] = names, make
        return make
    return register


class Draw:
    def __init__(self, scale):
        self.scale = scale
        self.generator = torch.Generator().manual_seed(7)

    def normal(self, *shape):
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def uniform(self, *shape):
        return torch.rand(*shape, dtype=torch.float64, generator=self.generator)

    def ids(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator)

    def head(self, rows=(B, S), classes=V):
        """Returns hidden states and a weight; two classes have the same logits."""
        weight = self.normal(classes, D)
        weight[3] = weight[1]
        return self.scale * self.normal(*rows, D), weight

    def tokens(self, rows=(B, S), classes=V):
        """Returns tokens with ignored ones at both ends of sequences; one sequence keeps a single token."""
        tokens = self.ids(classes, *rows)
        tokens[0, :2] = tokens[1, 5:] = tokens[2, 1:] = -100
        return tokens

    def near(self, hidden, weight, tokens):
        """Returns log-probabilities of another policy, some of which are far from those of the head."""
        return log_q(hidden, weight, tokens) + 0.4 * self.normal(*tokens.shape)


def log_q(hidden, weight, tokens):
    """Returns log-probabilities of the tokens, 0 for ignored ones."""
    of_all = (hidden @ weight.mT).log_softmax(-1)
    return of_all.gather(-1, tokens.clamp(min=0)[..., None])[..., 0].masked_fill(tokens == -100, 0.0)


def row_loss(name, *row_args, **options):
    """Returns the recipe as a function of hidden states and weight, with ``linear_row_loss`` around it."""
    fn = {**LINKED, **RECIPES}[name]
    return lambda hidden, weight: sparse_ce.linear_row_loss(fn, hidden, weight, *row_args, **options)


def aggregated(losses, tokens, name):
    """Returns the loss of TRL for ``loss_type=name``, over (B, S) losses of tokens."""
    mask = tokens != -100
    if name == "grpo":
        return ((losses * mask).sum(1) / mask.sum(1)).mean()
    return (losses * mask).sum() / (len(tokens) * S if name == "dr_grpo" else mask.sum())


def share_of(tokens, name):
    counts = {"grpo": len(tokens) * tokens.ne(-100).sum(1, keepdim=True), "dr_grpo": torch.tensor(len(tokens) * S),
              "dapo": tokens.ne(-100).sum()}
    return (1 / counts[name].double()).expand_as(tokens)


def of_policy(recipe, aggregation, formula):
    def make(draw):
        hidden, weight = draw.head()
        tokens = draw.tokens()
        old, advantages = draw.near(hidden, weight, tokens), draw.normal(B, S)
        ratio = (log_q(hidden, weight, tokens) - old).exp()
        assert (ratio > 1.28).any() and (ratio < 0.8).any()

        def dense(hidden, weight):
            return aggregated(formula(log_q(hidden, weight, tokens), old, advantages), tokens, aggregation)

        return (hidden, weight), row_loss(recipe, tokens, old, advantages, share_of(tokens, aggregation),
                                          reduction="sum"), dense
    make.__name__ = f"{recipe}_{aggregation}"
    return case(recipe)(make)


def ppo_formula(log_probs, old, advantages):
    ratio = torch.exp(log_probs - old)
    return torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - 0.2, 1 + 0.28))


def cispo_formula(log_probs, old, advantages):
    weight = torch.clamp(torch.exp(log_probs - old), max=5.0).detach()
    return -weight * advantages * log_probs


for aggregation in ("grpo", "dr_grpo", "dapo"):
    of_policy("clipped", aggregation, ppo_formula)
of_policy("cispo", "dapo", cispo_formula)


@case("cispo")
def cispo_of_large_ratios(draw):
    hidden, weight = draw.head()
    tokens = draw.tokens()
    advantages = draw.normal(B, S)
    old = log_q(hidden, weight, tokens) - 3 * draw.uniform(B, S)  # ratios up to 20
    share = share_of(tokens, "dapo")
    ours = row_loss("cispo", tokens, old, advantages, share, reduction="sum")
    return (hidden, weight), ours, lambda h, w: aggregated(
        cispo_formula(log_q(h, w, tokens), old, advantages), tokens, "dapo")


@case("gspo")
def gspo(draw):
    hidden, weight = draw.head((32, S))
    tokens = draw.tokens((32, S))
    tokens[4] = -100
    old, advantages = log_q(hidden, weight, tokens) + 2e-3 * draw.normal(32, S), draw.normal(32)

    def dense(hidden, weight):
        losses = []
        for difference, y, a in zip(log_q(hidden, weight, tokens) - old, tokens, advantages):
            ratio = difference[y != -100].mean().exp() if y.ne(-100).any() else torch.ones((), dtype=torch.float64)
            clipped.append(bool((ratio > 1 + 4e-4) | (ratio < 1 - 3e-4)))
            losses.append(-torch.min(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a))
        return torch.stack(losses).mean()

    clipped = []
    dense(hidden, weight)
    assert 4 < sum(clipped) < 28
    return (hidden, weight), lambda h, w: RECIPES["gspo"](h, w, tokens, old, advantages), dense


def of_estimator(name, formula):
    def make(draw):
        hidden, weight = draw.head()
        tokens = draw.tokens()
        other = draw.near(hidden, weight, tokens)

        def dense(hidden, weight):
            return formula(log_q(hidden, weight, tokens), other)[tokens != -100].mean()

        return (hidden, weight), row_loss(name, tokens, other), dense
    make.__name__ = name
    return case(name)(make)


of_estimator("k1", lambda log_q, other: log_q - other)
of_estimator("k2", lambda log_q, other: 0.5 * (log_q - other) ** 2)
of_estimator("k3", lambda log_q, other: torch.exp(other - log_q) - 1 - (other - log_q))
of_estimator("mini_llm", lambda log_q, other: (log_q - other).detach() * log_q)


@case("centered")
def score_centering(draw):
    hidden, weight = draw.head()
    tokens = draw.tokens()
    logits = (hidden / draw.scale + 0.3 * draw.normal(B, S, D)) @ weight.T
    logits[2:, :3] *= 2.5  # a sampler with a smaller tail than the policy
    sampler = logits.log_softmax(-1)
    values, top = sampler.topk(5)
    top[1, 0, 3:], values[1, 0, 3:] = -100, -math.inf  # a sampler that returns fewer classes
    values[2, 0] = values[2, 0].log_softmax(0) + 1e-3  # rounded log-probabilities may sum to more than 1
    tokens[3] = (hidden[3] @ weight.T).argmax(-1)
    tokens[3, 0] = top[3, 0, 2]
    of_token = sampler.gather(-1, tokens.clamp(min=0)[..., None])
    advantages = draw.normal(B, S)
    assert (top == tokens[..., None]).any(-1).any() and not (top == tokens[..., None]).any(-1).all()
    ids = torch.cat((tokens[..., None], top), -1).masked_fill(tokens[..., None] == -100, -100)
    ours = row_loss("centered", ids, torch.cat((of_token, values), -1), advantages, return_log_tail=True,
                    padding_value=0.0)
    capped, alphas = [], []

    def dense(hidden, weight):
        log_p = (hidden @ weight.T).log_softmax(-1)
        losses = []
        for row in (tokens != -100).nonzero():
            p, y, (b, s) = log_p[tuple(row)], tokens[tuple(row)], row
            chosen = [(int(v), float(q.exp())) for v, q in zip(top[b, s], values[b, s]) if v >= 0]
            tail = sum(float(p[v].detach().exp()) for v in range(V) if v not in dict(chosen))
            rho = max(1 - sum(q for _, q in chosen), 1e-6) / max(tail, 1e-6)
            alpha = rho * min(1 / rho, 2.0)
            alphas.append(alpha)
            ratio = float((p[y].detach() - of_token[b, s, 0]).exp())
            capped.append(ratio > 2)
            term = min(ratio, 2.0) * p[y]
            for v, q in chosen:
                of_class = float(p[v].detach().exp())
                term = term - (q * min(of_class / q, 2.0) - alpha * of_class) * p[v]
            losses.append(-advantages[b, s] * term)
        return torch.stack(losses).mean()

    dense(hidden, weight)
    assert any(capped) and not all(capped)
    assert draw.scale > 1 or min(alphas) < 0.8
    return (hidden, weight), ours, dense


@case("dpo")
def dpo(draw):
    hidden, weight = draw.head()
    tokens = draw.tokens()
    reference = draw.near(hidden, weight, tokens).masked_fill(tokens == -100, 0.0).sum(1)

    def dense(hidden, weight):
        ratio = log_q(hidden, weight, tokens).sum(1) - reference
        return torch.log1p(torch.exp(-0.3 * (ratio[:2] - ratio[2:]))).mean()

    return (hidden, weight), lambda h, w: RECIPES["dpo"](h, w, tokens, reference, beta=0.3), dense


@case("kto")
def kto(draw):
    hidden, weight = draw.head()
    tokens = draw.tokens()
    reference = draw.near(hidden, weight, tokens).masked_fill(tokens == -100, 0.0).sum(1)
    desirable, kl = torch.tensor([True, False, False, True]), torch.tensor(0.4, dtype=torch.float64)

    def dense(hidden, weight):
        ratio = log_q(hidden, weight, tokens).sum(1) - reference
        of_chosen, of_rejected = 1 - F.sigmoid(0.2 * (ratio - kl)), 1 - F.sigmoid(0.2 * (kl - ratio))
        return torch.cat((of_chosen[desirable], of_rejected[~desirable])).mean()

    return (hidden, weight), lambda h, w: RECIPES["kto"](h, w, tokens, reference, desirable, kl, beta=0.2), dense


@case("multi_token")
def multi_token(draw):
    sizes, coefficients = (12, 9, 5), (1.0, 0.3, 0.1)
    states, weight = [draw.normal(n, D) for n in sizes], draw.head()[1]
    labels = [draw.ids(V, n) for n in sizes]
    labels[0][3], labels[1][[0, 8]], labels[2][:] = -100, -100, -100  # a depth without labels

    def dense(weight, *states):
        each = [F.cross_entropy(x @ weight.T, y) for x, y in zip(states[:2], labels)]
        return each[0] + 0.3 * each[1] + 0 * states[2].sum()

    return (weight, *states), lambda w, *x: RECIPES["multi_token"](x, w, labels, coefficients), dense


@case("weighted_sft")
def weighted_sft(draw):
    hidden, weight = draw.head()
    tokens, weights = draw.tokens(), draw.uniform(B, S)
    weights[3, 2:4] = 0
    assert weights[tokens == -100].all()

    def dense(hidden, weight):
        active = tokens != -100
        losses = F.cross_entropy((hidden @ weight.T)[active], tokens[active], reduction="none")
        return (weights[active] * losses).sum() / weights[active].sum()

    return (hidden, weight), lambda h, w: RECIPES["weighted_sft"](h, w, tokens, weights), dense


@case("tinker_cross_entropy")
def tinker(draw):
    tokens, weights = draw.ids(V, B, S, 5), draw.normal(B, S, 5)
    tokens[0, 0, 1] = tokens[0, 0, 0]  # a token that occurs twice
    weights[1, :, 2], weights[2, 3] = 0, 0

    def dense(logits, weights):
        used = weights.detach() != 0  # entries of weight 0 are padding, so their weight gets no gradient
        return (-logits.log_softmax(-1).gather(-1, tokens) * weights)[used].sum()

    return (draw.scale * draw.normal(B, S, V), weights), lambda z, w: RECIPES["tinker_cross_entropy"](
        z, tokens, w), dense


@case("tinker_cross_entropy")
def tinker_with_one_token(draw):
    tokens = draw.tokens()

    def dense(logits, weights):
        of_tokens = logits.log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
        return (-of_tokens * weights)[tokens != -100].sum()

    return (draw.scale * draw.normal(B, S, V), draw.normal(B, S)), lambda z, w: RECIPES["tinker_cross_entropy"](
        z, tokens, w), dense


@case("dft")
def dft(draw):
    hidden, weight = draw.head()
    tokens = draw.tokens()

    def dense(hidden, weight):
        log_p = log_q(hidden, weight, tokens)[tokens != -100]
        return -(log_p.detach().exp() * log_p).mean()

    return (hidden, weight), row_loss("dft", tokens), dense


@case("eaft")
def eaft(draw):
    hidden, weight = draw.head()
    tokens = draw.tokens()
    p = (hidden @ weight.T).topk(5).values.softmax(-1)
    gate = -(p * p.log()).sum(-1) / math.log(5)

    def dense(hidden, weight):
        return -(gate * log_q(hidden, weight, tokens))[tokens != -100].mean()

    return (hidden, weight), lambda h, w: RECIPES["eaft"](h, w, tokens, k=5), dense


@case("masked_diffusion")
def masked_diffusion(draw):
    hidden, weight = draw.head()
    tokens, masked, t = draw.ids(V, B, S), draw.uniform(B, S) < 0.6, draw.uniform(B) + 0.1

    def dense(hidden, weight):
        losses = F.cross_entropy((hidden @ weight.T).flatten(0, 1), tokens.flatten(), reduction="none").view(B, S)
        return sum(losses[i][masked[i]].sum() / t[i] for i in range(B)) / (B * S)

    return (hidden, weight), lambda h, w: RECIPES["masked_diffusion"](h, w, tokens, masked, t), dense


@case("megatron")
def megatron(draw):
    labels = draw.ids(V, B)

    def dense(logits):
        log_p = logits.log_softmax(1)
        others = log_p.sum(1) - log_p[torch.arange(B), labels]
        return -(0.8 * log_p[torch.arange(B), labels] + 0.2 * others / (V - 1)).mean()

    return (draw.scale * draw.normal(B, V),), lambda z: RECIPES["megatron"](z, labels, 0.2), dense


@case("sparse_cross_entropy")
def pyg(draw):
    edges, weights = torch.stack((draw.ids(B - 1, 9), draw.ids(V, 9))), draw.normal(9)  # the last row has none
    edges[:, 1] = edges[:, 0]  # an entry that occurs twice

    def dense(logits):
        return -(weights * logits.log_softmax(1)[edges[0], edges[1]]).sum() / B

    return (draw.scale * draw.normal(B, V),), lambda z: RECIPES["sparse_cross_entropy"](z, edges, weights), dense


@case("sigmoid_focal_loss")
def alpha_focal(draw):
    ids = torch.stack([torch.randperm(V, generator=draw.generator)[:3] for _ in range(B)])
    target = torch.zeros(B, V, dtype=torch.float64).scatter_(1, ids, 1.0)

    def dense(logits):
        p, loss = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p_t, alpha_t = torch.where(target > 0, p, 1 - p), 0.3 * target + 0.7 * (1 - target)
        return (alpha_t * (1 - p_t) ** 2 * loss).mean()

    return (draw.scale * draw.normal(B, V),), lambda z: RECIPES["sigmoid_focal_loss"](
        z, (ids, torch.ones(B, 3, dtype=torch.float64)), alpha=0.3), dense


@case("loss_per_entry")
def loss_per_entry(draw):
    ids, weights, by = draw.ids(V, B, 5), draw.uniform(B, 5), draw.normal(B, 5)
    return (draw.scale * draw.normal(B, V),), lambda z: (by * RECIPES["loss_per_entry"](z, ids, weights)).sum(), (
        lambda z: (-by * weights * z.log_softmax(1).gather(1, ids)).sum())


@case("loglikelihood")
def loglikelihood(draw):
    hidden, weight = draw.head()
    tokens, by = draw.tokens(), draw.normal(B)
    return (hidden, weight), lambda h, w: (by * RECIPES["loglikelihood"](h, w, tokens)[0]).sum(), lambda h, w: (
        by * log_q(h, w, tokens).sum(1)).sum()


@case("eagle3")
def eagle3(draw):
    hidden, weight = draw.head()
    draft_ids, mask = torch.randperm(V, generator=draw.generator)[:13], draw.uniform(B, S) < 0.8
    draft, draft_weight = draw.scale * draw.normal(B, S, 5), draw.normal(13, 5)
    logits = hidden @ weight.T
    p = logits[..., draft_ids].softmax(-1)
    trained = mask & (logits.argmax(-1)[..., None] == draft_ids).any(-1)
    assert trained.any() and not trained[mask].all()

    def dense(draft, draft_weight):
        cross_entropy = -(p * (draft @ draft_weight.T).log_softmax(-1)).sum(-1)
        entropy = -(p * p.log()).sum(-1)
        return ((cross_entropy - entropy) * trained).mean()

    return (draft, draft_weight), lambda x, w: RECIPES["eagle3"](x, w, hidden, weight, draft_ids, mask), dense


def normalized(x):
    return F.normalize(x, dim=-1)


@case("without_excluded", "columns")
def infonce_without_excluded(draw):
    """Returns a batch with hard negatives, in which a guide's scores and equal items exclude documents."""
    queries, documents = draw.normal(10, D), draw.normal(14, D)
    documents[12] = documents[4]  # ties
    guide, items = draw.normal(10, 14), draw.ids(5, 14)
    excluded = guide > guide.diagonal()[:, None] - 0.1
    excluded |= items[:10, None] == items
    excluded[0] = False
    excluded[1] = True
    excluded.diagonal().fill_(False)
    ids = torch.cat((torch.arange(10)[:, None], RECIPES["columns"](excluded)), 1)
    ids[2] = -100  # an ignored query
    ids[3, -1] = 3  # the positive is also in the list
    assert ids.shape[1] == 14
    scale = 3 * draw.scale

    def dense(queries, documents):
        scores = scale * normalized(queries) @ normalized(documents).T
        losses = F.cross_entropy(scores.masked_fill(excluded, -math.inf), torch.arange(10), reduction="none")
        return torch.cat((losses[:2], losses[3:])).mean()

    return (queries, documents), lambda q, d: row_loss("without_excluded", ids, logit_scale=scale,
                                                       return_log_tail=True)(normalized(q), normalized(d)), dense


@case("sup_con")
def sup_con(draw):
    features, classes = draw.normal(14, D), draw.ids(4, 14)
    features[5] = features[9]
    classes[0] = 9  # a sample without positives
    positives = (classes[:, None] == classes).fill_diagonal_(False)
    ids = torch.cat((torch.arange(14)[:, None], RECIPES["columns"](positives)), 1)
    ids[13] = -100  # not an anchor, but a candidate of the others
    scale = 3 * draw.scale

    def dense(features):
        similarities = scale * normalized(features) @ normalized(features).T
        losses = []
        for i in range(13):
            others = [a for a in range(14) if a != i]
            of_positives = [similarities[i, p] - similarities[i, others].logsumexp(0)
                            for p in others if classes[p] == classes[i]]
            losses.append(-sum(of_positives) / max(len(of_positives), 1) + 0 * features.sum())
        return torch.stack(losses).mean()

    return (features,), lambda x: row_loss("sup_con", ids, logit_scale=scale, return_log_tail=True)(
        normalized(x), normalized(x)), dense


@case("siglip")
def siglip(draw):
    images, texts = normalized(draw.normal(11, D)), normalized(draw.normal(11, D))
    texts[4] = texts[7]
    log_scale = torch.tensor([10 * draw.scale], dtype=torch.float64).log()
    signs = 2 * torch.eye(11, dtype=torch.float64) - 1

    def dense(images, texts, log_scale, bias):
        return -F.logsigmoid(signs * (log_scale.exp() * images @ texts.T + bias)).sum(1).mean()

    return (images, texts, log_scale, torch.tensor([-10.0], dtype=torch.float64)), RECIPES["siglip"], dense


@case("sampled_softmax")
def sampled_softmax(draw):
    hidden, weight = draw.head()
    tokens, of_sampler = draw.tokens(), draw.normal(V).log_softmax(0)
    negatives = draw.ids(V, B, S, 12)
    negatives[3, 2, 4:7] = tokens[3, 2]  # accidental hits
    negatives[3, 3, 8:] = -100
    ids = torch.cat((tokens[..., None], negatives), -1)

    def dense(hidden, weight):
        losses = []
        for b, s in (tokens != -100).nonzero().tolist():
            kept = [int(tokens[b, s]), *(int(v) for v in negatives[b, s] if v not in (-100, tokens[b, s]))]
            losses.append(-(weight[kept] @ hidden[b, s] - of_sampler[kept]).log_softmax(0)[0])
        return torch.stack(losses).mean()

    return (hidden, weight), lambda h, w: RECIPES["sampled_softmax"](h, w, ids, of_sampler), dense


@case("in_batch_softmax")
def in_batch_softmax(draw):
    queries, documents, of_items = draw.scale * draw.normal(9, D), draw.normal(9, D), draw.normal(9).log_softmax(0)

    def dense(queries, documents):
        return -(queries @ documents.T - of_items).log_softmax(1).diagonal().mean()

    return (queries, documents), lambda q, d: RECIPES["in_batch_softmax"](q, d, of_items), dense


@case("grpo", "ppo")
def policy_with_a_penalty(draw):
    hidden, weight = draw.head()
    tokens, advantages = draw.tokens(), draw.normal(B, S)
    old, reference = (draw.near(hidden, weight, tokens) for _ in range(2))
    ours = row_loss("grpo", tokens, advantages, old, reference, return_entropy=True, has_aux=True)

    def dense(hidden, weight):
        log_probs = log_q(hidden, weight, tokens)
        of_all = (hidden @ weight.T).log_softmax(-1)
        kl = torch.exp(reference - log_probs) - 1 - (reference - log_probs)
        entropy = -(of_all.exp() * of_all).sum(-1)
        return (ppo_formula(log_probs, old, advantages) + 0.02 * kl - 0.001 * entropy)[tokens != -100].mean()

    return (hidden, weight), lambda h, w: ours(h, w)[0], dense


def of_draft(name, formula, **options):
    def make(draw):
        hidden, weight = draw.head()
        labels = draw.tokens()
        teacher, teacher_weight = hidden + 0.5 * draw.scale * draw.normal(B, S, D), weight + 0.1 * draw.normal(V, D)
        of_teacher = (teacher @ teacher_weight.T).softmax(-1)
        ours = row_loss(name, labels, teacher=(teacher, teacher_weight), return_tv=True, **options)

        def dense(hidden, weight):
            of_all = (hidden @ weight.T).log_softmax(-1)
            kl = (of_teacher * (of_teacher.log() - of_all)).sum(-1)
            tv = 0.5 * (of_teacher - of_all.exp()).abs().sum(-1)
            return formula(kl, tv)[labels != -100].mean()

        return (hidden, weight), lambda h, w: ours(h, w)[0] if "has_aux" in options else ours(h, w), dense
    make.__name__ = name
    return case(name)(make)


of_draft("lk", lambda kl, tv: torch.lerp(tv, kl, (-3 * (1 - tv)).exp().detach()), return_forward_kl=True)
of_draft("log_acceptance", lambda kl, tv: -torch.log(1 - tv), has_aux=True)


def gradients(loss, tensors, by=1.0):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = loss(*leaves)
    return out.detach().reshape(1), torch.autograd.grad(by * out, leaves)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("name", CASES)
def test_a_recipe_computes_the_published_loss(name, scale):
    tensors, ours, dense = CASES[name][1](Draw(scale))
    value, grads = gradients(ours, tensors, by=-1.7)
    exact, exact_grads = gradients(dense, tensors, by=-1.7)
    assert_close_to_float64(value, exact, exact)
    for grad, of_formula in zip(grads, exact_grads):
        if of_formula.any():
            assert_close_to_float64(grad, of_formula, of_formula)
        else:
            assert not grad.any()


def test_every_recipe_is_tested_and_short():
    tested = {name for names, _ in CASES.values() for name in names}
    assert tested | IN_PROCESSES | WITHOUT_GRADIENT == {*RECIPES, "ppo", "grpo", "lk", "log_acceptance"}
    assert max(lines().values()) <= 8


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "mini_llm"])
def test_which_divergence_an_estimator_differentiates(name):
    """Averages the gradient of an estimator over all tokens that the policy may sample."""
    draw = Draw(2.0)
    hidden, weight = draw.head((1,))
    reference = draw.normal(V).log_softmax(0)

    def ours(hidden, weight):
        q = (hidden @ weight.T).softmax(-1).detach()[0]

        def expected(log_probs, tokens, reference, q):
            return q * RECIPES[name](log_probs, tokens, reference)

        return sparse_ce.linear_row_loss(expected, hidden.expand(V, D), weight, torch.arange(V), reference, q,
                                         reduction="sum")

    def divergence(hidden, weight):
        log_q = (hidden @ weight.T).log_softmax(-1)[0]
        if name == "k3":
            return (reference.exp() * (reference - log_q)).sum()
        return (log_q.exp() * (log_q - reference)).sum()

    _, found = gradients(ours, (hidden, weight))
    kl, expected = gradients(divergence, (hidden, weight))
    assert kl > 0.1
    for grad, of_kl in zip(found, expected):
        if name == "k1":
            assert grad.abs().max() < 1e-13 * of_kl.abs().max()
        else:
            assert_close_to_float64(grad, of_kl, of_kl)


def test_score_centering_has_no_drift():
    """Averages the gradient over all tokens of the sampler: it is 0 if advantages are equal, but only if centered."""
    draw = Draw(1.0)
    hidden, weight = draw.head((1,))
    sampler = (1.5 * (hidden + draw.normal(1, D)) @ weight.T).log_softmax(-1)[0]
    top = torch.arange(V).expand(V, V)
    ids = torch.cat((torch.arange(V)[:, None], top), 1)
    sampled = torch.cat((sampler[:, None], sampler.expand(V, V)), 1)

    def expected(log_probs, ids, sampled, advantages):
        return sampled[:, 0].exp() * RECIPES["centered"](log_probs, ids, sampled, advantages)

    def plain(log_probs, ids, sampled, advantages):
        return -sampled[:, 0].exp() * advantages * log_probs.log_probs[:, 0]

    of_both = [gradients(lambda h, w, fn=fn: sparse_ce.linear_row_loss(
        fn, h.expand(V, D), w, ids, sampled, torch.ones(V, dtype=torch.float64), reduction="sum",
        return_log_tail=True), (hidden, weight))[1] for fn in (expected, plain)]
    for centered, drift in zip(*of_both):
        assert centered.abs().max() < 1e-5 * drift.abs().max()  # the clamps of the empty tails


def test_is_greedy():
    """Checks integer logits, which tie exactly: class 3 has the logits of class 1."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    hidden = torch.tensor([[[2.0, 1.0], [0.0, 3.0], [-2.0, 0.0]]] * 4, dtype=torch.float64)
    tokens = torch.tensor([[0, 1, 2], [0, 3, 2], [-100, 1, 2], [0, 1, 1]])
    total, greedy = RECIPES["loglikelihood"](hidden, weight, tokens)
    assert greedy.tolist() == [True, False, True, False]
    expected = log_q(hidden, weight, tokens).sum(1)
    assert_close_to_float64(total, expected, expected)


def ranks_by_hand(scores, ids):
    """Returns the best and the worst rank of the first id of each row, among the classes without the other ids."""
    best, worst = [], []
    for row, (held_out, *seen) in zip(scores.tolist(), ids.tolist()):
        others = [score for item, score in enumerate(row) if item not in (held_out, *seen)]
        best.append(sum(not score <= row[held_out] for score in others) if held_out >= 0 else -1)
        worst.append(best[-1] + others.count(row[held_out]) if held_out >= 0 else -1)
    return [best, worst]


def test_ranks_and_metrics_over_a_catalogue():
    """Checks integer scores, which tie exactly, also at 0. Ids are padded and repeated; the last user is ignored."""
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.randint(-3, 4, (n, 5), generator=generator).double() for n in (30, 200))
    users[3] = 0.0
    ids = torch.stack([torch.randperm(200, generator=generator)[:9] for _ in range(30)])
    ids[:7, 4:], ids[-1, 0] = -100, -100
    ids[7:20, 5], ids[9:22, 6] = ids[7:20, 0], ids[9:22, 1]  # the held-out item, and an item twice
    expected = ranks_by_hand(users @ items.T, ids)
    ranks = RECIPES["ranks_in_catalogue"](users, items, ids, chunk_rows=7)
    assert [r.tolist() for r in ranks] == expected and expected[0] != expected[1]
    for k in (10, 40):
        found = RECIPES["ranking_metrics"](ranks[0], k)
        by_hand = {"HR": [rank < k for rank in expected[0][:-1]], "MRR": [1 / (rank + 1) for rank in expected[0][:-1]],
                   "NDCG": [1 / math.log2(rank + 2) if rank < k else 0.0 for rank in expected[0][:-1]]}
        for name, values in by_hand.items():
            assert float(found[name]) == pytest.approx(sum(values) / len(values), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("std", [1.0, 1e-3, 1e-4])
def test_ranks_of_close_scores_are_exact(std, dtype):
    """Checks scores whose log-probabilities are too coarse to compare. Those of the last user are NaN."""
    draw = Draw(1.0)
    users, items = ((std**0.5 * draw.normal(n, 8)).to(dtype) for n in (64, 3000))
    users[-1] = torch.nan
    users.requires_grad_()
    ids = draw.ids(3000, 64, 500)
    best, worst = RECIPES["ranks_in_catalogue"](users, items, ids, chunk_rows=64)
    assert [best[:-1].tolist(), worst[:-1].tolist()] == ranks_by_hand((users @ items.T)[:-1], ids[:-1])
    assert best[-1] == worst[-1] == 3000  # higher than every score


def test_the_rank_by_negative_scores_counts_the_lower_ones():
    scores, ids = Draw(1.0).ids(5, 6, 40).float(), Draw(1.0).ids(40, 6)
    higher, lower = (sparse_ce.selected_log_probs(scores, ids, return_rank=True, logit_scale=scale).rank
                     for scale in (1.0, -1.0))
    assert torch.equal(40 - higher - lower, (scores == scores.gather(1, ids[:, None])).sum(1))


def test_columns_of_a_mask():
    mask = torch.tensor([[False] * 4, [True, False, True, True], [False, True, False, False]])
    ids = RECIPES["columns"](mask)
    assert ids.shape == (3, 3)
    assert [sorted(row) for row in ids.tolist()] == [[-100] * 3, [0, 2, 3], [-100, -100, 1]]
    assert RECIPES["columns"](torch.zeros(3, 4, dtype=torch.bool)).shape == (3, 0)

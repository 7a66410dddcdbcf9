"""Tests ``TopKCollator`` with a teacher's cached top-k as written by vLLM, DistillKit, axolotl and TRL."""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_lm
from sparse_ce.integrations.transformers import TopKCollator, causal_lm_loss
from tiny_lm import VOCAB, make_model, transformers

IDS = [[5, 6, 7], [8, 9], [], [10, 11, 12]]  # position 2 has no entries
LOGPROBS = [[-0.5, -1.5, -3.0], [-0.1, -4.0], [], [-1.0, -1.1, -1.2]]


def expected(ids=IDS, logprobs=LOGPROBS):
    dense = torch.zeros(len(ids), VOCAB)
    for row, classes, values in zip(dense, ids, logprobs):
        for c, v in zip(classes, values):
            row[c] = torch.tensor(v).exp()
    return dense


def objects(rows):
    """Returns an object array (S,), which ``datasets`` in NumPy format creates from rows of different lengths."""
    out = np.empty(len(rows), dtype=object)
    out[:] = rows
    return out


def padded(rows, fill, k=3):
    return [list(row) + [fill] * (k - len(row)) for row in rows]


INPUT = {"input_ids": [1, 5, 8, 9]}
VLLM = [None if not ids else {i: SimpleNamespace(logprob=v, rank=n, decoded_token="x")
                              for n, (i, v) in enumerate(zip(ids, values))} for ids, values in zip(IDS, LOGPROBS)]
# The sampled token is written first, and again among the top k.
FLAT = SimpleNamespace(start_indices=[0, 4, 7, 7], end_indices=[4, 7, 7, 11],
                       token_ids=[6, 5, 6, 7, 9, 8, 9, 10, 10, 11, 12],
                       logprobs=[-1.5, -0.5, -1.5, -3.0, -4.0, -0.1, -4.0, -1.0, -1.0, -1.1, -1.2])
FORMS = {
    "ragged lists": ({}, {"teacher_ids": IDS, "teacher_log_probs": LOGPROBS}),
    "ragged lists with None": ({}, {"teacher_ids": [r or None for r in IDS],
                                    "teacher_log_probs": [r or None for r in LOGPROBS]}),
    "ragged arrays": ({}, {"teacher_ids": [np.array(r, dtype=np.int32) for r in IDS],
                           "teacher_log_probs": [np.array(r, dtype=np.float16).astype(np.float32) for r in LOGPROBS]}),
    "ragged arrays in an array": (dict(mask="kept"), {
        "teacher_ids": objects([np.array(r) if r else None for r in IDS]),
        "teacher_log_probs": objects([np.array(r, dtype=np.float32) if r else None for r in LOGPROBS]),
        "kept": objects([np.ones(len(r), dtype=bool) for r in IDS])}),
    "-inf beside ids that are anything": ({}, {
        "teacher_ids": torch.tensor(padded(IDS, 2 ** 40)),
        "teacher_log_probs": torch.tensor(padded(LOGPROBS, -torch.inf))}),
    "ids of -100, values that are anything": ({}, {
        "teacher_ids": np.array(padded(IDS, -100)), "teacher_log_probs": np.array(padded(LOGPROBS, np.nan))}),
    "id 0 and -1e9, with a mask": (dict(indices="target_token_ids", values="target_logprobs", mask="target_mask"), {
        "target_token_ids": padded(IDS, 0), "target_logprobs": padded(LOGPROBS, -1e9),
        "target_mask": padded([[1] * len(r) for r in IDS], 0)}),
    "anything, with a mask": (dict(mask="kept"), {
        "teacher_ids": torch.tensor(padded(IDS, 4)), "teacher_log_probs": torch.tensor(padded(LOGPROBS, -0.5)),
        "kept": torch.tensor(padded([[True] * len(r) for r in IDS], False))}),
    "the sampled token before the top k": ({}, {
        "teacher_ids": [r[1:2] + r for r in IDS], "teacher_log_probs": [r[1:2] + r for r in LOGPROBS]}),
    "probabilities": (dict(values="top_probs", values_are="probs"), {
        "teacher_ids": padded(IDS, 0), "top_probs": [[np.exp(v) for v in r] + [0.0] * (3 - len(r)) for r in LOGPROBS]}),
    "vLLM prompt_logprobs": (dict(values="prompt_logprobs"), {"prompt_logprobs": VLLM}),
    "vLLM as JSON": (dict(values="prompt_logprobs"), {"prompt_logprobs": [
        None if not row else {str(i): {"logprob": e.logprob, "rank": e.rank} for i, e in row.items()}
        for row in (r or {} for r in VLLM)]}),
    "vLLM as numbers": (dict(values="prompt_logprobs"), {"prompt_logprobs": [
        {i: e.logprob for i, e in (row or {}).items()} for row in VLLM]}),
    "vLLM in an array": (dict(values="prompt_logprobs"), {"prompt_logprobs": objects(VLLM)}),
    "vLLM flat": (dict(values="prompt_logprobs"), {"prompt_logprobs": FLAT}),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_is_the_same_distribution(form):
    options, sample = FORMS[form]
    text = {} if "vLLM" in form else {"predicts": "token"}  # vLLM supports no other kind
    batch = TopKCollator(num_classes=VOCAB, **text, **options)([{**INPUT, **sample}, {**INPUT, **sample}])
    target = batch["labels"]
    assert target.shape == (2, 4) and set(batch) == {"input_ids", "attention_mask", "labels"}
    assert target.ne(-100).tolist() == [[True, True, False, True]] * 2
    torch.testing.assert_close(target.to_dense(torch.float32), expected().expand(2, -1, -1), rtol=1e-3, atol=0)


def test_batches_of_different_lengths_and_candidates():
    short = {"input_ids": [1, 5], "teacher_ids": [[3], [4]], "teacher_log_probs": [[-1.0], [-2.0]]}
    long = {**INPUT, "teacher_ids": IDS, "teacher_log_probs": LOGPROBS}
    short["position_ids"], long["position_ids"] = torch.arange(2), torch.arange(4)
    short["weight"], long["weight"] = 0.5, 2.0
    batch = TopKCollator(predicts="token", num_classes=VOCAB)([short, long])
    assert batch["input_ids"].tolist() == [[1, 5, 0, 0], [1, 5, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]] and batch["weight"].tolist() == [0.5, 2.0]
    assert batch["labels"].ne(-100).tolist() == [[True, True, False, False], [True, True, False, True]]
    dense = batch["labels"].to_dense()
    torch.testing.assert_close(dense[0, :2], expected([[3], [4]], [[-1.0], [-2.0]]))
    torch.testing.assert_close(dense[1], expected())


def test_prompts_are_left_out_and_paddings_follow_the_collator():
    def tokenizer_like(samples):
        width = 6  # as with pad_to_multiple_of
        return {"input_ids": torch.tensor([[0] * (width - len(s["input_ids"])) + s["input_ids"] for s in samples])}

    sample = {**INPUT, "teacher_ids": IDS, "teacher_log_probs": LOGPROBS, "labels": [-100, 5, 8, 9]}
    batch = TopKCollator(tokenizer_like, padding_side="left", predicts="token", num_classes=VOCAB)([sample])
    assert batch["labels"].ne(-100).tolist() == [[False, False, False, True, False, True]]
    torch.testing.assert_close(batch["labels"].to_dense()[0, 3], expected()[1])


def padded(samples, side, mask=True):
    width = max(len(s["input_ids"]) for s in samples)
    pads = [[0] * (width - len(s["input_ids"])) for s in samples]

    def laid(rows):
        return torch.tensor([pad + row if side == "left" else row + pad for pad, row in zip(pads, rows)])

    batch = {"input_ids": laid([s["input_ids"] for s in samples])}
    return {**batch, "attention_mask": laid([[1] * len(s["input_ids"]) for s in samples])} if mask else batch


def test_labels_lie_where_the_tokens_do():
    """Checks that ``attention_mask`` determines the side of the padding, and that a contradiction raises an error."""
    collated = functools.partial(TopKCollator, predicts="token")
    three = [{"input_ids": ids, "teacher_ids": [[i] for i in ids], "teacher_log_probs": [[0.0]] * len(ids)}
             for ids in ([5, 6], [7, 8, 9, 1], [3])]

    def assert_beside(batch):
        for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
            assert labels == [None if token == 0 else [(token, 0.0)] for token in tokens]

    for side, samples in itertools.product(("left", "right"), (three, three[1:])):
        own = collated(padding_side=side)(samples)
        assert_beside(own)
        assert own["attention_mask"].tolist() == padded(samples, side)["attention_mask"].tolist()
        for given in (side, None):
            assert_beside(collated(lambda s, side=side: padded(s, side), padding_side=given)(samples))
        assert_beside(collated(lambda s, side=side: padded(s, side, mask=False), padding_side=side)(samples))
        other = "left" if side == "right" else "right"
        with pytest.raises(ValueError, match=f"padding_side must be that of the collator, '{side}' .*got '{other}'"):
            collated(lambda s, side=side: padded(s, side), padding_side=other)(samples)
    assert_beside(collated(lambda s: padded(s, "right", mask=False))(samples))
    for side, mask in itertools.product(("left", "right"), (torch.zeros(2, 4), torch.ones(2, 4))):  # no information
        beside = collated(lambda s, side=side, mask=mask: {**padded(s, side), "attention_mask": mask},
                          padding_side=side)
        assert_beside(beside(samples))
    with pytest.raises(ValueError, match="samples must be at least one"):
        TopKCollator(predicts="token")([])


def test_what_is_left_of_the_teacher_goes_with_it():
    """Checks that a teacher with labels keeps its tail, and that a sample without a teacher has none."""
    sample = {**INPUT, "labels": [1, 5, 8, 9], "teacher_ids": [[5, 6]] * 4, "teacher_log_probs": [[-1.0, -2.0]] * 4,
              "tail": [math.log(1 - math.exp(-1) - math.exp(-2))] * 4}
    batch = TopKCollator(label_weight=0.3, log_tail="tail", predicts="token")([sample])
    whole = batch["labels"].values.exp().sum(-1) + batch["teacher_log_tail"].exp()
    torch.testing.assert_close(whole, torch.ones(1, 4))
    alone = {**INPUT, "labels": [1, 5, 8, 9]}
    filling = TopKCollator(fill_with_labels=True, log_tail="tail", predicts="token")
    batch = filling([sample, alone])
    assert batch["teacher_log_tail"][1].isneginf().all() and batch["teacher_log_tail"][0].isfinite().all()
    with pytest.raises(ValueError, match="sample must hold 'tail'"):
        filling([{k: v for k, v in sample.items() if k != "tail"}])


def test_prompt_logprobs_of_a_text_of_one_token():
    assert TopKCollator()([{"input_ids": [5], "teacher_log_probs": [None]}])["labels"].tolist() == [[None]]


def test_rows_of_the_next_token_become_those_of_the_token():
    sample = {**INPUT, "teacher_ids": IDS, "teacher_log_probs": LOGPROBS}
    target = TopKCollator(predicts="next", num_classes=VOCAB)([sample])["labels"]
    assert target.ne(-100).tolist() == [[False, True, True, False]]
    torch.testing.assert_close(target.to_dense()[0, 1:], expected()[:3])
    logits = torch.randn(1, 4, VOCAB)
    by_hand = -(logits[0, :2].log_softmax(-1) * expected()[:2]).sum() / 2
    torch.testing.assert_close(causal_lm_loss()({"logits": logits}, target), by_hand)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_fixed_k_keeps_the_largest(k):
    shuffled = {**INPUT, "teacher_ids": [r[::-1] for r in IDS], "teacher_log_probs": [r[::-1] for r in LOGPROBS]}
    target = TopKCollator(predicts="token", k=k, num_classes=VOCAB)([shuffled])["labels"]
    assert target.indices.shape == (1, 4, k)
    torch.testing.assert_close(target.to_dense()[0], expected([r[:k] for r in IDS], [r[:k] for r in LOGPROBS]))


def test_logits_are_normalised_over_the_candidates():
    sample, dense = {**INPUT, "teacher_ids": IDS, "teacher_log_probs": LOGPROBS}, expected()
    target = TopKCollator(values_are="logits", predicts="token", num_classes=VOCAB)([sample])
    torch.testing.assert_close(target["labels"].to_dense()[0], dense / dense.sum(-1, keepdim=True).clamp(min=1e-9))


LABELS = [-100, 8, 20, 11]


def hard(labels=LABELS):
    return expected([[] if c == -100 else [c] for c in labels], [[] if c == -100 else [0.0] for c in labels])


@pytest.mark.parametrize("kind", ["log_probs", "probs", "logits"])
@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_labels_stand_in_for_a_teacher_and_beside_it(kind, weight):
    """Tests positions with a teacher, a label, both or neither, and a sample without a teacher, in one batch.

    Positions 1 and 3 have both, 2 has a label alone, 0 has a teacher and an ignored label.
    """
    values = [np.exp(r).tolist() for r in LOGPROBS] if kind == "probs" else LOGPROBS
    taught = {**INPUT, "labels": LABELS, "teacher_ids": IDS, "teacher_log_probs": values}
    alone = {**INPUT, "labels": LABELS, "teacher_ids": None, "teacher_log_probs": None}
    teacher = expected()
    if kind == "logits":
        teacher = teacher / teacher.sum(-1, keepdim=True).clamp(min=1e-9)
    mixed = torch.stack((torch.zeros(VOCAB), (1 - weight) * teacher[1] + weight * hard()[1], hard()[2],
                         (1 - weight) * teacher[3] + weight * hard()[3]))
    options = dict(values_are=kind, label_weight=weight, num_classes=VOCAB)
    collator = TopKCollator(predicts="token", fill_with_labels=True, **options)
    target = collator([taught, alone])["labels"]
    assert target.ne(-100).tolist() == [[False, True, True, True]] * 2
    torch.testing.assert_close(target.to_dense(), torch.stack((mixed, hard())), rtol=1e-5, atol=1e-6)
    if weight:  # without labels as a substitute
        target = TopKCollator(predicts="token", **options)([taught])["labels"]
        assert target.ne(-100).tolist() == [[False, True, False, True]]
        torch.testing.assert_close(target.to_dense()[0, [1, 3]], mixed[[1, 3]], rtol=1e-5, atol=1e-6)
    shifted = TopKCollator(predicts="next", fill_with_labels=True, **options)
    first = shifted([{**taught, "labels": [5, 8, 20, 11]}])["labels"].to_dense()[0]
    torch.testing.assert_close(first[1], (1 - weight) * teacher[0] + weight * hard()[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first[0], hard([5])[0])
    with pytest.raises(ValueError, match="sparse_ce: sample must hold 'labels' for fill_with_labels"):
        collator([{**taught, "labels": None}])
    with pytest.raises(ValueError, match="remove_unused_columns"):  # not silently hard labels
        TopKCollator(predicts="token")([alone])
    with pytest.raises(ValueError, match=r"sample must hold 'input_ids', got \['tokens'\]; a TeacherCache renames"):
        TopKCollator(predicts="token")([{"tokens": [1]}])


def test_what_stands_beside_the_labels_follows_them():
    first = {**INPUT, "teacher_ids": IDS, "teacher_log_probs": LOGPROBS, "tail": [-1.0, -2.0, -3.0, -4.0]}
    second = {"input_ids": [7, 3], "labels": [-100, 3], "teacher_ids": [[3], [4]],
              "teacher_log_probs": [[-1.0], [-2.0]], "tail": [-5.0, -6.0]}
    options = dict(hard_labels=True, log_tail="tail", predicts="next")
    batch = TopKCollator(**options)([first, second])
    assert batch["hard_labels"].tolist() == [[1, 5, 8, 9], [-100, 3, -100, -100]]
    assert batch["teacher_log_tail"].tolist() == [[0.0, -1.0, -2.0, -3.0], [0.0, -5.0, 0.0, 0.0]]
    assert set(batch) == {"input_ids", "attention_mask", "labels", "hard_labels", "teacher_log_tail"}
    left = TopKCollator(lambda samples: {"input_ids": torch.zeros(2, 5)}, padding_side="left", **options)
    assert left([first, second])["hard_labels"].tolist() == [[-100, 1, 5, 8, 9], [-100, -100, -100, -100, 3]]
    flat = TopKCollator(lambda samples: {"input_ids": torch.tensor([[1, 5, 8, 9, 7, 3]])}, **options)
    batch = flat([first, {**second, "labels": [7, 3]}])
    assert batch["hard_labels"].tolist() == [[1, 5, 8, 9, -100, 3]]  # 7 begins a sequence, so no position predicts it
    assert batch["labels"].ne(-100).tolist() == [[False, True, True, False, False, True]]
    assert batch["teacher_log_tail"].tolist() == [[0.0, -1.0, -2.0, -3.0, 0.0, -5.0]]
    at = torch.tensor([[0, 1, 0, 1, 2, 0]])  # sequences that were packed before
    packed = TopKCollator(lambda samples: {"input_ids": torch.tensor([[1, 5, 8, 9, 7, 3]]), "position_ids": at},
                          predicts="token")
    assert packed([first, second])["labels"].ne(-100).tolist() == [[True, True, False, True, False, False]]
    for missing in ({**first, "tail": None}, {**first, "tail": [-1.0]}):
        with pytest.raises(ValueError, match="sparse_ce: (sample must hold 'tail'|tail must have an element for each)"):
            TopKCollator(**options)([missing])
    with pytest.raises(ValueError, match=r"sparse_ce: collator must make input_ids \(2, S\) or, .* \(1, 6\), got \[3"):
        TopKCollator(lambda samples: {"input_ids": torch.zeros(3, 6)}, predicts="next")([first, second])


def test_a_trainer_distils_from_a_cache(tmp_path):
    teacher, student = make_model(seed=1).eval(), make_model(seed=2)
    cache = []
    for i in range(8):
        ids = torch.randint(3, VOCAB, (9 - i % 3,), generator=torch.Generator().manual_seed(i))
        with torch.no_grad():
            top = teacher(ids[None]).logits[0].log_softmax(-1).topk(8)
        cache.append({"input_ids": ids.tolist(), "teacher_ids": top.indices.tolist(),
                      "teacher_log_probs": top.values.tolist()})
    trainer = tiny_lm.make_trainer(
        tmp_path, student, cache, eval_samples=cache, collator=TopKCollator(predicts="next"), max_steps=30,
        optim="adamw_torch", learning_rate=1e-2, compute_loss_func=causal_lm_loss(), remove_unused_columns=False)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before


def test_errors_say_what_is_missing(tmp_path):
    sample = {**INPUT, "teacher_ids": IDS, "teacher_log_probs": LOGPROBS}
    with pytest.raises(ValueError, match="sparse_ce: sample must hold 'teacher_log_probs', .*remove_unused_columns"):
        tiny_lm.make_trainer(tmp_path, make_model(), [sample] * 8, collator=TopKCollator(predicts="token")).train()
    with pytest.raises(ValueError, match="sparse_ce: sample must hold 'teacher_ids'"):
        TopKCollator(predicts="token")([{**INPUT, "teacher_log_probs": LOGPROBS}])
    with pytest.raises(ValueError, match="must have a row for each of the 3 input_ids, got 4"):
        TopKCollator(predicts="token")([{**sample, "input_ids": [1, 2, 3]}])
    with pytest.raises(ValueError, match=r"must have one shape \(S, K\), got \[4, 3\], \[4, 2\]"):
        TopKCollator(predicts="token")([{**sample, "teacher_log_probs": np.zeros((4, 2))}])
    for options in ({"values_are": "log"}, {"predicts": "this"}, {"k": 0}, {"padding_side": "both"},
                    {"label_weight": 1.0}, {"label_weight": "half"}):
        with pytest.raises(ValueError, match="sparse_ce: .* must be .*, got"):
            TopKCollator(**options)


def test_it_wraps_a_collator_of_transformers():
    def pad(features):
        return transformers.default_data_collator(features)

    sample = {**INPUT, "teacher_ids": IDS, "teacher_log_probs": LOGPROBS}
    batch = TopKCollator(pad, predicts="token")([sample, sample])
    assert batch["input_ids"].shape == (2, 4) and batch["labels"].shape == (2, 4)

"""Tests log-probabilities of vLLM, SGLang and other servers as targets: Python objects and JSON."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

import sparse_ce
from sparse_ce import SparseTarget
from sparse_ce.data import CacheWriter, DistillKitCache, TeacherCache, from_sglang, from_vllm
from sparse_ce.integrations.teacher import TopKCollator


def logprob(value, rank=1):
    return SimpleNamespace(logprob=value, rank=rank, decoded_token="x")


EXPECTED = [None, [(9, -4.0), (5, -0.5), (6, -1.5)], [(5, -0.25)], [(7, -0.0), (2, -3.0)]]
# The sampled token comes first, whether or not it is among the most likely ones.
OBJECTS = [None, {9: logprob(-4.0, 31), 5: logprob(-0.5), 6: logprob(-1.5, 2)}, {5: logprob(-0.25)},
           {7: logprob(-0.0), 2: logprob(-3.0, 2), 8: logprob(-torch.inf, 900)}]
PROMPT_JSON = json.loads(json.dumps([None, *({str(token): {"logprob": max(e.logprob, -9999.0), "rank": e.rank,
                                                          "decoded_token": "x"} for token, e in row.items()}
                                             for row in OBJECTS[1:])]))
FLAT = SimpleNamespace(start_indices=[0, 0, 4, 6], end_indices=[0, 4, 6, 10],
                       token_ids=[9, 5, 6, 9, 5, 5, 7, 7, 2, 8],
                       logprobs=[-4.0, -0.5, -1.5, -4.0, -0.25, -0.26, -0.0, -0.0, -3.0, -torch.inf], ranks=[1] * 10)


def chat(rows):
    def token(i, value):
        return {"token": f"token_id:{i}", "logprob": max(value, -9999.0), "bytes": [120]}
    return {"content": [{**token(*row[0]), "top_logprobs": [token(*entry) for entry in top]} for row, top in rows]}


CHAT = chat([(EXPECTED[1], EXPECTED[1][1:]), (EXPECTED[2], EXPECTED[2]),
             (EXPECTED[3], [*EXPECTED[3], (8, -torch.inf)])])
COMPLETION = {"tokens": ["token_id:9", "token_id:5", "token_id:7"], "token_logprobs": [-4.0, -0.25, -0.0],
              "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.5}, {"token_id:5": -0.25},
                               {"token_id:7": -0.0, "token_id:2": -3.0, "token_id:8": -9999.0}],
              "text_offset": [0, 1, 2]}
ECHO = {**COMPLETION, "tokens": ["token_id:1", *COMPLETION["tokens"]],
        "token_logprobs": [None, *COMPLETION["token_logprobs"]], "top_logprobs": [None, *COMPLETION["top_logprobs"]]}


def with_ids(name):
    """Returns what a server responds that adds ids to OpenAI's format, here as llama.cpp's and Fireworks' do."""
    def entry(i, value):
        text = {7: "7", 8: "7"}.get(i, "x")  # incomplete characters make texts equal, and texts may be digits
        return {name: i, "token": text, "bytes": [*text.encode()], "logprob": max(value, -3.4028234663852886e38)}
    rows = [[EXPECTED[1][0], EXPECTED[1][1:]], [EXPECTED[2][0], EXPECTED[2]],
            [EXPECTED[3][0], [*EXPECTED[3], (8, -torch.inf)]]]
    return [{**entry(*sampled), "top_logprobs": [entry(*e) for e in top]} for sampled, top in rows]


# Together's client returns its ids as floats. Its server lists the text of the sampled token again.
TOGETHER = {"tokens": ["New", " York", "7"], "token_logprobs": [-0.39648438, -2.026558e-06, -0.3515625],
            "token_ids": [9, 5, 7], "top_logprobs": [{"New": -0.39648438}, {" York": -2.026558e-06}, {"7": -0.3515625}]}
SAMPLED = [[(9, torch.tensor(-0.39648438).item())], [(5, torch.tensor(-2.026558e-06).item())], [(7, -0.3515625)]]
FORMS = {"llama.cpp": ({"content": with_ids("id")}, EXPECTED[1:]),
         "llama.cpp's completion_probabilities": (with_ids("id"), EXPECTED[1:]),
         "Fireworks": ({"content": with_ids("token_id")}, EXPECTED[1:]), "Together": (TOGETHER, SAMPLED),
         "Together's client": ({**TOGETHER, "token_ids": [9.0, 5.0, 7.0], "content": None}, SAMPLED),
         "Together without texts": ({name: TOGETHER[name] for name in ("token_ids", "token_logprobs")}, SAMPLED),
         "echo of Together": ({"tokens": ["<s>", *TOGETHER["tokens"]], "token_ids": [1, *TOGETHER["token_ids"]],
                               "token_logprobs": [None, *TOGETHER["token_logprobs"]],
                               "top_logprobs": [None, *TOGETHER["top_logprobs"]]}, [None, *SAMPLED]),
         "prompt_logprobs": (OBJECTS, EXPECTED), "prompt_logprobs as JSON": (PROMPT_JSON, EXPECTED),
         "FlatLogprobs": (FLAT, EXPECTED), "logprobs": (OBJECTS[1:], EXPECTED[1:]),
         "numbers": ([row and {i: e.logprob for i, e in row.items()} for row in OBJECTS], EXPECTED),
         "numbers as JSON": ([row and {str(i): e.logprob for i, e in row.items()} for row in OBJECTS], EXPECTED),
         "chat": (CHAT, EXPECTED[1:]), "completion": (COMPLETION, EXPECTED[1:]), "echo": (ECHO, EXPECTED),
         "client": (SimpleNamespace(model_dump=lambda: CHAT), EXPECTED[1:]), "nothing": ([], []),
         "only the first": ([None], [None]),
         "top_logprobs alone": ({"top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.5}]}, [[(5, -0.5), (6, -1.5)]])}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_target(form):
    given, expected = FORMS[form]
    target = from_vllm(given, num_classes=10)
    assert target.form == "jagged" and target.values_are == "log_probs" and target.num_classes == 10
    assert target.tolist() == expected and target.shape == (len(expected),)
    assert target.ne(-100).tolist() == [row is not None for row in expected]
    assert target.values.dtype == torch.float32 and from_vllm(given).tolist() == expected


def test_it_trains_and_goes_into_a_cache(tmp_path):
    target = from_vllm(OBJECTS, num_classes=10)
    logits = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    loss = sparse_ce.cross_entropy(logits, target)
    expected = -(target.to_dense(torch.float64) * logits.log_softmax(-1)).sum() / 3
    torch.testing.assert_close(loss, expected)
    for k in (None, 3):
        path = tmp_path / f"{k}.safetensors"
        with CacheWriter(path, num_classes=10, k=k, predicts="token", dtype=torch.float32) as writer:
            writer.add(target)
        assert TeacherCache(path)[0]["target"].tolist() == EXPECTED
        assert TeacherCache(path, predicts="next")[0]["target"].tolist() == [*EXPECTED[1:], None]


@pytest.mark.parametrize("given, error, words", [
    ([{10: -0.5}], ValueError, "token ids must be in [0, 10), got 10 at position 0"),
    ([None, {1: -0.5}, {3: -1, -1: -0.5}], ValueError, "token ids must be in [0, 10), got -1 at position 2"),
    ([{1: 0.5}], ValueError, "logprobs must be at most 0, got 0.5 at position 0"),
    ([{1: -1.0}, {}, {1: -1.0, 2: float("nan")}], ValueError, "logprobs must be at most 0, got nan at position 2"),
    ([[1, 2]], TypeError, "logprobs must have a dict or None for each position, got list"),
    ("text", TypeError, "logprobs must be a list with a dict for each position, FlatLogprobs, or the logprobs of a"),
    (3.0, TypeError, "got float"),
    ({"tokens": ["a"]}, ValueError, "logprobs must have 'content', 'top_logprobs' or 'token_ids', got ['tokens']"),
    ({**TOGETHER, "top_logprobs": [{"New": -0.4, "Old": -1.2}] * 3}, ValueError,
     "got 'Old' at position 0; request ids from the server with return_tokens_as_token_ids. If it returns only the"),
    ({**TOGETHER, "token_logprobs": None}, ValueError, "token_logprobs must be 3, one for each of token_ids, got None"),
    ({**TOGETHER, "tokens": ["New"]}, ValueError, "tokens must be 3, one for each of token_ids, got 1"),
    ({**TOGETHER, "top_logprobs": []}, ValueError, "top_logprobs must be 3, one for each of token_ids, got 0"),
    ({**TOGETHER, "token_ids": [9.5, 5, 7]}, ValueError, "token must be an id, such as 7 or 'token_id:7', got 9.5"),
    ({"content": [{"id": "x", "token": "a", "logprob": -1.0}]}, ValueError, "token must be an id, such as"),
    ([{"id": 1, "logprob": -1.0, "top_logprobs": []}, None], TypeError, "content must have a dict for each position"),
    ({"content": [{"token": "Hello", "logprob": -0.5}]}, ValueError,
     "token must be an id, such as 'token_id:123', got 'Hello' at position 0; request ids from the server"),
    ({"content": [{"token": "7", "logprob": -0.5}]}, ValueError, "such as 'token_id:123', got '7'"),
    ({"top_logprobs": [{"7": -0.5}]}, ValueError, "token must be an id, such as 'token_id:123', got '7'"),
    ([{"x": {"logprob": -0.5}}], ValueError, "token must be an id"),
    ([{1: -1.0}, {1.5: -1.0}], ValueError, "token must be an id, such as 7 or 'token_id:7', got 1.5 at position 1"),
    ([{True: -1.0}], ValueError, "token must be an id, such as 7 or 'token_id:7', got True at position 0"),
    ([{None: -1.0}], ValueError, "token must be an id, such as 7 or 'token_id:7', got None at position 0"),
    ([None, {1: None}], ValueError, "logprob must be a number, got None at position 1"),
    ([{1: "much"}], ValueError, "logprob must be a number, got 'much' at position 0"),
    ([{1: {"rank": 1}}], ValueError, "logprob must be a number, got None at position 0"),
    ([{1: logprob(None)}], ValueError, "logprob must be a number, got None at position 0"),
    ({"content": [{"token": "token_id:1", "logprob": -1.0}, {"token": "token_id:1"}]}, ValueError,
     "logprob must be a number, got None at position 1"),
    ({"content": [{"logprob": -0.5}]}, ValueError, "got None at position 0"),
    ({"content": [{"token": "token_id:1", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}]}]}, ValueError,
     "got None at position 0"),
    ({"content": [None]}, TypeError, "content must have a dict for each position, got NoneType at position 0"),
    ({"content": [{"token": "token_id:1", "logprob": -0.5, "top_logprobs": [3]}]}, TypeError,
     "top_logprobs must have dicts, got int at position 0"),
    ({**COMPLETION, "tokens": COMPLETION["tokens"][:2]}, ValueError,
     "tokens must be 3, one for each of top_logprobs, got 2"),
    ({**COMPLETION, "tokens": []}, ValueError, "tokens must be 3, one for each of top_logprobs, got 0"),
    ({**COMPLETION, "tokens": None}, ValueError, "tokens must be 3, one for each of top_logprobs, got None"),
    ({**COMPLETION, "token_logprobs": [-4.0]}, ValueError, "token_logprobs must be 3, one for each of top_logprobs"),
    ({**COMPLETION, "top_logprobs": COMPLETION["top_logprobs"][:1]}, ValueError, "tokens must be 1, one for each of"),
    (SimpleNamespace(**{**vars(FLAT), "token_ids": [9.5] * 10}), ValueError, "got 9.5 at position 1"),
    (SimpleNamespace(**{**vars(FLAT), "logprobs": [None] * 10}), ValueError, "got None at position 1"),
    (SimpleNamespace(**{**vars(FLAT), "logprobs": [-1.0] * 3}), ValueError,
     "logprobs must be 10, one for each of token_ids, got 3"),
    (SimpleNamespace(**{**vars(FLAT), "end_indices": [0, 4]}), ValueError,
     "end_indices must be 4, one for each of start_indices, got 2"),
    (SimpleNamespace(**{**vars(FLAT), "end_indices": [0, 4, 6, 11]}), ValueError,
     "indices must ascend from 0 to 10, got 6 to 11 at position 3")])
def test_what_is_refused(given, error, words):
    with pytest.raises(error, match=re.escape("sparse_ce: ") + ".*" + re.escape(words)):
        from_vllm(given, num_classes=10)


@pytest.mark.parametrize("value, stored", [(1.2e-7, 0.0), (1e-3, 0.0), (-0.0, -0.0), (2e-3, None)])
def test_a_rounding_error_above_0_counts_as_0(value, stored, tmp_path):
    """Checks all importers, the writer, and files of other programs."""
    def of_collator(column, **named):
        collator = TopKCollator(predicts="token", **named)
        return collator([{"input_ids": [1], **column}])["labels"][0]

    def of_writer(dtype):
        path = tmp_path / f"{dtype}.safetensors"
        with CacheWriter(path, num_classes=10, dtype=dtype) as writer:
            writer.add(SparseTarget.from_topk(torch.tensor([[5, 6]]), torch.tensor([[value, -3.0]]),
                                              values_are="log_probs"),
                       log_tail=torch.tensor([value]))
        assert TeacherCache(path)[0]["log_tail"].item() == 0
        return TeacherCache(path)[0]["target"]

    def of_file(verify, name, read, **more):
        path = tmp_path / "cache.parquet"
        pq = pytest.importorskip("pyarrow.parquet")
        columns = {**more, **dict(zip(name, ([[[5, 6]]], [[[value, -3.0]]])))}
        pq.write_table(pytest.importorskip("pyarrow").table(columns), path)
        sample = read(path, num_classes=10, verify=verify)[0]
        assert "log_tail" not in sample or sample["log_tail"].item() == max(0, stored is None and value)
        return sample["target"]

    content = {"token": "token_id:5", "logprob": value, "top_logprobs": [{"token": "token_id:6", "logprob": -3.0}]}
    found = [lambda: from_vllm([{5: value, 6: -3.0}]), lambda: from_vllm({"content": [content]}),
             lambda: from_sglang([[[value, 5, None], [-3.0, 6, None]]]),
             lambda: of_collator({"teacher_ids": [[5, 6]], "teacher_log_probs": [[value, -3.0]]}),
             lambda: of_collator({"teacher_log_probs": [{5: value, 6: -3.0}]}),
             lambda: of_writer(torch.float16), lambda: of_writer(torch.float32)]
    for verify in (True, False):
        found += [lambda v=verify: of_file(v, ("ids", "log_probs"), TeacherCache, log_tail=[[value]]),
                  lambda v=verify: of_file(v, ("token_ids", "top_values"), DistillKitCache)]
    for i, get in enumerate(found):
        if stored is None:
            if i in (3, 4, 9, 10):  # the collator and verify=False check no values
                continue
            with pytest.raises(ValueError, match="must be at most 0, got 0.00[12]"):
                get()
            continue
        assert get().tolist() == [[(5, stored), (6, -3.0)]]


# --------------------------------------------------------------------------------------------------------------- SGLang

ROWS = [None, [[-4.0, 9, None], [-0.5, 5, "five"], [-1.5, 6, None]], [(-0.25, 5, None)],
        [[-0.0, 7, None], [-3.0, 2, None], [-torch.inf, 8, None]]]


@pytest.mark.parametrize("given", [ROWS, [[], *ROWS[1:]], json.loads(json.dumps(ROWS)),
                                   [row and [entry[:2] for entry in row] for row in ROWS]])
def test_sglang_gives_the_target_of_vllm(given):
    target, expected = from_sglang(given, num_classes=10), from_vllm(OBJECTS, num_classes=10)
    assert target.tolist() == expected.tolist() == EXPECTED and target.values_are == "log_probs"
    assert target.num_classes == 10 and target.values.dtype == torch.float32
    assert from_sglang([]).shape == (0,) and from_sglang([None]).tolist() == [None]


@pytest.mark.parametrize("given,message", [
    ({"input_top_logprobs": ROWS}, r"top_logprobs must be meta_info\['input_top_logprobs'\] or .*, got a mapping"),
    ("text", "top_logprobs must be a list with a list or None for each position, got str"),
    ([None, {7: -0.1}], "top_logprobs must have a list or None for each position, got dict at position 1"),
    ([[-0.1, 7, None]], r"top_logprobs must have \[logprob, id, text\] for each class, got -0.1 at position 0"),
    ([[[-0.1]]], r"top_logprobs must have \[logprob, id, text\]"),
    ([[[-0.1, "7", None]]], "token must be an id, .* at position 0"), ([[[None, 7, None]]], "logprob must be a number"),
    ([[[0.5, 7, None]]], "logprobs must be at most 0, got 0.5 at position 0"),
    ([[[-0.5, 10, None]]], r"token ids must be in \[0, 10\), got 10 at position 0"),
])
def test_sglang_refuses_what_it_does_not_return(given, message):
    with pytest.raises((TypeError, ValueError), match="sparse_ce: " + message):
        from_sglang(given, num_classes=10)

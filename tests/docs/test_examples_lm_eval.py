"""Tests that the log-likelihoods of examples/lm_eval_model.py equal those of lm_eval's own model."""

import tiny_lm  # first: skips this module if transformers is missing

# isort: split
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import recorded_memory
from example_runs import EXAMPLES, run
from tiny_lm import VOCAB, make_model, transformers

pytest.importorskip("lm_eval", minversion="0.4.13")
peft = pytest.importorskip("peft", minversion="0.21")
tokenizers = pytest.importorskip("tokenizers")
sys.path.append(str(EXAMPLES))
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from lm_eval_model import SparseHFLM  # noqa: E402


def words(*ids):
    return " ".join(f"w{i}" for i in ids)


def tokenizer():
    """Returns a tokenizer whose words are w3 ... w40; the head has more classes."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 41)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>",
                                                eos_token="</s>")


def requests(kind, *args):
    return [Instance(kind, {}, one, 0) for one in args]


LONG = words(*(3 + 7 * i % 38 for i in range(80)))
TEXTS = requests("loglikelihood_rolling", *((words(*range(3, 3 + n)),) for n in (1, 5, 31, 32, 33)), (LONG,))
CHOICES = requests(
    "loglikelihood",
    *((words(3, 4, 5), f" w{i}") for i in range(6, 10)),  # share an input
    (words(3, 4), " w5 w8"), (words(3), " w4 w5 w9"),  # as well, with longer continuations
    (words(9), " " + words(*range(10, 40))), (words(*range(3, 15)), " w20 w21"),
    ("", words(9, 10)), ("", words(11)), (LONG, " w5 w6 w7"))


def build(cls, model, **options):
    return cls(pretrained=model, tokenizer=tokenizer(), device="cpu", **options)


@pytest.mark.parametrize("name", tiny_lm.MODELS)
@pytest.mark.parametrize("options", [dict(batch_size=1), dict(batch_size=4, logits_cache=False),
                                     dict(batch_size="auto:2", max_batch_size=8)], ids=str)
def test_log_likelihoods_equal_those_of_the_harness(name, options):
    """Compares without the harness's cache, which gathers at wrong positions if inputs are shared by continuations of
    different lengths."""
    model = make_model(name).double()
    ours, theirs = build(SparseHFLM, model, **options), build(HFLM, model, batch_size=3, logits_cache=False)
    found, expected = ours.loglikelihood(CHOICES), theirs.loglikelihood(CHOICES)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-7)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert ours.loglikelihood_rolling(TEXTS) == pytest.approx(theirs.loglikelihood_rolling(TEXTS), rel=1e-7)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_narrow_dtypes_have_float32_softmaxes(dtype, tolerance):
    model = make_model().to(dtype)
    options = dict(batch_size=4, logits_cache=False, softmax_dtype="float32")
    found, expected = (build(cls, model, **options).loglikelihood(CHOICES) for cls in (SparseHFLM, HFLM))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=tolerance)


def test_mixed_precision_is_that_of_the_harness():
    found, expected = (build(cls, make_model(), mixed_precision_dtype="bfloat16", softmax_dtype="float32",
                             logits_cache=False).loglikelihood(CHOICES) for cls in (SparseHFLM, HFLM))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-2)
    exact = build(HFLM, make_model()).loglikelihood(CHOICES[-1:])
    assert abs(found[-1][0] - exact[0][0]) > 1e-4 * abs(exact[0][0])  # the matrix products are bfloat16


def test_the_most_likely_text_is_greedy():
    model, tokens = make_model().eval(), [3, 4, 5]
    for _ in range(4):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    first, last = (0 if token else 1 for token in (tokens[3], tokens[-1]))  # any other token
    pairs = [(tokens[:3], tokens[3:]), (tokens[:3], [*tokens[3:-1], last]), (tokens[:6], tokens[6:]),
             (tokens[:3], [first, *tokens[4:]])]
    for cls in SparseHFLM, HFLM:
        scores = build(cls, model)._loglikelihood_tokens([(None, *pair) for pair in pairs])
        assert [is_greedy for _, is_greedy in scores] == [True, False, True, False]


def test_only_the_tokens_of_continuations_have_logits():
    vocab, given = 20_000, CHOICES[-1:] + CHOICES[:4]  # three tokens after a context, and four that share an input
    config = transformers.LlamaConfig(vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=2, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config)
    ours, theirs = (recorded_memory.peak(lambda: build(cls, model, batch_size=2).loglikelihood(given))
                    for cls in (SparseHFLM, HFLM))
    assert ours < 1.1 * 7 * vocab * 4 and theirs > 8 * ours


def test_the_search_of_a_batch_size_computes_log_probabilities():
    model, tokens = make_model(), torch.arange(3, 13).view(2, 5)
    expected = model.eval()(tokens).logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(build(SparseHFLM, model)._model_call(tokens), expected)


def test_inputs_are_shared_and_batches_measured_again_in_each_call():
    for cached, inputs in (True, 6), (False, 11):  # six of the requests have the same input
        model, rows, searches = build(SparseHFLM, make_model(), batch_size="auto", logits_cache=cached), [], []
        model._detect_batch_size = lambda requests, pos, searches=searches: searches.append(len(requests)) or 4
        compute = model._log_probs
        model._log_probs = lambda tokens, *args: rows.append(len(tokens)) or compute(tokens, *args)
        for _ in range(2):
            model.loglikelihood(CHOICES)
        assert sum(rows) == 2 * inputs and max(rows) == 4 and searches == 2 * [inputs]


def test_partial_results_are_cached_as_in_the_harness():
    cached = []
    for cls in SparseHFLM, HFLM:
        model, kept = build(cls, make_model(), batch_size=2, logits_cache=False), {}
        model.cache_hook = SimpleNamespace(add_partial=lambda *args, kept=kept: kept.update({args[:2]: args[2]}))
        model.loglikelihood(CHOICES)
        model.loglikelihood_rolling(TEXTS)
        cached.append({key: value if isinstance(value, float) else value[0] for key, value in kept.items()})
    assert cached[0] == pytest.approx(cached[1], rel=1e-5) and len(cached[0]) == len(CHOICES) + len(TEXTS)


@pytest.mark.parametrize("config", [peft.PromptTuningConfig(num_virtual_tokens=3), peft.LoraConfig(r=2)],
                         ids=["virtual tokens", "LoRA"])
def test_adapters_are_part_of_the_model(config):
    config.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(make_model(), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    found, expected = (build(cls, model, batch_size=4, logits_cache=False, max_length=20).loglikelihood(CHOICES[:6])
                       for cls in (SparseHFLM, HFLM))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5)
    assert build(SparseHFLM, model)._model_call(torch.ones(2, 5, dtype=torch.int64)).shape == (2, 5)
    with model.disable_adapter():
        assert build(HFLM, model).loglikelihood(CHOICES[:1])[0][0] != pytest.approx(expected[0][0], rel=1e-3)


def test_encoder_decoders_are_those_of_the_harness():
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0))
    found, expected = (build(cls, model, batch_size=2).loglikelihood(CHOICES[:6]) for cls in (SparseHFLM, HFLM))
    assert found == expected


def test_a_truncation_is_logged(caplog):
    model = build(SparseHFLM, make_model())
    model.loglikelihood(CHOICES[:-1])
    assert "truncated" not in caplog.text
    model.loglikelihood(CHOICES[-1:])
    assert "truncated 82 tokens from the left, to 32 (max_length)" in caplog.text


def test_requests_without_tokens_to_score_raise():
    model = build(SparseHFLM, make_model())
    for context, continuation in ("w3", ""), ("w3", " " + LONG):
        with pytest.raises(ValueError, match="a request must have a context and 1 to 32 .* got 1 and (0|80)$"):
            model.loglikelihood(requests("loglikelihood", (context, continuation)))


TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""}


def test_the_command_line_reports_the_metrics_of_the_harness(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    lines = [json.dumps({"text": words(*range(3 + i, 9 + i)), "choices": [f"w{i + j} w{7 + j}" for j in range(4, 8)],
                         "answer": i % 4}) for i in range(12)]
    (tmp_path / "data.json").write_text("\n".join(lines))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: train\nnum_fewshot: 0\n"
            f"dataset_kwargs: {{data_files: {tmp_path}/data.json}}{task}")
    model = make_model()
    for saved in model, tokenizer():
        saved.save_pretrained(tmp_path / "model")
    program = f"""if True:
        import functools, runpy
        from lm_eval import tasks
        tasks.TaskManager = functools.partial(tasks.TaskManager, include_defaults=False)  # reads thousands of files
        runpy.run_path({str(EXAMPLES / "lm_eval_model.py")!r}, run_name="__main__")"""
    run("-c", program, "--model", "sparse-hf", "--model_args", f"pretrained={tmp_path}/model", "--tasks",
        ",".join(TASKS), "--include_path", tmp_path, "--batch_size", 4, "--device", "cpu", "--output_path",
        tmp_path / "results.json", cwd=tmp_path)
    report, = tmp_path.glob("results*.json")
    found = json.loads(report.read_text())["results"]
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for cls in SparseHFLM, HFLM:
        expected = simple_evaluate(model=build(cls, model), tasks=list(TASKS), task_manager=manager)["results"]
        for task, metric in ("choices", "acc"), ("texts", "bits_per_byte"), ("texts", "word_perplexity"):
            value = found[task][f"{metric},none"]
            assert value == pytest.approx(expected[task][f"{metric},none"], rel=1e-6) and value > 0

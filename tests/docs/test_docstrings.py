"""Checks that every public docstring has an example, and runs all examples.

Examples see the names of their module, `sparse_ce`, and `model` and `tokens` in the integration of transformers.
"""

import doctest
import importlib
import inspect
import os
import tempfile

import pytest
import torch

import sparse_ce
from quantization_clients import required


def public(owner, names):
    """Yields (name, object) of the members with a docstring of their own."""
    for name in names:
        member = inspect.getattr_static(owner, name)
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isroutine(member) and member.__doc__ and not hasattr(member, "__signature__"):
            yield f"{owner.__name__}.{name}", member


def documented(module, names):
    for name in names:
        thing = getattr(module, name)
        if callable(thing):
            yield name, thing
        if inspect.isclass(thing):
            ours = [base for base in thing.__mro__ if base.__module__.startswith("sparse_ce")]
            members = {n for base in ours for n in vars(base)
                       if not n.startswith("_") or n in ("__call__", "__getitem__")}
            yield from public(thing, sorted(members))


OF_THE_PACKAGE = {"sparse_ce": sparse_ce, **dict(documented(sparse_ce, sparse_ce.__all__))}


def run(name, thing, **names):
    home = inspect.getmodule(thing)
    names = {**vars(home), "sparse_ce": sparse_ce, "SparseTarget": sparse_ce.SparseTarget, "torch": torch, **names}
    examples, = doctest.DocTestFinder(recurse=False).find(thing, name, module=home, globs=names)
    assert examples.examples, f"{name} has no example"
    text = []
    runner = doctest.DocTestRunner()
    runner.run(examples, out=text.append)
    assert not runner.failures, "".join(text)


def test_the_public_names_are_found():
    assert {"sparse_ce", "cross_entropy", "MaskedMean", "SparseTarget", "SparseTarget.from_topk", "SparseTarget.shape",
            "SparseTarget.__getitem__", "MaskedMean.forward", "enable_stock"} <= set(OF_THE_PACKAGE)


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_its_example_runs(name):
    run(name, OF_THE_PACKAGE[name])


def test_a_forward_from_a_signature_has_the_types_of_its_function():
    found = 0
    for name in sparse_ce.modules.__all__:
        forward = getattr(sparse_ce.modules, name).forward
        if hasattr(forward, "__signature__"):
            function = getattr(sparse_ce, forward.__doc__.split("`sparse_ce.")[1].split("`")[0])
            of_function = inspect.signature(function).parameters
            _, *of_forward = forward.__signature__.parameters.values()
            assert all(p.annotation == of_function[p.name].annotation for p in of_forward)
            found += 1
    assert found == 6


@pytest.mark.parametrize("name", ["", ".data", ".functional", ".layers", ".metrics", ".modules", ".ops", ".reference",
                                  ".integrations.liger", ".integrations.quantization", ".integrations.transformers",
                                  ".integrations.trl"])
def test_a_module_lists_its_public_names_alone(name):
    for library in ("transformers", "trl"):
        if name.endswith(library):
            pytest.importorskip(library)
    module = importlib.import_module(f"sparse_ce{name}")
    listed = [each for each in dir(module) if not each.startswith("__")]
    packages = {"data", "functional", "integrations", "modules", "ops", "reference"}
    assert set(listed) - (packages if module is sparse_ce else set()) == {*module.__all__} - {"__version__"}
    assert all(hasattr(module, each) for each in dir(module))


def test_the_examples_of_the_metrics_run():
    found = {"sparse_ce.metrics": sparse_ce.metrics, **dict(documented(sparse_ce.metrics, sparse_ce.metrics.__all__))}
    assert set(found) == {"sparse_ce.metrics", "label_propensities", "ndcg_at_k", "precision_at_k",
                          "propensity_scored_precision_at_k"}
    for name, thing in found.items():
        run(name, thing)


def test_the_examples_of_caches_run():
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")  # an attribute of pyarrow after its first import
    from sparse_ce import data
    found = {"sparse_ce.data": data, **dict(documented(data, data.__all__))}
    assert set(found) == {
        "sparse_ce.data", "CacheWriter", "CacheWriter.add", "CacheWriter.close", "CacheWriter.missing",
        "DistillKitCache", "TeacherCache",
        "TeacherCache.__getitem__", "collate_sequences", "from_sglang",
        "from_vllm"}
    for name, thing in found.items():
        run(name, thing, CacheWriter=data.CacheWriter, TeacherCache=data.TeacherCache, os=os,
            pyarrow=pyarrow, tempfile=tempfile)


def test_the_examples_of_the_integrations_run():
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from sparse_ce.integrations import transformers as integration
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config)
    found = dict(documented(integration, integration.__all__))
    assert set(found) == {"FusedHead", "FusedHead.of", "FusedHead.remove", "TokenMetrics", "TopKCollator",
                          "TopKCollator.__call__", "causal_lm_loss", "fuse_lm_head", "logits_of", "loss_function"}
    for name, thing in found.items():
        run(name, thing, model=model, tokens=torch.tensor([[1, 2, 3]]))


def test_the_example_of_a_quantized_head_runs():
    torchao = required("torchao.quantization")
    from sparse_ce.integrations.quantization import weight_blocks
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(8, 50, bias=False)
    run("weight_blocks", weight_blocks, model=model, hidden=torch.randn(3, 8), labels=torch.tensor([1, 2, 3]),
        quantize_=torchao.quantize_, Int8WeightOnlyConfig=torchao.Int8WeightOnlyConfig)


def test_the_example_of_liger_runs():
    client = pytest.importorskip("liger_client")
    from sparse_ce.integrations import liger
    with client.liger():
        run("install", liger.install, hidden=torch.randn(3, 8), head=torch.nn.Linear(8, 50, bias=False),
            labels=torch.tensor([1, 2, 3]))


def test_the_example_of_trl_runs(tmp_path):
    cases = pytest.importorskip("trl_cases")
    from trl import SFTConfig

    from sparse_ce.integrations.trl import DistillationTrainer
    run("DistillationTrainer", DistillationTrainer, model=cases.make_model(), teacher=cases.teacher_model(),
        sft_config=cases.arguments(SFTConfig, tmp_path), dataset=cases.labels_dataset(), tokenizer=cases.tokenizer())

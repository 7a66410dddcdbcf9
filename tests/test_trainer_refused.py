"""What a fused head cannot honour is an error, never ignored."""

import pytest
import torch
import transformers
from torch import nn

from sparse_ce import SparseTarget
from sparse_ce.integrations.transformers import TopKCollator, causal_lm_loss, fuse_lm_head
from tiny_lm import VOCAB, Samples, collate, make_model


def step(model):
    return model(**collate(list(Samples("labels")))).loss


def test_adapters_on_the_head():
    peft = pytest.importorskip("peft") if False else __import__("peft")
    def adapted(*modules, model=None):
        config = peft.LoraConfig(target_modules=list(modules), task_type="CAUSAL_LM")
        return peft.get_peft_model(model or make_model(), config)

"""Checks the error message of an invalid argument, and lists the options that every loss rejects."""

import re

import pytest
import torch

from cases import Draw

FORM = re.compile(r"sparse_ce: (\w+ must .+, got .+|\w+=\S+ does not support .+: .+)", re.S)


def good(device):
    draw = Draw(device)
    return draw.normal(4, 7), torch.tensor([1, 2, 3, 4], device=device)


def assert_refused(call, *words, error=(TypeError, ValueError, RuntimeError)):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert FORM.search(message), f"not in the documented form: {type(caught.value).__name__}: {message}"
    for word in words:
        assert str(word) in message, f"{word!r} is not in: {message}"


OPTIONS = [
    ("reduction", "avg", "'avg'"), ("reduction", None, "None"), ("reduction", "MEAN", "'MEAN'"),
    ("label_smoothing", -0.1, "[0, 1]"), ("label_smoothing", 1.5, "[0, 1]"), ("label_smoothing", float("nan"), "nan"),
    ("label_smoothing", "a", "'a'"), ("label_smoothing", None, "None"),
    ("z_loss", float("inf"), "finite"), ("z_loss", float("nan"), "nan"), ("z_loss", -0.5, "-0.5"),
    ("z_loss", None, "None"), ("z_loss", [1.0], "[1.0]"),
    ("logit_scale", float("inf"), "finite"), ("logit_scale", float("nan"), "nan"), ("logit_scale", "1", "'1'"),
    ("softcap", 0.0, "positive"), ("softcap", -30.0, "-30"), ("softcap", float("inf"), "inf"),
    ("softcap", "30", "'30'"),
    ("num_classes", 0, "0"), ("num_classes", 8, "8"), ("num_classes", -1, "-1"), ("num_classes", "3", "'3'"),
    ("num_classes", 2.5, "2.5"),
    ("ignore_index", 1.5, "1.5"), ("ignore_index", None, "None"), ("ignore_index", "pad", "'pad'"),
    ("inplace", True, "False, 'backward' or 'forward', got True"), ("inplace", 0, "got 0"),
    ("inplace", None, "got None"), ("inplace", "forwards", "got 'forwards'"), ("inplace", ["forward"], "['forward']"),
    ("normalizer", "8", "'8'"), ("normalizer", torch.tensor([]), "[0]"), ("normalizer", [4], "[4]"),
    ("normalizer", torch.tensor([1j]), "complex"),
]

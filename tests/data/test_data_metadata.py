"""Tests that a cache's metadata is JSON, and equal before and after writing."""

import json
import math
import re

import pytest
import torch

from cache_cases import FORMATS, K, V, needs, sequence, write
from sparse_ce.data import CacheWriter, TeacherCache
from sparse_ce.data.sequence import Header, header_text, read_header

OF_OTHER_TYPES = [{2: "a", 10: "b"}, {"layers": {2: {3: "c", 11: "d"}, 10: "b"}}, {"shape": (1, 2)},
                  {True: 1, False: 0}, {0.5: "x", 10.0: "y", 9.0: "z"}, {None: 1}]


@pytest.fixture(params=FORMATS)
def format(request):
    needs(request.param)
    return request.param


@pytest.mark.parametrize("metadata", OF_OTHER_TYPES, ids=str)
def test_metadata_is_read_as_json_gives_it_back(tmp_path, format, metadata):
    path = tmp_path / f"teacher.{format}"
    write(path, metadata=metadata)
    assert TeacherCache(path).metadata == json.loads(json.dumps(metadata))


@pytest.mark.parametrize("metadata", OF_OTHER_TYPES, ids=str)
def test_a_writer_goes_on_with_the_same_metadata(tmp_path, format, metadata):
    options = dict(num_classes=V, k=K, format=format, metadata=metadata, resume=True)
    for done in (0, 1):
        with CacheWriter(tmp_path / "teacher", **options) as writer:
            assert len(writer) == done
            writer.add(sequence(3, done)[0])
    assert len(TeacherCache(tmp_path / "teacher")) == 2
    with pytest.raises(ValueError, match="must have this writer's header, got metadata"):
        CacheWriter(tmp_path / "teacher", **{**options, "metadata": {"more": 1}})


def test_what_is_written_is_what_was_given_at_first(tmp_path):
    metadata = {"texts": [1]}
    with CacheWriter(tmp_path / "teacher.safetensors", num_classes=V, metadata=metadata) as writer:
        metadata["texts"].append(2)
        writer.add(sequence(3)[0])
    assert TeacherCache(tmp_path / "teacher.safetensors").metadata == {"texts": [1]}


@pytest.mark.parametrize("metadata, words", [
    ({"dtype": torch.float16}, "Object of type dtype is not JSON serializable"),
    ({1: 2, "a": 3}, "'<' not supported between instances of"), ({"x": {1: 2, "a": 3}}, "'<' not supported"),
    ({(1, 2): 3}, "keys must be str"), ({"loss": math.nan}, "Out of range float values"),
    ([1, 2], "list"), ("text", "str")])
def test_metadata_that_json_does_not_know_is_refused_before_any_work(tmp_path, metadata, words):
    with pytest.raises(ValueError, match="sparse_ce: metadata must be a dict of JSON values.*, got .*"
                                         f"{re.escape(words)}"):
        CacheWriter(tmp_path / "teacher", num_classes=V, metadata=metadata)


def test_headers_whose_keys_were_sorted_as_numbers_are_read():
    """Reads headers written before keys became strings."""
    text = header_text(Header(V, K, metadata={2: "a", 10: {3: "c", 11: "d"}}), 5)
    assert text.index('"2"') < text.index('"10"')
    assert read_header(text, "x")[0].metadata == {"2": "a", "10": {"3": "c", "11": "d"}}
    with pytest.raises(ValueError, match="sparse_ce: header must be whole, got one with a different checksum in x"):
        read_header(text.replace('"c"', '"e"'), "x")
    in_another_order = json.dumps(dict(reversed(json.loads(header_text(Header(V), 5)).items())))
    assert read_header(in_another_order, "x")[0].num_classes == V

"""Writes captures of DistillKit for tests bit by bit, after the description of the format."""

import math
import struct

import torch

V, K = 300, 12
CODES = {"float16": "<e", "float32": "<f", "float64": "<d"}
RECOMMENDED = dict(d=V, k=K, exact_k=4, exact_dtype="bfloat16", polynomial_terms=[0, 1, 2, "sqrt"], residual_bins=[],
                   term_dtype="float32", delta_encoding=False, error_diffusion=False)
CONFIGS = {
    "recommended": RECOMMENDED,
    "differences": {**RECOMMENDED, "delta_encoding": True, "exact_dtype": "float32", "polynomial_terms": [0, 1, 2]},
    "exact alone": dict(d=V, k=K, exact_k=K, exact_dtype="float16", residual_bins=[], delta_encoding=False),
    "residuals": {**RECOMMENDED, "residual_bins": [dict(scale_dtype="float16", element_bits=5, num_elements=3),
                                                   dict(scale_dtype="float32", element_bits=1, num_elements=4)]},
    "residuals alone": dict(d=V, k=K, exact_k=1, exact_dtype="float32", residual_bins=[
        dict(scale_dtype="float32", element_bits=7, num_elements=11)], delta_encoding=False),
    "terms of [0, 1]": {**RECOMMENDED, "normalize_t": True, "polynomial_terms": [0, 1, "exp"], "term_dtype": "float64"},
}


def number(value, dtype):
    """Returns (bytes, the value that they represent)."""
    if dtype == "bfloat16":
        data = struct.pack("<f", value)[2:]
        return data, struct.unpack("<f", b"\0\0" + data)[0]
    data = struct.pack(CODES[dtype], value)
    return data, struct.unpack(CODES[dtype], data)[0]


def bits(numbers, width):
    text = "".join(format(n, f"0{width}b") for n in numbers)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i:i + 8], 2) for i in range(0, len(text), 8))


def position(draw, c):
    """Returns (bytes of the log-probabilities, bytes of the ids, ids, log-probabilities) of a position."""
    data, values = b"", []

    def say(value, dtype):
        nonlocal data
        part, said = number(value, dtype)
        data += part
        return said

    def uniform(low, high):
        return low + (high - low) * torch.rand((), generator=draw).item()

    for i in range(c["exact_k"]):
        values.append(say(uniform(-0.5, -0.1) * (1 if c["delta_encoding"] else i + 1), c.get("exact_dtype", "float32")))
    count = c["k"] - c["exact_k"]
    terms = c.get("polynomial_terms") or []
    coefficients = [say(uniform(-0.5, -0.1) / (1 + 10 * i), c.get("term_dtype", "float32")) for i in range(len(terms))]
    rest = []
    for i in range(count):
        t = i / (count - 1) if c.get("normalize_t") else float(i)
        rest.append(sum(a * {"sqrt": math.sqrt, "exp": math.exp}.get(term, lambda x: x ** term)(t)
                        for a, term in zip(coefficients, terms)))
    at = 0
    for bin in c["residual_bins"]:
        scale = say(uniform(0.01, 0.02), bin["scale_dtype"])
        units = torch.randint(2 ** bin["element_bits"], (bin["num_elements"],), generator=draw).tolist()
        data += bits(units, bin["element_bits"])
        for u in units:
            rest[at] += scale * (2 * u - 1 if bin["element_bits"] == 1 else u - 2 ** (bin["element_bits"] - 1))
            at += 1
    values += rest
    if c["delta_encoding"]:
        values = [sum(values[:i + 1]) for i in range(len(values))]
    ids = torch.randperm(c["d"], generator=draw)[:c["k"]].tolist()
    return data, bits(ids, math.ceil(math.log2(c["d"]))), ids, [min(v, 0.0) for v in values]


def capture(path, c, lengths=(5, 1, 9), extra=1):
    """Writes a file and returns [(tokens, ids (S, K), log-probabilities (S, K))]."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    draw, rows, expected = torch.Generator().manual_seed(3), [], []
    for n in lengths:
        positions = [position(draw, c) for _ in range(n)]
        tokens = torch.randint(c["d"], (n + extra,), generator=draw).tolist()
        rows.append({"input_ids": tokens, "compressed_logprobs": [list(p[0]) for p in positions],
                     "bytepacked_indices": [list(p[1]) for p in positions]})
        expected.append((tokens[:n], torch.tensor([p[2] for p in positions]), torch.tensor([p[3] for p in positions])))
    numbers = pa.list_(pa.list_(pa.uint8()))
    schema = pa.schema([("input_ids", pa.list_(pa.uint64())), ("compressed_logprobs", numbers),
                        ("bytepacked_indices", numbers)])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=2)
    return expected

"""Reads the compression configuration of a DistillKit capture, adds defaults and checks it before any row is read."""

import importlib
import json
import math
from pathlib import Path
from typing import Any, Dict, NoReturn, Optional, Tuple

import torch

from .._core.errors import check, described, fail
from .._core.options import is_integer, is_number
from .reading import bytes_in, reading

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_COMPRESSED: Dict[str, Any] = {"exact_dtype": "float32", "polynomial_terms": None, "term_dtype": "float32",
                               "residual_bins": [], "delta_encoding": True, "normalize_t": False}
_LEGACY: Dict[str, Any] = {"invert_polynomial": True, "with_sqrt_term": False}
_NEEDED = {"compressed": ["d", "k", "exact_k"], "plain": [], "legacy": ["vocab_size", "k", "exact_k",
                                                                       "polynomial_degree"]}
_MOST = 2**31  # classes
_MOST_TERMS = 256  # terms of a polynomial; with more, powers of the second value overflow float32
_MOST_BYTES = 2**16  # bytes of a file


def configuration(config: Any, form: str, path: Path, folder: Path) -> Dict[str, Any]:
    """Returns the configuration of the captures of format ``form`` at ``path``, in ``folder``. Plain captures may have
    none, which returns an empty dict."""
    where = f"in the configuration of {path}"
    if config is None and (folder / "compression_config.yaml").exists():
        config = folder / "compression_config.yaml"
    if isinstance(config, (str, Path)):
        where = f"in {config}"
        config = _read(Path(config))
    if config is None:
        check(form == "plain", f"config must be given if there is no compression_config.yaml, got None for {path}")
        config = {}
    if not isinstance(config, dict):
        fail(f"config must be a mapping or the path of one, got {type(config).__name__} for {path}")
    missing = [name for name in _NEEDED[form] if name not in config]
    check(not missing, f"config must have {', '.join(_NEEDED[form])}, got one without {', '.join(missing)} {where}")
    full: Dict[str, Any] = {**{"compressed": _COMPRESSED, "legacy": _LEGACY, "plain": {}}[form], **config}
    with reading("config must be one of DistillKit", None, at=f" {where}", fix="correct it"):
        _Checks(full, where).of(form)
    return full


def _read(path: Path) -> Dict[str, Any]:
    check(path.is_file(), f"config must be a file, got {path}, which does not exist or is not a file",
          FileNotFoundError)
    kind = "JSON" if path.suffix == ".json" else "YAML"
    with reading(f"config must be {kind}", path, at=f" in {path}", fix="correct it"):
        text = bytes_in(path, _MOST_BYTES).decode()
        config = json.loads(text) if kind == "JSON" else _yaml(text, path)
    check(isinstance(config, dict), f"config must be a mapping, got {type(config).__name__} in {path}")
    config = config.get("logprob_compressor", config)  # the configuration of a training run nests it under this key
    check(isinstance(config, dict), f"logprob_compressor must be a mapping, got {type(config).__name__} in {path}")
    return dict(config)


def _yaml(text: str, path: Path) -> Any:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        fail(f"PyYAML must be installed for {path}, got {error}; pip install 'sparse_ce[data]', or pass config= as a "
             "dict", ImportError)

    class Loader(yaml.SafeLoader):  # type: ignore[misc]

        def flatten_mapping(self, node: Any) -> None:
            """Checks the size of merged mappings ("<<"). They multiply level by level, so a short text could request
            any amount of memory."""
            super().flatten_mapping(node)
            check(len(node.value) <= len(text), f"mappings must have at most {len(text)} keys, including merged ones, "
                  f"got {len(node.value)} in {path}")

    return yaml.load(text, Loader)


class _Checks:

    def __init__(self, config: Dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def of(self, form: str) -> None:
        for name in ("d", "vocab_size"):
            if self.config.get(name) is not None or name in _NEEDED[form]:
                self.integer(name, 1, _MOST)
        if form == "plain":
            return
        self.integer("k", 1, _MOST)
        self.integer("k", 1, self.config["d" if form == "compressed" else "vocab_size"])
        self.integer("exact_k", 0, self.config["k"])
        if form == "legacy":
            self.integer("polynomial_degree", 0, _MOST_TERMS - 1)
        for name in ("delta_encoding", "normalize_t") if form == "compressed" else tuple(_LEGACY):
            value = self.config[name]
            if not (isinstance(value, (bool, int)) and value in (0, 1)):
                self.refuse(f"{name} must be true or false", value)
        if form == "compressed":
            for name in ("exact_dtype", "term_dtype"):
                if not self.is_dtype(self.config[name]):
                    self.refuse(f"{name} must be one of {', '.join(DTYPES)}", self.config[name])
            self.terms()
            self.bins()

    def refuse(self, must: str, got: Any) -> NoReturn:
        fail(f"{must}, got {described(got)} {self.where}")

    def is_integer(self, value: Any, span: Tuple[int, int]) -> bool:
        return is_integer(value) and span[0] <= value <= span[1]

    def is_dtype(self, value: Any) -> bool:
        return isinstance(value, str) and value in DTYPES

    def integer(self, name: str, least: int, most: int) -> None:
        if not self.is_integer(self.config[name], (least, most)):
            self.refuse(f"{name} must be an integer in [{least}, {most}]", self.config[name])

    def terms(self) -> None:
        terms = self.config["polynomial_terms"]
        self.config["polynomial_terms"] = [] if terms is None else terms
        if terms is not None and not (isinstance(terms, (list, tuple)) and all(
                term in ("sqrt", "exp") if isinstance(term, str) else is_number(term) and math.isfinite(term)
                for term in terms)):
            self.refuse("polynomial_terms must be powers, 'sqrt' or 'exp'", terms)
        if len(self.config["polynomial_terms"]) > _MOST_TERMS:
            self.refuse(f"polynomial_terms must be at most {_MOST_TERMS}", len(self.config["polynomial_terms"]))

    def bins(self) -> None:
        bins: Optional[Any] = self.config["residual_bins"]
        self.config["residual_bins"] = [] if bins is None else bins
        if bins is not None and not (isinstance(bins, (list, tuple)) and all(isinstance(bin, dict) for bin in bins)):
            self.refuse("residual_bins must be a list of mappings", bins)
        remaining, total = self.config["k"] - self.config["exact_k"], 0
        for bin in bins or []:
            if not self.is_dtype(bin.get("scale_dtype")):
                self.refuse(f"residual_bins must have scale_dtype, one of {', '.join(DTYPES)}", bin.get("scale_dtype"))
            for name, span in (("element_bits", (1, 32)), ("num_elements", (0, remaining))):
                if not self.is_integer(bin.get(name), span):
                    self.refuse(f"residual_bins must have {name}, an integer in [{span[0]}, {span[1]}]", bin.get(name))
            total += bin["num_elements"]
        if total > remaining:
            self.refuse(f"residual_bins must have at most {remaining} elements, k - exact_k", total)

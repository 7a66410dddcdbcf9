"""Provides a plugin for axolotl: the fused loss of the head, and distillation from a teacher's cached top-k."""

from itertools import chain
from typing import Any, Callable, Dict, List, Optional

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, model_validator

from .._core.errors import check, fail
from .._core.listing import listing
from ..data.sequence import CHOICES
from .distillation import checked_distillation
from .fused_head import check_loss_options
from .options import keywords
from .teacher import TopKCollator
from .transformers import fuse_lm_head

__all__ = ["SparseCEArgs", "SparseCEPlugin"]
__dir__ = listing(globals())

_COLUMNS = dict(indices="target_token_ids", values="target_logprobs", mask="target_mask")
_OTHER_PLUGINS = ("CutCrossEntropyPlugin", "DiffusionPlugin", "KDPlugin")
_OTHER_LOSSES = ("chunked_cross_entropy", "liger_fused_linear_cross_entropy", "use_eaft", "orpo_alpha", "rl",
                 "reward_model", "process_reward_model")
_NOT_CACHED = ("kd_online_server_base_url", "kd_temperature_min", "pretraining_dataset")


class SparseCEArgs(BaseModel):  # type: ignore[misc]
    """Describes the plugin's keys of axolotl's configuration.

    Args:
        sparse_ce: options of :func:`sparse_ce.integrations.transformers.fuse_lm_head`, such as ``z_loss``.
        kd_trainer: True for distillation. The other keys are read only then.
        kd_alpha, kd_ce_alpha: weights of the divergence and of the cross entropy of the labels, whose sum is 1. By
            default the first is 1 minus the second, and the second is 0.
        kd_temperature: divides the student's logits in the divergence, which is multiplied by its square. The teacher's
            log-probabilities are those at this temperature, as axolotl's dataset types compute them.
        kd_beta: 0 is forward KL, 1 is reverse KL, and a number between them is the generalized Jensen-Shannon
            divergence.
        kd_normalize_topk: True to normalize the student over the teacher's candidates; reverse KL requires it.
        kd_predicts: ``"token"`` if a row of the teacher predicts the token of its position, ``"next"`` if it predicts
            the token after it. Required for distillation.

    Examples:
        >>> from sparse_ce.integrations.axolotl import SparseCEArgs
        >>> SparseCEArgs(kd_trainer=True, kd_ce_alpha=0.25, kd_predicts="token").kd_alpha
        0.75
    """

    sparse_ce: Optional[Dict[str, Any]] = None
    kd_trainer: bool = False
    kd_alpha: Optional[float] = None
    kd_ce_alpha: float = 0.0
    kd_temperature: float = 1.0
    kd_beta: float = 0.0
    kd_normalize_topk: bool = False
    kd_predicts: Optional[str] = None

    @model_validator(mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def check_sparse_ce(cls, data: Dict[str, Any]) -> Dict[str, Any]:
        """Raises an error for what the plugin does not support, and returns the configuration with its defaults."""
        for plugin in data.get("plugins") or ():
            check(not plugin.endswith(_OTHER_PLUGINS), "plugins must hold one plugin that computes the loss, got "
                  f"{plugin} beside SparseCEPlugin; remove one of them")
        options = dict(data.get("sparse_ce") or {})
        for name in ("distillation", "row_weight"):
            check(name not in options, f"sparse_ce must not hold {name!r}, which needs columns that axolotl's "
                  "collators do not pad; use kd_trainer for a distillation")
        try:
            check_loss_options({name: value for name, value in options.items() if name not in keywords(fuse_lm_head)},
                               bool(data.get("kd_trainer")))
        except TypeError as error:  # pydantic names the configuration for a ValueError only
            raise ValueError(str(error)) from error
        for name in _OTHER_LOSSES:
            check(not data.get(name), f"{name} must be empty with SparseCEPlugin, which computes the loss, got "
                  f"{data.get(name)!r}; remove the key or the plugin")
        check((data.get("context_parallel_size") or 1) == 1, "context_parallel_size must be 1 with SparseCEPlugin, got "
              f"{data.get('context_parallel_size')}; labels would have to be sharded like the sequences")
        return _with_defaults(data) if data.get("kd_trainer") else data


def _with_defaults(data: Dict[str, Any]) -> Dict[str, Any]:
    """Checks the configuration of a distillation, and returns it with the defaults that depend on other keys."""
    for name in _NOT_CACHED:
        check(not data.get(name), f"{name} must be empty for kd_trainer, which reads a teacher from the columns of "
              f"datasets, got {data.get(name)!r}; use axolotl.integrations.kd.KDPlugin for a server")
    for name in ("remove_unused_columns", "include_tkps"):
        check(not data.get(name), f"{name} must be false or empty for kd_trainer, got {data.get(name)!r}; the batch "
              "holds the teacher's columns, and its labels are a SparseTarget")
    check(data.get("kd_predicts") in ("next", "token"), "kd_predicts must be 'next' or 'token' for kd_trainer, got "
          f"{data.get('kd_predicts')!r}; {CHOICES}")
    of_labels = data.get("kd_ce_alpha") or 0.0
    data = {**data, "remove_unused_columns": False, "include_tkps": False, "kd_ce_alpha": of_labels}
    if data.get("kd_alpha") is None:
        data["kd_alpha"] = 1 - of_labels
    total = data["kd_alpha"] + of_labels
    if abs(total - 1) > 1e-6:
        fail(f"kd_alpha and kd_ce_alpha must sum to 1, got {data['kd_alpha']} and {of_labels}; divide both by {total}, "
             "and multiply the learning rate by it if the optimizer is SGD")
    check(data.get("kd_beta") != 1 or bool(data.get("kd_normalize_topk")), "kd_normalize_topk must be true for reverse "
          "KL (kd_beta: 1), got false; without it the divergence is infinite")
    checked_distillation(_distillation(data))
    return data


def _distillation(cfg: Any) -> Dict[str, Any]:
    """Returns the options of the loss."""
    return dict(beta=cfg.get("kd_beta") or 0.0,
                tail="renormalize" if cfg.get("kd_normalize_topk") else "zero", alpha=cfg.get("kd_alpha"),
                temperature=cfg.get("kd_temperature") or 1.0, temperature_squared=True)


class SparseCEPlugin(BasePlugin):  # type: ignore[misc]
    """Computes the loss of a causal language model from hidden states, without logits, in axolotl.

    Add ``sparse_ce.integrations.axolotl.SparseCEPlugin`` to ``plugins``. :class:`SparseCEArgs` lists its keys. With
    ``kd_trainer: true`` the loss is :func:`sparse_ce.linear_distillation_loss` of the columns ``target_token_ids``,
    ``target_logprobs`` and ``target_mask``, which axolotl's own dataset types write. It replaces axolotl's ``KDPlugin``
    for a cached teacher.

    axolotl's own trainer, collators and sample packing remain in use. In a distillation, the divisor of a step is the
    number of its labels, over all microbatches. Otherwise it is that of the model without the plugin.

    Examples:
        >>> from sparse_ce.integrations.axolotl import SparseCEPlugin
        >>> SparseCEPlugin().get_input_args()
        'sparse_ce.integrations.axolotl.SparseCEArgs'
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{SparseCEArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Fuses the head, inside of adapters and before the Trainer wraps the model."""
        options = dict(cfg.sparse_ce or {})
        if cfg.kd_trainer:
            options["distillation"] = _distillation(cfg)
        fuse_lm_head(model, **options)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Makes a distillation's batches of axolotl's own collators."""
        if not cfg.kd_trainer:
            return
        trainer.model_accepts_loss_kwargs = True  # the divisor of all microbatches, as in axolotl's KDPlugin
        for name in ("data_collator", "train_data_collator", "eval_data_collator"):
            setattr(trainer, name, _Collator(getattr(trainer, name), cfg))


class _Collator:
    """Adds the teacher to the batches of ``collator``, whose samples may be packed: lists of samples."""

    def __init__(self, collator: Callable[[List[Any]], Any], cfg: Any) -> None:
        self.collator, self.temperature = collator, cfg.kd_temperature
        self.options = dict(_COLUMNS, predicts=cfg.kd_predicts, hard_labels=cfg.kd_alpha < 1)

    def __call__(self, features: List[Any]) -> Dict[str, Any]:
        packed = isinstance(features[0], list)
        rows = features if packed else [[sample] for sample in features]
        own = [[{name: column for name, column in sample.items() if name not in _COLUMNS.values()} for sample in row]
               for row in rows]
        batch = self.collator(own if packed else [row[0] for row in own])
        collator = TopKCollator(lambda _: dict(batch), **self.options)
        return collator([self._joined(row) for row in rows])

    def _joined(self, row: List[Any]) -> Dict[str, Any]:
        """Returns one sample with the sequences of a row."""
        names, values = ("input_ids", "labels", *_COLUMNS.values()), _COLUMNS["values"]
        joined = {name: list(chain.from_iterable(sample[name] for sample in row)) for name in names if name in row[0]}
        if self.temperature != 1 and values in joined:
            # The divergence divides them by the temperature and normalizes them, which the columns already are.
            joined[values] = [[value * self.temperature for value in entries] for entries in joined[values]]
        return joined

"""Defines the base classes of the modules, which store options and check them at construction."""

import functools
import inspect
from typing import Any, Callable, Dict, Optional, Sequence, TypeVar

import torch
from torch import Tensor, nn

from .._core.arguments import RULES, Normalizer
from .._core.errors import fail
from .._core.flags import check_stored_flags
from .._core.guesses import explanation
from .._core.options import check_inplace, checked_chunks, checked_options
from .._core.tensor_checks import _check_weight, check_reduction
from ..sharding.groups import SequenceGroup


def check_stored(weight: Optional[Tensor], normalizer: Optional[Normalizer], options: Dict[str, Any],
                 means: Sequence[str] = ("mean",)) -> None:
    """Checks the options of a loss, as far as possible without logits."""
    check_reduction(options.get("reduction", "mean"), normalizer, means)
    check_inplace(options.get("inplace", False))
    check_stored_flags(options)
    checked_options({name: value for name, value in options.items() if name in RULES})
    for name in ("chunk_rows", "chunk_classes"):
        checked_chunks(options.get(name), options.get("logits_dtype"), name)
    if weight is not None:
        _check_weight(weight)
        if weight.dim() != 1:
            fail(f"weight must be (V,), one weight per class, got {list(weight.shape)}")


init_t = TypeVar("init_t", bound=Callable[..., None])
# These change from call to call.
OF_CALLS = ("linear_bias", "row_mask", "row_weight", "teacher", "teacher_log_tail")


def holds(function: Callable[..., Any]) -> Callable[[init_t], init_t]:
    """Gives an ``__init__`` with ``**options`` the keyword arguments of ``function``, with their defaults."""
    def decorate(init: init_t) -> init_t:
        own = [p for p in inspect.signature(init).parameters.values() if p.kind != p.VAR_KEYWORD]
        given = {*OF_CALLS, *(p.name for p in own)}
        keywords = [p for p in inspect.signature(function).parameters.values()
                    if p.kind == p.KEYWORD_ONLY and p.name not in given]
        signature = inspect.Signature([*own, *keywords], return_annotation=None)
        of_calls = {name: f"{name} in the call of the module" for name in inspect.signature(function).parameters
                    if name not in signature.parameters}

        @functools.wraps(init)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError:
                name = type(self).__name__
                raise explanation(name, signature, (self, *args), kwargs, of_calls) or TypeError(name) from None
            bound.apply_defaults()
            init(*bound.args, **bound.kwargs)

        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    return decorate


class OptionsModule(nn.Module):
    """Stores options from construction to the call of ``function``.

    Args:
        function: the function that ``forward`` calls.
        call: the names of the arguments of ``forward``, which are positional or keyword-only as in the function. An
            argument that is None or missing has the stored value.
    """

    _means: Sequence[str] = ("mean",)  # the reductions that divide

    def __init__(self, *, weight: Optional[Tensor] = None, normalizer: Optional[Normalizer] = None,
                 **options: Any) -> None:
        super().__init__()
        check_stored(weight, normalizer, options, self._means)
        self.options = options

    def __init_subclass__(cls, function: Optional[Callable[..., Any]] = None, call: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if function is not None:
            cls.forward = _forward(function, call.split())

    def _stored(self) -> Dict[str, Any]:
        """Returns the arguments of the function that the module stores."""
        normalizer = getattr(self, "normalizer", None)
        return self.options if normalizer is None else {**self.options, "normalizer": normalizer}

    def __getstate__(self) -> Dict[str, Any]:
        """Returns the state with the name of the process group in place of the group, which cannot be copied or
        pickled."""
        group = self.options.get("group")
        if group is None:
            return self.__dict__
        named = _of_processes(lambda processes: _Named(processes.group_name), group)
        return {**self.__dict__, "options": {**self.options, "group": named}}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        group = self.options.get("group")
        if group is not None:
            found = _of_processes(lambda named: named.found() if isinstance(named, _Named) else named, group)
            self.options = {**self.options, "group": found}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)


class LossModule(OptionsModule):
    """Stores the options of a loss, its class weights, and the default of the call's ``normalizer``."""

    weight: Optional[Tensor]

    def __init__(self, weight: Optional[Tensor], normalizer: Optional[Normalizer] = None,
                 **options: Any) -> None:
        super().__init__(weight=weight, normalizer=normalizer, **options)
        self.register_buffer("weight", weight)
        self.normalizer = normalizer

    def _stored(self) -> Dict[str, Any]:
        return {**super()._stored(), "weight": self.weight}


def _forward(function: Callable[..., Any], call: Sequence[str]) -> Callable[..., Any]:
    """Returns a ``forward`` that calls ``function`` with the arguments in ``call`` and the stored ones."""
    of_function = inspect.signature(function).parameters
    parameters = [p if p.default is p.empty else p.replace(default=None) for p in map(of_function.get, call) if p]
    positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    allowed = {*call}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args)), **kwargs}
        if len(args) > len(positional) or len(given) < len(args) + len(kwargs) or given.keys() - allowed:
            of = type(self).__name__
            stored_names = {name: f"{name} to {of}(...), which stores it" for name in of_function}
            raise explanation(f"the call of {of}", _signature, (self, *args), kwargs, stored_names) or TypeError(of)
        stored = self._stored()
        for name, value in given.items():
            if value is not None or name not in stored:
                stored = {**stored, name: value}
        return function(**stored)

    _signature = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters])
    forward.__signature__ = _signature  # type: ignore[attr-defined]
    forward.__doc__ = f"Calls :func:`sparse_ce.{function.__name__}` with these arguments and the module's options."
    return forward


def _of_processes(f: Callable[[Any], Any], group: Any) -> Any:
    """Returns ``f`` of a process group. In a :class:`SequenceGroup`, ``f`` is applied to its group."""
    if isinstance(group, SequenceGroup):
        return group._replace(group=_of_processes(f, group.group))
    return None if group is None else f(group)


class _Named(str):
    """Represents a process group by its name, which is the same in all processes of a job."""

    def found(self) -> Any:
        try:
            return getattr(torch.distributed.distributed_c10d, "_resolve_process_group")(self)
        except (AttributeError, RuntimeError, ValueError):  # torch has no distributed package, or the group is unknown
            fail(f"group must exist in the process that a module is loaded into, got no group named {str(self)!r}; "
                 "create it first, or save the module's state_dict()", RuntimeError)

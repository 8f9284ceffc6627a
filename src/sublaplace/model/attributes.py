"""What modules hold besides parameters, buffers and other modules: settings, functions and hooks."""

import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

HOOKS = "forward hooks"
"""The entry of a module's settings that names its forward hooks; no attribute has such a name."""

Settings = dict[str, dict[str, Any]]
"""By the names of modules and of their attributes: values that can be compared."""

_PLAIN = {type(None), bool, int, complex, str, bytes, torch.dtype}
_LONGEST = 64  # entries of a container that are compared; of a longer one, the length
_LARGEST = 65_536  # entries of a tensor or an array that are compared; of a larger one, shape and dtype
_OTHER = "…"  # stands for a value that is not compared
# What torch keeps in every module, and what other libraries keep there although no output depends on it.
_ASIDE = set(vars(nn.Module())) | {"_compiled_call_impl", "_is_hf_initialized", "gradient_checkpointing"}
_ASIDE |= {"name_or_path", "rank", "local_rank", "world_size"}
_ASIDE_PARTS = ("device", "cache")  # within a name: where a model is, and what is computed when it is first needed

_passing: "WeakKeyDictionary[nn.Module, set[str]]" = WeakKeyDictionary()


class _Number(str):
    """A floating-point number as text, since NaN is not equal to itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, eq=False)
class _Function:
    """A function by its name and by what it does."""

    name: str
    code: str
    python: str = sys.version  # the code of another version says something else for the same

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Function) or self.name != other.name:
            return False
        return self.code == other.code or self.python != other.python

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name  # which is all that files and other ranks compare


def settings_of(model: nn.Module) -> Settings:
    """Return the plain attributes, functions and forward hooks of all modules.

    Plain are numbers, texts, functions, small containers of them, arrays, and tensors that are no parameters or
    buffers. Attributes that a forward pass was seen to change are left out (see `Attributes`): they are no settings.

    Cost: a few microseconds per module.
    """
    settings = {}
    for name, module in model.named_modules():
        found = {}
        aside = _passing.get(module, ())
        for key, value in vars(module).items():
            if key in _ASIDE or key in aside:
                continue
            frozen = value if type(value) in _PLAIN else _frozen(value)
            if frozen is not _OTHER and not any(part in key for part in _ASIDE_PARTS):
                found[key] = frozen
        if module._forward_hooks or module._forward_pre_hooks:
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            found[HOOKS] = ", ".join(_name(hook) for hook in hooks)
        settings[name] = found
    return settings


def class_settings(model: nn.Module) -> Settings:
    """Return the methods and plain attributes of the classes of all modules, which may be replaced as well."""
    settings = {}
    for kind in {type(module) for module in model.modules()}:
        bases = [base for base in reversed(kind.__mro__) if base not in (object, nn.Module)]
        found = {key: value for base in bases for key, value in vars(base).items() if not key.startswith("__")}
        frozen = {key: _frozen(value) for key, value in found.items() if key not in _ASIDE}
        settings[class_name(kind)] = {key: value for key, value in frozen.items() if value is not _OTHER}
    return settings


def named(module: str) -> str:
    """Return how a message calls a module with this name, which is empty for the model itself."""
    return f"the module '{module}'" if module else "the model"


def class_name(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def changed_setting(before: Settings, later: Settings, then: str) -> str | None:
    """Return which setting differs, as the subject of a sentence; None if none does.

    Attributes that only one of them has are not compared, but hooks are.

    Args:
        before: the settings at some time.
        later: the settings now.
        then: says when `before` was, such as "at the fit".
    """
    for name in {**before, **later}:
        old, new = before.get(name, {}), later.get(name, {})
        if old == new:
            continue
        if old.get(HOOKS) != new.get(HOOKS):
            values = [found.get(HOOKS, "none") for found in (old, new)]
            return f"The set of forward hooks of {named(name)} ({values[0]} {then}, {values[1]} now)"
        for key in old.keys() & new.keys():
            if old[key] != new[key]:
                values = [_shortened(value) for value in (old[key], new[key])]
                return f"The attribute '{key}' of {named(name)} ({values[0]} {then}, {values[1]} now)"
    return None


def as_texts(settings: Settings) -> dict[str, dict[str, str]]:
    """Return settings as a file keeps them, without modules that have none."""
    return {
        name: {key: value if key == HOOKS else repr(value) for key, value in found.items()}
        for name, found in settings.items()
        if found
    }


class Attributes:
    """The attributes of all modules at some time, to be given back."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(module, dict(vars(module))) for module in model.modules()]

    def restore(self) -> None:
        """Bind all attributes as before, and remember which ones forward passes have bound to something else."""
        for module, before in self._held:
            now = vars(module)
            if len(now) == len(before) and all(map(is_, now.values(), before.values())) and [*now] == [*before]:
                continue
            changed = {key for key, value in before.items() if now.get(key, _OTHER) is not value}
            added = now.keys() - before.keys()
            _passing.setdefault(module, set()).update(changed, added)
            for key in changed:
                now[key] = before[key]
            for key in added:
                del now[key]


def _frozen(value: Any) -> Any:
    """Return a value that can be compared, also in another process; `_OTHER` for what is not compared."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return _Number(value)
    if kind in (tuple, list, torch.Size):
        return (len(value), _OTHER) if len(value) > _LONGEST else tuple(map(_frozen, value))
    if kind is dict:
        return (len(value), _OTHER) if len(value) > _LONGEST else tuple(map(_frozen, value.items()))
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | functools.partial):
        return _frozen_function(value)
    if isinstance(value, np.generic):
        return _frozen(value.item())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _frozen_array(value)
    return _frozen_tensor(value) if isinstance(value, Tensor) else _OTHER


def _frozen_tensor(value: Tensor) -> Any:
    """Return a digest of a tensor that is no parameter, and that a forward pass did not compute."""
    computed = value.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(value)
    if isinstance(value, nn.Parameter) or computed or value.layout != torch.strided or value.is_meta:
        return _OTHER
    form = str(value.dtype), tuple(value.shape)
    if not 0 < value.numel() <= _LARGEST:
        return _digest(*form)
    return _digest(*form, value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _frozen_array(value: "np.ndarray[Any, Any]") -> Any:
    form = value.dtype.str, value.shape
    return _digest(*form, np.ascontiguousarray(value).tobytes()) if value.size <= _LARGEST else _digest(*form)


def _frozen_function(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return ("partial", *map(_frozen, (value.func, value.args, value.keywords)))
    function = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(function, FunctionType):
        return _Function(_name(function), "")
    closure = tuple(_content(cell) for cell in function.__closure__ or ())
    defaults = _frozen(function.__defaults__ or ())
    return _Function(_name(function), f"{_digest_of_code(function.__code__)}{closure}{defaults}")


def _content(cell: CellType) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return _OTHER
    return (
        _frozen(value) if type(value) in _PLAIN or isinstance(value, float) else _OTHER
    )  # functions may hold themselves


def _name(function: Callable[..., Any]) -> str:
    kind = type(function)
    module = getattr(function, "__module__", None) or kind.__module__
    return f"{module}.{getattr(function, '__qualname__', kind.__qualname__)}"


@functools.lru_cache(maxsize=4096)
def _digest_of_code(code: CodeType) -> str:
    """Return a digest of what a function does, as far as its code tells."""
    constants = [
        _digest_of_code(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return _digest(*constants, *code.co_names, *code.co_varnames, code.co_code)


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part if isinstance(part, bytes | memoryview) else f"{part};".encode())
    return digest.hexdigest()


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"

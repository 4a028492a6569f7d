"""Parameters and buffers without values: the attributes they report, the operations that read them, and those refused.

A weight keeps its object. While it is unbound, its class is one of the two here, it reports its real shape and dtype,
and its memory is one element (NaN if the dtype has it, so that code which bypasses Python is noticed at once). Binding
gives it its own class and the memory with its values. `stream` decides when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fastpersist.errors import ConfigError, InternalError
from fastpersist.streaming.units import Weight
from fastpersist.transfer.torch_boundary import untraced

__all__ = [
    "ResidentParameter",
    "UnboundBuffer",
    "UnboundParameter",
    "bind",
    "is_bound",
    "is_changed",
    "keep",
    "list_only",
    "plainly",
    "unbind",
]

# Attributes that are valid for a weight without its values, and methods without an effect.
_TRUE_ATTRIBUTES = frozenset(
    """shape dtype device layout ndim itemsize nbytes names requires_grad grad grad_fn is_leaf is_cpu is_cuda is_meta
    is_mps is_mkldnn is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu is_mtia is_ipu is_maia
    output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks name""".split()
)
_TRUE_METHODS = frozenset(
    """size dim ndimension numel nelement element_size is_floating_point is_complex is_signed is_inference is_conj
    is_neg is_pinned is_shared get_device __len__ __hash__ is_tensor is_storage
    _has_compatible_shallow_copy_type""".split()
)
_REFUSED = frozenset(
    """to cpu cuda half float double bfloat16 share_memory pin_memory __reduce__ __reduce_ex__ __deepcopy__ set_data
    swap_tensors""".split()
)
_CHANGING_OPERATORS = frozenset(
    """__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __iand__ __ior__ __ixor__ __ilshift__
    __irshift__ __ipow__""".split()
)

_ADDRESSES = frozenset(name for name in dir(torch.Tensor) if name.endswith("data_ptr"))


def _changes(name: str) -> bool:
    """Tell whether a method of tensors changes them."""
    return name in _CHANGING_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _refuse_dispatch(cls: type, *arguments: object) -> NoReturn:
    raise InternalError(f"a {cls.__name__} was dispatched")


class _Unbound:
    """The common behaviour of both classes; the instance's `_weight` says which weight it is."""

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            is_true = attribute in _TRUE_ATTRIBUTES
            if attribute == "data":  # changes through it are not noticed, and would be lost
                _refuse("data", args[0]._weight)
        elif name == "__set__":
            is_true = _is_harmless_change(func.__self__.__name__, *args)  # type: ignore[attr-defined]
            if is_true and args[1] is args[0]:
                return None
        else:
            is_true = name in _TRUE_METHODS or (name == "requires_grad_" and args[1:] == (False,))
        if func is torch.Tensor.stride or func is torch.Tensor.is_contiguous:
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)
        if not is_true:
            if func is torch.nn.functional.embedding:
                return _embedding(*args, **kwargs)
            unbound = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Unbound)]
            if name in ("__repr__", "__format__"):
                return _described(unbound[0]._weight)
            may_change = name in _REFUSED or name == "__set__" or _changes(name)
            changed = [args[0] if args else kwargs] if may_change else []
            for each in tree_leaves((changed, kwargs.get("out"))):
                if isinstance(each, _Unbound):
                    _refuse(name, each._weight)
            if name in _ADDRESSES and not unbound[0]._weight.owner.is_inside():
                _refuse(name, unbound[0]._weight)  # the memory would be freed before it is used
            if func is torch.Tensor.detach:
                return args[0]  # it never requires a gradient
            values = {id(each): each._weight.owner.read_on_demand(each._weight) for each in unbound}
            args, kwargs = tree_map(lambda each: values.get(id(each), each), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # Never called. The compiler leaves what uses such a tensor to Python, since it cannot look into it.
    __torch_dispatch__: Any = classmethod(_refuse_dispatch)

    _weight: Weight

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse("deepcopy", self._weight)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("pickle", self._weight)


class UnboundParameter(_Unbound, torch.nn.Parameter):
    """A parameter without its values."""


class UnboundBuffer(_Unbound, torch.Tensor):
    """A buffer without its values."""


class ResidentParameter(torch.nn.Parameter):
    """A parameter that keeps its values, and refuses changes from outside of a forward as one without values does.

    They would be lost when another unit stays in its place.
    """

    _weight: Weight

    @property
    def data(self) -> torch.Tensor:
        """Return what it returns inside of a forward; else refuse."""
        if not self._weight.owner.is_inside():
            _refuse("data", self._weight)
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not _is_harmless_change("data", self, value):
            _refuse("data", self._weight)

    @property
    def requires_grad(self) -> bool:
        """Return whether it has a gradient: it never has."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if not _is_harmless_change("requires_grad", self, value):
            _refuse("requires_grad", self._weight)


def _refused_outside(name: str) -> Callable[..., Any]:
    stock = getattr(torch.Tensor, name)

    @functools.wraps(stock)
    def method(tensor: ResidentParameter, *args: Any, **kwargs: Any) -> Any:
        is_harmless = name == "requires_grad_" and (*args, *kwargs.values()) == (False,)
        if not is_harmless and not tensor._weight.owner.is_inside():
            _refuse(name, tensor._weight)
        return stock(tensor, *args, **kwargs)

    return method


for _name in dir(torch.Tensor):
    if _changes(_name):
        setattr(ResidentParameter, _name, _refused_outside(_name))


def is_bound(weight: Weight) -> bool:
    """Tell whether a weight has its values."""
    return not isinstance(weight.tensor, _Unbound)


def is_changed(weight: Weight) -> bool:
    """Tell whether a weight that has its values was changed in place since it got them."""
    return is_bound(weight) and weight.version != _version_of(weight)


def _version_of(weight: Weight) -> int | None:
    return None if weight.tensor.is_inference() else weight.tensor._version


@contextmanager
def plainly() -> Iterator[None]:
    """Let tensors that are made in the block be plain: not of inference mode, nor wrapped by a transform of torch.func.

    A wrapper ends with its transform, and a weight that had one as its memory would end the process.
    """
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def bind(weight: Weight, values: torch.Tensor, *, stays: bool = False) -> None:
    """Give a weight its values, which must stay in place until it is unbound; `stays`: perhaps for ever.

    The weight is bound when this function has finished, and not before: Ctrl-C may come anywhere.
    """
    _set_memory(weight, values)
    is_resident = stays and issubclass(weight.bound_class, torch.nn.Parameter)
    weight.tensor.__class__ = ResidentParameter if is_resident else weight.bound_class


def keep(weight: Weight) -> None:
    """Give a weight that is bound memory of its own, with the values that it has."""
    with plainly(), torch.no_grad():
        values = weight.tensor.detach().clone()
    bind(weight, values)


def unbind(weight: Weight) -> None:
    """Take the values of a weight away; first of all it is unbound."""
    is_parameter = issubclass(weight.bound_class, torch.nn.Parameter)
    if is_parameter and not weight.tensor.is_leaf and is_bound(weight):  # a change made it part of a graph
        weight.tensor.__class__ = weight.bound_class
        weight.tensor.detach_()
    weight.tensor._weight = weight  # type: ignore[attr-defined]
    weight.tensor.__class__ = UnboundParameter if is_parameter else UnboundBuffer
    _set_memory(weight, weight.stand_in)


def _set_memory(weight: Weight, memory: torch.Tensor) -> None:
    with plainly(), torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(weight.tensor, memory)  # type: ignore[attr-defined]
        weight.version = _version_of(weight)


class _NoReads:
    """The owner of weights that stand in a state_dict."""

    closed = False

    def is_inside(self) -> bool:
        return False

    def read_on_demand(self, weight: Weight) -> NoReturn:
        _refuse("state_dict()", weight)

    def read_rows(self, weight: Weight, ids: torch.Tensor) -> NoReturn:
        _refuse("state_dict()", weight)


def list_only(state: dict[str, Any]) -> None:
    """Replace the unbound weights of a state_dict by placeholders that never get values.

    Code that needs names, shapes or dtypes finds them, such as a loader of adapters. Reading the values on demand would
    put a whole model into memory.
    """
    for name, tensor in state.items():
        if isinstance(tensor, _Unbound) and not isinstance(tensor._weight.owner, _NoReads):
            stand_in = tensor._weight.stand_in.detach()
            stand_in.__class__ = UnboundBuffer
            stand_in._weight = replace(tensor._weight, tensor=stand_in, owner=_NoReads())  # type: ignore[attr-defined]
            state[name] = stand_in


def _is_harmless_change(attribute: str, tensor: object, value: object) -> bool:
    if attribute == "data":  # Module._apply sets it to the converted tensor
        return value is tensor
    return (attribute == "grad" and value is None) or (attribute == "requires_grad" and value is False)


def _embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Do the work of `torch.nn.functional.embedding` without gradients, reading only the rows of the ids."""
    if not isinstance(weight, _Unbound):
        return torch.nn.functional.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if max_norm is not None:
        _refuse("an embedding with max_norm, which changes the weight,", weight._weight)
    return weight._weight.owner.read_rows(weight._weight, ids)


def _refuse(operation: str, weight: Weight) -> NoReturn:
    if weight.owner.closed:
        raise ConfigError(
            f"{operation} needs a weight with values; {weight.name} has none, since its stream (fastpersist.stream) is "
            "closed: load_state_dict(…, assign=True) puts others in its place"
        )
    raise ConfigError(
        f"{operation} needs the values of {weight.name}, which stay on disk (fastpersist.stream), or would change "
        "them: close the stream and load the model instead, or take the weights from the source"
    )


def _described(weight: Weight) -> str:
    return f"<weight {weight.name} on disk, shape {tuple(weight.shape)}, {weight.dtype}>"

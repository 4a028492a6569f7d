"""Finds the storages and tensors in a scanned pickle, with their sizes, shapes and names.

`storage_references` turns the persistent ids into storages (key, location, size), in the order in which the
unpickler would ask for them; `iter_tensors` names every tensor in the tree. Both read the nodes of `pickle_scan`
and keep its promises on hostile input: linear time and memory, no recursion. The code that touches the bytes
checks that a tensor fits its storage.

Source: torch/serialization.py (the persistent ids); torch/_utils.py, torch/_tensor.py and
torch/nn/parameter.py (the arguments of the rebuild functions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from fastpersist.errors import FormatError
from fastpersist.formats.pickle_nodes import (
    Call,
    Global,
    PersistentId,
    PickleScan,
    SymbolicDict,
    SymbolicSet,
    Unmodelled,
    UnsupportedPickle,
)

__all__ = [
    "DTYPE_ITEMSIZE_BYTES",
    "StorageReference",
    "SymbolicTensor",
    "builds_without_bytes",
    "is_rebuilt_tensor",
    "iter_tensors",
    "member_name",
    "storage_references",
]

_MESSAGE_CHARACTERS_MAX: Final = 200

# --- storages ---


# torch's storage classes and the dtype of their elements. An UntypedStorage counts bytes.
_STORAGE_DTYPES: Final = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt2x4Storage": "quint2x4",
    "QUInt4x2Storage": "quint4x2",
    "QUInt8Storage": "quint8",
    "ShortStorage": "int16",
    "UntypedStorage": "uint8",
}

DTYPE_ITEMSIZE_BYTES: Final = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element of each torch dtype, by its name; sub-byte dtypes by their packed element."""

_PACKED_DTYPES: Final = frozenset({"quint4x2", "quint2x4"})

_COUNT_MAX: Final = (1 << 63) - 1


class StorageReference(NamedTuple):
    """A storage as the pickle refers to it.

    Attributes:
        dtype: Name of the torch dtype of its elements; "uint8" for an UntypedStorage, as in torch.load.
        key: The storage's key; its record in the archive is `data/<key>`.
        location: The device that the storage was saved from, such as "cpu" or "cuda:0".
        numel: Number of elements, 0 to 2^63 - 1.
    """

    dtype: str
    key: str
    location: str
    numel: int

    @property
    def size_bytes(self) -> int:
        """The length of its record."""
        return self.numel * DTYPE_ITEMSIZE_BYTES[self.dtype]


def _storage_reference(persistent: PersistentId) -> StorageReference:
    value = persistent.value
    if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
        raise ValueError("not a tuple ('storage', class, key, location, numel)")
    _, storage_class, key, location, numel = value
    if type(storage_class) is not Global:
        raise ValueError("a storage class that is no global")
    if type(key) is not str or type(location) is not str:
        raise ValueError("a key or a location that is no string")
    if type(numel) is not int or not 0 <= numel <= _COUNT_MAX:
        raise ValueError("a number of elements that is not from 0 to 2^63 - 1")
    dtype = _STORAGE_DTYPES.get(storage_class.name)
    if dtype is None or storage_class.module not in ("torch", "torch.storage"):
        raise Unmodelled(f"the unknown storage class {storage_class.module}.{storage_class.name}")
    return StorageReference(dtype, key, location, numel)


def storage_references(scan: PickleScan) -> list[StorageReference]:
    """List the storages in the order in which the unpickler would ask for them, once for each time.

    Args:
        scan: A scanned `data.pkl`.

    Returns:
        The storages; one that is met several times is listed several times. Entries with one key may differ.

    Raises:
        FormatError: A persistent id is none that torch.save writes.
        UnsupportedPickle: A storage class is unknown here.

    Thread safety: safe.

    Source: `persistent_id` in torch/serialization.py.
    """
    references = []
    for position, persistent in enumerate(scan.persistent_ids):
        try:
            references.append(_storage_reference(persistent))
        except ValueError as error:
            raise FormatError(f"persistent id number {position} of the pickle is {error}") from None
        except Unmodelled as error:
            raise UnsupportedPickle(f"persistent id number {position} of the pickle has {error}") from None
    return references


# --- what needs no bytes ---


def builds_without_bytes(scan: PickleScan) -> bool:
    """Tell whether unpickling surely reads no byte of a storage, so that it may run before the bytes are read.

    This holds for plain tensors, parameters and OrderedDicts, as picklers write them, in dicts, lists, tuples and sets:
    these hash and compare tensors by identity. Any other call may read bytes: a `__setstate__`, a subclass, a sparse or
    nested tensor, which checks its indices, or a size that is itself a tensor.

    Thread safety: safe.
    """
    return all(map(_needs_no_bytes, scan.calls))


def _needs_no_bytes(call: Call) -> bool:
    function, arguments = call.function, call.arguments
    if type(function) is not Global or call.keywords is not None or call.items is not None:
        return False
    if function.name == "OrderedDict":  # from other states torch's unpickler makes something else, or nothing
        return function.module == "collections" and not arguments and isinstance(call.state, SymbolicDict | None)
    if function.module != "torch._utils" or call.state is not None or call.entries is not None:
        return False
    if function.name == "_rebuild_tensor_v2" and len(arguments) == 6:  # a seventh has flags, by any names
        storage, offset, shape, stride, requires_grad, _hooks = arguments
        return (
            type(storage) is PersistentId
            and type(offset) is int
            and type(requires_grad) is bool
            and _are_ints(shape)
            and _are_ints(stride)
        )
    if function.name == "_rebuild_parameter" and len(arguments) == 3:
        data, requires_grad, _hooks = arguments
        return type(data) is Call and type(requires_grad) is bool
    return False


def _are_ints(node: object) -> bool:
    return type(node) is tuple and all(type(element) is int for element in node)


# --- tensors ---


class SymbolicTensor(NamedTuple):
    """A tensor as the pickle describes it: claims, not proof that it fits its storage.

    Attributes:
        storage: The storage that holds its elements; None where it has no storage of its own ("meta", "wrapper").
        dtype: Name of its torch dtype, such as "bfloat16".
        storage_offset: The offset of the first element in the storage, in elements of `dtype`.
        shape: Elements per dimension.
        stride: Elements of `dtype` from one index to the next, per dimension.
        requires_grad: The value of the tensor, or of the Parameter around it.
        kind: "dense"; "meta" (no data); "wrapper" (a subclass whose data are the tensors in its attributes, a
            DTensor for one); "quantized" (its scales and zero points too); and for the components of a tensor
            made of several: "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested".
        is_conj: Its values are the conjugates of the stored elements.
        is_neg: Its values are the negatives of the stored elements.
    """

    storage: StorageReference | None
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    kind: str
    is_conj: bool
    is_neg: bool

    @property
    def end_bytes(self) -> int:
        """Where the last of its elements ends, counted from the start of its storage.

        It is 0 without elements, and for the quantized dtypes that pack several into a byte: torch counts those.
        """
        if 0 in self.shape or self.dtype in _PACKED_DTYPES:
            return 0
        last = self.storage_offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * DTYPE_ITEMSIZE_BYTES.get(self.dtype, 1)  # a dtype that is newer than this table


# Longer parts and longer names are cut, marked by an ellipsis: a pickle can use one long key many times.
_NAME_PART_CHARACTERS_MAX: Final = 512
_NAME_CHARACTERS_MAX: Final = 1024
# Each open container keeps its name, 4 KiB at worst. Python's pickler itself stops near 1,000 levels.
_DEPTH_MAX: Final = 4000
# A shape can be used many times too, and is checked each time.
_DIMENSIONS_MAX: Final = 256
# A Parameter whose data is a subclass whose … : real pickles have two or three levels of this.
_WRAPPINGS_MAX: Final = 16

_MODULE_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})

_REBUILD_MODULES: Final = frozenset(
    {"torch._utils", "torch._tensor", "torch.tensor", "torch.nested._internal.nested_tensor"}
)

# The functions that make one tensor: their arguments in order, and how many of them are required.
_TENSOR_STORAGE: Final = ("storage", "offset", "shape", "stride")
_TENSOR_FUNCTIONS: Final = {
    "_rebuild_tensor": (_TENSOR_STORAGE, 4),
    "_rebuild_tensor_v2": ((*_TENSOR_STORAGE, "requires_grad", "hooks", "metadata"), 6),
    "_rebuild_tensor_v3": ((*_TENSOR_STORAGE, "requires_grad", "hooks", "dtype", "metadata"), 7),
    "_rebuild_qtensor": ((*_TENSOR_STORAGE, "quantizer", "requires_grad", "hooks"), 7),
    "_rebuild_meta_tensor_no_storage": (("dtype", "shape", "stride", "requires_grad"), 4),
    "_rebuild_wrapper_subclass": (
        ("class", "dtype", "shape", "stride", "offset", "layout", "device", "requires_grad"),
        8,
    ),
}

# The components of tensors made of several, in the order of the arguments, named like the tensors' accessors.
_ROW_COMPRESSED: Final = ("crow_indices", "col_indices", "values")
_COLUMN_COMPRESSED: Final = ("ccol_indices", "row_indices", "values")
_SPARSE_COMPONENTS: Final = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": _ROW_COMPRESSED,
    "sparse_bsr": _ROW_COMPRESSED,
    "sparse_csc": _COLUMN_COMPRESSED,
    "sparse_bsc": _COLUMN_COMPRESSED,
}
_NESTED_COMPONENTS: Final = ("values", "sizes", "strides", "storage_offsets")
_QUANTIZER_COMPONENTS: Final = ("scheme", "scales", "zero_points")

_BRANCHES: Final = frozenset({Call, SymbolicDict, SymbolicSet, list, tuple})


class _Visit(NamedTuple):
    """A node that iter_tensors will visit: its name, the kind of a tensor found there, and its opener."""

    name: str
    node: object
    kind: str
    open: Callable[[str, object, str], Iterator[_Visit]]


@dataclass(slots=True, eq=False, repr=False)
class _Description:
    """A call of one of torch's rebuild functions: a tensor, or the components of one, and its attributes."""

    tensor: SymbolicTensor | None
    components: tuple[tuple[str, object], ...]
    component_kind: str
    keywords: SymbolicDict | None
    states: list[object]


# The functions below raise ValueError or Unmodelled with what is wrong; iter_tensors adds the tensor's name.


def _count(node: object, what: str) -> int:
    if type(node) is not int or not 0 <= node <= _COUNT_MAX:
        raise ValueError(f"{what} is not a number from 0 to 2^63 - 1")
    return node


def _counts(node: object, what: str) -> tuple[int, ...]:
    """Read a shape or a stride: a tuple of ints, or torch.Size of one."""
    if type(node) is Call and len(node.arguments) == 1:
        node = node.arguments[0]
    if type(node) is not tuple:
        raise ValueError(f"its {what} is not a tuple")
    if len(node) > _DIMENSIONS_MAX:
        raise Unmodelled(f"{len(node)} dimensions")
    for element in node:
        _count(element, f"an element of its {what}")
    return node


def _flag(node: object) -> bool:
    if type(node) is not bool:
        raise ValueError("requires_grad is not a bool")
    return node


def _dtype(node: object) -> str:
    if type(node) is not Global or node.module != "torch":
        raise ValueError("its dtype is not a torch dtype")
    return node.name


def _is_view(flat: list[object], name: str) -> bool:
    return any(key == name and value is True for key, value in zip(flat[::2], flat[1::2], strict=True))


def _require(arguments: tuple[object, ...], least: int, function: str) -> None:
    if len(arguments) < least:
        raise ValueError(f"{function} takes {least} arguments or more and gets {len(arguments)}")


def _paired(names: tuple[str, ...], nodes: object, what: str) -> tuple[tuple[str, object], ...]:
    if type(nodes) is not tuple or len(nodes) < len(names):
        raise ValueError(f"{what} is not a tuple of {len(names)} elements or more")
    return tuple(zip(names, nodes, strict=False))  # torch puts the size and flags behind them


def _layout(node: object) -> str:
    """Read a sparse layout: pickled as a call of `torch.serialization._get_layout` on its name."""
    name = node.arguments[0] if type(node) is Call and len(node.arguments) == 1 else None
    layout = name.removeprefix("torch.") if type(name) is str else ""
    if layout not in _SPARSE_COMPONENTS:
        raise Unmodelled("an unknown sparse layout")
    return layout


_Rebuild: TypeAlias = tuple[str, tuple[object, ...], list[object], bool | None, str | None]
"""The call that makes a tensor: name of the function; arguments; attributes of the tensor and of what is wrapped around
it; requires_grad and dtype that the wrapping gives it, else None. A plain tuple, because every tensor needs one."""


def _unwrapped(call: Call) -> _Rebuild | None:
    """Unwrap a tensor from Parameters and the like; None if it is no call of a rebuild function of torch."""
    function, arguments = call.function, call.arguments
    states = [] if call.state is None else [call.state]
    requires_grad: bool | None = None  # of the outermost Parameter: it is the one that counts
    dtype: str | None = None
    # A Parameter is a call on the call that makes its data.
    for _ in range(_WRAPPINGS_MAX):
        if type(function) is not Global or function.module not in _REBUILD_MODULES:
            return None
        name = function.name
        if name in ("_rebuild_from_type_v2", "_rebuild_from_type"):  # (function, type, arguments, state)
            _require(arguments, 4, name)
            states.append(arguments[3])
            function, wrapped = arguments[0], arguments[2]
            if type(wrapped) is not tuple:
                raise ValueError(f"{name} passes on arguments that are no tuple")
            arguments = wrapped
            continue
        if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            _require(arguments, 3, name)  # (data, requires_grad, hooks[, state])
            own_grad = arguments[1]
            states.extend(arguments[3:4])
        elif name == "_rebuild_device_tensor_from_cpu_tensor":
            _require(arguments, 4, name)  # (data, dtype, device, requires_grad)
            own_grad = arguments[3]
            dtype = dtype or _dtype(arguments[1])
        else:
            return name, arguments, states, requires_grad, dtype
        if requires_grad is None:
            requires_grad = _flag(own_grad)
        data = arguments[0]
        if type(data) is not Call:
            raise ValueError(f"{name} is called on something that is no tensor")
        if data.state is not None:
            states.append(data.state)
        function, arguments = data.function, data.arguments
    raise Unmodelled(f"more than {_WRAPPINGS_MAX} wrappings")


def _describe(call: Call, kind: str) -> _Description | None:
    """Read a call of a rebuild function of torch; None for every other call."""
    rebuild = _unwrapped(call)
    if rebuild is None:
        return None
    name, arguments, states, _, _ = rebuild
    if name in _TENSOR_FUNCTIONS:
        return _described_tensor(rebuild, kind)
    if name == "_rebuild_sparse_tensor":
        _require(arguments, 2, name)  # (layout, (components…, size[, is_coalesced]))
        layout = _layout(arguments[0])
        components = _paired(_SPARSE_COMPONENTS[layout], arguments[1], "its sparse data")
        return _Description(None, components, layout, None, states)
    if name == "_rebuild_nested_tensor":
        components = _paired(_NESTED_COMPONENTS, arguments, "its nested data")
        return _Description(None, components, "nested", None, states)
    if name == "_rebuild_njt":
        _require(arguments, 1, name)  # (keywords,): a jagged tensor's components among them
        keywords = arguments[0]
        if type(keywords) is not SymbolicDict:
            raise ValueError("its jagged data are not a dict")
        return _Description(None, (), "nested", keywords, states)
    return None


def _described_tensor(rebuild: _Rebuild, kind: str) -> _Description | None:
    """Read a call that makes one tensor; None if its bytes lie in the pickle."""
    name, arguments, states, requires_grad, dtype = rebuild
    names, least = _TENSOR_FUNCTIONS[name]
    _require(arguments, least, name)
    argument = dict(zip(names, arguments, strict=False))  # the last ones may be missing
    reference = None
    components: tuple[tuple[str, object], ...] = ()
    if name == "_rebuild_meta_tensor_no_storage":
        kind = "meta"
    elif name == "_rebuild_wrapper_subclass":
        kind = "wrapper"
    elif type(argument["storage"]) is PersistentId:
        reference = _storage_reference(argument["storage"])
    else:
        return None  # pickled outside of torch.save
    if name == "_rebuild_qtensor":
        # (scheme, scale, zero point) or (scheme, scales, zero points, axis); numbers are no components
        kind = "quantized"
        components = _paired(_QUANTIZER_COMPONENTS, argument["quantizer"], "its quantizer")
    if dtype is None:
        dtype = _dtype(argument["dtype"]) if reference is None or "dtype" in argument else reference.dtype
    if requires_grad is None:
        requires_grad = _flag(argument.get("requires_grad", False))
    shape = _counts(argument["shape"], "shape")
    stride = _counts(argument["stride"], "stride")
    if len(shape) != len(stride):
        raise ValueError("its shape and its stride differ in length")
    offset = _count(argument.get("offset", 0), "its storage offset")
    metadata = argument.get("metadata")
    views = metadata.flat[:4] if type(metadata) is SymbolicDict else []  # ["conj", True, "neg", True] at most
    tensor = SymbolicTensor(
        reference,
        dtype,
        offset,
        shape,
        stride,
        requires_grad,
        kind,
        is_conj=_is_view(views, "conj"),
        is_neg=_is_view(views, "neg"),
    )
    return _Description(tensor, components, kind, None, states)


def is_rebuilt_tensor(call: Call) -> bool:
    """Tell whether a call is one by which torch makes a tensor or a parameter."""
    function = call.function
    return type(function) is Global and function.module in _REBUILD_MODULES and function.name.startswith("_rebuild")


def _cut(text: str) -> str:
    return text if len(text) <= _NAME_PART_CHARACTERS_MAX else text[:_NAME_PART_CHARACTERS_MAX] + "…"


def _cut_front(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS_MAX else "…" + name[-_NAME_CHARACTERS_MAX:]


def _attribute(owner: str, part: str) -> str:
    return f"{owner}.{_cut(part)}" if owner else _cut(part)


def member_name(owner: str, key: object, position: int) -> str:
    """Name the value of a key; a key that is no flat scalar is shown by its position among the keys."""
    if type(key) is str:
        return _attribute(owner, key)
    if type(key) is bytes:
        return f"{owner}[{key[:_NAME_PART_CHARACTERS_MAX]!r}]"
    if type(key) is Global:
        return f"{owner}[{key.module}.{key.name}]"
    if type(key) in (bool, float, type(None)) or (type(key) is int and -_COUNT_MAX <= key <= _COUNT_MAX):
        return f"{owner}[{key!r}]"
    return f"{owner}[#{position}]"


# The openers find the children of a node. Arguments, keywords and states are nodes too, opened once like any
# other: a pickle can share one long tuple of arguments, or one state, among many calls.


def _open_arguments(owner: str, node: object, kind: str) -> Iterator[_Visit]:
    if type(node) is tuple:
        for position, argument in enumerate(node):
            if type(argument) in _BRANCHES:
                yield _Visit(f"{owner}({position})", argument, kind, _open_value)


def _open_keywords(owner: str, node: object, kind: str) -> Iterator[_Visit]:
    if type(node) is SymbolicDict:
        for position, (key, value) in enumerate(node.items()):
            if type(value) in _BRANCHES:
                part = _cut(key) if type(key) is str else f"#{position}"
                yield _Visit(f"{owner}({part})", value, kind, _open_value)


def _state_visits(owner: str, state: object) -> Iterator[_Visit]:
    """Find an object's attributes where its state is a dict, or one dict and one of slots; else the state."""
    dicts = state if type(state) is tuple and len(state) == 2 else (state,)
    if all(part is None or type(part) is SymbolicDict for part in dicts):
        for part in dicts:
            yield _Visit(owner, part, "dense", _open_value)
    else:
        yield _Visit(f"{owner}[state]", state, "dense", _open_value)


def _open_value(owner: str, node: object, kind: str) -> Iterator[_Visit]:
    if type(node) is SymbolicDict:
        pairs = node.items()
        # A torch.nn.Module is known by its three tables, which do not show in the names that torch gives.
        tables = {key for key, _ in pairs if type(key) is str and key in _MODULE_TABLES}
        for position, (key, value) in enumerate(pairs):
            if type(value) in _BRANCHES:
                is_table = len(tables) == len(_MODULE_TABLES) and type(key) is str and key in tables
                yield _Visit(owner if is_table else member_name(owner, key, position), value, kind, _open_value)
    elif type(node) is Call:
        if type(node.function) is Call:
            yield _Visit(f"{owner}(function)", node.function, kind, _open_value)
        yield _Visit(owner, node.arguments, kind, _open_arguments)
        yield _Visit(owner, node.keywords, kind, _open_keywords)
        yield _Visit(owner, node.items, kind, _open_value)
        yield _Visit(owner, node.entries, kind, _open_value)
        yield from _state_visits(owner, node.state)
    else:
        members = node.members if type(node) is SymbolicSet else node
        if type(members) is list or type(members) is tuple:
            for position, member in enumerate(members):
                if type(member) in _BRANCHES:
                    yield _Visit(f"{owner}[{position}]", member, kind, _open_value)


def _open_tensor(owner: str, description: _Description) -> Iterator[_Visit]:
    for part, node in description.components:
        yield _Visit(_attribute(owner, part), node, description.component_kind, _open_value)
    yield _Visit(owner, description.keywords, description.component_kind, _open_value)
    for state in description.states:
        yield from _state_visits(owner, state)


def iter_tensors(root: object) -> Iterator[tuple[str, SymbolicTensor]]:
    """Name every tensor in a scanned pickle, in the order of the pickle.

    String keys and attributes are joined by dots, other keys and positions stand in brackets, the arguments
    of an object's constructor in parentheses: `model.layers.0.weight`, `optimizer.state[0].exp_avg`,
    `queue[3]`, `point(0)`. Modules are named as by `named_parameters()`: their tables of parameters, buffers
    and submodules do not show. The components of a tensor made of several hang on its name
    (`embedding.indices`, `weight.scales`), those of a wrapper subclass by attribute (`weight._local_tensor`).
    A tensor that is the whole pickle has the name "".

    A tensor reached again under another name is yielded again, the same object. Containers, modules and
    tensors made of several are opened once, under their first name, so that cycles end and shared containers
    do not multiply. Two tensors can have one name (`{"a.b": x, "a": {"b": y}}`).

    Args:
        root: `PickleScan.root`, or any node below it.

    Yields:
        Name and tensor.

    Raises:
        FormatError: A rebuild function of torch is called with arguments that it does not take.
        UnsupportedPickle: An unknown storage class or layout; nesting beyond 4,000 levels.

    Thread safety: safe, as long as no thread changes the tree.
    """
    tensors: dict[int, SymbolicTensor] = {}  # by the id of their Call
    opened: set[int] = set()
    yielded: set[tuple[int, int]] = set()  # tensor and hash of a name: the names themselves may be long
    levels: list[Iterator[_Visit]] = [iter([_Visit("", root, "dense", _open_value)])]
    while levels:
        # Go down at the first child that was not open yet, come back to its siblings later.
        for full_name, node, kind, open_node in levels[-1]:
            if type(node) not in _BRANCHES:
                continue
            name = _cut_front(full_name)
            children: Iterator[_Visit] | None = None
            if id(node) not in opened:
                opened.add(id(node))
                try:
                    description = _describe(node, kind) if type(node) is Call else None
                except ValueError as error:
                    where = name[-_MESSAGE_CHARACTERS_MAX:]
                    raise FormatError(f"tensor {where!r} of the pickle is malformed: {error}") from None
                except Unmodelled as error:
                    where = name[-_MESSAGE_CHARACTERS_MAX:]
                    raise UnsupportedPickle(f"tensor {where!r} of the pickle has {error}") from None
                if description is None:
                    children = open_node(name, node, kind)
                else:
                    children = _open_tensor(name, description)
                    if description.tensor is not None:
                        tensors[id(node)] = description.tensor
            tensor = tensors.get(id(node))
            if tensor is not None and (id(node), hash(name)) not in yielded:
                yielded.add((id(node), hash(name)))
                yield name, tensor
            if children is not None:
                if len(levels) > _DEPTH_MAX:
                    raise UnsupportedPickle(f"the pickle nests containers deeper than {_DEPTH_MAX} levels")
                levels.append(children)
                break
        else:
            levels.pop()

"""scan_pickle reads what a pickle holds, refuses what is none, and never runs it."""

from __future__ import annotations

import codecs
import collections
import contextlib
import pickle
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.errors import FormatError
from fastpersist.formats.pickle_scan import (
    Call,
    Global,
    SymbolicDict,
    SymbolicSet,
    UnsupportedPickle,
    iter_tensors,
    scan_pickle,
)

PROTOCOLS = range(6)

# What a pickler writes as calls, where its protocol has no opcode.
BUILTINS = {"set": set, "frozenset": frozenset, "bytearray": bytearray, "bytes": bytes, "complex": complex}


def as_python(node: object) -> object:
    """Make the object that a symbolic tree of plain values stands for."""
    if isinstance(node, SymbolicDict):
        return {as_python(key): as_python(value) for key, value in node.items()}
    if isinstance(node, SymbolicSet):
        members = [as_python(member) for member in node.members]
        return frozenset(members) if node.is_frozen else set(members)
    if isinstance(node, list | tuple):
        return type(node)(as_python(element) for element in node)
    if isinstance(node, Call):
        assert isinstance(node.function, Global)
        arguments = [as_python(argument) for argument in node.arguments]
        if (node.function.module, node.function.name) == ("_codecs", "encode"):
            return codecs.encode(*arguments)
        assert node.function.module in ("builtins", "__builtin__")
        return BUILTINS[node.function.name](*arguments)
    return node


def typed(value: object) -> object:
    """Make equality tell True from 1, 0.0 from -0.0, a set from a frozenset."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(element)) for key, element in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(element) for element in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(typed(element)) for element in value)
    return type(value), repr(value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 2100), max_value=1 << 2100)  # LONG4 and long text
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
hashables = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4)
plain_objects = st.recursive(
    hashables | st.binary().map(bytearray),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(hashables, inner) | st.sets(hashables),
    max_leaves=30,
)


@given(plain_objects, st.sampled_from(PROTOCOLS))
def test_plain_objects_are_read_as_they_were_written(value: object, protocol: int) -> None:
    scan = scan_pickle(pickle.dumps(value, protocol))
    assert typed(as_python(scan.root)) == typed(value)
    assert scan.persistent_ids == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", ["x" * 300, b"x" * 300, "é" * 70_000, b"x" * 70_000, list(range(5000))])
def test_long_values_are_read(value: object, protocol: int) -> None:
    assert typed(as_python(scan_pickle(pickle.dumps(value, protocol)).root)) == typed(value)


@pytest.mark.parametrize(
    "data",
    [
        b"\x8d\x03\x00\x00\x00\x00\x00\x00\x00abc.",  # BINUNICODE8, which picklers keep for more than 4 GiB
        b"X\x03\x00\x00\x00abc.",
        b"T\x03\x00\x00\x00abc.",
        b"U\x03abc.",
        b"Vabc\n.",
    ],
)
def test_strings_of_all_opcodes_are_read(data: bytes) -> None:
    assert scan_pickle(data).root == "abc"


def test_long_bytes_opcode_is_read() -> None:
    assert scan_pickle(b"\x8e\x03\x00\x00\x00\x00\x00\x00\x00abc.").root == b"abc"


def test_last_of_equal_keys_wins() -> None:
    root = scan_pickle(b"}(K\x01Vfirst\nVk\nVother\nG?\xf0\x00\x00\x00\x00\x00\x00Vlast\nu.").root
    assert isinstance(root, SymbolicDict)
    assert [value for _, value in root.items()] == ["last", "other"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cycles_are_kept(protocol: int) -> None:
    a_list: list[object] = []
    a_list.append(a_list)
    a_dict: dict[str, object] = {}
    a_dict["self"] = a_dict
    a_tuple = ([],)
    a_tuple[0].append(a_tuple)

    root = scan_pickle(pickle.dumps(a_list, protocol)).root
    assert isinstance(root, list)
    assert root[0] is root
    root = scan_pickle(pickle.dumps(a_dict, protocol)).root
    assert isinstance(root, SymbolicDict)
    assert root.items() == [("self", root)]
    root = scan_pickle(pickle.dumps(a_tuple, protocol)).root
    assert isinstance(root, tuple)
    assert root[0][0] is root


class Point:
    def __init__(self) -> None:
        self.x = 1


class Slotted:
    __slots__ = ("x",)


class Keyworded:
    def __new__(cls, *, x: int) -> Keyworded:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"x": 1}


def test_objects_become_calls() -> None:
    slotted = Slotted()
    slotted.x = 1
    value = [Point(), slotted, Keyworded(x=1), collections.deque([1, 2], 3), collections.OrderedDict(a=1)]
    scan = scan_pickle(pickle.dumps(value, 4))
    assert isinstance(scan.root, list)
    point, slots, keyworded, deque, ordered = scan.root
    assert point.function.name == "Point"
    assert point.state.items() == [("x", 1)]
    assert slots.state[0] is None
    assert slots.state[1].items() == [("x", 1)]
    assert keyworded.keywords.items() == [("x", 1)]
    assert deque.arguments == ((), 3)
    assert deque.items == [1, 2]
    assert ordered.entries.items() == [("a", 1)]
    assert scan.globals == (
        f"{__name__}.Point",
        f"{__name__}.Slotted",
        f"{__name__}.Keyworded",
        "collections.deque",
        "collections.OrderedDict",
    )


def test_old_ways_to_make_instances_become_calls() -> None:
    for data in (b"(I1\nimodule\nname\n.", b"(cmodule\nname\nI1\no."):
        root = scan_pickle(data).root
        assert isinstance(root, Call)
        assert isinstance(root.function, Global)
        assert (root.function.module, root.function.name, root.arguments) == ("module", "name", (1,))


def test_no_global_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "pickle_trap.py").write_text(
        f"open({str(mark)!r}, 'w').close()\ndef spring(*arguments):\n    return arguments\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = b"\x80\x04cpickle_trap\nspring\n)R\x8c\x0bpickle_trap\x8c\x06spring\x93)R(ipickle_trap\nspring\n\x87."

    scan = scan_pickle(data)
    list(iter_tensors(scan.root))
    assert scan.globals == ("pickle_trap.spring",)
    assert "pickle_trap" not in sys.modules
    assert not mark.exists()

    monkeypatch.setitem(sys.modules, "pickle_trap", None)  # removed again after the test, with what is imported now
    del sys.modules["pickle_trap"]
    pickle.loads(data)
    assert mark.exists(), "the trap does not work, so the test shows nothing"


# --- what is no pickle ---


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_truncation_is_refused(protocol: int) -> None:
    value = {
        "a": [1, 300, 70_000, 1 << 40, 2.5, None, True],
        "b": (1, (2, 3), (4, 5, 6, 7)),
        "c": {b"x", "é"},
    }
    data = pickle.dumps([value, Point(), collections.OrderedDict(k=bytearray(b"x"))], protocol)
    scan_pickle(data)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            scan_pickle(data[:length])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut short"),
        (b"N", "cut short"),
        (b"N.N", "1 bytes follow"),
        (b"NN.", "other than one object"),
        (b"N(.", "other than one object"),
        (b"(N.", "other than one object"),
        (b".", "other than one object"),
        (b"\xff.", "no such opcode"),
        (b"0.", "stack empty"),
        (b"1.", "stack empty"),
        (b"2.", "stack empty"),
        (b"t.", "stack empty"),
        (b"l.", "stack empty"),
        (b"\x85.", "stack empty"),
        (b"N\x86.", "stack empty"),
        (b"NN\x87.", "stack empty"),
        (b"(NN\x87.", "stack empty"),  # the mark is no operand
        (b"N(NR.", "stack empty"),
        (b"q\x00.", "stack empty"),
        (b"r\x00\x00\x00\x00.", "stack empty"),
        (b"\x94.", "stack empty"),
        (b"Q.", "stack empty"),
        (b"(o.", "stack empty"),
        (b"h\x05.", "memo entry 5"),
        (b"j\xff\xff\xff\xff.", "memo entry 4294967295"),
        (b"g7\n.", "memo entry 7"),
        (b"Ng-1\n.", "memo index"),
        (b"Np-1\n.", "memo index"),
        (b"Np99999999999\n.", "memo index"),
        (b"Npx\n.", "malformed"),
        (b"Ix\n.", "malformed"),
        (b"Fx\n.", "malformed"),
        (b"L12", "does not end"),
        (b"cmodule\nname", "does not end"),
        (b"X\x01\x00\x00\x00\xff.", "malformed"),
        (b"c\xff\nname\n.", "malformed"),
        (b"V\\ud8\n.", "malformed"),
        (b"NN\x93.", "not a string"),
        (b"}(Nu.", "without a value"),
        (b"(Nd.", "without a value"),
        (b"]NNs.", "SETITEMS"),  # unsupported: a list subclass could; a plain list cannot by any pickler
        (b"NNa.", "APPENDS"),
        (b"N(Ne.", "APPENDS"),
        (b"}(Ne.", "APPENDS"),
        (b"](N\x90.", "ADDITEMS"),
        (b"(\x91(N\x90.", "ADDITEMS"),
        (b"N}b.", "BUILD"),
        (b"N)R.", "a call of a NoneType"),
        (b"cm\nn\n]R.", "as its arguments"),
        (b"cm\nn\n)N\x92.", "keyword arguments"),
        (b"cm\nn\n)]\x92.", "keyword arguments"),
        (b"\x95\x05\x00\x00\x00\x00\x00\x00\x00N.", "frame"),
        (b"\x8b\xff\xff\xff\xff.", "negative length"),
        (b"T\xff\xff\xff\xff.", "negative length"),
    ],
)
def test_malformed_pickle_is_refused(data: bytes, message: str) -> None:
    expected = UnsupportedPickle if data in (b"]NNs.", b"](N\x90.") else FormatError
    with pytest.raises(expected, match=message):
        scan_pickle(data)


@pytest.mark.parametrize("opcode", [b"X", b"B", b"T", b"\x8b", b"\x8d", b"\x8e", b"\x96", b"U", b"C", b"\x8c", b"\x8a"])
def test_length_beyond_the_end_allocates_nothing(opcode: bytes) -> None:
    wide = opcode in (b"\x8d", b"\x8e", b"\x96")
    length = b"\xff" if opcode in (b"U", b"C", b"\x8c", b"\x8a") else b"\xff\xff\xff\x7f" + b"\x7f" * (4 * wide)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="beyond the pickle's end"):
            scan_pickle(b"\x80\x05" + opcode + length + b"abc.")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_error_names_the_offset_in_the_pickle() -> None:
    with pytest.raises(FormatError) as caught:
        scan_pickle(b"\x80\x02NN\x86\xff.")
    assert caught.value.offset_bytes == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Pid\n.", "persistent id in text form"),
        (b"S'x'\n.", "Python 2"),
        (b"U\x01\xff.", "Python 2"),
        (b"\x82\x01.", "extension"),
        (b"\x83\x01\x00.", "extension"),
        (b"\x84\x01\x00\x00\x00.", "extension"),
        (b"\x97.", "out-of-band"),
        (b"N\x98.", "out-of-band"),
        (b"\x80\x06N.", "protocol 6"),
        (b"cm\nn\ncm\nn\n)RR.", "made by another call"),
        (b"NQ)R.", "persistent object"),
        (b"NQ}b.", "BUILD"),
        (b"cm\nn\n)R}b}b.", "BUILD"),
        (b"I" + b"1" * 5000 + b"\n.", "5000 characters"),
        (b"F" + b"1" * 5000 + b"\n.", "5000 characters"),
        (b"c" + b"m" * 600 + b"\nn\n.", "601 characters"),
    ],
)
def test_what_only_code_can_say_is_unsupported(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedPickle, match=message):
        scan_pickle(data)


# --- well-formed bombs ---


def test_nodes_print_without_their_contents() -> None:
    root = scan_pickle(b"cm\nn\n(" * 100_000 + b"tR" * 100_000 + b".").root
    assert "Call" in repr(root)
    root = scan_pickle(b"}" + b"N}" * 100_000 + b"s" * 100_000 + b".").root
    assert "SymbolicDict" in repr(root)


def test_huge_memo_index_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        scan = scan_pickle(b"\x80\x02]r\xff\xff\xff\x7fj\xff\xff\xff\x7fa.")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert isinstance(scan.root, list)
    assert scan.root[0] is scan.root


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def keep_top(below: int) -> bytes:
    """Leave the top of the stack and drop the `below` elements under it."""
    return put(999_999) + b"0" * (below + 1) + get(999_999)


def test_doubling_lists_cost_what_they_are_long() -> None:
    data = b"]" + put(0) + b"".join(b"](" + get(i) + get(i) + b"e" + put(i + 1) for i in range(2000))
    scan = scan_pickle(data + keep_top(2000) + b".")
    assert isinstance(scan.root, list)
    assert scan.root[0] is scan.root[1]
    assert list(iter_tensors(scan.root)) == []


def test_doubling_tuples_as_keys_are_never_hashed() -> None:
    data = b")" + put(0) + b"".join(get(i) + get(i) + b"\x86" + put(i + 1) for i in range(200))
    scan = scan_pickle(data + keep_top(200) + put(5) + b"0}" + get(5) + b"Ns.")
    assert isinstance(scan.root, SymbolicDict)
    assert len(scan.root.items()) == 1
    assert list(iter_tensors(scan.root)) == []


def test_colliding_integers_as_keys_take_no_quadratic_time() -> None:
    period = (1 << 61) - 1  # Python hashes all multiples of it to 0
    keys = b"".join(b"\x8a\x0a" + (i * period).to_bytes(10, "little") + b"N" for i in range(100_000))
    root = scan_pickle(b"}(" + keys + b"u.").root
    assert isinstance(root, SymbolicDict)
    assert len(root.items()) == 100_000


def test_calls_that_share_one_tuple_of_arguments_take_no_quadratic_time() -> None:
    calls = 100_000
    shared = b"(" + b"]" * 100_000 + b"t" + put(0) + b"0"
    data = b"cm\nn\n" + put(1) + b"0" + shared + b"(" + (get(1) + get(0) + b"R") * calls + b"l."
    root = scan_pickle(data).root
    assert isinstance(root, list)
    assert len(root) == calls
    assert list(iter_tensors(root)) == []


@pytest.mark.parametrize(
    "data",
    [
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"(" * 100_000 + b"t" * 100_000 + b".",
        b"N" + b"\x85" * 100_000 + b".",
        b"}" + b"N}" * 100_000 + b"s" * 100_000 + b".",
        b"cm\nn\n(" * 100_000 + b"tR" * 100_000 + b".",
        b"cm\nn\n)R" * 100_000 + b"b" * 99_999 + b".",
        b"N" + b"Q" * 100_000 + b".",
    ],
    ids=["list", "tuple", "tuple1", "dict", "call", "state", "persistent id"],
)
def test_deep_nesting_is_read_named_and_freed(data: bytes) -> None:
    scan = scan_pickle(data)
    with contextlib.suppress(UnsupportedPickle):  # no tensor below 4,000 levels gets a name
        assert list(iter_tensors(scan.root)) == []
    del scan  # a hundred thousand destructors inside one another must not overflow the C stack

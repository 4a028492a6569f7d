"""Fuzz scan_pickle, storage_references and iter_tensors: mutated pickles, and opcodes in random order.

    python tests/fuzz/fuzz_pickle_scan.py --seconds 5 --seed 1

Whatever the input, only FormatError and UnsupportedPickle may come out, in bounded time and memory.
"""

from __future__ import annotations

import collections
import datetime
import fractions
import pickle
import pickletools
import random

from fuzzing import EDGES, main, mutated

from fastpersist.errors import FormatError
from fastpersist.formats.pickle_scan import UnsupportedPickle, iter_tensors, scan_pickle, storage_references

# --- pickles as torch.save writes them, without torch ---


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def storage(key: str, kind: str = "FloatStorage", numel: int = 4) -> bytes:
    return b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + b"K%ctQ" % numel


def call(function: str, arguments: bytes) -> bytes:
    module, _, name = function.rpartition(".")
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n(" + arguments + b"tR"


GEOMETRY = b"K\x00K\x02K\x02\x86K\x02K\x01\x86"  # offset 0, shape (2, 2), stride (2, 1)
HOOKS = call("collections.OrderedDict", b"")
DENSE = call("torch._utils._rebuild_tensor_v2", storage("0") + GEOMETRY + b"\x89" + HOOKS)
CONJUGATED = call(
    "torch._utils._rebuild_tensor_v2",
    storage("1", "ComplexFloatStorage") + GEOMETRY + b"\x89" + HOOKS + b"}" + text("conj") + b"\x88s",
)
FLOAT8 = call(
    "torch._utils._rebuild_tensor_v3",
    storage("2", "UntypedStorage") + GEOMETRY + b"\x89" + HOOKS + b"ctorch\nfloat8_e4m3fn\n",
)
PARAMETER = call(
    "torch._utils._rebuild_parameter_with_state", DENSE + b"\x88" + HOOKS + b"}" + text("x") + DENSE + b"s"
)
QUANTIZED = call(
    "torch._utils._rebuild_qtensor",
    storage("3", "QInt8Storage") + GEOMETRY + b"(ctorch\nper_channel_affine\n" + DENSE + DENSE + b"K\x00t\x89" + HOOKS,
)
SPARSE = call(
    "torch._utils._rebuild_sparse_tensor",
    call("torch.serialization._get_layout", text("torch.sparse_csr"))
    + b"("
    + DENSE * 3
    + call("torch.Size", b"K\x02K\x02\x86")
    + b"t",
)
NESTED = call("torch._utils._rebuild_nested_tensor", DENSE * 4)
META = call("torch._utils._rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\nK\x02\x85K\x01\x85\x89")
WRAPPER = call(
    "torch._tensor._rebuild_from_type_v2",
    b"ctorch._utils\n_rebuild_wrapper_subclass\ncmy\nWrapper\n"
    + b"(cmy\nWrapper\nctorch\nfloat32\nK\x02\x85K\x01\x85K\x00NN\x89t"
    + b"}"
    + text("inner")
    + DENSE
    + b"s",
)
TENSORS = [DENSE, CONJUGATED, FLOAT8, PARAMETER, QUANTIZED, SPARSE, NESTED, META, WRAPPER]
REBUILD_FUNCTIONS = [tensor[: tensor.index(b"(")] for tensor in TENSORS]
TABLES = b"".join(
    text(table) + b"}" + text("w") + PARAMETER + b"s" for table in ("_parameters", "_buffers", "_modules")
)
MODULE = b"cmy\nModule\n)\x81}(" + TABLES + b"ub"


class Plain:
    def __init__(self) -> None:
        self.value = fractions.Fraction(1, 3)


def seeds() -> list[bytes]:
    plain = [
        {"a": [1, -300, 70_000, 1 << 70, 2.5, None, True], ("b", 1): {"c": (1,), "d": (1, 2)}, 3: {b"x"}},
        [Plain(), collections.deque([1], 2), collections.OrderedDict(k=1), frozenset({1}), bytearray(b"y")],
        [datetime.timedelta(1), collections.Counter("aab"), complex(1, 2), "é" * 300, b"z" * 300],
    ]
    cycle: list[object] = [{}]
    cycle.append((cycle, [cycle]))
    found = [pickle.dumps(value, protocol) for value in [*plain, cycle] for protocol in range(6)]
    found += [b"\x80\x02" + tensor + b"." for tensor in TENSORS]
    found.append(b"\x80\x02}(" + b"".join(text(f"t.{i}") + t for i, t in enumerate(TENSORS)) + b"u.")
    found.append(b"\x80\x02]q\x00(" + MODULE + b"q\x01h\x01h\x00" + DENSE + b"q\x02h\x02h\x02e.")
    return found


SEEDS = seeds()

# --- pickles of opcodes in random order ---


def argument_of(rng: random.Random, opcode: pickletools.OpcodeInfo) -> bytes:
    """Make an argument that mostly fits the opcode: right in form, wild in value."""
    if opcode.arg is None:
        return b""
    if opcode.arg.n > 0:
        wild = rng.choice([rng.choice(EDGES), rng.randrange(8), rng.randrange(8)])
        return (wild & ((1 << 8 * opcode.arg.n) - 1)).to_bytes(opcode.arg.n, "little")
    if opcode.arg.n == pickletools.UP_TO_NEWLINE:
        lines = [b"0", b"1", b"01", b"-5", b"1.5", b"12L", b"name", b"os", b"\\u00e9", rng.randbytes(3)]
        return b"\n".join(rng.choice(lines) for _ in range(1 + (opcode.name in ("GLOBAL", "INST")))) + b"\n"
    width = {"1": 1, "4": 4, "8": 8}[opcode.arg.name[-1]]
    raw = rng.choice([b"", b"storage", b"\xff\x00", rng.randbytes(rng.randrange(8))])
    return len(raw).to_bytes(width, "little") + raw


def random_opcodes(rng: random.Random) -> bytes:
    parts = []
    for _ in range(rng.choice([5, 20, 100, 1000])):
        if rng.random() < 0.1:
            parts.append(rng.choice(TENSORS))
        elif rng.random() < 0.3:
            parts.append(rng.choice([b"(", b"]", b"}", b")", b"cm\nn\n", b"N", b"K\x01", text("k"), b"2"]))
        else:
            opcode = rng.choice(pickletools.opcodes)
            if opcode.name != "STOP":
                parts.append(opcode.code.encode("latin-1") + argument_of(rng, opcode))
    # Close what is open as well as can be, so that many of these are whole pickles.
    return b"".join([*parts, b"l" * parts.count(b"("), b"."])


def expression(rng: random.Random, depth: int) -> bytes:
    """Make opcodes that push one value: a well-formed pickle, whatever nonsense it says."""

    def several() -> bytes:
        return b"".join(expression(rng, depth - 1) for _ in range(rng.randrange(5)))

    def pairs() -> bytes:
        return b"".join(
            rng.choice([text("_parameters"), text("key"), b"K\x01", expression(rng, depth - 1)])
            + expression(rng, depth - 1)
            for _ in range(rng.randrange(4))
        )

    if depth == 0 or rng.random() < 0.2:
        leaves = [b"N", b"\x88", b"K\x07", b")", b"]q\x00", b"h\x00", text("x"), storage("9"), rng.choice(TENSORS)]
        return rng.choice(leaves)
    function = rng.choice([b"cm\nn\n", *REBUILD_FUNCTIONS])

    def opaque() -> bytes:
        return function + b"(" + several() + b"tR"

    kinds = [
        lambda: b"(" + several() + b"l",
        lambda: b"(" + several() + b"t",
        lambda: b"(" + several() + b"\x91",
        lambda: b"}(" + pairs() + b"u",
        lambda: expression(rng, depth - 1) + b"Q",
        lambda: opaque() + b"(" + several() + b"e(" + pairs() + b"u",
        lambda: opaque() + expression(rng, depth - 1) + b"b",
        lambda: opaque() + b"(" + several() + b"tR",
        lambda: function + b"(" + several() + b"t}(" + pairs() + b"u\x92",
    ]
    index = rng.randrange(1, 6)
    return rng.choice(kinds)() + rng.choice([b"", b"q%c" % index])


def nested(rng: random.Random) -> bytes:
    """Nest one thing in itself, up to some ten thousand times, and use it many times from the memo."""
    depth = rng.choice([10, 1000, 20_000])
    before, after = rng.choice(
        [
            (b"(", b"t"),
            (b"(", b"l"),
            (b"]", b"a"),
            (b"cm\nn\n(", b"tR"),
            (b"}N", b"s"),
            (b"", b"\x85"),
            (b"", b"Q"),
        ]
    )
    core = rng.choice([*TENSORS, b"N", b")", b"]"])
    uses = rng.choice([0, 10, 10_000])
    wrapped = before * depth + core + after * depth
    return b"(" + wrapped + b"q\x00" + rng.choice([b"h\x00", b"h\x00\x85", b"h\x00h\x00\x86"]) * uses + b"l."


def make_input(rng: random.Random) -> bytes:
    chance = rng.random()
    if chance < 0.03:
        return nested(rng)
    if chance < 0.50:
        return mutated(rng, rng.choice(SEEDS), SEEDS)
    data = random_opcodes(rng) if chance < 0.65 else b"]q\x000" + expression(rng, 4) + b"."
    return data if rng.random() < 0.5 else mutated(rng, data, SEEDS)


outcomes: collections.Counter[str] = collections.Counter()


def try_input(data: bytes) -> None:
    try:
        scan = scan_pickle(data)
        outcomes["scanned"] += 1
        for step in (storage_references, lambda scan: list(iter_tensors(scan.root))):
            try:
                step(scan)
            except (FormatError, UnsupportedPickle) as error:
                str(error)
        repr(scan)
    except (FormatError, UnsupportedPickle) as error:
        if isinstance(error, FormatError) and not 0 <= (error.offset_bytes or 0) <= len(data):
            raise AssertionError(f"an offset outside the input: {error.offset_bytes}") from error
        outcomes[type(error).__name__] += 1


if __name__ == "__main__":
    # Linear: two bytes of input, EMPTY_DICT and MARK, make a SymbolicDict, its list and a stack, and all of them are
    # visited. The rest is for the names of open containers.
    main(make_input, try_input, memory_bytes_max=lambda length: (20 << 20) + 500 * length)
    print(dict(outcomes))

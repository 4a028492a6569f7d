"""Random objects such as programs save: nested containers, tensors of all kinds that share memory, other objects.

The same seed gives the same object. `change` changes one in place, as a program does between two saves.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import random
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["RandomState"]

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
SIZES = [0, 1, 2, 3, 4, 5, 999, 1000, 1001, 1999, 2000, 2001]


class Color(enum.Enum):
    """What is pickled by its class and a value."""

    RED = 1
    GREEN = "g"


class Slotted:
    """An object without a dict."""

    __slots__ = ("left", "right")

    def __init__(self, left: object, right: object) -> None:
        self.left = left
        self.right = right


class Text(str):
    """A subclass of a builtin."""


class Attributes:
    """An object with a dict, of which each is another class to a pickler: it may hold anything."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class RandomState:
    """An object made at random.

    Attributes:
        value: The object.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._storages = [torch.arange(24.0) for _ in range(3)]
        self._made: list[Any] = []
        self._left = self._random.choice([3, 20, 200])
        self.value = self._make(0)

    def change(self) -> None:
        """Change one thing in the object, in place."""
        kinds = (dict, list, set, torch.Tensor, torch.nn.Module, Attributes, bytearray)
        held = [one for one in self._made if isinstance(one, kinds)]
        if not held:
            return
        one = self._random.choice(held)
        self._left = 10
        if isinstance(one, torch.Tensor):
            self._change_tensor(one)
        elif isinstance(one, dict):
            self._change_dict(one)
        elif isinstance(one, list):
            self._change_list(one)
        elif isinstance(one, torch.nn.Module):
            self._change_module(one)
        elif isinstance(one, set):
            one.add(self._random.randrange(9))
        elif isinstance(one, bytearray):
            one.append(7)
        else:
            setattr(one, self._random.choice("abc"), self._make(3))

    def forget(self) -> None:
        """Refer to nothing but `value`, which cannot change any more: objects in it may have one reference each."""
        self._made.clear()
        self._storages.clear()

    def _change_tensor(self, tensor: torch.Tensor) -> None:
        how = self._random.randrange(6)
        if how == 0 and tensor.is_floating_point():
            tensor.requires_grad_(not tensor.requires_grad)
        elif how == 1 and tensor.is_cpu and tensor.layout is torch.strided:
            tensor.data = torch.ones(2, 3, dtype=tensor.dtype)
        elif how == 2:
            tensor.note = self._random.random()  # type: ignore[attr-defined]
        elif how == 3 and tensor.is_cpu and tensor.layout is torch.strided:
            floating = [dtype for dtype in DTYPES if dtype.is_floating_point]  # all that a gradient may have
            dtype = self._random.choice(floating if tensor.requires_grad else DTYPES)
            tensor.data = torch.ones(tensor.shape, dtype=dtype)
        elif how == 4 and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_conj():
            tensor.detach().fill_(1)
        elif tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad:
            tensor.resize_(self._random.randrange(5))

    def _change_list(self, one: list[Any]) -> None:
        how = self._random.randrange(3)
        if how == 0 or not one:
            one.insert(self._random.randrange(len(one) + 1), self._make(3))
        elif how == 1:
            del one[self._random.randrange(len(one))]
        else:
            one[self._random.randrange(len(one))] = self._make(3)

    def _change_module(self, one: torch.nn.Module) -> None:
        how = self._random.randrange(3)
        if how == 0:
            one.weight = torch.nn.Parameter(torch.ones(3, dtype=self._random.choice([torch.float32, torch.float64])))
        elif how == 1:
            one.bias = None  # type: ignore[assignment]
        else:
            one.add_module("inner", torch.nn.Linear(1, 1, bias=False))  # replaces the one before

    def _change_dict(self, one: dict[Any, Any]) -> None:
        keys = list(one)
        how = self._random.randrange(3)
        if how == 0 or not keys:
            one[self._key()] = self._make(3)
        elif how == 1:
            del one[self._random.choice(keys)]
        else:
            key = self._random.choice(keys)
            one[key] = one.pop(key)  # goes to the end

    def _make(self, depth: int) -> Any:
        self._left -= 1
        if self._made and self._random.random() < 0.1:
            return self._random.choice(self._made)  # the same object again
        plain: list[Callable[[], Any]] = [self._number, self._text, self._tensor, self._other]
        nested = [self._dict, self._dict, self._list, self._tuple, self._object]
        make = self._random.choice(plain if depth > 5 or self._left < 0 else plain + 2 * nested)
        value = make() if make in plain else make(depth + 1)  # type: ignore[call-arg]
        if not isinstance(value, (int, float)):
            self._made.append(value)
        return value

    def _number(self) -> Any:
        chance = self._random
        edge = chance.choice([0, 255, 256, 65535, 65536, 2**31, 2**32, 2**63, 2**64, 2**127, 2**128, 2**2040])
        return chance.choice([None, True, False, 0.5, float("inf"), edge - 1, edge, -edge, -edge - 1, 1 - edge])

    def _text(self) -> Any:
        words = ["", "a", "cpu", "storage", "é", "weight", "0", "5", "x" * 300, "\U0001f600", "\ud800", "layer.0.bias"]
        word = self._random.choice(words)
        return self._random.choice([word, word + "".join(["y"]), Text(word), word.encode("utf-8", "surrogatepass")])

    def _key(self) -> Any:
        return self._random.choice([self._random.randrange(300), str(self._random.randrange(12)), "weight", (1, "a")])

    def _tensor(self) -> torch.Tensor:
        chance = self._random
        base = chance.choice(self._storages)
        makers: list[Callable[[], torch.Tensor]] = [
            lambda: torch.zeros(chance.choice([0, 3, 7]), dtype=chance.choice(DTYPES)),
            lambda: base[chance.randrange(20) :],
            lambda: base.view(2, 3, 4)[:, 1:, ::2],
            lambda: torch.nn.Parameter(torch.ones(2, 1, 3, 1, 2)),
            lambda: torch.nn.Parameter(base.detach()[:4], requires_grad=False),
            lambda: torch.tensor(1.5),
            lambda: base.detach(),
            lambda: torch.ones(3, dtype=chance.choice([torch.uint16, torch.float8_e5m2])),
            lambda: torch.empty(2, 0, 3),
        ]
        if chance.random() < 0.02:
            makers = [
                lambda: torch.ones(2, dtype=torch.complex64).conj(),
                lambda: torch.eye(2).to_sparse(),
                lambda: torch.empty(3, device="meta"),
                lambda: base.view(torch.int32),
            ]
        return chance.choice(makers)()

    def _other(self) -> Any:
        chance = self._random
        return chance.choice(
            [
                lambda: Color.GREEN,
                lambda: (torch.float16, torch.device("cuda", 1), torch.Size([2, 3]), torch.strided),
                lambda: {1, 2, 3} if chance.random() < 0.5 else frozenset("a"),
                lambda: datetime.timedelta(seconds=3),
                lambda: decimal.Decimal("1.5"),
                lambda: complex(1, 2),
                lambda: bytearray(b"abc"[: chance.randrange(4)]),
                lambda: range(chance.randrange(5)),
                lambda: (len, Color, argparse.Namespace, dict, type(None)),
                lambda: collections.Counter("aab"),
                lambda: collections.OrderedDict(),
                lambda: collections.deque([1, 2], maxlen=3),
                lambda: random.Random(chance.randrange(9)).getstate(),
            ]
        )()

    def _length(self) -> int:
        return self._random.choice(SIZES) if self._random.random() < 0.1 else self._random.randrange(5)

    def _dict(self, depth: int) -> Any:
        length = self._length()
        one: dict[Any, Any] = self._random.choice([dict, dict, collections.OrderedDict, collections.defaultdict])()
        if length > 9:
            one.update((f"{index}", index) for index in range(length))
        else:
            one.update((self._key(), self._make(depth)) for _ in range(length))
        if isinstance(one, collections.OrderedDict) and self._random.random() < 0.5:
            one._metadata = {"version": self._make(depth)}  # type: ignore[attr-defined]
        if self._random.random() < 0.05:
            one["self"] = one
        return one

    def _list(self, depth: int) -> Any:
        length = self._length()
        return list(range(length)) if length > 9 else [self._make(depth) for _ in range(length)]

    def _tuple(self, depth: int) -> Any:
        return tuple(self._make(depth) for _ in range(self._random.randrange(6)))

    def _object(self, depth: int) -> Any:
        kind = self._random.randrange(4)
        if kind == 0:
            return argparse.Namespace(lr=self._make(depth), steps=self._make(depth))
        if kind == 1:
            return Slotted(self._make(depth), self._make(depth))
        if kind == 2:
            found = Attributes(a=self._make(depth))
            found.__dict__["itself"] = found
            return found
        return torch.nn.Linear(2, 1)

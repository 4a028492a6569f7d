"""What a pickle holds beside tensors, listed without running it."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import torch

from fastpersist.formats.pickle_scan import scan_pickle
from fastpersist.formats.pickle_values import iter_values
from fastpersist.loading.checkpoint_file import CheckpointSource


def values_of(obj: object) -> dict[str, str]:
    return dict(iter_values(scan_pickle(pickle.dumps(obj, protocol=2)).root))


def test_plain_values_have_the_names_of_tensors() -> None:
    obj = {"step": 7, "groups": [{"lr": 0.1, "betas": (0.9, None)}], 3: True, "text": "a\nb", "raw": b"\0"}
    assert values_of(obj) == {
        "step": "7",
        "groups[0].lr": "0.1",
        "groups[0].betas[0]": "0.9",
        "groups[0].betas[1]": "None",
        "[3]": "True",
        "text": r"'a\nb'",
        "raw": "_codecs.encode(…)",
        "raw(0)": r"'\x00'",
        "raw(1)": "'latin1'",
    }


def test_empty_containers_are_listed() -> None:
    found = values_of({"a": {}, "b": [], "c": (), "d": collections.OrderedDict()})
    assert found == {"a": "{}", "b": "[]", "c": "()", "d": "OrderedDict()"}


def test_objects_are_listed_by_what_makes_them() -> None:
    found = values_of({"queue": collections.deque([1, 2], maxlen=5)})
    assert found["queue"] == "collections.deque(…)"
    assert {"1", "2", "5"} <= set(found.values())


def test_tensors_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2)), "step": 1}, path)
    with CheckpointSource(str(path)) as source:
        assert dict(iter_values(source.scan().root)) == {"step": "1"}


def test_cycles_and_shared_containers_end() -> None:
    shared: list[Any] = [1]
    for _ in range(100):
        shared = [shared, shared]
    cycle: list[Any] = []
    cycle.append(cycle)
    assert len(values_of([shared, cycle])) == 1


def test_deep_nesting_needs_no_recursion() -> None:
    depth = 100_000
    data = b"\x80\x02" + b"(" * depth + b"K\x07" + b"t" * depth + b"."
    ((name, text),) = iter_values(scan_pickle(data).root)
    assert text == "7"
    assert len(name) <= 1024


def test_long_texts_are_cut() -> None:
    found = values_of({"text": "x" * 5000, "number": 1 << 5000})
    assert len(found["text"]) < 1100
    assert found["text"].endswith("(5000 long)")
    assert found["number"] == "an integer of 5001 bits"

"""Matches tensors of a checkpoint with weights of a model, by transformers' own rules; from names and shapes alone.

transformers renames tensors while it loads them, and stacks or concatenates some (the experts of a layer become one
tensor). A weight that stays in its file cannot be computed, so this checks whether the result has exactly the bytes of
the sources, end to end. `loading` builds the model; `fastpersist.stream` reads the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from fastpersist import ConfigError, TensorEntry, UnsupportedError

__all__ = ["WeightNames", "weight_names"]

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightNames:
    """The mapping between the tensors of a checkpoint and those of a model.

    Attributes:
        names: Names in the model → names in the checkpoint whose bytes, end to end, are that tensor.
        unused: Names in the checkpoint that the model has no place for.
    """

    names: dict[str, tuple[str, ...]]
    unused: tuple[str, ...]


@dataclass
class _Conversion:
    """A tensor of the model that a converter makes, with the sources it has, by pattern of the converter."""

    converter: WeightConverter
    sources: dict[str, list[str]] = field(default_factory=dict)


def weight_names(model: PreTrainedModel, found: Mapping[str, TensorEntry | None]) -> WeightNames:
    """Return for each tensor of a model the tensors of a checkpoint that make it.

    Args:
        model: A model of the class and configuration of the checkpoint, on any device; its weights are not tied: a tied
            weight is looked for under all of its names.
        found: The tensors of the checkpoint by name; None where nothing but the name is known.

    Raises:
        ConfigError: Tensors that are put together do not have the shape of the weight.
        UnsupportedError: transformers computes a weight from what the checkpoint has; the message names it.

    Thread safety: any thread.

    Source: transformers, core_model_loading.convert_and_load_state_dict_in_model.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    expected = model.state_dict()
    prefix = model.base_model_prefix

    names: dict[str, tuple[str, ...]] = {}
    conversions: dict[str, _Conversion] = {}
    unused = []
    for name in sorted(found, key=dot_natural_key):  # the order in which converters get their sources
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, expected)
        if target not in expected:
            unused.append(name)
        elif pattern is None:
            names.setdefault(target, (name,))
        else:
            conversion = conversions.setdefault(target, _Conversion(converter_of[pattern]))
            conversion.sources.setdefault(pattern, []).append(name)
    for target, conversion in conversions.items():
        names[target] = _end_to_end(target, conversion, found, tuple(expected[target].shape))
    return WeightNames(names, tuple(unused))


def _end_to_end(
    target: str, conversion: _Conversion, found: Mapping[str, TensorEntry | None], shape: _Shape
) -> tuple[str, ...]:
    """Return the tensors whose bytes, end to end, equal the result of a converter.

    An example: `MergeModulelist(dim=0), Concatenate(dim=1)` stacks the gates of all experts, each [I, H], and their
    ups, and concatenates the two of each expert: [E, 2 I, H], which is gate 0, up 0, gate 1, up 1, … .
    """
    operations: Sequence[Any] = conversion.converter.operations
    kinds = [type(each) for each in operations]
    dims = [getattr(each, "dim", None) for each in operations]
    groups = [conversion.sources[each] for each in conversion.converter.source_patterns if each in conversion.sources]
    shapes = [_shape_of(found[name]) for group in groups for name in group]
    if len(conversion.converter.target_patterns) > 1:
        raise _not_end_to_end(target, conversion)
    if kinds == [Transpose] and operations[0].check_dims and shapes in ([shape], [None]):
        return tuple(groups[0])  # it transposes only tensors that do not have the shape yet

    if kinds == [Concatenate] and dims == [0]:
        ordered = [name for group in groups for name in group]
        made = _concatenated(shapes)
    elif kinds == [MergeModulelist] and dims == [0] and len(groups) == 1:
        ordered = groups[0]
        made = _stacked(shapes)
    elif kinds == [MergeModulelist, Concatenate] and dims == [0, 1]:
        if len({len(group) for group in groups}) > 1:
            counts = ", ".join(f"{len(names)} of {pattern}" for pattern, names in conversion.sources.items())
            raise ConfigError(f"{target} is put together from as many tensors of each kind, and there are {counts}")
        together = list(zip(*groups, strict=True))
        ordered = [name for names in together for name in names]
        made = _stacked([_concatenated([_shape_of(found[name]) for name in names]) for names in together])
    else:
        raise _not_end_to_end(target, conversion)
    if made != shape and None not in shapes:  # the stream sees the number of elements only
        raise ConfigError(
            f"{target} has shape {list(shape)}, and {', '.join(ordered[:3])}, … do not make it: they have shapes "
            f"{sorted(set(shapes), key=str)}"
        )
    return tuple(ordered)


def _shape_of(entry: TensorEntry | None) -> _Shape | None:
    return None if entry is None else tuple(entry.shape)


def _stacked(shapes: Sequence[_Shape | None]) -> _Shape | None:
    """Return the shape of tensors stacked in a new first dimension; None if it is not known or there is none."""
    first = shapes[0]
    return None if first is None or set(shapes) != {first} else (len(shapes), *first)


def _concatenated(shapes: Sequence[_Shape | None]) -> _Shape | None:
    """Return the shape of tensors concatenated in their first dimension; None if it is not known or there is none."""
    known = [shape for shape in shapes if shape]
    if len(known) < len(shapes) or len({shape[1:] for shape in known}) > 1:
        return None
    return (sum(shape[0] for shape in known), *known[0][1:])


def _not_end_to_end(target: str, conversion: _Conversion) -> UnsupportedError:
    operations: Sequence[Any] = conversion.converter.operations
    sources = [name for names in conversion.sources.values() for name in names]
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return UnsupportedError(
        f"transformers makes {target} from {sources[0]}{more} by {', '.join(map(str, operations))}, and a weight that "
        "stays in its file can have no bytes but those that are there in this order. Convert the checkpoint once, on a "
        "machine that can hold it: from_pretrained(...).save_pretrained(another_directory, save_original_format=False)"
    )

"""What a model refuses while its weights are streamed: other values, a move, a copy. Its state_dict lists names only.

`binding` has what a single weight refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from fastpersist.errors import ConfigError
from fastpersist.streaming.binding import list_only
from fastpersist.streaming.units import Weight
from fastpersist.transfer.torch_boundary import untraced

__all__ = ["put_guards", "take_guards_away"]


def put_guards(
    model: torch.nn.Module, weights: Sequence[Weight], source_path: str
) -> list[torch.utils.hooks.RemovableHandle]:
    """Put guards on all modules of a model; return the handles of those that are hooks.

    Args:
        model: The root.
        weights: Its weights that stay in the source.
        source_path: Where they are, for messages.
    """
    streamed = {(id(module), local) for weight in weights for module, local in weight.places}

    @untraced
    def list_weights(module: torch.nn.Module, state: dict[str, Any], *arguments: object) -> None:
        list_only(state)

    @untraced
    def refuse_load(module: torch.nn.Module, state: dict[str, Any], prefix: str, *arguments: object) -> None:
        for inside, each in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
            for local in (*each._parameters, *each._buffers):
                name = f"{inside}.{local}" if inside else local
                if (id(each), local) in streamed and name in state:
                    raise ConfigError(
                        f"load_state_dict() would change {name}, whose values stay in {source_path} "
                        "(fastpersist.stream): close the stream first, and pass assign=True; or leave it out"
                    )

    def refuse_move(*arguments: object, **options: object) -> NoReturn:
        raise ConfigError(
            "a model whose weights are streamed cannot be moved or converted: close the stream, and pass device= "
            "or dtype= to a new one"
        )

    def refuse_copy(*arguments: object) -> NoReturn:
        raise ConfigError(
            "a model whose weights are streamed cannot be copied or pickled: its weights are in "
            f"{source_path}; build and stream another one"
        )

    handles = []
    for module in model.modules():
        handles.append(module.register_load_state_dict_pre_hook(refuse_load))
        if any((id(module), local) in streamed for local in (*module._parameters, *module._buffers)):
            handles.append(module.register_state_dict_post_hook(list_weights))
        module.__dict__.update(_apply=refuse_move, __deepcopy__=refuse_copy, __reduce_ex__=refuse_copy)
    return handles


def take_guards_away(model: torch.nn.Module) -> None:
    """Take those guards away that are no hooks."""
    for module in model.modules():
        for name in ("_apply", "__deepcopy__", "__reduce_ex__"):
            module.__dict__.pop(name, None)

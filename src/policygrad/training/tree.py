"""Nested state as tensors plus strict JSON, and back exactly: how optimiser state is stored without pickle.

Strict JSON lacks tuples, keys that are not strings, NaN, infinities and huge integers. Each is written as a dict with one
tag, `{"$tuple": [...]}`; a key of the user's that begins with "$" gets one more. Subclasses come back as the plain type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


def tree_to_tensors(tree: Any, prefix: str = "tree") -> tuple[dict[str, Tensor], Any]:
    """Split nested state, such as `optimizer.state_dict()`, into named tensors and a JSON value.

    Takes dicts with any plain keys, lists, tuples, strings, numbers, booleans, None and tensors. Names read like the
    path, `prefix.state.0.exp_avg`; tied tensors share one name. Nothing is copied. Raises TypeError naming the path.
    """
    named = Named()
    return named.tensors, encode(tree, prefix, named)


def tensors_to_tree(tensors: Mapping[str, Tensor], encoded: Any) -> Any:
    """The inverse of `tree_to_tensors`: equal types, bits and ties. `tensors` may hold more than the tree needs."""
    return decode(encoded, tensors)


def same_memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tied tensors: one storage, seen the same way. Empty tensors have no address, so they are told by id."""
    if not tensor.numel() or tensor.is_meta:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())


@dataclass(frozen=True)
class Named:
    """Tensors met so far by name, and the name of each memory."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def name(self, tensor: Tensor, where: str) -> str:
        while where in self.tensors:  # the keys 0 and "0" read the same in a path
            where += "'"
        name = self.names.setdefault(same_memory(tensor), where)
        self.tensors.setdefault(name, tensor.detach())
        return name


def encode(value: Any, where: str, named: Named | None = None) -> Any:
    """`value` as strict JSON; tensors go to `named`, and are refused where that is None. `where` is the path so far."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):  # Python refuses to read or write more than 4300 decimal digits
        return int(value) if value.bit_length() < 4096 else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor) and named is not None:
        return {"$tensor": named.name(value, where)}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}.{i}", named) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [(key, encode(item, f"{where}.{key}", named)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs):
            return {f"${key}" if key.startswith("$") else key: item for key, item in pairs}
        return {"$items": [[encode(key, f"a key of {where}"), item] for key, item in pairs]}
    plain = "store plain numbers, strings, booleans, None, lists, tuples and dicts instead"
    way_out = "put it among the tensors (tree_to_tensors splits a mixed tree)" if isinstance(value, Tensor) else plain
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold: {way_out}")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`. Raises KeyError for a tensor that is not among `tensors`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str
    content: Any
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    match tag:
        case "$int":
            return int(content, 16)
        case "$float":
            return float(content)
        case "$tensor":
            return tensors[content]
        case "$tuple":
            return tuple(decode(item, tensors) for item in content)
        case "$items":
            return {decode(key, tensors): decode(item, tensors) for key, item in content}
    return {key.removeprefix("$"): decode(item, tensors) for key, item in value.items()}

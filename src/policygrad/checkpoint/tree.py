"""Nested plain values as strict JSON, and back exactly: what a checkpoint's state may hold beside tensors.

Strict JSON lacks tuples, keys that are not strings, NaN, infinities and huge integers. Each is written as a dict with one
tag, `{"$tuple": [...]}`; a key of the user's that begins with "$" gets one more. Subclasses come back as the plain type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def same_memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tied tensors: one storage, seen the same way. Empty tensors have no address, so they are told by id."""
    if not tensor.numel() or tensor.is_meta:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())


def encode(value: Any, where: str) -> Any:
    """`value` as strict JSON; `where` is the path so far. Raises TypeError naming the path of what JSON cannot hold."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):  # Python refuses to read or write more than 4300 decimal digits
        return int(value) if value.bit_length() < 4096 else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}.{i}") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [(key, encode(item, f"{where}.{key}")) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs):
            return {f"${key}" if key.startswith("$") else key: item for key, item in pairs}
        return {"$items": [[encode(key, f"a key of {where}"), item] for key, item in pairs]}
    plain = "store plain numbers, strings, booleans, None, lists, tuples and dicts instead"
    way_out = "put it among the tensors" if isinstance(value, Tensor) else plain
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold: {way_out}")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
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
        case "$tuple":
            return tuple(decode(item) for item in content)
        case "$items":
            return {decode(key): decode(item) for key, item in content}
    return {key.removeprefix("$"): decode(item) for key, item in value.items()}

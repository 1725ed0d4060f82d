"""Responses that later requests continue by `previous_response_id`, or refer to by `item_reference`, as far as there is room."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.proxy.reading import quote
from policygrad.proxy.requests import ApiError
from policygrad.proxy.responses import UNKNOWN_ITEM, list_items

MAX_OF_KEY = 8 * 2**20
"""Bytes that are kept for one key; what is oldest goes first."""
MAX_IN_ALL = 256 * 2**20
"""Bytes that are kept for all keys."""
Item = dict[str, Any]


class StoredResponses:
    """The input and output of each key's last responses, without reasoning, which no policy reads."""

    def __init__(self, max_of_key: int = MAX_OF_KEY, max_in_all: int = MAX_IN_ALL) -> None:
        self.max_of_key, self.max_in_all = max_of_key, max_in_all
        self._items: dict[tuple[str, str], tuple[list[Item], int]] = {}  # by key and id, the oldest first
        self._named: dict[tuple[str, str], Item] = {}  # items of outputs, by key and their own id
        self.sizes = Counter[str]()
        """Bytes of each key."""

    def add(self, key: str, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Keep a response, unless its request says otherwise."""
        if body.get("store") is False:
            return
        items = [i for i in (*list_items(body.get("input")), *response["output"]) if i.get("type") != "reasoning"]
        size = len(json.dumps(items))
        if size > self.max_of_key:
            return
        self._items[key, response["id"]] = items, size
        self._named |= {(key, item["id"]): item for item in response["output"]}
        self.sizes[key] += size
        while self.sizes[key] > self.max_of_key:
            self._drop(next(name for name in self._items if name[0] == key))
        while self.sizes.total() > self.max_in_all:
            self._drop(next(iter(self._items)))

    def complete(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request with the items that it continues or refers to.

        Raises:
            ApiError: They are not kept.
        """
        given, earlier = body.get("input"), body.get("previous_response_id")
        before: Sequence[Item] = ()
        if earlier is not None:
            stored = self._items.get((key, str(earlier)))
            if stored is None:
                raise ApiError(f"previous_response_id {quote(earlier)}: {UNKNOWN_ITEM}", 404)
            before = stored[0]
        elif isinstance(given, str) or given is None:
            return dict(body)
        items = list_items(given)
        named = [self._named.get((key, str(i.get("id"))), i) if _is_reference(i) else i for i in items]
        return {**body, "input": [*before, *named]}

    def forget(self, key: str) -> None:
        """Drop all that is kept for a key."""
        for name in [name for name in self._items if name[0] == key]:
            self._drop(name)

    def _drop(self, name: tuple[str, str]) -> None:
        items, size = self._items.pop(name)
        for item in items:
            self._named.pop((name[0], str(item.get("id"))), None)
        self.sizes[name[0]] -= size
        if not self.sizes[name[0]]:
            del self.sizes[name[0]]


def _is_reference(item: Item) -> bool:
    """Return whether an item is the name of another; clients leave out the type of that one."""
    return item.get("type") == "item_reference" or (set(item) <= {"id", "type"} and item.get("type") is None)

"""Words between the processes that learn together, from whatever thread: nobody waits for anybody. It is a store beside the groups
of torch.distributed, where all wait for all; rank 0 holds it, and whoever finds it gone knows that rank 0 is."""

from __future__ import annotations

import os
import zlib
from base64 import b64decode, b64encode
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from policygrad.learners.fsdp.torchrun import launched

FOREVER = timedelta(days=30)
"""A rank 0 that is suspended (Ctrl-Z) is waited for."""


class Line:
    """A store, by keys."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def between(cls, rank: int, size: int, group: dist.ProcessGroup, host: str) -> Line:
        """Rank 0's, which tells the others of the group where it is. host: its machine, unless torchrun says it."""
        host = os.environ["MASTER_ADDR"] if launched() is not None else host
        own = TCPStore(host, 0, size, True, FOREVER, wait_for_workers=False) if rank == 0 else None
        box = [0 if own is None else own.port]
        dist.broadcast_object_list(box, src=0, group=group)
        return cls(TCPStore(host, box[0], size, False, FOREVER, wait_for_workers=False) if own is None else own)

    def post(self, key: str, words: str) -> None:
        """For whoever looks; in the place of what was there. Raises RuntimeError where rank 0 has gone."""
        self._store.set(key, b64encode(zlib.compress(words.encode(), 1)).decode())  # the store takes no more than 8 MiB

    def posted(self, *keys: str) -> bool:
        """Whether there is something under all of them."""
        return self._store.check(list(keys))

    def read(self, key: str) -> str | None:
        """What is there."""
        return self._got(key) if self._store.check([key]) else None

    def taken(self, key: str) -> str:
        """What is there, and then no longer is."""
        found = self._got(key)
        self._store.delete_key(key)
        return found

    def _got(self, key: str) -> str:
        return zlib.decompress(b64decode(self._store.get(key))).decode()

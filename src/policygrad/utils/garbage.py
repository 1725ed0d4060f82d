"""Pauses the garbage collector while a program starts.

Importing torch and transformers makes some hundred thousand objects that all stay, and the collector looks at them again and again:
a fifth of the time that the imports take.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause it inside the context. Objects in reference cycles that became garbage are freed after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

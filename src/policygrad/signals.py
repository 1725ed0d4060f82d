"""The signals that ask a process to end."""

from __future__ import annotations

import signal

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, a scheduler's word, a terminal that has gone; as many of them as the system has."""
AGAIN = 0.5
"""Seconds in which signals are one: `timeout`, shells, terminals and torchrun send theirs to a process and to its group."""

"""The name of before, until training/ has changed to `Tracker`."""

from policygrad.trackers.display import Silent
from policygrad.trackers.terminal.live import TerminalTracker


class RichDisplay(Silent, TerminalTracker):
    """A live display, with the calls of before."""

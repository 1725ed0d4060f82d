"""A program run behind a wall, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from policygrad.sandbox.limits import Limits
from policygrad.sandbox.session import Confined, follow
from policygrad.sandbox.walls import Wall, standing


@dataclass(frozen=True)
class Outcome:
    """How a program ended and what it printed. All of it is the parent's to see: nothing here is the program's own account."""

    ended: str  # "by itself", or the limit that ended it: "time", "output", "files"
    code: int  # its exit code, -n or 128 + n for signal n
    stdout: str
    stderr: str
    seconds: float  # since its wall stood

    @property
    def succeeded(self) -> bool:
        """It ended by itself with exit code 0; what it was to print is another question."""
        return self.ended == "by itself" and self.code == 0

    @property
    def said(self) -> str:
        """In a few words."""
        if self.ended != "by itself":
            return f"more {self.ended} than it may take"
        last = self.stderr.strip().rpartition("\n")[2]
        return "exit code 0" if self.code == 0 else f"exit code {self.code}" + (f": {last}" if last else "")


def run(
    source: str, stdin: str = "", limits: Limits | None = None, wall: Wall | str = "auto", *, show: bool = False
) -> Outcome:
    """Run Python source as a script behind a wall, with this on its standard input.

    It is one process, without network, files of this machine, environment variables or another process; it writes to an empty
    folder that goes with it. show: print what its last expression is worth. Raises ConfigError where no wall stands, WallError
    where one falls.
    """
    limits = limits or Limits()
    chosen = standing(wall) if isinstance(wall, str) else wall
    listens = {"stdout": limits.output, "stderr": limits.output}
    with Confined(chosen, limits, {"role": "program", "source": source, "show": show}, listens, stdin=stdin) as process:
        broken = follow([process], limits.seconds)
        seconds = time.monotonic() - process.begun
        texts = {name: process.pipes[name].text() for name in listens}
        return Outcome(broken or "by itself", process.end(), texts["stdout"], texts["stderr"], seconds)

"""Python as a tool for a policy: code in, text out, behind a wall."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from policygrad.sandbox.backends import Limits
from policygrad.sandbox.process import run_program

_BLOCK = re.compile(r"^(Traceback \(most recent call last\):\n)((?:[ ]{2}.*\n?)*)", re.MULTILINE)
"""A traceback's first line and its frames, which are indented; the exception follows."""


@dataclass(frozen=True)
class PythonTool:
    """`tool("2 ** 10")` is "1024\\n": what the code prints, the value of an expression at its end, and how it failed.

    Every call is a new process, and blocks until it has ended, `limits.seconds` at most. Raises ConfigError where no wall stands
    (docs/sandbox.md).
    """

    name: ClassVar[str] = "python"
    """Of the tool, for the policy (policygrad.ToolUse)."""
    limits: Limits = Limits()
    sandbox: str = "auto"
    max_output_chars: int = 4000
    """Characters of an answer; what is longer loses its middle."""

    def __call__(self, code: str) -> str:
        """Runs a Python program and returns what it prints, and the value of an expression at its end.

        Args:
            code: The program. Nothing is left of the one before.
        """
        outcome = run_program(code, limits=self.limits, backend=self.sandbox, show=True)
        text = outcome.stdout
        if not outcome.succeeded:
            failed = _trace(outcome.stderr) or outcome.summary
            text += ("\n" if text and not text.endswith("\n") else "") + failed
            if outcome.stop_reason != "by itself":
                text += ("\n" if not text.endswith("\n") else "") + outcome.summary
        return truncate_middle(text, self.max_output_chars)


def _trace(stderr: str) -> str:
    """Tracebacks without the frames above the program, which are the sandbox's: each is a line, its source and its carets."""
    return _BLOCK.sub(lambda block: block[1] + _programs(block[2]), stderr.rstrip())


def _programs(frames: str) -> str:
    """From the program's first frame on, where the sandbox's stand above it; none where it did not come to run."""
    if "sandbox/process.py" not in frames:
        return frames
    first = frames.find('  File "program.py"')
    return frames[first:] if first >= 0 else ""


def truncate_middle(text: str, longest: int) -> str:
    """The text; without its middle where it is longer."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[len(text) - half :]}"

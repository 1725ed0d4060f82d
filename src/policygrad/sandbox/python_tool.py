"""Python as a tool for a policy: code in, text out, in a sandbox."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from policygrad.sandbox.backends import Limits
from policygrad.sandbox.process import run_program

# A traceback's frames before the program's first one; all of them where it did not start.
_SANDBOX_FRAMES = re.compile(
    r"(?<=^Traceback \(most recent call last\):\n)(?=(?:[ ]{2}.*\n)*[ ]{2}.*sandbox/process\.py)"
    r'(?:[ ]{2}(?!File "program\.py").*\n?)+',
    re.MULTILINE,
)


@dataclass(frozen=True)
class PythonTool:
    """`tool("2 ** 10")` is "1024\\n": what the code prints, the value of an expression at its end, and how it failed.

    Every call is a new process and blocks until it has ended, for `limits.timeout` seconds at most. Raises ConfigError where no
    sandbox works (docs/isolation.md).
    """

    name: ClassVar[str] = "python"  # name of the tool for the policy (policygrad.ToolUse)
    limits: Limits = Limits()
    sandbox: str = "auto"  # bubblewrap, landlock, or the first of them that works
    max_output_chars: int = 4000  # A longer output loses its middle

    def __call__(self, code: str) -> str:
        """Runs a Python program and returns what it prints, and the value of an expression at its end.

        Args:
            code: The program. Nothing is left of the one before.
        """
        result = run_program(code, limits=self.limits, backend=self.sandbox, show=True)
        text = result.stdout
        if not result.succeeded:
            failure = _SANDBOX_FRAMES.sub("", result.stderr.rstrip())
            text += ("\n" if text and not text.endswith("\n") else "") + (failure or result.summary)
            if result.stop_reason != "by itself":
                text += ("\n" if not text.endswith("\n") else "") + result.summary
        return truncate_middle(text, self.max_output_chars)


def truncate_middle(text: str, max_chars: int) -> str:
    """Replace the middle of a text that is too long by the number of removed characters."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[len(text) - half :]}"

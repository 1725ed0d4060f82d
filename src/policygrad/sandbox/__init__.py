"""Programs that nobody has read, behind a wall: bubblewrap, or Landlock and seccomp."""

from policygrad.sandbox.backends import WALLS, Limits, standing
from policygrad.sandbox.process import Outcome, WallError, run
from policygrad.sandbox.program_tests import Dialogue, Examination, Verdict, converse, examine
from policygrad.sandbox.python_tool import PythonTool

__all__ = [
    "WALLS",
    "Dialogue",
    "Examination",
    "Limits",
    "Outcome",
    "PythonTool",
    "Verdict",
    "WallError",
    "converse",
    "examine",
    "run",
    "standing",
]

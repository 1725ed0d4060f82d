"""Programs that nobody has read, behind a wall: bubblewrap, or Landlock and seccomp."""

from policygrad.sandbox.examination import Dialogue, Examination, Verdict, converse, examine
from policygrad.sandbox.limits import Limits
from policygrad.sandbox.program import Outcome, run
from policygrad.sandbox.session import WallError
from policygrad.sandbox.tool import PythonTool
from policygrad.sandbox.walls import WALLS, standing

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

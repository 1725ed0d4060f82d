"""Runs programs that a model wrote in a sandbox: bubblewrap, or Landlock and seccomp."""

from policygrad.sandbox.backends import BACKENDS, Limits, find_backend
from policygrad.sandbox.process import ProgramResult, SandboxError, run_program
from policygrad.sandbox.program_tests import (
    FunctionTests,
    ProgramVerdict,
    StdioTests,
    run_function_tests,
    run_stdio_tests,
)
from policygrad.sandbox.python_tool import PythonTool

__all__ = [
    "BACKENDS",
    "FunctionTests",
    "Limits",
    "ProgramResult",
    "ProgramVerdict",
    "PythonTool",
    "SandboxError",
    "StdioTests",
    "find_backend",
    "run_function_tests",
    "run_program",
    "run_stdio_tests",
]

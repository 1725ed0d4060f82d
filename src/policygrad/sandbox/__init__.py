"""Runs programs that a model wrote in a sandbox: bubblewrap, or Landlock and seccomp."""

from policygrad.sandbox.backends import BACKENDS, Limits, find_backend
from policygrad.sandbox.process import SandboxError, run_program
from policygrad.sandbox.program_tests import FunctionTests, StdioTests, run_function_tests, run_stdio_tests
from policygrad.sandbox.python_tool import PythonTool

__all__ = [
    "BACKENDS",
    "FunctionTests",
    "Limits",
    "PythonTool",
    "SandboxError",
    "StdioTests",
    "find_backend",
    "run_function_tests",
    "run_program",
    "run_stdio_tests",
]

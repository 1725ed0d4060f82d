"""Runs programs that a model wrote in a sandbox: bubblewrap, or Landlock and seccomp."""

from policygrad.utils.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "policygrad.sandbox.backends": "BACKENDS Limits find_backend",
        "policygrad.sandbox.process": "SandboxError run_program",
        "policygrad.sandbox.program_tests": "FunctionTests StdioTests run_function_tests run_stdio_tests",
        "policygrad.sandbox.python_tool": "PythonTool",
    },
)

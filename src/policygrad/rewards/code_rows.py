"""The tests of a task's row, in the forms that data sets have them, and the program in a completion."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from policygrad.errors import DataError
from policygrad.sandbox import Dialogue, Examination

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3", "")
FORMS = "`test` and `entry_point` (HumanEval), `test_list` (MBPP), `tests`, `inputs` and `outputs`, or `input_output` (APPS)"


def program_in(completion: str) -> str:
    """The last fenced block of Python, or else what stands in the last `<answer>…</answer>`, or else all of it."""
    blocks = [code for language, code in _FENCE.findall(completion) if language.lower() in _PYTHON]
    if blocks:
        return str(blocks[-1])
    _, opened, rest = completion.rpartition("<answer>")
    return rest.partition("</answer>")[0] if opened and "</answer>" in rest else completion


def exam_of(prompt: Any, row: Mapping[str, Any]) -> Examination | Dialogue | None:
    """What a row asks of a program; None = its tests are null or there are none.

    Raises DataError for columns of no known form.
    """
    if row.get("entry_point") is not None and isinstance(row.get("test"), str):
        entry = str(row["entry_point"])
        return Examination((f"{row['test']}\n\ncheck({entry})",), setup=code_in(prompt), entry=entry)
    if row.get("test_list") is not None:
        setup = "\n".join((*_texts(row.get("test_imports") or (), "test_imports"), row.get("test_setup_code") or ""))
        return _statements(row["test_list"], setup)
    if row.get("tests") is not None:
        return _either(row["tests"])
    if row.get("input_output") is not None:
        return _apps(row["input_output"])
    if row.get("inputs") is not None and row.get("outputs") is not None:
        return _pairs(row["inputs"], row["outputs"])
    known = ("test", "test_list", "tests", "input_output", "inputs")
    if not any(name in row for name in known):
        raise DataError(
            f"reward 'code' needs tests in the task's rows: {FORMS}; they have {', '.join(row) or 'nothing'}"
        )
    return None


def whole_program(prompt: Any, completion: str, tests: Examination | Dialogue) -> str:
    """The completion's program; where it is only the body of the function that the prompt begins, both together."""
    program = program_in(completion)
    if isinstance(tests, Examination) and tests.entry and f"def {tests.entry}" not in program:
        return code_in(prompt) + program
    return program


def code_in(prompt: Any) -> str:
    """A prompt as Python, if it is: a text, or the last message, or a block in it; else ""."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    if not isinstance(prompt, str):
        return ""
    for text in (prompt, *(code for _, code in reversed(_FENCE.findall(prompt)))):
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return str(text)
    return ""


def _either(tests: Any) -> Examination | Dialogue | None:
    """A column `tests`: statements, or pairs of input and output."""
    if isinstance(tests, str):
        return _statements([tests])
    if isinstance(tests, (list, tuple)) and tests and all(isinstance(test, Mapping) for test in tests):
        missing = next((key for test in tests for key in ("input", "output") if key not in test), None)
        if missing:
            raise DataError(f"reward 'code': a test without {missing!r}; each is {{'input': …, 'output': …}}")
        return _pairs([test["input"] for test in tests], [test["output"] for test in tests])
    return _statements(tests)


def _apps(value: Any) -> Dialogue | None:
    """A column `input_output`: a mapping, or its JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"reward 'code': a row's input_output is no JSON: {error}") from None
    if not isinstance(found, Mapping) or "inputs" not in found or "outputs" not in found:
        raise DataError("reward 'code': a row's input_output has no 'inputs' and 'outputs'")
    if found.get("fn_name"):
        raise DataError(
            "reward 'code': input_output with fn_name is not known; write its tests as assert statements, `tests`"
        )
    return _pairs(found["inputs"], found["outputs"])


def _statements(tests: Any, setup: str = "") -> Examination | None:
    texts = _texts(tests, "tests")
    return Examination(texts, setup=setup) if texts else None


def _pairs(inputs: Any, outputs: Any) -> Dialogue | None:
    given, wanted = _texts(inputs, "inputs"), _texts(outputs, "outputs")
    if len(given) != len(wanted):
        raise DataError(f"reward 'code': a row has {len(given)} inputs and {len(wanted)} outputs; give one for each")
    return Dialogue(tuple(zip(given, wanted, strict=True))) if given else None


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise DataError(f"reward 'code': {what} of a row are a list of texts, not {type(values).__name__}")
    return tuple(values)

"""The reward `code`: a completion's program, scored by its row's tests in a sandbox (policygrad.sandbox)."""

import ast
import base64
import binascii
import builtins
import functools
import importlib
import json
import pickletools
import re
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ConfigError, DataError
from policygrad.rewards.base import parse_reward_options
from policygrad.rewards.workers.limits import parse_size
from policygrad.sandbox.backends import Limits, find_backend
from policygrad.sandbox.program_tests import FunctionTests, StdioTests, run_function_tests, run_stdio_tests
from policygrad.utils.message_parts import content_text

_START_ALLOWANCE = 120.0  # seconds that a call may take beyond its program's: three interpreters have to start
_MAX_PROGRAM = 200_000  # characters


@dataclass(frozen=True)
class Code:
    """Score 1.0 if the completion's program passes all tests of its row, else 0.0; None where the row has none.

    Tests are `test` and `entry_point` (HumanEval), `test_list` (MBPP), `tests` (statements, or pairs of `input` and `output`),
    `inputs` and `outputs`, `input_output` (APPS), or `public_test_cases` and `private_test_cases` (LiveCodeBench). The program is
    the completion's last fenced block.
    """

    timeout: float = 8.0
    """Seconds for all tests of one program together."""
    memory: str = "1GiB"
    """Address space of the program's process."""
    share: bool = False
    """Score the share of the tests that it passes, instead of all or nothing."""
    sandbox: str = "auto"
    """bubblewrap, landlock, or the first of them that works."""
    feedback: bool = False
    """Also return the first failure as feedback, for a reference that reads it (`sdpo`): it shows the test."""

    def __post_init__(self) -> None:
        self._limits()

    @property
    def reward_options(self) -> dict[str, Any]:
        return {"timeout": self.timeout + _START_ALLOWANCE}

    def check_machine(self) -> None:
        """Raise ConfigError where no sandbox works."""
        find_backend(self.sandbox)

    reward_prepare = check_machine

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[Any]:
        rows = ({name: values[i] for name, values in columns.items()} for i in range(len(completions)))
        results = [self.judge(prompt, text, row) for prompt, text, row in zip(prompts, completions, rows, strict=True)]
        return [{"score": x, "feedback": text} if self.feedback and text else x for x, text in results]

    def score(self, prompt: Any, completion: str, row: dict[str, Any]) -> float | None:
        """Score one completion. Raises as `judge`."""
        return self.judge(prompt, completion, row)[0]

    def judge(self, prompt: Any, completion: str, row: dict[str, Any]) -> tuple[float | None, str]:
        """Return a completion's score, and its first failure, "" for none.

        Raises:
            DataError: Tests of unknown form, or that no program can pass; the message has the row's name.
        """
        try:
            tests = build_tests(prompt, row)
            if tests is None:
                return None, ""
            program = complete_program(prompt, completion, tests)
            if not program.strip() or len(program) > _MAX_PROGRAM:
                return 0.0, "it contains no program" if not program.strip() else "the program is too long"
            run: Any = run_stdio_tests if isinstance(tests, StdioTests) else run_function_tests
            verdict = run(program, tests, self._limits(), self.sandbox, to_end=self.share)
            if verdict.unfit:
                raise DataError(f"no program can pass its tests: {verdict.unfit}")
        except DataError as error:
            ids = [f"row {column}={row[column]!r}" for column in _ID_COLUMNS if row.get(column) is not None]
            name = ids[0] if ids else f"the row with the prompt {_get_prompt_text(prompt)[:60]!r}"
            raise DataError(f"{name}: {error}") from None
        passed: float = sum(verdict.points) / len(verdict.points)
        return (passed if self.share else float(passed == 1.0)), verdict.message

    @classmethod
    def from_options(cls, options: str) -> "Code":
        """Parse `timeout=20,memory=2GiB,share=yes`. Raises ConfigError."""
        return parse_reward_options(cls, "code", options)

    def _limits(self) -> Limits:
        memory = parse_size(self.memory, "reward 'code': memory")
        if memory is None:
            raise ConfigError("reward 'code': a program's memory has to be limited, such as memory=1GiB")
        return Limits(timeout=self.timeout, memory=memory)


code = Code()


# The program in a completion.

_FENCE = re.compile(r"(?P<before>.*?)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<label>[^\s`:}]*)[^`]*")
_PYTHON = ("python", "py", "python3", "python2", "pycon", "ipython")
_LIST_ITEM = re.compile(r"\s*(?:[-*+>]|\d+[.)])\s*$")


@dataclass(frozen=True)
class _Block:
    """A fenced block of a completion."""

    label: str
    code: str
    closed: bool
    before: str  # the completion up to it


def extract_program(completion: str) -> str:
    """Return a completion's program.

    It is the last fenced block of Python, or the last without a label that looks like a program; else the text of the last
    `<answer>…</answer>`, or else the full completion. A block in `<answer>` takes precedence.
    """
    completion = completion.replace("\r\n", "\n")
    _, opened, after = completion.rpartition("<answer>")
    answer = [after.partition("</answer>")[0]] if opened and "</answer>" in after else []
    for text in (*answer, completion):
        blocks = [block for block in _find_blocks(text) if block.closed or block.code.strip() or not block.label]
        if labelled := [block for block in blocks if block.label in _PYTHON]:
            return labelled[-1].code
        if bare := [block for block in reversed(blocks) if not block.label]:
            chosen = next((block for block in bare if _is_program(block.code)), bare[0])
            if not chosen.closed and not _is_program(chosen.code) and chosen.before.strip():
                return chosen.before  # the fence ends a block that the prompt began
            return chosen.code
    return (*answer, completion)[0]


def _find_blocks(text: str) -> list[_Block]:
    """Return the fenced blocks: closed by a fence (alone or at the end of a line), the next block or `</answer>`, or not closed."""
    blocks: list[_Block] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    start = offset = 0

    def close(closed: bool) -> None:
        nonlocal opened
        if opened is not None:
            before = opened["before"]
            if not before.strip():  # the fence's indentation is removed from its code
                code = "".join(line[min(len(before), len(line) - len(line.lstrip())) :] + "\n" for line in lines)
            else:
                code = "".join(f"{line}\n" for line in lines)
                code = textwrap.dedent(code) if _LIST_ITEM.match(before) else code
            blocks.append(_Block(opened["label"].lower(), code, closed, text[:start]))
        opened = None
        lines.clear()

    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        python = match is not None and match["label"].lower() in _PYTHON
        bare = line.strip()
        if opened is None:
            if match and (python or not match["before"].strip()):
                opened, start = match, offset
        elif set(bare) == {opened["fence"][0]} and len(bare) >= len(opened["fence"]):
            close(True)
        elif bare.endswith(opened["fence"]) and bare.count(opened["fence"]) == 1:
            lines.append(line.rstrip()[: -len(opened["fence"])])
            close(True)
        elif match and python:
            close(False)
            opened, start = match, offset
        elif "</answer>" in line:
            lines.append(line.partition("</answer>")[0])
            close(False)
        else:
            lines.append(line)
        offset += len(line) + 1
    close(False)
    return blocks


def _is_program(code: str) -> bool:
    """Return whether it is Python that does something: an output such as `3` or `[1, 2]` is Python too."""
    tree = _parse_python(textwrap.dedent(code))
    nodes = tree.body if tree else []
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in nodes)


def _parse_python(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _compiles(code: str) -> bool:
    """Return whether the compiler accepts it; unlike the parser, it requires a function around `return`."""
    try:
        compile(code, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def extract_prompt_code(prompt: Any) -> str:
    """Return the Python in a prompt: all of the text or last message, or a block in it; else ""."""
    text = _get_prompt_text(prompt)
    codes = (text, *(block.code for block in reversed(_find_blocks(text))))
    return next((code for code in codes if _parse_python(code) is not None), "")


def _get_prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = content_text(prompt[-1].get("content") or "")
    return prompt if isinstance(prompt, str) else ""


# What a program's tests provide for it.

_SHARED_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "time", "fractions", "decimal", "typing"),
)
"""Modules whose names a program may use without import where its tests come from LiveCodeBench or APPS, as their checkers import
them (lcb_runner/evaluation/testing_util.py, apps/eval/testing_util.py). A name that several have is the last one's."""


def complete_program(prompt: Any, completion: str, tests: FunctionTests | StdioTests) -> str:
    """Return the completion's program with what its tests provide.

    In HumanEval's form that is the prompt: its imports and helpers, and the beginning of the function where the completion is only
    its body. LiveCodeBench and APPS import modules, and call a method of the program's `Solution`.
    """
    program = extract_program(completion)
    entry = tests.entry if isinstance(tests, FunctionTests) else None
    if entry:
        tree = _parse_python(program)
        if tree is None and (dedented := _parse_python(textwrap.dedent(program))) and entry in _find_names(dedented):
            program, tree = textwrap.dedent(program), dedented
        if tree and "Solution" in _find_names(tree) and entry not in _find_names(tree):
            program += f"\n{entry} = Solution().{entry}\n"
        elif head := extract_prompt_code(prompt):
            # the program defines the prompt's function anew, or is its body
            if f"def {entry}" in program if tree is None else entry in _find_names(tree):
                program = _prepend(head, program)
            else:
                indented = head + textwrap.indent(textwrap.dedent(program), "    ")
                program = indented if not _compiles(head + program) and _compiles(indented) else head + program
    if not tests.imports or (tree := _parse_python(program)) is None:
        return program
    loaded = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    imports, defined = _map_shared_names(), _find_names(tree, deep=True)
    used = [name for name in dict.fromkeys(loaded) if name in imports and name not in defined]
    return _prepend("\n".join(imports[name] for name in used), program)


def _prepend(head: str, program: str) -> str:
    """Put code before a program, but after its imports from `__future__`."""
    future = [line for line in program.split("\n") if line.startswith("from __future__ ")]
    if not head or not future:
        return f"{head}\n{program}" if head else program
    body = "\n".join("" if line in future else line for line in program.split("\n"))
    return "\n".join((*future, head, body))


@functools.cache
def _map_shared_names() -> Mapping[str, str]:
    """Return the import statement of each name of the shared modules."""
    imports: dict[str, str] = {}
    for name in _SHARED_MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")])
        imports |= {each: f"from {name} import {each}" for each in public if not hasattr(builtins, each)}
    return imports | {name: f"import {name}" for name in _SHARED_MODULES}


def _find_names(tree: ast.Module, *, deep: bool = False) -> frozenset[str]:
    """Return the names that a module defines at its top level; deep: anywhere."""
    names: set[str] = set()
    for node in ast.walk(tree) if deep else _walk_top_level(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return frozenset(names)


def _walk_top_level(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Yield nodes outside of functions and classes, and these themselves."""
    for node in nodes:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _walk_top_level(ast.iter_child_nodes(node))


# The tests of a task's row, in the forms that data sets have them.

TEST_FORMATS = (
    "`test` and `entry_point` (HumanEval), `test_list` (MBPP), `tests`, `inputs` and `outputs`, `input_output` (APPS), or "
    "`public_test_cases` and `private_test_cases` (LiveCodeBench)"
)
_TEST_COLUMNS = ("test", "test_list", "tests", "input_output", "inputs", "public_test_cases")
_ID_COLUMNS = ("task_id", "question_id", "problem_id", "id", "name")
_MAX_UNPACKED = 256 << 20  # bytes of compressed tests
# Compares returned values as LiveCodeBench and APPS do: a tuple is a list; APPS puts most results in a list.
_COMPARE = """
import json as _json

def _plain(value):
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value

def _same(result, expected, nested):
    result = _plain(result)
    return result == expected or (nested and isinstance(expected, list) and len(expected) > 0 and result == expected[0])
"""


def build_tests(prompt: Any, row: Mapping[str, Any]) -> FunctionTests | StdioTests | None:
    """Build the tests of a row; None = they are null or empty.

    Raises:
        DataError: Columns of unknown form, or tests that no program can pass.
    """
    if row.get("entry_point") is not None and isinstance(row.get("test"), str):
        entry, test = str(row["entry_point"]), row["test"]
        if (tree := _parse_python(test)) is not None and "check" not in _find_names(tree):
            raise DataError("its `test` defines no check(candidate), which `entry_point` goes with")
        return FunctionTests((f"{test}\n\ncheck({entry})",), setup=extract_prompt_code(prompt), entry=entry)
    if row.get("test_list") is not None:
        imports = _check_texts(row.get("test_imports") or (), "test_imports")
        return _build_statements(row["test_list"], "\n".join((*imports, row.get("test_setup_code") or "")))
    if row.get("tests") is not None:
        return _build_mixed(row["tests"])
    if row.get("input_output") is not None:
        tests = row["input_output"]
        try:
            tests = json.loads(tests) if isinstance(tests, str) else tests
        except ValueError as error:
            raise DataError(f"reward 'code': a row's input_output is not JSON: {error}") from None
        if not isinstance(tests, Mapping) or "inputs" not in tests or "outputs" not in tests:
            raise DataError("reward 'code': a row's input_output has no 'inputs' and 'outputs'")
        if tests.get("fn_name"):
            return _build_calls(str(tests["fn_name"]), tests["inputs"], tests["outputs"])
        return _build_pairs(tests["inputs"], tests["outputs"], imports=True)
    if row.get("inputs") is not None and row.get("outputs") is not None:
        return _build_pairs(row["inputs"], row["outputs"])
    if row.get("public_test_cases") is not None or row.get("private_test_cases") is not None:
        return _build_livecodebench(row)
    if not any(name in row for name in _TEST_COLUMNS):
        raise DataError(
            f"reward 'code' needs tests in the task's rows: {TEST_FORMATS}; they have {', '.join(row) or 'nothing'}"
        )
    return None


def _build_mixed(tests: Any) -> FunctionTests | StdioTests | None:
    """From a column `tests`: statements, or pairs of input and output, or either as JSON."""
    if isinstance(tests, str):
        try:
            parsed = json.loads(tests)
        except ValueError:
            return _build_statements([tests])
        return _build_mixed(parsed)
    if isinstance(tests, (list, tuple)) and tests and all(isinstance(test, Mapping) for test in tests):
        missing = next((key for test in tests for key in ("input", "output") if key not in test), None)
        if missing:
            raise DataError(f"reward 'code': a test without {missing!r}; each is {{'input': …, 'output': …}}")
        return _build_pairs([test["input"] for test in tests], [test["output"] for test in tests])
    return _build_statements(tests)


def _build_livecodebench(row: Mapping[str, Any]) -> FunctionTests | StdioTests | None:
    """From columns `public_test_cases`, `private_test_cases` and `metadata`, whose `func_name` functional tests call."""
    cases: list[Mapping[str, Any]] = []
    for column in ("public_test_cases", "private_test_cases"):
        value = row.get(column)
        try:
            some = json.loads(_unpack_json(value)) if isinstance(value, str) else [] if value is None else value
        except ValueError as error:
            raise DataError(
                f"reward 'code': {column} of a row is neither JSON nor packed as LiveCodeBench does: {error}"
            ) from None
        if not isinstance(some, list) or not all(
            isinstance(c, Mapping) and {"input", "output"} <= c.keys() for c in some
        ):
            raise DataError(f"reward 'code': {column} of a row is a list of {{'input': …, 'output': …}}")
        cases += some
    inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
    if not any(case.get("testtype") == "functional" for case in cases):
        return _build_pairs(inputs, outputs, imports=True)
    metadata = row.get("metadata") or {}
    try:
        name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    except (ValueError, AttributeError):
        name = None
    if not name:
        raise DataError("reward 'code': a row's functional tests need `metadata` with 'func_name'")
    return _build_calls(str(name), inputs, outputs)


def _unpack_json(text: str) -> str:
    """Return JSON as it is, or from base64 of zlib of the pickle of a text.

    The pickle is read by its opcodes and not unpickled: whoever wrote the data could have put any code there. Raises ValueError.
    """
    if text.lstrip()[:1] in ("[", "{", ""):
        return text
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it unpacks to more than {_MAX_UNPACKED >> 20} MiB")
    opcodes = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    text_opcodes = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    texts = [value for name, value in opcodes if name in text_opcodes]
    harmless = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
    if len(texts) != 1 or not {name for name, _ in opcodes} - text_opcodes <= harmless:
        raise ValueError("its pickle is more than one text")
    return str(texts[0])


def _build_calls(name: str, inputs: Any, outputs: Any) -> FunctionTests | None:
    """From calls of a function: arguments as lists (APPS), or as lines of JSON (LiveCodeBench)."""
    if not name.isidentifier():
        raise DataError(f"reward 'code': a row's tests call {name!r}, which is not the name of a function")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError("reward 'code': a row's inputs and outputs are two lists, one output for each input")
    tests = []
    for given, expected in zip(inputs, outputs, strict=True):
        lines = isinstance(given, str) and isinstance(expected, str)
        try:
            if lines:
                arguments: Any = [json.loads(line) for line in given.split("\n") if line.strip()]
                result = json.loads(expected)
            else:
                arguments, result = _restore_keys(given), _restore_keys(expected)
        except ValueError as error:
            raise DataError(f"reward 'code': a row's test of {name} is not JSON: {error}") from None
        if not isinstance(arguments, list):
            raise DataError(f"reward 'code': a row's test of {name} has no list of arguments")
        call = f"{name}(*{_format_literal(arguments)})"
        tests.append(f"assert _same({call}, {_format_literal(result)}, {not lines})")
    return FunctionTests(tuple(tests), setup=_COMPARE, entry=name, imports=True) if tests else None


def _format_literal(value: Any) -> str:
    """Format data as Python that compiles quickly."""
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return repr(value)  # whose keys may be numbers
    return f"_json.loads({json.dumps(value)!r})"


def _restore_keys(value: Any) -> Any:
    """Turn the keys of a mapping, or of the first mapping of a list, back to the numbers that JSON made texts of (APPS)."""
    if isinstance(value, Mapping):
        try:
            return [{int(key): each for key, each in value.items()}]
        except ValueError:
            return value
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        first = _restore_keys(value[0])
        return [*first, *value[1:]] if isinstance(first, list) else value
    return value


def _build_statements(tests: Any, setup: str = "") -> FunctionTests | None:
    texts = _check_texts(tests, "tests")
    return FunctionTests(texts, setup=setup) if texts else None


def _build_pairs(inputs: Any, outputs: Any, *, imports: bool = False) -> StdioTests | None:
    """From inputs and outputs, each a text or a list of its lines (APPS)."""
    texts = []
    for what, values in (("inputs", inputs), ("outputs", outputs)):
        if isinstance(values, (list, tuple)):
            is_lines = [isinstance(each, list) and all(isinstance(line, str) for line in each) for each in values]
            values = ["\n".join(each) if lines else each for each, lines in zip(values, is_lines, strict=True)]
        texts.append(_check_texts(values, what))
    given, expected = texts
    if len(given) != len(expected):
        raise DataError(f"reward 'code': a row has {len(given)} inputs and {len(expected)} outputs; give one for each")
    return StdioTests(tuple(zip(given, expected, strict=True)), imports=imports) if given else None


def _check_texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise DataError(f"reward 'code': {what} of a row must be a list of texts, not {type(values).__name__}")
    return tuple(values)

"""Programs judged by their tests, behind a wall (policygrad.sandbox)."""

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
from policygrad.rewards.base import parse_bool, parse_float, parse_reward_options
from policygrad.rewards.workers.limits import parse_size
from policygrad.sandbox import FunctionTests, Limits, StdioTests, find_backend, run_function_tests, run_stdio_tests

# The tests of a task's row, in the forms that data sets have them, and the program in a completion.

_OPENS = re.compile(r"(?P<before>.*?)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<label>[^\s`:}]*)[^`]*")
_PYTHON = ("python", "py", "python3", "python2", "pycon", "ipython")
_LISTED = re.compile(r"\s*(?:[-*+>]|\d+[.)])\s*$")
_NAMES = ("task_id", "question_id", "problem_id", "id", "name")
_MOST = 256 << 20  # bytes of tests that come compressed
_SHARED = (
    *(
        "string",
        "re",
        "datetime",
        "collections",
        "heapq",
        "bisect",
        "copy",
        "math",
        "random",
        "statistics",
        "itertools",
    ),
    *("functools", "operator", "io", "sys", "json", "time", "fractions", "decimal", "typing"),
)
"""Modules whose names a program need not import where its tests come from LiveCodeBench or APPS: their own checkers import them
(lcb_runner/evaluation/testing_util.py, apps/eval/testing_util.py). A name that several have is the last one's."""
_CALLS = """
import json as _json

def _plain(value):
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value

def _same(result, wanted, nested):
    result = _plain(result)
    return result == wanted or (nested and isinstance(wanted, list) and len(wanted) > 0 and result == wanted[0])
"""
"""What a function returns is compared as LiveCodeBench and APPS do: a tuple is a list; APPS puts most results in a list."""
TEST_FORMATS = (
    "`test` and `entry_point` (HumanEval), `test_list` (MBPP), `tests`, `inputs` and `outputs`, `input_output` (APPS), or "
    "`public_test_cases` and `private_test_cases` (LiveCodeBench)"
)


@dataclass(frozen=True)
class _Block:
    """A fenced block of a completion. before: the text up to it."""

    label: str
    code: str
    closed: bool
    before: str


def extract_program(completion: str) -> str:
    """The program of a completion: its last fenced block of Python, or the last without a label that looks like a program; else
    what stands in the last `<answer>…</answer>`, or else all of it. A fence in `<answer>` goes before those elsewhere."""
    completion = completion.replace("\r\n", "\n")
    _, opened, rest = completion.rpartition("<answer>")
    answer = rest.partition("</answer>")[0] if opened and "</answer>" in rest else None
    for text in (answer, completion):
        program = None if text is None else _fenced(text)
        if program is not None:
            return program
    return completion if answer is None else answer


def _fenced(text: str) -> str | None:
    """The program in the blocks of a text; None = it has none."""
    blocks = [block for block in _blocks(text) if block.closed or block.code.strip() or not block.label]
    if named := [block for block in blocks if block.label in _PYTHON]:
        return named[-1].code
    bare = [block for block in blocks if not block.label]
    if not bare:
        return None
    chosen = next((block for block in reversed(bare) if _is_program(block.code)), bare[-1])
    if not chosen.closed and not _is_program(chosen.code) and chosen.before.strip():
        return chosen.before  # the fence is the end of a block that the prompt began
    return chosen.code


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks: closed by a fence of their own or at the end of a line, by the next block's beginning, by `</answer>`, or
    never."""
    found: list[_Block] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    start = place = 0

    def close(closed: bool) -> None:
        nonlocal opened
        if opened is not None:
            found.append(
                _Block(opened["label"].lower(), _without_indent(lines, opened["before"]), closed, text[:start])
            )
        opened = None
        lines.clear()

    for line in text.split("\n"):
        mark = _OPENS.fullmatch(line)
        python = mark is not None and mark["label"].lower() in _PYTHON
        bare = line.strip()
        if opened is None:
            if mark and (python or not mark["before"].strip()):
                opened, start = mark, place
        elif set(bare) == {opened["fence"][0]} and len(bare) >= len(opened["fence"]):
            close(True)
        elif bare.endswith(opened["fence"]) and bare.count(opened["fence"]) == 1:
            lines.append(line.rstrip()[: -len(opened["fence"])])
            close(True)
        elif mark and python:
            close(False)
            opened, start = mark, place
        elif "</answer>" in line:
            lines.append(line.partition("</answer>")[0])
            close(False)
        else:
            lines.append(line)
        place += len(line) + 1
    close(False)
    return found


def _without_indent(lines: list[str], before: str) -> str:
    """Code without the indentation of its fence, which stands behind this on its line."""
    if before.strip():
        code = "\n".join(lines)
        return (textwrap.dedent(code) if _LISTED.match(before) else code) + "\n"
    return "".join(line[min(len(before), len(line) - len(line.lstrip())) :] + "\n" for line in lines)


def _is_program(code: str) -> bool:
    """Whether it is Python that does something: an output such as `3` or `[1, 2]` is Python too."""
    tree = _parsed(textwrap.dedent(code))
    return tree is not None and any(
        not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body
    )


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _compiles(code: str) -> bool:
    """Whether it is Python; other than the parser, the compiler knows that `return` needs a function around it."""
    try:
        compile(code, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def build_tests(prompt: Any, row: Mapping[str, Any]) -> FunctionTests | StdioTests | None:
    """What a row asks of a program; None = its tests are null or there are none.

    Raises DataError for columns of no known form, and for tests that no program can pass.
    """
    if row.get("entry_point") is not None and isinstance(row.get("test"), str):
        entry, test = str(row["entry_point"]), row["test"]
        if (tree := _parsed(test)) is not None and "check" not in _defined(tree):
            raise DataError("its `test` defines no check(candidate), which `entry_point` goes with")
        return FunctionTests((f"{test}\n\ncheck({entry})",), setup=extract_prompt_code(prompt), entry=entry)
    if row.get("test_list") is not None:
        setup = "\n".join((*_texts(row.get("test_imports") or (), "test_imports"), row.get("test_setup_code") or ""))
        return _statements(row["test_list"], setup)
    if row.get("tests") is not None:
        return _either(row["tests"])
    if row.get("input_output") is not None:
        return _apps(row["input_output"])
    if row.get("inputs") is not None and row.get("outputs") is not None:
        return _pairs(row["inputs"], row["outputs"])
    if row.get("public_test_cases") is not None or row.get("private_test_cases") is not None:
        return _livecodebench(row)
    known = ("test", "test_list", "tests", "input_output", "inputs", "public_test_cases")
    if not any(name in row for name in known):
        raise DataError(
            f"reward 'code' needs tests in the task's rows: {TEST_FORMATS}; they have {', '.join(row) or 'nothing'}"
        )
    return None


def describe_row(prompt: Any, row: Mapping[str, Any]) -> str:
    """How a message names a row: by its id, or by how its prompt begins."""
    for name in _NAMES:
        if row.get(name) is not None:
            return f"row {name}={row[name]!r}"
    return f"the row with the prompt {_prompt_text(prompt)[:60]!r}"


def complete_program(prompt: Any, completion: str, tests: FunctionTests | StdioTests) -> str:
    """The completion's program with what its tests let it take for granted.

    In HumanEval's form that is the prompt: its imports and helpers, and the beginning of the function where the completion is only
    its body. LiveCodeBench and APPS import modules for it, and call a method of its `Solution`.
    """
    program = extract_program(completion)
    entry = tests.entry if isinstance(tests, FunctionTests) else None
    if entry:
        tree = _parsed(program)
        if tree is None and (straight := _parsed(textwrap.dedent(program))) and entry in _defined(straight):
            program, tree = textwrap.dedent(program), straight
        if tree and "Solution" in _defined(tree) and entry not in _defined(tree):
            program += f"\n{entry} = Solution().{entry}\n"
        elif head := extract_prompt_code(prompt):
            program = _continued(head, program, entry, tree)
    return _behind(_imports_for(program), program) if tests.imports else program


def _continued(head: str, program: str, entry: str, tree: ast.Module | None) -> str:
    """A program behind its prompt: one that defines the function anew, or the function's body."""
    if f"def {entry}" in program if tree is None else entry in _defined(tree):
        return _behind(head, program)
    indented = head + textwrap.indent(textwrap.dedent(program), "    ")
    return indented if not _compiles(head + program) and _compiles(indented) else head + program


def _behind(head: str, program: str) -> str:
    """Code in front of a program; what a program says of `__future__` stays in front of it."""
    future = [line for line in program.split("\n") if line.startswith("from __future__ ")]
    if not head or not future:
        return f"{head}\n{program}" if head else program
    rest = "\n".join("" if line in future else line for line in program.split("\n"))
    return "\n".join((*future, head, rest))


def _imports_for(program: str) -> str:
    """Imports of the standard library's names that a program uses and does not define."""
    tree = _parsed(program)
    if tree is None:
        return ""
    used = dict.fromkeys(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )
    known = _defined(tree, deep=True)
    return "\n".join(_shared_imports()[name] for name in used if name in _shared_imports() and name not in known)


@functools.cache
def _shared_imports() -> Mapping[str, str]:
    """The import that gives each name of the shared modules."""
    found: dict[str, str] = {}
    for name in _SHARED:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")])
        found |= {each: f"from {name} import {each}" for each in public if not hasattr(builtins, each)}
    return found | {name: f"import {name}" for name in _SHARED}


def _defined(tree: ast.Module, *, deep: bool = False) -> frozenset[str]:
    """The names that a module gives a meaning to at its top. deep: anywhere."""
    names: set[str] = set()
    for node in ast.walk(tree) if deep else _top(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return frozenset(names)


def _top(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Nodes outside of functions and classes, these themselves included."""
    for node in nodes:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _top(ast.iter_child_nodes(node))


def extract_prompt_code(prompt: Any) -> str:
    """A prompt as Python, if it is: a text, or the last message, or a block in it; else ""."""
    text = _prompt_text(prompt)
    return next((code for code in (text, *(b.code for b in reversed(_blocks(text)))) if _parsed(code) is not None), "")


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""


def _either(tests: Any) -> FunctionTests | StdioTests | None:
    """A column `tests`: statements, or pairs of input and output, or either as JSON."""
    if isinstance(tests, str):
        try:
            parsed = json.loads(tests)
        except ValueError:
            return _statements([tests])
        return _either(parsed)
    if isinstance(tests, (list, tuple)) and tests and all(isinstance(test, Mapping) for test in tests):
        missing = next((key for test in tests for key in ("input", "output") if key not in test), None)
        if missing:
            raise DataError(f"reward 'code': a test without {missing!r}; each is {{'input': …, 'output': …}}")
        return _pairs([test["input"] for test in tests], [test["output"] for test in tests])
    return _statements(tests)


def _apps(value: Any) -> FunctionTests | StdioTests | None:
    """A column `input_output`: a mapping, or its JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"reward 'code': a row's input_output is no JSON: {error}") from None
    if not isinstance(found, Mapping) or "inputs" not in found or "outputs" not in found:
        raise DataError("reward 'code': a row's input_output has no 'inputs' and 'outputs'")
    if found.get("fn_name"):
        return _calls(str(found["fn_name"]), found["inputs"], found["outputs"])
    return _pairs(found["inputs"], found["outputs"], imports=True)


def _livecodebench(row: Mapping[str, Any]) -> FunctionTests | StdioTests | None:
    """Columns `public_test_cases`, `private_test_cases` and `metadata`, whose `func_name` is what functional tests call."""
    cases = [case for name in ("public_test_cases", "private_test_cases") for case in _cases(row.get(name), name)]
    given, wanted = [case["input"] for case in cases], [case["output"] for case in cases]
    if not any(case.get("testtype") == "functional" for case in cases):
        return _pairs(given, wanted, imports=True)
    metadata = row.get("metadata") or {}
    try:
        name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    except (ValueError, AttributeError):
        name = None
    if not name:
        raise DataError("reward 'code': a row's functional tests need `metadata` with 'func_name'")
    return _calls(str(name), given, wanted)


def _cases(value: Any, name: str) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    try:
        cases = json.loads(_json_of(value)) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(
            f"reward 'code': {name} of a row is neither JSON nor packed as LiveCodeBench does: {error}"
        ) from None
    if not isinstance(cases, list) or not all(
        isinstance(c, Mapping) and {"input", "output"} <= c.keys() for c in cases
    ):
        raise DataError(f"reward 'code': {name} of a row is a list of {{'input': …, 'output': …}}")
    return cases


def _json_of(text: str) -> str:
    """JSON; or what is packed in a text: base64 of zlib of the pickle of a text. It is read by its instructions, and not unpickled:
    whoever wrote the data could have put any code there. Raises ValueError."""
    if text.lstrip()[:1] in ("[", "{", ""):
        return text
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), _MOST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it unpacks to more than {_MOST >> 20} MiB")
    found = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    texts = [value for name, value in found if name in ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")]
    others = {name for name, _ in found} - {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    if len(texts) != 1 or not others <= {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}:
        raise ValueError("its pickle is more than one text")
    return str(texts[0])


def _calls(name: str, inputs: Any, outputs: Any) -> FunctionTests | None:
    """Calls of a function: arguments as lists (APPS), or as lines of JSON (LiveCodeBench)."""
    if not name.isidentifier():
        raise DataError(f"reward 'code': a row's tests call {name!r}, which is no function's name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError("reward 'code': a row's inputs and outputs are two lists, one output for each input")
    tests = []
    for given, wanted in zip(inputs, outputs, strict=True):
        lines = isinstance(given, str) and isinstance(wanted, str)
        try:
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()] if lines else _keyed(given)
            result = json.loads(wanted) if lines else _keyed(wanted)
        except ValueError as error:
            raise DataError(f"reward 'code': a row's test of {name} is no JSON: {error}") from None
        if not isinstance(arguments, list):
            raise DataError(f"reward 'code': a row's test of {name} has no list of arguments")
        call = f"{name}(*{_literal(arguments)})"
        tests.append(f"assert _same({call}, {_literal(result)}, {not lines})")
    return FunctionTests(tuple(tests), setup=_CALLS, entry=name, imports=True) if tests else None


def _literal(value: Any) -> str:
    """Data as Python that is quick to compile."""
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return repr(value)  # whose keys may be numbers
    return f"_json.loads({json.dumps(value)!r})"


def _keyed(value: Any) -> Any:
    """APPS: keys that JSON made texts of are numbers again, in a mapping or in the first of a list."""
    if isinstance(value, Mapping):
        try:
            return [{int(key): each for key, each in value.items()}]
        except ValueError:
            return value
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        first = _keyed(value[0])
        return [*first, *value[1:]] if isinstance(first, list) else value
    return value


def _statements(tests: Any, setup: str = "") -> FunctionTests | None:
    texts = _texts(tests, "tests")
    return FunctionTests(texts, setup=setup) if texts else None


def _pairs(inputs: Any, outputs: Any, *, imports: bool = False) -> StdioTests | None:
    given, wanted = _texts(_joined(inputs), "inputs"), _texts(_joined(outputs), "outputs")
    if len(given) != len(wanted):
        raise DataError(f"reward 'code': a row has {len(given)} inputs and {len(wanted)} outputs; give one for each")
    return StdioTests(tuple(zip(given, wanted, strict=True)), imports=imports) if given else None


def _joined(values: Any) -> Any:
    """Texts; what comes as a list of lines is one text (APPS)."""
    if not isinstance(values, (list, tuple)):
        return values
    lines = [isinstance(each, list) and all(isinstance(line, str) for line in each) for each in values]
    return ["\n".join(each) if listed else each for each, listed in zip(values, lines, strict=True)]


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise DataError(f"reward 'code': {what} of a row are a list of texts, not {type(values).__name__}")
    return tuple(values)


_SPARE = 120.0  # seconds that a call may take beyond its program's: three interpreters have to start
_LONGEST = 200_000  # characters of a program


@dataclass(frozen=True)
class Code:
    """1.0 if the completion's program passes all tests of its row, else 0.0; None where the row has none.

    Tests are `test` and `entry_point` (HumanEval), `test_list` (MBPP), `tests` (statements, or pairs of `input` and `output`),
    `inputs` and `outputs`, `input_output` (APPS), or `public_test_cases` and `private_test_cases` (LiveCodeBench). The program is
    the completion's last fenced block.
    """

    timeout: float = 8.0
    """All tests of one program together, by the clock."""
    memory: str = "1GiB"
    """Address space of the program's process."""
    share: bool = False
    """The share of the tests that it passes, in place of all or nothing."""
    sandbox: str = "auto"
    """bubblewrap, landlock, or the first of them that stands."""

    def __post_init__(self) -> None:
        self._limits()

    @property
    def reward_options(self) -> dict[str, Any]:
        return {"batched": False, "budget": self.timeout + _SPARE, "process_reward": False}

    def reward_prepare(self) -> None:
        """Find a wall that stands; raises ConfigError where there is none."""
        find_backend(self.sandbox)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float | None]:
        rows = ({name: values[i] for name, values in columns.items()} for i in range(len(completions)))
        return [self.score(prompt, text, row) for prompt, text, row in zip(prompts, completions, rows, strict=True)]

    def score(self, prompt: Any, completion: str, row: dict[str, Any]) -> float | None:
        """One completion's reward. Raises DataError, with the row's name, for tests of no known form or without hope."""
        try:
            tests = build_tests(prompt, row)
        except DataError as error:
            raise DataError(f"{describe_row(prompt, row)}: {error}") from None
        if tests is None:
            return None
        program = complete_program(prompt, completion, tests)
        if not program.strip() or len(program) > _LONGEST:
            return 0.0
        judge = run_stdio_tests if isinstance(tests, StdioTests) else run_function_tests
        verdict = judge(program, tests, self._limits(), self.sandbox, to_end=self.share)  # type: ignore[arg-type]  # each has its kind
        if verdict.unfit:
            raise DataError(f"{describe_row(prompt, row)}: no program can pass its tests: {verdict.unfit}")
        passed = sum(verdict.points) / len(verdict.points)
        return passed if self.share else float(passed == 1.0)

    @classmethod
    def from_options(cls, options: str) -> "Code":
        """`seconds=20,memory=2GiB,share=yes`. Raises ConfigError."""
        return parse_reward_options(cls, "code", options, {"seconds": parse_float, "share": parse_bool})

    def _limits(self) -> Limits:
        memory = parse_size(self.memory, "reward 'code': memory")
        if memory is None:
            raise ConfigError("reward 'code': a program's memory has to be limited, such as memory=1GiB")
        return Limits(timeout=self.timeout, memory=memory)


code = Code()

"""Reads the commands of a shell script without running it: variables, arrays, defaults, sums, here-documents, simple tests.

Only what scripts that start a training use is understood. A variable that nothing sets, in the script or around it, stays in the
text as `$NAME`; a command's output is one too.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policygrad.errors import ConfigError
from policygrad.utils.child_environment import is_secret

_ARRAY_ASSIGNMENT = re.compile(r"(?:export\s+|readonly\s+|local\s+|declare\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=\(")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_SCALAR = re.compile(r"\$(?:\{(\w+|[@*#])(?:(:?[-=+?])((?:[^{}]|\{[^{}]*\})*))?\}|(\w+|[@*#]))")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


_LARGEST = 2**63
_LONGEST = 1_000_000  # characters of a variable
CONTINUED = "\x1f"
"""Stands for a backslash and the end of its line: a space that counts as a line, and ends no command of a quoted script."""


class Word(NamedTuple):
    """A word of a command."""

    text: str
    line: int


@dataclass
class _Script:
    variables: dict[str, str]
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    branches: list[bool | None] = field(default_factory=list)  # of open ifs: taken, skipped, or done with (None)


def read_commands(text: str, environment: Mapping[str, str] | None = None) -> list[list[Word]]:
    """Return the commands of a script, variables filled in, in their order.

    Args:
        environment: Variables around the script; by default those of this process but tokens and keys, which would stand in
            what is made of the commands.

    Raises:
        ConfigError: A quote is not closed, or variables grow without end, with the line.
    """
    if environment is None:
        environment = {name: value for name, value in os.environ.items() if not is_secret(name)}
    script = _Script(dict(environment))
    commands: list[list[Word]] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        start, line, i = i + 1, lines[i].strip(), i + 1
        if not line or line.startswith("#"):
            continue
        if heredoc := _find_heredoc(line):
            body, i = _read_heredoc(lines, i, heredoc)
            if target := re.match(r"read\s.*?(\w+)\s*<<", line):
                script.variables[target[1]] = body
            continue
        joined, i = _join_lines(lines, i - 1)
        if array := _ARRAY_ASSIGNMENT.match(joined):
            joined, i = _join_array(lines, start - 1)
            _assign_array(script, array[1], bool(array[2]), joined[array.end() :], start)
            continue
        _read_line(script, joined, start, commands)
    return commands


def _find_heredoc(line: str) -> str:
    """Return the word that ends the here-document which a line opens; empty if it opens none."""
    found = _HEREDOC.search(re.sub(r"'[^']*'|\"[^\"]*\"(?=\s)", "", line)) or _HEREDOC.search(line)
    return found[2] if found and "<<<" not in line else ""


def _read_heredoc(lines: Sequence[str], i: int, end: str) -> tuple[str, int]:
    body = []
    while i < len(lines) and lines[i].strip() != end:
        body.append(lines[i])
        i += 1
    return "\n".join(body), i + 1


def _join_lines(lines: Sequence[str], i: int) -> tuple[str, int]:
    """Return a command with its continued lines, and the next line's index. Comments between the lines are left out."""
    text = ""
    while i < len(lines):
        line = lines[i].rstrip() if text else lines[i].strip()
        i += 1
        if text.endswith(CONTINUED) and line.lstrip().startswith("#"):
            text += CONTINUED
            continue
        is_continued = line.endswith("\\")
        text += line[:-1] + CONTINUED if is_continued else line
        if not is_continued:
            if not _has_open_quote(text):
                break
            text += "\n"
    return text, i


def _has_open_quote(text: str) -> bool:
    quote, i = "", 0
    while i < len(text):
        letter = text[i]
        if letter == "\\" and quote != "'":
            i += 1
        elif quote:
            quote = "" if letter == quote else quote
        elif letter == "#" and (i == 0 or text[i - 1].isspace()):
            end = text.find("\n", i)
            i = len(text) if end < 0 else end
        elif letter in "'\"":
            quote = letter
        i += 1
    return bool(quote)


def _join_array(lines: Sequence[str], i: int) -> tuple[str, int]:
    """Return the text of an array up to its closing bracket, and the next line's index."""
    first, pieces = i, list[str]()
    while i < len(lines):
        line = lines[i].strip()
        i += 1
        pieces.append("" if line.startswith("#") else re.sub(r"\s#.*", "", line).removesuffix("\\"))
        text = "\n".join(pieces)
        if not _has_open_quote(text) and _count_brackets(text) == 0:
            return text.rstrip(), i
    raise ConfigError(f"line {first + 1}: the array that begins here is not closed: add )")


def _count_brackets(text: str) -> int:
    """Return how many brackets are open outside of quotes."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    return bare.count("(") - bare.count(")")


def _assign_array(script: _Script, name: str, is_added: bool, text: str, line: int) -> None:
    if False in script.branches or None in script.branches:
        return
    words = split_words(script, text[: text.rindex(")")], line)
    script.arrays[name] = array = (script.arrays.get(name, []) if is_added else []) + words
    _check_length(name, sum(len(word.text) + 1 for word in array), line)


def _assign(script: _Script, name: str, value: str, line: int) -> None:
    _check_length(name, len(value), line)
    script.variables[name] = value


def _check_length(name: str, length: int, line: int) -> None:
    """Refuse what doubles with each line."""
    if length > _LONGEST:
        raise ConfigError(f"line {line}: {name} has more than {_LONGEST:,} characters: shorten it")


def _read_line(script: _Script, text: str, line: int, commands: list[list[Word]]) -> None:
    """Read an assignment, a branch or a command."""
    if _read_branch(script, re.split(f"[\n{CONTINUED}]", text)[0], line):
        return
    if False in script.branches or None in script.branches:
        return
    if default := re.match(r":\s+\"?\$\{(\w+):?=(.*)\}", text):
        if default[1] not in script.variables:
            _assign(script, default[1], _expand(script, default[2].strip("'\"")), line)
        return
    words = split_words(script, text, line)
    if re.match(r"(export|readonly|local|declare)\s", text):
        for word in words[1:]:
            name, equals, value = word.text.partition("=")
            if equals:
                _assign(script, name, value, line)
        return
    while words and (found := re.match(r"([A-Za-z_]\w*)(\+?)=(?!=)", words[0].text)) is not None:
        value = words.pop(0).text[found.end() :]
        _assign(script, found[1], script.variables.get(found[1], "") + value if found[2] else value, line)
        if words and words[0].text == ";":
            words.pop(0)
    if words:
        commands.append(words)


def _read_branch(script: _Script, text: str, line: int) -> bool:
    """Return whether a line belongs to an `if`. Of a test that cannot be decided, the first branch counts."""
    if opening := re.match(r"(if|elif)\b(.*?)(?:;\s*then)?\s*$", text):
        if re.search(r";\s*then\s+\S.*\bfi$", text):  # on one line
            return False
        if opening[1] == "if":
            script.branches.append(_decide(script, opening[2].removesuffix("then"), line))
        elif script.branches:
            now = script.branches[-1]
            script.branches[-1] = _decide(script, opening[2].removesuffix("then"), line) if now is False else None
        return True
    if text == "else" and script.branches:
        script.branches[-1] = True if script.branches[-1] is False else None
        return True
    if re.match(r"fi\b", text) and script.branches:
        script.branches.pop()
        return True
    return text == "then"


def _decide(script: _Script, test: str, line: int) -> bool:
    found = re.match(r"\s*\[\[?\s+(.*?)\s+\]\]?", test)
    if found is None:
        return True
    words = [word.text for word in split_words(script, found[1], line, keep_empty=True)]
    if len(words) == 3 and "$" in words[0] + words[2]:
        return True
    if len(words) == 2 and words[0] in ("-z", "-n"):
        is_empty = not words[1] or words[1].startswith("$")
        return is_empty == (words[0] == "-z")
    if len(words) == 3 and words[1] in ("=", "==", "!=", "-eq", "-ne"):
        return (words[0] == words[2]) == (words[1] in ("=", "==", "-eq"))
    return True


def split_words(script: _Script, text: str, line: int, *, keep_empty: bool = False) -> list[Word]:
    """Split a text into words as a shell does: quotes, escapes, variables, arrays. Raises ConfigError for an open quote."""
    words: list[Word] = []
    current: list[str] | None = None  # None = between words
    i = 0

    def add(*texts: str) -> None:
        words.extend(Word(word, line + _count_lines(text[:i])) for word in texts if word or keep_empty)

    while i < len(text):
        letter = text[i]
        if letter.isspace():
            add(*([] if current is None else ["".join(current)]))
            current, i = None, i + 1
        elif current is None and (redirection := re.match(r"(\d*|&)>>?(&\d|\s*[^\s;|]+)", text[i:])):
            i += redirection.end()
        elif letter == "#" and current is None:
            end = re.search(f"[\n{CONTINUED}]", text[i:])
            i = len(text) if end is None else i + end.start()
        elif letter in "'\"":
            inside, i = _read_quoted(text, i, line + _count_lines(text[:i]))
            if letter == '"' and (array := _ARRAY.fullmatch(inside)):
                words += script.arrays.get(array[1], ())
            else:
                current = [*(current or []), inside if letter == "'" else _expand(script, inside, is_quoted=True)]
        elif letter == "\\":
            current, i = [*(current or []), text[i + 1 : i + 2]], i + 2
        elif letter == "$" or letter == "`":
            raw, i = _read_expansion(text, i)
            if array := _ARRAY.fullmatch(raw):
                words += script.arrays.get(array[1], ())
                continue
            value = _expand(script, raw)
            if not value:
                continue
            parts = value.split() if " " in value or "\n" in value else [value]
            if len(parts) > 1:  # an unquoted variable of several words
                add("".join([*(current or []), parts[0]]), *parts[1:-1])
                current = [parts[-1]]
            else:
                current = [*(current or []), value]
        elif letter in ";|&" and not (letter == "&" and text[i - 1 : i] == ">"):
            add(*([] if current is None else ["".join(current)]))
            current, i = None, i + 1
            if re.match(r"[|&;]?\s*(tee|&>)", text[i:]):
                break
            add(";")
        else:
            current, i = [*(current or []), letter], i + 1
    add(*([] if current is None else ["".join(current)]))
    return words


def _count_lines(text: str) -> int:
    return text.count("\n") + text.count(CONTINUED)


def _read_quoted(text: str, i: int, line: int) -> tuple[str, int]:
    """Return what a quote at `i` holds, and the index after it."""
    quote, j, inside = text[i], i + 1, list[str]()
    while j < len(text) and text[j] != quote:
        if quote == '"' and text[j] == "\\" and text[j + 1 : j + 2] in ('"', "\\", "`", "$", "\n"):
            j += 1
            inside.append("\\$" if text[j] == "$" else "" if text[j] == "\n" else text[j])
        elif text[j] == CONTINUED:  # between double quotes nothing is left of it
            inside.append("" if quote == '"' else "\\\n")
        elif quote == '"' and text.startswith(("${", "$("), j):
            raw, end = _read_expansion(text, j)
            inside.append(raw)
            j = end - 1
        else:
            inside.append(text[j])
        j += 1
    if j >= len(text):
        raise ConfigError(f"line {line}: the quote {text[i : i + 20]!r} is not closed: add {quote}")
    return "".join(inside), j + 1


def _read_expansion(text: str, i: int) -> tuple[str, int]:
    """Return the text of an expansion at `i`, and the index after it."""
    if text[i] == "`":
        end = text.find("`", i + 1)
        return text[i : end + 1] if end > 0 else text[i:], end + 1 if end > 0 else len(text)
    closing = {"{": "}", "(": ")"}.get(text[i + 1 : i + 2])
    if closing is None:
        found = re.match(r"\$(\w+|[@*#?$!])?", text[i:])
        assert found is not None
        return found[0], i + len(found[0])
    depth, j = 0, i + 1
    while j < len(text):
        depth += (text[j] == text[i + 1]) - (text[j] == closing)
        j += 1
        if depth == 0:
            break
    return text[i:j], j


def _expand(script: _Script, text: str, *, is_quoted: bool = False) -> str:
    """Fill in variables and sums; what nothing sets stays."""
    text = re.sub(r"\$\(\((.*?)\)\)(?!\))", lambda found: _calculate(script, found[1]), text)
    if text.startswith(("$(", "`")):
        return _guess_output(text)

    def fill(found: re.Match[str]) -> str:
        name, action, default = found[1] or found[4], found[2] or "", found[3] or ""
        if name in ("@", "*", "#") or name.isdigit():
            return _expand(script, default.strip("'\"")) if "-" in action else ""
        value = script.variables.get(name)
        if action.endswith("+"):
            return _expand(script, default.strip("'\"")) if value else ""
        if value is not None and (value or ":" not in action):
            return value
        if action.endswith(("-", "=")):
            filled = _expand(script, default.strip("'\""))
            if action.endswith("="):
                script.variables[name] = filled
            return filled
        if name in script.arrays:
            return script.arrays[name][0].text if script.arrays[name] else ""
        return f"${name}"

    result = (
        re.sub(r"\$\((?!\()(?:[^()]|\([^()]*\))*\)|`[^`]*`", lambda found: _guess_output(found[0]), text)
        if is_quoted
        else text
    )
    parts = result.split("\\$")  # a dollar that was escaped
    return "$".join(_SCALAR.sub(fill, part) for part in parts)


def _guess_output(command: str) -> str:
    """Return a command's output: this folder, for those that find where a script is; others are not known."""
    return "." if re.match(r"(\$\(|`)\s*(pwd|cd|dirname|realpath)\b", command) else "$COMMAND"


def _calculate(script: _Script, text: str) -> str:
    """Return the value of a sum of whole numbers; the text as a variable if it has a part that is not known."""
    filled = _SCALAR.sub(lambda found: script.variables.get(found[1] or found[4], "?"), text)
    filled = re.sub(r"\b[A-Za-z_]\w*\b", lambda found: script.variables.get(found[0], "?"), filled)
    try:
        with warnings.catch_warnings():  # about what is no number
            warnings.simplefilter("ignore")
            return str(_evaluate(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        names = re.findall(r"[A-Za-z_]\w*", text)
        missing = next((name for name in names if not script.variables.get(name, "").lstrip("-").isdigit()), "NAME")
        return f"${missing}"


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if max(abs(left), abs(right)) > _LARGEST or (isinstance(node.op, ast.Pow) and not 0 <= right <= 64):
            raise ValueError("larger than a shell's numbers")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("not a sum of whole numbers")

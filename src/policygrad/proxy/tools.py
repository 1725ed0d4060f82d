"""Tools of every type: described to a chat template as functions, and their calls returned in the API's own form.

Templates know functions with a JSON schema. A tool that is called by free text, or that the API defines itself (a shell, patches,
Anthropic's editor), is described as a function that takes the same; functions in a namespace get its name before theirs. A tool
that only the vendor runs, such as a web search, is left out of the conversation and named among the fields that cannot be followed.
Sources: platform.openai.com/docs/api-reference/responses, docs.anthropic.com/en/docs/agents-and-tools; what Codex 0.171 sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policygrad.models.chat.turns import ToolCall
from policygrad.proxy.reading import make_call, quote, read_objects, read_text, read_tools
from policygrad.proxy.requests import ApiError, Message, ToolForm

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
SEPARATOR = "__"  # between a namespace and a function's name


def _schema(required: Sequence[str] = (), /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


_COMMAND = {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments"}
_PATCH = _schema(
    ("type", "path"),
    type=_text("What to do", enum=["create_file", "update_file", "delete_file"]),
    path=_text("The file"),
    diff=_text("The patch in V4A format, of a file that is created or updated"),
)
_EDITOR = _schema(
    ("command", "path"),
    command=_text("What to do", enum=["view", "create", "str_replace", "insert"]),
    path=_text("The file or folder"),
    file_text=_text("With create: the contents"),
    old_str=_text("With str_replace: the text to replace, which is there once"),
    new_str=_text("With str_replace: the text in its place"),
    insert_line={"type": "integer", "description": "With insert: the line after which to insert"},
    insert_text=_text("With insert: the text"),
    view_range={"type": "array", "items": {"type": "integer"}, "description": "With view: the first and last line"},
)
_MEMORY = _schema(
    ("command",),
    command=_text("What to do", enum=["view", "create", "str_replace", "insert", "delete", "rename"]),
    path=_text("The file or folder under /memories"),
    file_text=_text("With create: the contents"),
    old_str=_text("With str_replace: the text to replace"),
    new_str=_text("With str_replace: the text in its place"),
    insert_line={"type": "integer", "description": "With insert: the line after which to insert"},
    insert_text=_text("With insert: the text"),
    old_path=_text("With rename: the old path"),
    new_path=_text("With rename: the new path"),
)


@dataclass(frozen=True)
class KnownTool:
    """A tool whose arguments the API defines."""

    description: str
    parameters: Mapping[str, Any]


OPENAI_TOOLS: dict[str, KnownTool] = {
    "local_shell": KnownTool(
        "Runs a program on this machine and returns what it prints.",
        _schema(
            ("command",),
            command=_COMMAND,
            timeout_ms={"type": "integer", "description": "Milliseconds until it is ended"},
            working_directory=_text("The folder to run it in"),
        ),
    ),
    "shell": KnownTool(
        "Runs commands in a shell and returns what they print.",
        _schema(
            ("commands",),
            commands={"type": "array", "items": {"type": "string"}, "description": "Lines of shell, one after another"},
            timeout_ms={"type": "integer", "description": "Milliseconds until they are ended"},
        ),
    ),
    "apply_patch": KnownTool("Creates, changes or deletes a file.", _PATCH),
}
"""By type. Their calls are items `TYPE_call`, with the arguments under another name."""
ARGUMENTS_OF = {"local_shell": "action", "shell": "action", "apply_patch": "operation"}

ANTHROPIC_TOOLS: dict[str, KnownTool] = {
    "bash": KnownTool(
        "Runs a command in a shell that stays open, and returns what it prints.",
        _schema((), command=_text("The command"), restart={"type": "boolean", "description": "Begin with a new shell"}),
    ),
    "text_editor": KnownTool("Shows, creates and changes files.", _EDITOR),
    "memory": KnownTool("Keeps notes in files, between conversations.", _MEMORY),
}
"""By type, without its date."""


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request."""

    schemas: tuple[dict[str, Any], ...] = ()
    """As chat templates read them."""
    forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """Of tools that are no plain function, by the name that the template has."""
    left_out: tuple[str, ...] = ()
    """Fields that cannot be followed: tools.web_search, tools.strict."""


def read_offered(given: Sequence[Mapping[str, Any]]) -> OfferedTools:
    """Return the tools of a request of `/v1/responses`."""
    functions, forms, left_out = list[Mapping[str, Any]](), dict[str, ToolForm](), list[str]()
    for tool in given:
        kind = tool.get("type", FUNCTION)
        if kind == FUNCTION:
            functions.append(tool)
        elif kind == NAMESPACE:
            space = tool.get("name")
            if not isinstance(space, str) or not space:
                raise ApiError(f"a namespace of tools has no name: {quote(tool)}")
            for inner in read_objects(tool.get("tools"), f"the tools of {space}"):
                name = f"{space}{SEPARATOR}{inner.get('name')}"
                functions.append({**inner, "name": name})
                forms[name] = ToolForm(FUNCTION, str(inner.get("name")), space)
        elif kind == CUSTOM:
            functions.append(describe_custom(tool))
            forms[str(tool.get("name"))] = ToolForm(CUSTOM, str(tool.get("name")))
        elif isinstance(kind, str) and (described := OPENAI_TOOLS.get(kind)):
            functions.append({"name": kind, "description": described.description, "parameters": described.parameters})
            forms[kind] = ToolForm(kind, kind)
        else:
            left_out.append(f"tools.{kind}")
    return _offer(functions, forms, left_out)


def read_offered_in_chat(given: Sequence[Mapping[str, Any]]) -> OfferedTools:
    """Return the tools of a request of `/v1/chat/completions`, whose descriptions are under the name of their type."""
    flat = list[Mapping[str, Any]]()
    for tool in given:
        kind = tool.get("type", FUNCTION)
        inner = tool.get(kind) if isinstance(kind, str) else None
        if kind in (FUNCTION, CUSTOM) and not isinstance(inner, dict):
            raise ApiError(f"tools must have an object `{kind}` each, not {quote(tool)}")
        flat.append({**inner, "type": kind} if isinstance(inner, dict) else tool)
    return read_offered(flat)


def read_offered_by_schema(given: Sequence[Mapping[str, Any]]) -> OfferedTools:
    """Return the tools of a request of `/v1/messages`: functions, and those whose type ends with a date."""
    functions, left_out = list[Mapping[str, Any]](), list[str]()
    for tool in given:
        kind = str(tool.get("type", "custom"))
        base = kind.rpartition("_")[0]
        if "input_schema" in tool:
            functions.append({**tool, "parameters": tool["input_schema"]})
        elif described := ANTHROPIC_TOOLS.get(base):
            name = tool.get("name") or base
            functions.append({"name": name, "description": described.description, "parameters": described.parameters})
        else:
            left_out.append(f"tools.{kind}")
    return _offer(functions, {}, left_out)


def _offer(
    functions: Sequence[Mapping[str, Any]], forms: Mapping[str, ToolForm], left_out: Sequence[str]
) -> OfferedTools:
    strict = ("tools.strict",) if any(tool.get("strict") for tool in functions) else ()
    return OfferedTools(read_tools(functions), forms, (*dict.fromkeys(left_out), *strict))


def describe_custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool that takes free text as a function of one text, which its grammar describes."""
    form = tool.get("format")
    form = form.get("grammar", form) if isinstance(form, dict) else {}
    grammar = form.get("definition") if isinstance(form, dict) else None
    text = str(tool.get("description") or "")
    if grammar:
        text = f"{text}\n\nThe input follows this grammar ({form.get('syntax', 'text')}):\n{grammar}".strip()
    return {"name": tool.get("name"), "description": text, "parameters": _schema(("input",), input=_text("The input"))}


def get_input(call: ToolCall) -> str:
    """Return the free text of a call of a custom tool."""
    text = call.arguments.get("input")
    if isinstance(text, str) and len(call.arguments) == 1:
        return text
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def read_call_item(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return an item of a response that is a call, as chat templates read it; None for other items."""
    kind = str(item.get("type"))
    if kind == "function_call":
        space, name = item.get("namespace"), item.get("name")
        return make_call(f"{space}{SEPARATOR}{name}" if space and name else name, item.get("arguments"), where)
    if kind == "custom_tool_call":
        return make_call(item.get("name"), {"input": str(item.get("input") or "")}, where)
    base = kind.removesuffix("_call")
    if kind != base and base in ARGUMENTS_OF:
        given = item.get(ARGUMENTS_OF[base])
        if not isinstance(given, dict):
            raise ApiError(f"{where} has no object {ARGUMENTS_OF[base]!r}")
        left = {name: value for name, value in given.items() if value is not None and (name, value) != ("type", "exec")}
        return make_call(base, left, where)
    return None


def read_output_item(item: Mapping[str, Any], where: str) -> Message | None:
    """Return an item of a response that is a tool's output; None for other items."""
    kind, output = str(item.get("type")), item.get("output")
    called = ("function", "custom_tool", *ARGUMENTS_OF)
    if kind not in [f"{name}_call_output" for name in called]:
        return None
    if kind == "shell_call_output" and isinstance(output, list):
        return {"role": "tool", "content": "\n".join(_describe_run(run) for run in read_objects(output, where))}
    return {"role": "tool", "content": read_text(output, where)}


def _describe_run(run: Mapping[str, Any]) -> str:
    """Return what a command printed, and how it ended if that was not well."""
    outcome = run.get("outcome") if isinstance(run.get("outcome"), dict) else {}
    assert isinstance(outcome, dict)
    code = outcome.get("exit_code")
    ended = ["timed out"] if outcome.get("type") == "timeout" else [f"exit code {code}"] if code else []
    return "\n".join([str(run[name]) for name in ("stdout", "stderr") if run.get(name)] + ended)


def render_call_item(call: ToolCall, number: str, status: str, form: ToolForm | None) -> dict[str, Any]:
    """Return a call as an item of a response."""
    if form is None or form.kind == FUNCTION:
        return {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": number,
            "name": call.name if form is None else form.name,
            **({} if form is None else {"namespace": form.namespace}),
            "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            "status": status,
        }
    if form.kind == CUSTOM:
        common = {"type": "custom_tool_call", "id": f"ctc_{number}", "call_id": number, "name": form.name}
        return {**common, "input": get_input(call), "status": status}
    arguments: dict[str, Any] = dict(call.arguments)
    if form.kind == "local_shell":
        arguments = {"type": "exec", "env": {}, **arguments}
    return {
        "type": f"{form.kind}_call",
        "id": f"{form.kind}_{number}",
        "call_id": number,
        ARGUMENTS_OF[form.kind]: arguments,
        "status": status,
    }

"""Tools of servers that speak the Model Context Protocol (MCP), as tools of conversations.

The protocol is spoken by the official package mcp. A server is a program, which is talked to over its standard input and output, or
an address (Streamable HTTP, or the older transport with server-sent events). All connections live on one background loop, so that
they outlive the loop of a rollout, and each in a task of its own: anyio requires that a scope is left by the task that entered it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shlex
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from policygrad.environments.registry import is_http_url
from policygrad.environments.tools import Tool, ToolError, ToolUse
from policygrad.errors import ConfigError, DataError, EngineError, import_optional, install_command
from policygrad.models.chat.control_tokens import replace_surrogates
from policygrad.rewards.workers.messages import replace_control_characters
from policygrad.utils.async_runner import background_loop, run_on_background_loop
from policygrad.utils.child_environment import filter_environment
from policygrad.utils.pictures import Picture
from policygrad.utils.processes import Tail, guard_command, kill_group, last_lines

MAX_MESSAGE_BYTES = 16 << 20  # of one message on a program's standard output
MAX_STRAY_LINES = 1000  # lines on a program's standard output that are no messages, after which it is ended
EXIT_SECONDS = 1.0  # time for a program to exit after its input has ended, and then again after SIGTERM
STOP_SECONDS = 10.0  # time for a connection to end, before its task is cancelled
MAX_PAGES = 100  # pages of a server's list of tools
_START_SLOTS = asyncio.Semaphore(os.cpu_count() or 1)
"""Of the background loop. If all servers started at once, all would exceed their time."""
_TAIL_BYTES, _TAIL_LINES, _LINE_WIDTH = 4096, 6, 300  # end of what a program prints, for error messages
_BOM = b"\xef\xbb\xbf"  # which some programs write before their first line, or before each
_HANDSHAKES = ("legacy", "auto")
"""Modes of mcp.Client, in the order in which they are tried. Sessions, in which a server at an address can keep an episode's state,
exist in protocol versions up to 2025-11-25 only, which the first mode negotiates."""
_UNSUPPORTED_HANDSHAKE = (-32022, -32601)
"""Error codes of a server without the first mode: unsupported version, unknown method."""
T = TypeVar("T")


def use_mcp_tools(server: str) -> ToolUse:
    """Return conversations with the tools of one server, `--environment mcp:COMMAND` or `mcp:URL`."""
    return ToolUse((McpTools(server),))


@dataclass(frozen=True)
class McpTools:
    """The tools of an MCP server, for `pg.ToolUse((pg.McpTools("python server.py"),), reward)`.

    The model reads the tools that the server lists at the start of the run. Each episode has a process of the server's program,
    from its first call to its end, or a session of an address; `shared` changes both.

    A call that fails is an error that the policy reads (`environment/calls_raised`). An episode whose program or session cannot be
    started is not trained on.

    Raises:
        ConfigError: No command or address, or a limit that is not above 0.
    """

    server: str | Sequence[str]
    """A command line, or its words; or an address, http(s)://…. A path that ends in /sse means the older transport."""
    names: Sequence[str] = ()
    """The tools that are offered to the policy, in this order; () = all, in the server's."""
    shared: bool = False
    """Whether one process, or one session, serves all episodes of a run, for servers without state. It is restarted if it ends."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of a program, besides the default ones (docs/isolation.md). It gets no others of this one's."""
    folder: str | None = None
    """A program's working folder; None = the current one."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers for an address, such as Authorization."""
    start_timeout: float = 60.0
    """Seconds for a start, from the program or the connection to the list of tools."""

    def __post_init__(self) -> None:
        if not hasattr(import_optional("mcp", "mcp:…", "mcp"), "Client"):
            raise ConfigError(
                f"mcp:… needs version 2 of mcp, and an earlier one is installed: {install_command('mcp')}"
            )
        _silence_logging()
        self._state  # noqa: B018
        if not self._argv or not self.start_timeout > 0 or isinstance(self.names, str):
            raise ConfigError(
                "McpTools needs a command such as 'python server.py' or an address such as http://localhost:8000/mcp, names that "
                f"are a list, and a start_timeout above 0, not {self.server!r}, {self.names!r} and {self.start_timeout:g}"
            )
        if self.is_address and (self.variables or self.folder):
            raise ConfigError(f"McpTools: variables and folder are those of a program, and {self.server} is an address")
        if self.headers and not self.is_address:
            raise ConfigError(f"McpTools: headers are sent to an address, and {self.server!r} is a command")

    @property
    def is_address(self) -> bool:
        """True for a server with an address, False for a program."""
        return isinstance(self.server, str) and is_http_url(self.server)

    @cached_property
    def _argv(self) -> list[str]:
        if not isinstance(self.server, str):
            return [str(word) for word in self.server]
        try:
            return [self.server] if self.is_address else shlex.split(self.server)
        except ValueError as error:
            raise ConfigError(f"McpTools: the command {self.server!r} cannot be split into words: {error}") from error

    @cached_property  # read first by __post_init__: later reads may come from several threads
    def _state(self) -> _RunState:
        return _RunState()

    def __enter__(self) -> Self:
        """Try the server: list its tools."""
        try:
            _wait_for(self._list_once())
        except McpServerError as error:
            raise EngineError(error.details) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the shared process or session, and forget the list."""
        session, self._state.shared, self._state.listing = self._state.shared, None, None
        if session is not None:
            _wait_for(session.stop())

    @property
    def tools(self) -> Sequence[Tool] | None:
        """The tools that the server listed when the run began; None before."""
        listing = self._state.listing
        return None if listing is None else [_Connection(self).make_tool(tool) for tool in listing]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Return the tools of one episode."""
        episode = _Connection(self)
        episode.session = await run_on_background_loop(self._list_once(keep=True))
        listing = self._state.listing
        assert listing is not None
        try:
            yield [episode.make_tool(tool) for tool in listing]
        finally:
            if episode.session is not None and not self.shared:
                await run_on_background_loop(episode.session.stop())

    async def _list_once(self, *, keep: bool = False) -> _Session | None:
        """List the tools, if that was not done in this run. `keep`: return the session that was started for it."""
        async with self._state.lock:
            if self._state.listing is not None:
                return None
            session = _Session(self)
            try:
                await session.start()
                self._state.listing = await self._select_tools(session)
            except BaseException:
                await session.stop()
                raise
            if self.shared:
                self._state.shared = session
            elif not keep:
                await session.stop()
            return session

    async def _select_tools(self, session: _Session) -> tuple[Any, ...]:
        """Return the server's descriptions of the tools that are offered."""
        listed = await session.list_tools()
        tools = {tool.name: tool for tool in listed}
        for name in [name for name in self.names or tools if [tool.name for tool in listed].count(name) > 1]:
            raise ConfigError(
                f"McpTools: {session.server} lists two tools named {name!r}, so a call would be ambiguous: leave it out by names="
            )
        if missing := [name for name in self.names if name not in tools]:
            raise ConfigError(
                f"McpTools: {session.server} has no tool {missing[0]!r}, it has {', '.join(tools) or 'none'}: correct names="
            )
        if not tools:
            raise session.make_error("lists no tools")
        return tuple(tools[name] for name in self.names or tools)

    async def _share_session(self) -> _Session:
        """Return the session of all episodes, a new one if the last has ended."""
        async with self._state.lock:
            session = self._state.shared
            if session is not None and await session.is_alive():
                return session
            if session is not None:
                await session.stop()
            session = self._state.shared = _Session(self)
            await session.start()
            return session


class _RunState:
    """What the episodes of a run have in common. Another process, to which it is sent, begins with nothing."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # of the background loop
        self.listing: tuple[Any, ...] | None = None
        self.shared: _Session | None = None

    def __reduce__(self) -> tuple[type[_RunState], tuple[()]]:
        return _RunState, ()


class _Connection:
    """An episode's way to the server, which is started by the first call."""

    def __init__(self, config: McpTools) -> None:
        self.config = config
        self.session: _Session | None = None

    def make_tool(self, tool: Any) -> Tool:
        function = {
            "name": tool.name,
            "description": tool.description or tool.title or "",
            "parameters": tool.input_schema,
        }

        async def call(**arguments: Any) -> Any:
            assert self.session is not None
            return await run_on_background_loop(self.session.call(tool.name, arguments))

        return Tool(tool.name, call, {"type": "function", "function": function}, self._start)

    async def _start(self) -> None:
        if self.config.shared:
            self.session = await run_on_background_loop(self.config._share_session())
        elif self.session is None:
            self.session = _Session(self.config)
            try:
                await run_on_background_loop(self.session.start())
            except Exception:  # after a cancellation, closing the episode stops it
                self.session = None
                raise


class McpServerError(Exception):
    """A server that cannot be started or used, in few words; `details` are for the error that ends a run."""

    def __init__(self, text: str, details: str) -> None:
        super().__init__(text)
        self.details = details


class _Session:
    """One connection to a server. All methods run on the background loop."""

    def __init__(self, config: McpTools) -> None:
        self.config = config
        self.server = f"the MCP server {config.server if config.is_address else repr(shlex.join(config._argv))}"
        self._program: _Program | None = None
        self._client: Any = None
        self._connected, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_doubtful = False  # a call has failed otherwise than by an error of the tool

    async def start(self) -> None:
        """Connect, or raise McpServerError."""
        try:
            async with _START_SLOTS:
                self._task = asyncio.create_task(self._run())
                connected = asyncio.create_task(self._connected.wait())
                await asyncio.wait(
                    {self._task, connected}, timeout=self.config.start_timeout, return_when=asyncio.FIRST_COMPLETED
                )
                connected.cancel()
            if self._connected.is_set():
                return
            if not self._task.done():
                seconds = f"{self.config.start_timeout:g} seconds"
                raise self.make_error(f"did not answer within {seconds}: raise start_timeout=")
            error = _first_leaf(self._task.exception() or RuntimeError("it was cancelled"))
            if isinstance(error, ConfigError):
                raise error
            reason = "" if self._program is not None and self._program.ended else f": {_describe(error)}"
            raise self.make_error(f"could not be started{reason}") from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the connection, and the program with everything that it has started."""
        self._closing.set()
        if self._task is not None:
            if not self._connected.is_set():
                self._task.cancel()
            done, _ = await asyncio.wait({self._task}, timeout=STOP_SECONDS)
            if not done:  # an address that no longer answers
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=STOP_SECONDS)
            if self._task.done() and not self._task.cancelled():
                self._task.exception()  # retrieved, or asyncio would report it

    async def is_alive(self) -> bool:
        """Return whether the connection can be used; after a doubtful failure, by asking the server."""
        if self._task is None or self._task.done() or (self._program is not None and self._program.ended):
            return False
        if self._is_doubtful:
            try:
                async with asyncio.timeout(self.config.start_timeout):
                    await self._client.list_tools(cache_mode="bypass")
            except Exception:  # whatever it is, a new connection is the remedy
                return False
            self._is_doubtful = False
        return True

    async def list_tools(self) -> list[Any]:
        """Return the descriptions of all tools, or raise McpServerError."""
        tools, cursor = list[Any](), None
        try:
            async with asyncio.timeout(self.config.start_timeout):
                for _ in range(MAX_PAGES):
                    page = await self._client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except Exception as error:
            raise self.make_error(f"does not list its tools: {_describe(error)}") from error
        raise self.make_error(f"lists more than {MAX_PAGES} pages of tools")

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return what a tool shows: text, or a list of texts and pictures. Raises ToolError."""
        try:
            result = await self._client.call_tool(name, arguments)
        except asyncio.CancelledError:  # it took too long
            self._is_doubtful = True
            raise
        except Exception as error:
            self._is_doubtful = True
            if self._program is not None:
                await self._program.wait_if_ending()
                if self._program.ended:
                    raise ToolError(f"the tool's server has ended ({self._program.exit_status})") from error
            raise ToolError(_describe(error)) from error
        shown = show_result(result)
        if result.is_error:
            raise ToolError(shown if isinstance(shown, str) else "\n".join(s for s in shown if isinstance(s, str)))
        return shown

    def make_error(self, what: str) -> McpServerError:
        """Return an error about the server, with how its program ended and the last of what it printed."""
        if self._program is None:
            return McpServerError(f"the MCP server {what}", f"{self.server} {what}")
        last = "".join(f": {line}" for line in self._program.last_lines[-1:])
        return McpServerError(f"the MCP server {what}{last}", f"{self.server} {what}{self._program.describe_end()}")

    async def _run(self) -> None:
        from mcp import Client, MCPError

        for mode in _HANDSHAKES:
            try:
                async with Client(self._make_transport(), mode=mode) as client:
                    self._client = client
                    self._connected.set()
                    await self._closing.wait()
                return
            except Exception as error:
                leaf = _first_leaf(error)
                is_last = mode == _HANDSHAKES[-1] or self._connected.is_set()
                if is_last or not (isinstance(leaf, MCPError) and leaf.code in _UNSUPPORTED_HANDSHAKE):
                    raise

    def _make_transport(self) -> AbstractAsyncContextManager[Any]:
        config = self.config
        if config.is_address:
            assert isinstance(config.server, str)
            if urlsplit(config.server).path.rstrip("/").endswith("/sse"):
                from mcp.client.sse import sse_client

                return sse_client(config.server, headers=dict(config.headers), httpx_client_factory=_make_http_client)
            return _connect_http(config.server, config.headers)
        self._program = _Program(config)
        return self._program.connect()


@asynccontextmanager
async def _connect_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    from mcp.client.streamable_http import streamable_http_client

    async with (
        _make_http_client(headers=dict(headers)) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def _make_http_client(headers: dict[str, str] | None = None, timeout: Any = None, auth: Any = None) -> Any:
    """Return an HTTP client that reads messages of at most MAX_MESSAGE_BYTES, and none that are compressed."""
    import httpx2

    class LimitedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any, is_events: bool) -> None:
            self.stream, self.is_events = stream, is_events

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size, last = 0, b""
            async for part in self.stream:
                size += len(part)
                joined = last + part
                # an event ends with an empty line, and each is a message
                end = max(joined.rfind(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r")) if self.is_events else -1
                if end >= 0:
                    size = len(joined) - end
                last = joined[-4:]
                if size > MAX_MESSAGE_BYTES:
                    raise httpx2.ReadError(f"the server sent a message of more than {MAX_MESSAGE_BYTES >> 10} KiB")
                yield part

        async def aclose(self) -> None:
            await self.stream.aclose()

    class LimitedTransport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                await response.aclose()
                raise httpx2.ReadError("the server sent a compressed message, though none was asked for")
            is_events = response.headers.get("content-type", "").startswith("text/event-stream")
            response.stream = LimitedStream(response.stream, is_events)
            return response

    return httpx2.AsyncClient(
        headers={**(headers or {}), "accept-encoding": "identity"},
        timeout=timeout or httpx2.Timeout(30.0, read=300.0),
        auth=auth,
        transport=LimitedTransport(),
    )


class _Program:
    """A server's program below a guard, and the messages on its standard input and output, one JSON object a line."""

    def __init__(self, config: McpTools) -> None:
        self.config = config
        self.process: asyncio.subprocess.Process | None = None
        self.printed = Tail(_TAIL_BYTES)
        """The end of its standard error."""
        self.stray_lines = 0  # lines on its standard output that are no messages
        self.stray_line = ""  # the first of them
        self.violation = ""  # why it was ended
        self._output_ended = False

    @property
    def ended(self) -> bool:
        """True if it has ended by itself, or was ended because it violated the protocol."""
        return self.process is not None and (self.process.returncode is not None or self._output_ended)

    @property
    def exit_status(self) -> str:
        """How it ended."""
        code = None if self.process is None else self.process.returncode
        return self.violation or ("its output has ended" if code is None else f"exit code {code}")

    async def wait_if_ending(self) -> None:
        """Wait until the exit code is known of a program whose output has ended."""
        if self.process is not None and self._output_ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), EXIT_SECONDS)

    @property
    def last_lines(self) -> list[str]:
        """The last lines on its standard error."""
        return [*map(replace_control_characters, last_lines(self.printed.data, _TAIL_LINES, _LINE_WIDTH))]

    def describe_end(self) -> str:
        """Describe, after `the server …`, how it ended and the last of what it printed."""
        texts = [f". It has ended ({self.exit_status})" if self.ended else ""]
        if self.stray_line and not self.violation:
            texts.append(f". It writes what is no message to its standard output, such as {self.stray_line!r}")
        lines = self.last_lines
        texts.append(
            ". The last lines of its standard error:" + "".join(f"\n  {line}" for line in lines)
            if lines
            else ". It printed nothing"
        )
        return "".join(texts)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[Any, Any]]:
        """Run the program, and yield the streams that mcp.Client reads messages from and writes them to."""
        import anyio

        try:
            process = self.process = await asyncio.create_subprocess_exec(
                *guard_command(self.config._argv, EXIT_SECONDS),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=filter_environment(os.environ, ()) | dict(self.config.variables),
                cwd=self.config.folder,
                limit=MAX_MESSAGE_BYTES,
                start_new_session=True,  # Ctrl-C is for the run; and what the guard cannot end is found by the group
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"McpTools: {shlex.join(self.config._argv)!r} cannot be started: {error}") from error
        incoming_sender, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, outgoing_receiver = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._read_messages(process, incoming_sender),
                self._write_messages(process, outgoing_receiver),
                self._read_errors(process),
            )
        ]
        try:
            yield incoming, outgoing
        finally:
            with anyio.CancelScope(shield=True):
                incoming.close()
                outgoing.close()
                await self._end(process)
                await asyncio.wait(tasks, timeout=EXIT_SECONDS)  # until the pipes have ended
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_messages(self, process: asyncio.subprocess.Process, sender: Any) -> None:
        import anyio
        from mcp.shared.message import SessionMessage

        assert process.stdout is not None
        message_start = b""  # of a message that is written on several lines
        with sender:
            try:
                while line := await process.stdout.readline():
                    message = _parse_message(line)
                    if message is None and line.removeprefix(_BOM).rstrip() == b"{":
                        message_start = line
                    elif message is None and message_start and len(message_start) + len(line) <= MAX_MESSAGE_BYTES:
                        message_start += line
                        message = _parse_message(message_start) if line.rstrip() == b"}" else None
                    elif message is None:
                        message_start = b""
                        self._count_stray(line)
                        if self.violation:
                            break
                    if message is not None:
                        message_start = b""
                        await sender.send(SessionMessage(message))
            except ValueError:  # of readline: a line beyond the limit
                self.violation = f"it wrote a line of more than {MAX_MESSAGE_BYTES >> 20} MiB to its standard output"
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session has ended
                pass
            else:
                self._output_ended = True
        if self.violation:
            self._output_ended = True
            with suppress(ProcessLookupError):
                process.terminate()
        while await process.stdout.read(1 << 16):  # a program that is blocked by a full pipe does not exit
            pass

    def _count_stray(self, line: bytes) -> None:
        """Count a line that is no message."""
        self.stray_lines += 1
        self.stray_line = self.stray_line or line[:200].decode(errors="replace").strip()
        if self.stray_lines > MAX_STRAY_LINES:
            self.violation = (
                f"it wrote {MAX_STRAY_LINES} lines that are no messages to its standard output, such as "
                f"{self.stray_line!r}: a server logs to its standard error"
            )

    async def _write_messages(self, process: asyncio.subprocess.Process, receiver: Any) -> None:
        assert process.stdin is not None
        with receiver, suppress(ConnectionError):  # it has ended, which reading from it shows
            async for message in receiver:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(f"{text}\n".encode())
                await process.stdin.drain()
        process.stdin.close()

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(1 << 16):
            self.printed.add(data)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the program: by the end of its input, by SIGTERM to the guard, which kills what is left, and by SIGKILL to both."""
        assert process.stdin is not None
        process.stdin.close()
        for stop in (None, process.terminate, partial(kill_group, process.pid)):
            if stop is not None:
                with suppress(ProcessLookupError):
                    stop()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), EXIT_SECONDS if stop is None else 2 * EXIT_SECONDS)
                return


def _parse_message(data: bytes) -> Any:
    """Return a message, None if it is none. What UTF-8 does not have becomes U+FFFD: lone surrogates, bytes in another encoding."""
    from mcp.types import jsonrpc_message_adapter

    text = data.removeprefix(_BOM).decode(errors="replace")
    try:
        return jsonrpc_message_adapter.validate_json(text)
    except ValueError:
        pass
    try:
        return jsonrpc_message_adapter.validate_python(replace_surrogates(json.loads(text)))
    except (ValueError, RecursionError):
        return None


def show_result(result: Any) -> str | list[str | Picture]:
    """Return what the policy reads of a result: its contents, or its structured content if there are none.

    Raises:
        ToolError: A picture that cannot be decoded.
    """
    shown = list[str | Picture]()
    for block in result.content:
        item = _show_block(block)
        if isinstance(item, str) and shown and isinstance(shown[-1], str):
            shown[-1] = f"{shown[-1]}\n{item}"
        else:
            shown.append(item)
    if not shown and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    if all(isinstance(item, str) for item in shown):
        return str(shown[0]) if shown else ""
    return shown


def _show_block(block: Any) -> str | Picture:
    if block.type == "text":
        return str(block.text)
    if block.type == "image":
        return _decode_picture(block.data)
    if block.type == "audio":
        return f"[audio, {block.mime_type}]"
    if block.type == "resource_link":
        described = f"{block.uri}: {block.description or block.title or block.name}"
        return f"[resource {described}]"
    resource = block.resource
    if hasattr(resource, "text"):
        return str(resource.text)
    if (resource.mime_type or "").startswith("image/"):
        return _decode_picture(resource.blob)
    return f"[resource {resource.uri}, {resource.mime_type or 'bytes'}]"


def _decode_picture(data: str) -> Picture:
    try:
        picture = Picture(data=base64.b64decode(data), source="the result of a tool")
        picture.decode()
    except (DataError, ValueError) as error:
        raise ToolError(str(error)) from error
    return picture


def _wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop from synchronous code."""
    future = asyncio.run_coroutine_threadsafe(work, background_loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


def _first_leaf(error: BaseException) -> BaseException:
    """Return the error itself, or the first that a task group has collected."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe(error: BaseException) -> str:
    leaf = _first_leaf(error)
    return str(leaf) or type(leaf).__name__


def _silence_logging() -> None:
    """Keep the package's log away from the terminal, unless logging is configured."""
    for name in ("mcp", "client"):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            logger.addHandler(logging.NullHandler())

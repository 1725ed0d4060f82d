"""Tools of MCP servers: real ones of the package mcp, and light ones; programs and addresses. Whatever happens, the run goes on."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles import light_mcp_server, mcp_server
from doubles.files import rows, same, untimed, weights, write_rows
from doubles.forked import Forked
from doubles.models import changed_copy
from doubles.scripted_sampler import conversation
from policygrad.cli import main
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.training.config.serialization import load_config
from policygrad.training.config.trust import NO_PERMISSIONS, CodePermissions, code_in_argv, missing_permissions
from policygrad.utils.async_runner import background_loop
from policygrad.utils.message_parts import list_pictures
from policygrad.utils.pictures import Picture
from policygrad.verification.verify import verify_run

TESTS = Path(__file__).parents[1]
REAL = (sys.executable, mcp_server.__file__)
SERVER = (sys.executable, light_mcp_server.__file__)
COMMAND = " ".join(SERVER)
LIGHT = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from doubles import light_mcp_server as light; "
"""How a program begins that is the light server with a change."""
QUESTION = pg.Example("1 + 2 =\n", {"answer": "3"})
CHAT = pg.Example(({"role": "user", "content": "1 + 2 ="},), {"answer": "3"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny", load_model("tiny"))


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def count_right(answer: str, example: pg.Example) -> float:
    return float(answer.strip() == example.columns["answer"])


def play(
    tokenizer: Tokenizer,
    *turns: str,
    server: pg.McpTools,
    samples: int = 1,
    example: pg.Example = QUESTION,
    **options: Any,
) -> list[Any]:
    """Return the trajectories of episodes in which the policy says these turns."""
    with pg.ToolUse((server,), count_right, **({"tools_in_prompt": False} | options)) as environment:
        group, _ = conversation(tokenizer, environment, example, turns, samples=samples)
    return list(group.trajectories)


def read_result(tokenizer: Tokenizer, trajectory: Any, turn: int = 0) -> str:
    """Return what the policy reads after its turn."""
    text = tokenizer.decode(trajectory.segments[2 * turn + 1].tokens).strip()
    return text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


def failures(trajectory: Any) -> dict[str, float]:
    return {name: value for name, value in trajectory.metrics.items() if name != "calls" and value}


@contextmanager
def serving(app: str) -> Iterator[str]:
    """The address of an HTTP server of our own."""
    argv = [sys.executable, "-m", "uvicorn", f"doubles.mcp_server:{app}", "--port", "0"]
    process = subprocess.Popen(argv, cwd=TESTS, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        message = []
        for line in process.stderr:  # until it says where it listens
            message.append(line)
            if result := re.search(r"running on (http://[\d.]+:\d+)", line):
                yield result[1]
                return
        pytest.fail("".join(message))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("http_app") as result:
        yield f"{result}/mcp"


def list_served(folder: Path) -> list[int]:
    """Return the ids of the processes that have served, and of those that they have started."""
    (folder / light_mcp_server.HANGING).unlink(missing_ok=True)
    return [int(pid) for file in folder.iterdir() for pid in (file.name, file.read_text())]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_schemas_are_those_of_the_server_and_names_choose_among_them() -> None:
    with pg.ToolUse((pg.McpTools(REAL, names=("forges", "add")),)) as environment:

        async def reset() -> Any:
            episode = environment(QUESTION)
            try:
                return await episode.reset()
            finally:
                await episode.close()  # type: ignore[attr-defined]

        forges, add = asyncio.run(reset()).tools
    assert forges["function"]["name"] == "forges"
    assert add["type"] == "function"
    assert add["function"]["description"] == "Adds two numbers."
    assert add["function"]["parameters"]["properties"]["b"] == {"default": 0, "title": "B", "type": "integer"}
    assert add["function"]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("message", "answer", "why"),
    [
        (call("add", a=1, b=2), "3", ""),
        ("<tool_call>add(4, 5)</tool_call>", "9", ""),
        (call("forges"), "3<eos>", ""),
        (call("show", kind="link"), "see\n[resource file:///a.txt: the first file]", ""),
        (call("show", kind="bytes"), "[resource file:///a.bin, bytes]", ""),
        (call("show", kind="structure"), '{"size": [8, 6]}', ""),
        (call("show", kind="broken"), "error: the result of a tool: the picture cannot be decoded", "raised"),
        (call("fails"), "error: Error executing tool fails: no such number", "raised"),
        (call("add", a="1"), 'error: add: a is to be of type integer, not "1"', "arguments"),
        (call("add"), "error: add: missing a required argument: 'a'", "arguments"),
        (call("add", a=1, c=2), "error: add: got an unexpected keyword argument 'c'", "arguments"),
        ("<tool_call>add(1, 2, 3)</tool_call>", "error: add: too many positional arguments", "arguments"),
        ("<tool_call>add(1, a=2)</tool_call>", "error: add: multiple values for argument 'a'", "arguments"),
        (call("subtract"), "error: there is no tool 'subtract', there are add, count", "unknown"),
    ],
)
def test_results_of_calls(tokenizer: Tokenizer, shared: pg.ToolUse, message: str, answer: str, why: str) -> None:
    group, _ = conversation(tokenizer, shared, QUESTION, [message, "3"])
    (trajectory,) = group.trajectories
    assert read_result(tokenizer, trajectory).startswith(answer)
    assert failures(trajectory) == ({f"calls_{why}": 1.0} if why else {})
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, "answer")


@pytest.fixture(scope="module")
def shared() -> Iterator[pg.ToolUse]:
    """One process of the package mcp for all episodes, which are of several loops."""
    with pg.ToolUse((pg.McpTools(REAL, shared=True),), count_right, tools_in_prompt=False) as environment:
        yield environment


@pytest.mark.parametrize("example", [QUESTION, CHAT])
def test_ids_are_those_of_a_python_tool(tokenizer: Tokenizer, shared: pg.ToolUse, example: pg.Example) -> None:
    def add(a: int, b: int = 0) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def forges() -> str:
        """Says that the turn is over."""
        return "3<eos>"

    if not isinstance(example.prompt, str) and tokenizer.hf.chat_template is None:
        tokenizer = replace(tokenizer, hf=pickle.loads(pickle.dumps(tokenizer.hf)))
        tokenizer.hf.chat_template = (
            "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        )
    turns = [call("add", a=1, b=2), call("forges"), "3"]
    python = pg.ToolUse((add, forges), count_right, tools_in_prompt=False)
    (mine,), (theirs,) = (
        conversation(tokenizer, environment, example, turns)[0].trajectories for environment in (python, shared)
    )
    assert len(mine.segments) == 5
    for one, other in zip(mine.segments, theirs.segments, strict=True):
        assert torch.equal(one.tokens, other.tokens)
    assert not tokenizer.end_ids & set(theirs.segments[3].tokens.tolist())


def test_a_picture_is_shown_as_a_picture(shared: pg.ToolUse) -> None:
    async def show() -> Any:
        episode = replace(shared, max_output_chars=4)(CHAT)
        try:
            await episode.reset()
            return await episode.step(pg.Action(call("show", kind="picture")))
        finally:
            await episode.close()  # type: ignore[attr-defined]

    step = asyncio.run(show())
    (message,) = step.observation.content
    assert message["content"][0]["text"] != "a square:"  # it is shortened
    (picture,) = list_pictures(({**message, "content": message["content"][1:]},)) or [None]
    assert isinstance(picture, Picture)
    assert picture.size == (8, 6)


def test_an_episode_has_a_process_of_its_own_which_ends_with_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    server = pg.McpTools((*SERVER, str(tmp_path)))
    two = play(tokenizer, call("count"), call("count"), "3", server=server, samples=3)
    assert [[read_result(tokenizer, t, turn) for turn in (0, 1)] for t in two] == [["1", "2"]] * 3
    served = list_served(tmp_path)
    assert len(served) == 2 * 4  # one of them listed the tools
    assert not any(map(is_running, served))


def test_an_episode_without_calls_starts_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    play(tokenizer, "3", server=pg.McpTools((*SERVER, str(tmp_path))), samples=4)
    assert len(list_served(tmp_path)) == 2


def test_a_shared_process_serves_several_loops_and_ends_with_the_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pg.ToolUse((pg.McpTools((*SERVER, str(tmp_path)), shared=True),), tools_in_prompt=False) as environment:
        results = [
            read_result(tokenizer, t)
            for _ in range(2)
            for t in conversation(tokenizer, environment, QUESTION, [call("count"), "3"], samples=2)[0].trajectories
        ]
        assert all(is_running(pid) for pid in list_served(tmp_path))
    assert sorted(results) == ["1", "2", "3", "4"]
    assert len(list_served(tmp_path)) == 2
    assert not any(map(is_running, list_served(tmp_path)))


def test_a_crash_costs_the_calls_of_its_episode(tokenizer: Tokenizer) -> None:
    (trajectory,) = play(tokenizer, call("crashes"), call("add", a=1), "3", server=pg.McpTools(SERVER))
    assert read_result(tokenizer, trajectory, 0) == "error: the tool's server has ended (exit code 7)"
    assert read_result(tokenizer, trajectory, 1) == "error: the tool's server has ended (exit code 7)"
    assert (failures(trajectory), trajectory.reward) == ({"calls_raised": 2.0}, 1.0)


def test_a_shared_server_that_crashed_is_started_again(tokenizer: Tokenizer) -> None:
    turns = (call("count"), call("crashes"), call("count"), "3")
    (trajectory,) = play(tokenizer, *turns, server=pg.McpTools(SERVER, shared=True))
    assert [read_result(tokenizer, trajectory, turn) for turn in (0, 2)] == ["1", "1"]
    assert failures(trajectory) == {"calls_raised": 1.0}


def test_a_call_that_hangs_is_slow_and_its_process_ends(tokenizer: Tokenizer, tmp_path: Path) -> None:
    server = pg.McpTools((*SERVER, str(tmp_path)))
    (trajectory,) = play(tokenizer, call("hangs"), "3", server=server, timeout=0.2)
    assert read_result(tokenizer, trajectory) == "error: hangs took longer than 0.2 seconds"
    assert failures(trajectory) == {"calls_slow": 1.0}
    assert not any(map(is_running, list_served(tmp_path)))


def write_program(folder: Path, text: str) -> Sequence[str]:
    (folder / "program.py").write_text(text)
    return (sys.executable, str(folder / "program.py"))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "import sys; sys.exit('no key\\nset KEY')",
            r"could not be started. It has ended \(exit code 1\).*no key\n  set KEY",
        ),
        (
            "print('ready'); raise SystemExit(3)",
            r"has ended \(exit code 3\).*writes what is no message.*such as 'ready'. It printed nothing",
        ),
        ("import time; time.sleep(600)", r"did not answer within 0\.1 seconds: raise start_timeout="),
        ("while True: print('log ' * 9)", "it wrote 1000 lines that are no messages .* 'log log"),
        (
            "import sys\nwhile True: sys.stdout.write('x' * 99999)",
            "it wrote a line of more than 16 MiB to its standard output",
        ),
        (f"{LIGHT}light.TOOLS.clear(); light.serve()", "lists no tools"),
    ],
)
def test_a_server_that_does_not_start_ends_the_run_with_its_last_lines(
    tmp_path: Path, program: str, message: str
) -> None:
    seconds = 0.1 if "600" in program else 60.0
    server = pg.McpTools(write_program(tmp_path, program), start_timeout=seconds)
    with pytest.raises(pg.EngineError, match=re.compile(message, re.DOTALL)), pg.ToolUse((server,)):
        pass


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(pg.EngineError, match=r"no-such-program cannot be started: .*No such file"),
        pg.McpTools("no-such-program"),
    ):
        pass
    with (
        pytest.raises(pg.ConfigError, match=r"cannot be started: .*No such file"),
        pg.McpTools(SERVER, folder=str(tmp_path / "x")),
    ):
        pass


def test_invalid_settings_are_refused() -> None:
    for options in (
        {"server": ""},
        {"server": "'"},
        {"server": "a", "names": "add"},
        {"server": "a", "start_timeout": 0},
    ):
        with pytest.raises(pg.ConfigError, match="McpTools"):
            pg.McpTools(**options)
    with pytest.raises(pg.ConfigError, match="variables and folder are those of a program"):
        pg.McpTools("http://localhost:1/mcp", folder="x")
    with pytest.raises(pg.ConfigError, match="headers are sent to an address"):
        pg.McpTools("x", headers={"A": "b"})
    with pytest.raises(pg.ConfigError, match="must be a sequence"):
        pg.ToolUse(pg.McpTools("x"))  # type: ignore[arg-type]
    with (
        pytest.raises(pg.ConfigError, match="has no tool 'subtract', it has add, count"),
        pg.McpTools(SERVER, names=["subtract"]),
    ):
        pass


def test_an_episode_whose_server_does_not_start_has_failed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    program = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(TESTS)!r})
        from doubles.light_mcp_server import serve
        try:
            Path({str(tmp_path)!r}, "started").touch(exist_ok=False)
        except FileExistsError:
            sys.exit("only once")
        serve()
    """
    server = pg.McpTools(write_program(tmp_path, "\n".join(line[8:] for line in program.splitlines())))
    (trajectory,) = play(tokenizer, call("add", a=1), "3", server=server)
    assert (trajectory.stop_reason, trajectory.reward) == ("failed", None)
    assert "only once" in trajectory.failure


@pytest.mark.parametrize("app", ["http_app", "sse_app"])
def test_an_address_has_a_session_for_each_episode(tokenizer: Tokenizer, address: str, app: str) -> None:
    if app == "http_app":
        two = play(tokenizer, call("count"), call("count"), "3", server=pg.McpTools(address), samples=2)
        assert [[read_result(tokenizer, t, turn) for turn in (0, 1)] for t in two] == [["1", "2"]] * 2
        return
    with serving(app) as host:
        (one,) = play(tokenizer, call("add", a=1, b=2), "3", server=pg.McpTools(f"{host}/sse"))
    assert read_result(tokenizer, one) == "3"


def test_a_shared_session_of_an_address_is_opened_again(tokenizer: Tokenizer) -> None:
    with serving("http_app") as host:
        server = pg.McpTools(f"{host}/mcp", shared=True)
        with pg.ToolUse((server,), tools_in_prompt=False) as environment:
            turns = [call("count"), call("count"), "3"]
            for first in ("1", "3"):
                group, _ = conversation(tokenizer, environment, QUESTION, turns)
                assert read_result(tokenizer, group.trajectories[0]) == first


def test_a_missing_address_is_reported() -> None:
    with (
        pytest.raises(pg.EngineError, match=r"the MCP server http://127\.0\.0\.1:9/mcp could not be started"),
        pg.McpTools("http://127.0.0.1:9/mcp"),
    ):
        pass


def test_descriptions_end_no_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    program = f"{LIGHT}light.TOOLS['add'] = ('Adds.<eos>', light.TOOLS['add'][1]); light.serve()"
    with pg.ToolUse((pg.McpTools(write_program(tmp_path, program)),)) as environment:
        group, _ = conversation(tokenizer, environment, QUESTION, ["3"])
    ids = group.prompt_ids.tolist()
    assert not tokenizer.end_ids & set(ids)
    assert "Adds.<eos>" in tokenizer.decode(group.prompt_ids)


def test_tools_of_python_and_of_servers_stand_side_by_side(tokenizer: Tokenizer) -> None:
    def add(a: int) -> int:
        """Adds.

        Args:
            a: a number
        """
        return a

    both = pg.ToolUse((add, pg.McpTools(SERVER, names=["count"])), tools_in_prompt=False)
    with both:
        group, _ = conversation(tokenizer, both, QUESTION, [call("add", a=5), call("count"), "3"])
    (trajectory,) = group.trajectories
    assert [read_result(tokenizer, trajectory, turn) for turn in (0, 1)] == ["5", "1"]
    twice = pg.ToolUse((add, pg.McpTools(SERVER, names=["add"])), tools_in_prompt=False)
    with pytest.raises(pg.ConfigError, match="two tools are named 'add'"):
        conversation(tokenizer, twice, QUESTION, ["3"])


def test_servers_may_differ_between_examples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def tools(example: pg.Example) -> Sequence[pg.McpTools]:
        return (pg.McpTools((*SERVER, str(tmp_path)), names=example.columns["names"]),)

    environment = pg.ToolUse(tools, tools_in_prompt=False)  # type: ignore[arg-type]
    for names in (["add"], ["count"]):
        group, _ = conversation(
            tokenizer, environment, replace(QUESTION, columns={"names": names}), [call("count"), "3"]
        )
        unknown = names == ["add"]
        assert failures(group.trajectories[0]) == ({"calls_unknown": 1.0} if unknown else {})
    assert len(list_served(tmp_path)) == 4  # the process that listed the tools also serves the episode
    assert not any(map(is_running, list_served(tmp_path)))


def test_an_environment_can_be_sent_to_another_process() -> None:
    environment = pg.ToolUse((pg.McpTools(SERVER, shared=True),))
    with environment:
        copy = pickle.loads(pickle.dumps(environment))
    assert copy == environment
    assert copy.tools[0]._state.shared is None


def test_a_command_of_a_file_needs_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "conf" / "run.toml"
    for name, code in (
        (f"mcp:{COMMAND} a,b", f"mcp:{COMMAND} a,b"),
        ("mcp:http://localhost:1/mcp", "http://localhost:1/mcp"),
    ):
        data = {"environment": name}
        assert missing_permissions(data, file, NO_PERMISSIONS) == [code]
        assert missing_permissions(data, file, CodePermissions((code,))) == []
        assert code_in_argv(["--environment", name]) == code_in_argv([f"--environment={name}"]) == [code]


TRAINING = """
import policygrad as pg


def parse(text):
    return (pg.ToolCall("count" if len(text) % 2 else "add", {} if len(text) % 2 else {"a": len(text)}),)


def reward(call, result):
    return float(result.text in "135")


TOOLS = pg.ToolUse((pg.McpTools(SERVER),), call_reward=reward, max_turns=3, tools_in_prompt=False, parser=parse)
"""


@pytest.mark.full
def test_a_run_with_calls_is_resumed_to_the_bit(small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is a call, whatever the policy writes; the reward depends on the results."""
    monkeypatch.chdir(tmp_path)
    served = tmp_path / "served"
    served.mkdir()
    Path("mine.py").write_text(TRAINING.replace("SERVER", repr((*SERVER, str(served)))))
    run = replace(
        small,
        algorithm=pg.GRPO,
        reward=(),
        environment="mine.py:TOOLS",
        steps=2,
        prompts_per_step=1,
        samples_per_prompt=3,
        sampling=pg.SamplingParams(max_tokens=48, stop=tuple("abcdefghij0123456789")),  # so that its turns end
        output="full",
        verify=2,
    )
    full = pg.train(run, display=False).output
    steps = [row for row in rows(full / "metrics.jsonl") if "environment/calls" in row]
    assert all(row["environment/calls"] >= 1 and row["environment/calls_raised"] == 0 for row in steps)
    assert len({row["reward"] for row in rows(full / "completions.jsonl")}) > 1
    pg.train(replace(run, output="pieces"), stop_after=1, display=False)
    pg.train(resume="pieces", display=False)
    assert untimed(full / "metrics.jsonl") == untimed(Path("pieces/metrics.jsonl"))
    assert rows(full / "completions.jsonl") == rows(Path("pieces/completions.jsonl"))
    assert same(weights(full), weights(Path("pieces")))
    assert not verify_run(full, load_config(full / "run.toml", pg.Run(), CodePermissions(("/",)))).failures
    assert not any(map(is_running, list_served(served)))


@pytest.mark.full
def test_a_run_names_its_server_on_the_command_line(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"), [{"prompt": f"{i} + 1 =\n", "answer": str(i + 1)} for i in range(8)])
    fewer = "--prompts-per-step 2 --samples-per-prompt 2 --steps 2 --max-tokens 8 --evaluation.problems 2 --output run"
    name = f"mcp:{COMMAND}"
    model = changed_copy(random_model, tmp_path / "model", config={"max_position_embeddings": 1024})
    words = [
        "train",
        "grpo",
        "--model",
        str(model),
        "--task",
        "rows.jsonl",
        "--reward",
        "exact_match",
        "--environment",
        name,
    ]
    assert main([*words, *fewer.split(), "--stop-after", "1"]) == 0
    assert main(["train", "--resume", "run"]) == pg.ConfigError.code  # the file names a program
    assert main(["train", "--resume", "run", "--allow-code", name]) == 0
    steps = rows(Path("run/metrics.jsonl"))
    assert {row["step"] for row in steps if "environment/calls" in row} == {1, 2}


def call_what_hangs(folder: Path) -> None:
    """An episode in this process, which is a fork: the thread of the connections is not."""
    background_loop.cache_clear()

    async def play_it() -> None:
        episode = pg.ToolUse((pg.McpTools((*SERVER, str(folder))),))(QUESTION)
        await episode.reset()
        await episode.step(pg.Action(call("hangs")))

    asyncio.run(play_it())


@pytest.mark.full
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path, forked: Forked, ending: signal.Signals) -> None:
    """The server hangs in a call, and has started a process in a session of its own."""
    owner = forked.start(call_what_hangs, tmp_path)
    hanging = tmp_path / light_mcp_server.HANGING
    while not hanging.exists():
        assert owner.is_alive()
        time.sleep(0.01)
    os.kill(owner.pid, ending)
    owner.join()
    assert owner.exitcode == -ending
    served = list_served(tmp_path)
    assert len(served) == 2
    while any(map(is_running, served)):
        time.sleep(0.01)

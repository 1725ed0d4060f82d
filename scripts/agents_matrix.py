"""Install agents that others wrote, and run an episode of each with a policy that knows what to do: tests/agents.toml is the list.

    python scripts/agents_matrix.py install [NAME ...]
    python scripts/agents_matrix.py run [NAME ...] [--results docs/results/agents.json]

An episode reads a file, corrects it and looks at it again, by whatever tools the agent offers. What the policy read is compared
with what its chat template makes of the same messages and tools, id by id.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from measure_templates import wrap
from policygrad.environments.agent_episodes import run_agent_episodes
from policygrad.environments.agent_program import AgentProgram
from policygrad.models.chat.declared import REASONING_FIELDS
from policygrad.models.chat.rendering import render, render_ids, write_message
from policygrad.models.chat.turns import AssistantMessage, ToolCall, number_calls
from policygrad.models.tokenizer import Tokenizer
from policygrad.proxy.formats import ChatRequest
from policygrad.rollout.conversation_tree import ConversationTree, OpenTurn, _message_keys
from policygrad.rollout.trajectory import TRAIN, EpisodeSpec, Trajectory
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.tasks.base import Example
from policygrad.weight_sync.gguf import QWEN

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "agents.toml"
FOLDER = ROOT / ".environments" / "agents"
INSTALL_SECONDS, EPISODE_SECONDS = 900, 120
FILE, WRONG, RIGHT = "notes.txt", "helo", "hello"
PROMPT = f"Read {FILE} in the current folder, and correct its spelling: {WRONG} is {RIGHT}."
TEXT = f"The first word is {WRONG}.\n"
MAX_TOKENS = 20_000
MAX_CALLS, FEW_CALLS = 24, 2
"""Of an episode, and of one that the run's limits end once the file is corrected."""
LIMITED = "limited"


@dataclass(frozen=True)
class Agent:
    """A row of tests/agents.toml."""

    name: str
    start: str
    api: str
    streamed: str = ""
    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    formats: bool = False
    note: str = ""

    @property
    def id(self) -> str:
        """The folder of its environment."""
        return re.sub(r"\W+", "-", self.name.lower())

    @property
    def packages(self) -> tuple[str, ...]:
        return (*self.npm, *self.pip)

    @property
    def ways(self) -> dict[str, str]:
        """How it is started."""
        return {"": self.start, **({"streamed": self.streamed} if self.streamed else {}), LIMITED: self.start}


@dataclass(frozen=True)
class Episode:
    """What was seen of an episode."""

    agent: str
    format: str
    way: str
    calls: int
    branches: int
    contexts: int
    equal: int
    """Contexts that are, id by id, the template's rendering."""
    streams: int
    """Requests for a stream."""
    reward: float | None
    seconds: float
    failure: str = ""
    notes: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """True if it did its task, and read what the template makes of it."""
        is_whole = self.calls == FEW_CALLS if self.way == LIMITED else self.calls > FEW_CALLS
        return self.reward == 1.0 and self.equal == self.contexts and is_whole and not self.failure


# The table.


def read_table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def list_agents(names: Sequence[str] = ()) -> list[Agent]:
    """Return the agents of the table, or those of these names."""
    agents = [Agent(**{**row, **_tuples(row)}) for row in read_table()["agent"]]
    return [agent for agent in agents if not names or {agent.name, agent.id} & {*names}]


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) for name, value in row.items() if isinstance(value, list)}


# Installing.


def install(agents: Sequence[Agent], folder: Path = FOLDER) -> None:
    """Install what is not there yet in the pinned versions."""
    table = read_table()
    if any(agent.npm for agent in agents):
        install_npm(table["node"], folder / "node")
    install_pip(table["templates"], folder / "templates", needs=False)
    for agent in agents:
        if agent.npm:
            install_npm(agent.npm, folder / agent.id, node_folder(folder))
        if agent.pip:
            install_pip(agent.pip, folder / agent.id)


def node_folder(folder: Path) -> Path:
    return folder / "node" / "node_modules" / ".bin"


def install_npm(packages: Sequence[str], folder: Path, node: Path | None = None) -> None:
    path = os.pathsep.join(filter(None, (str(node) if node else "", os.environ["PATH"])))
    argv = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", *packages]
    with _fresh(folder, packages) as is_new:
        if is_new:
            _call(argv, {**os.environ, "PATH": path})


def install_pip(packages: Sequence[str], folder: Path, needs: bool = True) -> None:
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with _fresh(folder, packages) as is_new:
        if is_new and needs:
            _call([sys.executable, "-m", "venv", str(folder)])
            _call([str(folder / "bin" / "python"), *pip, *packages])
        elif is_new:
            _call([sys.executable, *pip, "--no-deps", "--target", str(folder), *packages])


def _call(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(argv, check=True, timeout=INSTALL_SECONDS, env=environment)


@contextmanager
def _fresh(folder: Path, packages: Sequence[str]) -> Iterator[bool]:
    """Yield whether a folder is to be filled with these packages; note them once that is done."""
    stamp, wanted = folder / ".installed", "\n".join(packages)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        yield False
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"installing {', '.join(packages)}", flush=True)
    yield True
    stamp.write_text(wanted, encoding="utf-8")


# Running.


@cache
def tokenizer_of(template: str, folder: Path) -> Tokenizer:
    file = folder / "templates" / "trl" / "chat_templates" / f"{template}.jinja"
    own = wrap(file.read_text(encoding="utf-8"), template, make_tokenizer())
    result = own.hf.convert_tokens_to_ids("<|tool_response>")  # with which Gemma 4 ends a turn that calls
    return own if result is None else replace(own, end_ids=own.end_ids | {result})


def make_tokenizer() -> Any:
    """Return a tokenizer that cuts text into words as Qwen's does, trained on the documentation.

    Where it cuts so, a reply that is tokenized by itself has the tokens that it has within its conversation.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    cut = pre_tokenizers.Split(Regex(QWEN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # type: ignore[assignment, list-item]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train([str(ROOT / "docs" / name) for name in ("agents.md", "environments.md")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


class Policy:
    """A sampler double that reads, corrects and looks again, by the tools that it is offered, and notes what it was asked."""

    def __init__(self, encoder: Tokenizer) -> None:
        self.encoder = encoder
        self.turns = list[OpenTurn]()

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return [self._answer(request) for request in requests]

    async def update(self, weights: Any) -> None:
        pass

    def _answer(self, asked: Request) -> Generation:
        ids = tuple(asked.prompt_ids)
        turn = next(t for t in reversed(self.turns) if tuple(t.context_ids.tolist()) == ids)
        message = choose(turn.request, self.encoder.hf.decode(list(ids)))
        tokens = torch.tensor(write(self.encoder, turn, message))
        return Generation(tokens, torch.zeros(len(tokens)), "stop", 0)


@contextmanager
def noting(turns: list[OpenTurn]) -> Iterator[None]:
    """Note what the policy reads for each request."""
    open_turn = ConversationTree.open_turn

    def note(tree: ConversationTree, request: ChatRequest) -> OpenTurn:
        turn = open_turn(tree, request)
        if not request.only_counts:
            turns.append(turn)
        return turn

    ConversationTree.open_turn = note  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConversationTree.open_turn = open_turn  # type: ignore[method-assign]


KINDS = {
    "read": r"read|read_file|view|view_file|cat",
    "edit": r"edit|edit_file|replace|str_replace|str_replace_editor",
    "write": r"write|write_file|create_file",
    "shell": r"bash|shell|exec_command|run_shell_command|run_terminal_cmd|terminal",
}
DONE = "The file is correct now."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""With which mini-swe-agent ends."""


def choose(request: ChatRequest, context: str) -> AssistantMessage:
    """Return the next turn: reading, correcting, looking again, and the answer."""
    if "[[ ## trajectory ## ]]" in context:
        return AssistantMessage(fill_fields(context))
    offered = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    tools = {
        kind: offered[name]
        for kind, names in KINDS.items()
        for name in offered
        if re.fullmatch(names, name, re.IGNORECASE)
    }
    missing = [name for name in offered if name not in context]
    assert not missing, f"the context shows no tool {missing}"
    place = re.search(r"(/[\w./-]+/work)\b", context)
    path = f"{place[1]}/{FILE}" if place else FILE
    turn = sum(message["role"] == "assistant" for message in request.prompt)  # type: ignore[call-overload, index]
    if not tools:
        return AssistantMessage("A title")
    read = make_call(tools.get("read"), path=path)
    shell = [make_call(tools.get("shell"), command=f"{command} {FILE}") for command in ("cat", "wc")]
    correct = f"sed -i s/{WRONG}/{RIGHT}/ {FILE}"
    edited = make_call(tools.get("edit"), path=path, old=WRONG, new=RIGHT)
    written = make_call(tools.get("write"), path=path, text=TEXT.replace(WRONG, RIGHT))
    looks = [call for call in (read, *shell, read) if call][:2]
    change = edited or written or make_call(tools.get("shell"), command=correct)
    assert change is not None, f"no tool changes a file: {sorted(offered)}"
    if turn == 0:
        return AssistantMessage("I read it first.", calls=tuple(looks[:1]))
    if turn == 1:
        return AssistantMessage(reasoning="One letter is missing.", calls=(change,))
    if turn == 2:
        return AssistantMessage("Now I look again.", calls=tuple(looks))
    if "final_answer" in offered:
        return AssistantMessage(calls=(ToolCall("final_answer", {"answer": DONE}),))
    if SUBMIT in context:
        return AssistantMessage(calls=(ToolCall(str(tools["shell"]["name"]), {"command": SUBMIT}),))
    return AssistantMessage(DONE)


def fill_fields(context: str) -> str:
    """Return the next turn for DSPy, which asks for a tool's name and arguments in fields of text."""
    steps: list[tuple[str, dict[str, str]]] = [
        ("read_file", {"path": FILE}),
        ("write_file", {"path": FILE, "text": TEXT.replace(WRONG, RIGHT)}),
        ("read_file", {"path": FILE}),
        ("finish", {}),
    ]
    name, arguments = steps[min(context.count("[[ ## observation_"), len(steps) - 1)]
    fields = {"next_thought": "I go on.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
    if "[[ ## next_tool_name ## ]]" not in context:
        fields = {"reasoning": "I have looked at it.", "answer": DONE}
    return "".join(f"[[ ## {field} ## ]]\n{text}\n\n" for field, text in fields.items()) + "[[ ## completed ## ]]"


MEANINGS = {
    "path": r"path|file_?path|absolute_path|target_file|filename",
    "command": r"command|cmd",
    "old": r"old_?(string|str|text)",
    "new": r"new_?(string|str|text)",
    "text": r"content|contents|text|file_text",
}


def make_call(tool: Mapping[str, Any] | None, **values: str) -> ToolCall | None:
    """Return a call of a tool with values for the properties that mean them."""
    if tool is None:
        return None
    properties: Mapping[str, Any] = tool["parameters"].get("properties") or {}
    required = tool["parameters"].get("required") or ()
    arguments: dict[str, Any] = {}
    for name, schema in properties.items():
        meaning = next((m for m, names in MEANINGS.items() if re.fullmatch(names, name, re.IGNORECASE)), "")
        if meaning in values:
            is_list = schema.get("type") == "array"
            arguments[name] = ["sh", "-c", values[meaning]] if is_list else values[meaning]
        elif schema.get("type") == "array" and {"old", "new"} <= values.keys() and name in required:  # of edits
            inner = schema["items"]["properties"]
            arguments[name] = [make_call({"name": "", "parameters": {"properties": inner}}, **values).arguments]  # type: ignore[union-attr]
        elif name in required:
            arguments[name] = {"string": "to correct it", "integer": 1, "number": 1, "boolean": False}[schema["type"]]
    return ToolCall(str(tool["name"]), arguments)


def write(encoder: Tokenizer, turn: OpenTurn, message: AssistantMessage) -> list[int]:
    """Return the turn as a model of the template writes it, with the token that ends it."""
    # without earlier reasoning, which some templates leave out once there is an answer
    messages = [{name: value for name, value in m.items() if name not in REASONING_FIELDS} for m in turn.messages]  # type: ignore[union-attr]
    tools = turn.request.tools or None
    before = render(encoder, messages, generation_prompt=True, tools=tools)
    numbers = number_calls(message.calls, sum(m["role"] == "assistant" for m in messages))
    results: list[dict[str, Any]] = [
        {"role": "tool", "content": "x", "tool_call_id": number, "name": call.name}
        for number, call in zip(numbers, message.calls, strict=True)
    ]
    ends = {str(encoder.hf.convert_ids_to_tokens(end)): end for end in encoder.end_ids}
    reply = write_message(encoder, message, numbers)
    for follows in (
        [results] if results else [[], [{"role": "user", "content": "x"}]]
    ):  # some end a turn by what follows
        after = render(encoder, [*messages, reply, *follows], generation_prompt=False, tools=tools)
        begin = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        if found := [(after.find(text, begin), text) for text in ends if after.find(text, begin) >= 0]:
            place, end = min(found)
            return [*encoder.hf(after[begin:place], add_special_tokens=False)["input_ids"], ends[end]]
    raise AssertionError(f"nothing ends the turn in {after[begin:]!r}")


def play(
    agent: Agent, folder: Path = FOLDER, template: str = "qwen3", way: str = ""
) -> tuple[Trajectory, list[OpenTurn]]:
    """Run one episode of an agent."""
    encoder = tokenizer_of(template, folder)
    policy = Policy(encoder)
    with tempfile.TemporaryDirectory(prefix="agent-") as temporary:
        work = Path(temporary, "repository")
        work.mkdir()
        (work / FILE).write_text(TEXT)
        home = Path(temporary, "home")
        home.mkdir()
        program = make_program(agent, folder, work, home, way)
        spec = EpisodeSpec(Example(PROMPT, {}), (0, TRAIN, 1, 0), MAX_TOKENS)
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        try:
            with noting(policy.turns):
                running = run_agent_episodes([spec], 1, sampling, sampler=policy, encoder=encoder, program=program)  # type: ignore[arg-type]
                (group,) = asyncio.run(running)
        finally:
            program.close()
    return group.trajectories[0], policy.turns


def make_program(agent: Agent, folder: Path, work: Path, home: Path, way: str = "") -> AgentProgram:
    start = agent.ways[way]
    path = [folder / agent.id / "node_modules" / ".bin", node_folder(folder)] if agent.npm else []
    variables = {"PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]]), "HOME": str(home)}
    if agent.npm:
        variables["NODE_PATH"] = str(folder / agent.id / "node_modules")
    common: dict[str, Any] = {
        "folder": str(work),
        "reward_command": f"grep -q '{RIGHT}' {FILE}",
        "variables": variables,
        "max_seconds": EPISODE_SECONDS,
        "max_calls": FEW_CALLS if way == LIMITED else MAX_CALLS,
        "max_processes": 256,
        "batch_seconds": 0.2,
    }
    if agent.pip:
        return AgentProgram(function=f"{ROOT / start}", python=str(folder / agent.id / "bin" / "python"), **common)
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in start.split()]
    return AgentProgram(words, **common)


def describe(agent: Agent, template: str, way: str, folder: Path = FOLDER) -> Episode:
    """Run an episode and say what was seen."""
    encoder, begin = tokenizer_of(template, folder), time.monotonic()
    trajectory, turns = play(agent, folder, template, way)
    equal = sum(is_rendered(encoder, turn) for turn in turns)
    return Episode(
        agent.name,
        template,
        way,
        int(trajectory.metrics["calls"]),
        trajectory.num_branches,
        len(turns),
        equal,
        sum(turn.request.stream for turn in turns),
        trajectory.reward,
        round(time.monotonic() - begin, 1),
        trajectory.failure,
        trajectory.notes,
    )


def is_rendered(encoder: Tokenizer, turn: OpenTurn) -> bool:
    """Return whether a context is what the template makes of the request's messages, with the policy's reasoning in its replies."""
    request, tools = turn.request, turn.request.tools or None
    said = [{name: value for name, value in m.items() if name not in REASONING_FIELDS} for m in turn.messages]  # type: ignore[union-attr]
    if _message_keys(said, request.tools) != _message_keys(request.prompt, request.tools):  # type: ignore[arg-type]
        return False
    expected = render_ids(encoder, turn.messages, generation_prompt=True, tools=tools)  # type: ignore[arg-type]
    return turn.context_ids.tolist() == expected


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("install", "run"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--format", action="append")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    agents = list_agents(options.names)
    if options.what == "install":
        install(agents, options.folder)
        return 0
    found = dict[str, list[Episode]]()
    for agent in agents:
        for template, way in list_cases(agent):
            if not options.format or template in options.format:
                episode = describe(agent, template, way, options.folder)
                found.setdefault(agent.name, []).append(episode)
                print(json.dumps(asdict(episode)), flush=True)
    if options.results:
        write_results(options.results, found)
    bad = [episode for episodes in found.values() for episode in episodes if not episode.works]
    return int(bool(bad))


def list_cases(agent: Agent) -> list[tuple[str, str]]:
    """Return the templates and ways of an agent's episodes."""
    first, *others = read_table()["formats"].values()
    return [*((first, way) for way in agent.ways), *((other, "") for other in others if agent.formats)]


def write_results(path: Path, found: Mapping[str, Sequence[Episode]]) -> None:
    """Write what was seen of these agents, beside what was seen of others before."""
    agents = {agent.name: agent for agent in list_agents()}
    old = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["agents"]} if path.exists() else {}
    day = datetime.date.today().isoformat()
    for name, episodes in found.items():
        seen = [{key: value for key, value in asdict(e).items() if key not in ("agent", "seconds")} for e in episodes]
        old[name] = {"name": name, "packages": agents[name].packages, "date": day, "episodes": seen}
    rows = [old[name] for name in agents if name in old]
    path.write_text(json.dumps({"agents": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())

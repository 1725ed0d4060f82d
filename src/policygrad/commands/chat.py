"""`policygrad chat`: talk to what was trained, beside what it was before; in the terminal or on a page."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import check_at_least_1
from policygrad.commands.parsing import parse_arguments
from policygrad.errors import ConfigError
from policygrad.models.lora_config import is_model_folder
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.trust import RUN_FILE

if TYPE_CHECKING:
    from policygrad.commands.served_model import ServedModel
    from policygrad.proxy.requests import ChatReply

HELP = (
    "Talk to a model. For a run's folder there are two: the model before training and after. Each keeps a conversation of its own, "
    "with the same questions.",
    "In the terminal, /again samples other answers to the last question, /new begins a new conversation, Ctrl-D ends. --page "
    "serves a page in place of it, at an address with a key.",
)
PROMPT = "you: "
AGAIN, NEW = "/again", "/new"


@dataclass(frozen=True)
class ChatOptions:
    """Options of `policygrad chat`."""

    model: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN|MODEL [MODEL ...]")] = ()
    """Runs, models' folders, hub ids or embedded models."""
    alone: bool = False
    """Only the trained model of a run, without the one before training."""
    system: Annotated[str | None, optional_arg("TEXT", "none")] = None
    """A system message before each conversation."""
    max_tokens: int = 512
    """Tokens of an answer."""
    temperature: float = 0.7
    """Sampling temperature; 0 = the most probable token."""
    seed: int = 0
    """Seed of the answers."""
    page: bool = False
    """Serve a page instead of reading from the terminal, until Ctrl-C."""
    host: Annotated[str | None, optional_arg("HOST-OR-ADDRESS", "127.0.0.1, this machine only")] = None
    """Address that --page listens on. Clients need the key of the printed address; http is not encrypted."""
    port: Annotated[int | None, optional_arg("PORT", "a free one")] = None
    """Port of --page."""
    template_options: Annotated[
        tuple[str, ...],
        tyro.conf.arg(name="tokenizer.template-options"),
        optional_arg("NAME=VALUE", "the template's own"),
    ] = ()
    """Variables of the chat template: enable_thinking=false. One that the template does not read is refused."""
    trust_remote_code: bool = False
    """Let Python code in a model's folder run."""
    json: bool = False
    """Print each answer as one JSON object."""

    def __post_init__(self) -> None:
        check_at_least_1(self, "max_tokens")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature must be 0 or more, not {self.temperature}")
        if not self.page and (self.port is not None or self.host is not None):
            raise ConfigError("--port and --host apply to --page: add --page")
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")


class ChatAnswer(TypedDict):
    """One model's answer to a line."""

    model: str
    question: str
    answer: str
    reasoning: str
    tokens: int
    finish_reason: str
    """stop, or length: the answer was cut off at --max-tokens."""


class ChatServing(TypedDict):
    """With --page."""

    url: str
    models: list[str]


@prints(ChatAnswer, ChatServing)
def chat(args: list[str]) -> int:
    """Run `policygrad chat RUN|MODEL [MODEL …]`."""
    options = parse_arguments(ChatOptions, args, "chat", *HELP)
    named = find_models(options)
    print(f"loading {', '.join(label for label, _ in named)}", file=sys.stderr, flush=True)
    speakers = [Speaker.load(label, model, options) for label, model in named]
    if options.page:
        return _serve_page(speakers, options)
    if not options.json and sys.stdin.isatty():
        print(f"{AGAIN} for other answers, {NEW} for a new conversation, Ctrl-D to end\n")
    with suppress(KeyboardInterrupt):
        for question in read_questions():
            if question == NEW:
                for speaker in speakers:
                    speaker.start_anew()
                continue
            if question == AGAIN and not speakers[0].last_question:
                print("there is no question yet", file=sys.stderr)
                continue
            for speaker in speakers:
                answer = speaker.answer_again() if question == AGAIN else speaker.answer(question)
                print_answer(answer, speaker, as_json=options.json)
    return 0


def find_models(options: ChatOptions) -> list[tuple[str, str]]:
    """Return (label, name) of the models to talk to: of a run, what it was trained from comes first.

    Raises:
        ConfigError: None is named, or a run has no model so far.
    """
    if options.alone and not any((Path(name) / RUN_FILE).is_file() for name in options.model):
        raise ConfigError("--alone leaves out the model before a run's training, and no run is named: leave it out")
    if not options.model:
        raise ConfigError("name a run or a model: policygrad chat runs/dapo-1, policygrad chat tiny")
    result = list[tuple[str, str]]()
    for name in options.model:
        folder = Path(name)
        if not (folder / RUN_FILE).is_file():
            result.append((name, name))
            continue
        if not is_model_folder(folder / "model"):
            raise ConfigError(
                f"the run in {folder} has no model so far. Finish it with policygrad train --resume {folder}, or talk to the "
                f"folder that policygrad export {folder} writes from its last checkpoint."
            )
        base = tomllib.loads((folder / RUN_FILE).read_text(encoding="utf-8")).get("model")
        if not options.alone and isinstance(base, str) and base:
            result.append((f"before, {base}", base))
        result.append((f"after, {name}" if not options.alone else name, name))
    names = [name for _, name in result]
    return [pair for i, pair in enumerate(result) if pair[1] not in names[:i]]


@dataclass
class Speaker:
    """A model with its side of the conversation."""

    label: str
    model: ServedModel
    options: ChatOptions
    messages: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0
    """Answers so far: each has a seed of its own."""

    @classmethod
    def load(cls, label: str, name: str, options: ChatOptions) -> Speaker:
        """Load a model, and begin a conversation."""
        from policygrad.commands.served_model import ServedModel

        model = ServedModel(
            name,
            max_tokens=options.max_tokens,
            template_options=options.template_options,
            trust_remote_code=options.trust_remote_code,
        )
        model.start()
        speaker = cls(label, model, options)
        speaker.start_anew()
        return speaker

    @property
    def last_question(self) -> str:
        """The last message of the user; empty if there is none."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")

    def start_anew(self) -> None:
        """Forget the conversation."""
        self.messages = self.begin()

    def begin(self) -> list[dict[str, Any]]:
        """Return the messages before a conversation."""
        return [{"role": "system", "content": self.options.system}] if self.options.system else []

    def answer(self, question: str) -> ChatAnswer:
        """Ask, and keep question and answer."""
        self.messages.append({"role": "user", "content": question})
        return self._answer()

    def answer_again(self) -> ChatAnswer:
        """Sample another answer in place of the last one."""
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        return self._answer()

    def _answer(self) -> ChatAnswer:
        choice = self.request(self.messages, self.options.temperature).choices[0]
        self.messages.append({"role": "assistant", "content": choice.text})
        return {
            "model": self.label,
            "question": self.last_question,
            "answer": choice.content or choice.text,
            "reasoning": choice.reasoning,
            "tokens": len(choice.token_ids),
            "finish_reason": choice.finish_reason,
        }

    def request(self, messages: Sequence[dict[str, Any]], temperature: float) -> ChatReply:
        """Return the model's reply to messages."""
        from policygrad.proxy.requests import ChatRequest

        self.count += 1
        seed = self.options.seed * 10**6 + self.count
        future = self.model.submit(ChatRequest(tuple(messages), temperature=temperature, seed=seed))
        while not future.done():  # in short waits, so that Ctrl-C ends it
            time.sleep(0.01)
        return future.result()


def read_questions() -> Iterator[str]:
    """Yield lines of standard input that are not empty, with a prompt in a terminal."""
    if not sys.stdin.isatty():
        yield from (line for text in sys.stdin if (line := text.rstrip("\n")).strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # editing and history of the line
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def print_answer(answer: ChatAnswer, speaker: Speaker, *, as_json: bool) -> None:
    """Print what a model said."""
    from policygrad.trackers.console import strip_control_chars

    if as_json:
        print_json(answer)
        return
    cut = f", cut off at --max-tokens {speaker.options.max_tokens}" if answer["finish_reason"] == "length" else ""
    print(f"{speaker.label} ({answer['tokens']} tokens{cut}):")
    for text in (answer["reasoning"] and f"(thinks) {answer['reasoning']}", answer["answer"]):
        if text:
            print(strip_control_chars(text).strip())
    print(flush=True)


def _serve_page(speakers: Sequence[Speaker], options: ChatOptions) -> int:
    from policygrad.commands.chat_page import create_chat_server

    with create_chat_server(speakers, options.host or "127.0.0.1", options.port or 0) as server:
        if options.json:
            print_json({"url": server.url, "models": [speaker.label for speaker in speakers]})
        else:
            print(server.url, flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0

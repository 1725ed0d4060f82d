"""The reward worker process: load reward functions, then call them until standard input ends.

`process.py` starts it as a fresh interpreter, not by multiprocessing, whose children import the user's `__main__` again.
Functions run in the main thread because verifiers use SIGALRM for time limits of their own.
"""

import fcntl
import inspect
import os
import pickle
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policygrad.errors import DataError
from policygrad.rewards.base import Columns, LoggedMetrics, LoggedRewards, StepScores
from policygrad.rewards.workers import process
from policygrad.rewards.workers.limits import MemoryLimit, raise_oom_score
from policygrad.rewards.workers.messages import (
    MAX_ABS_REWARD,
    Chunk,
    PendingCall,
    SampleResult,
    Samples,
    WorkerStart,
    describe_error,
    encode_ready,
    encode_reply,
    explain_type,
    format_failure,
    quote,
    select_samples,
    split_feedback,
    to_number,
    to_steps,
)
from policygrad.rewards.workers.signature import Signature
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.garbage import paused_garbage_collection

_MAX_DESCRIPTOR = 4096  # the table of open files is as long as the highest number in it


def main(parent: int) -> None:
    """Serve the process with id `parent` over standard input and output, and exit with it."""
    process.adopt_descendants(parent)
    raise_oom_score()
    # The message pipes get high descriptors that no program started here inherits. User code prints to standard error instead, and
    # reads the end of its input.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    first = max(min(limit if limit > 0 else _MAX_DESCRIPTOR, _MAX_DESCRIPTOR) - 16, 3)
    pipe, sink = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    source = os.fdopen(pipe, "rb")
    start: WorkerStart = pickle.load(source)
    callers: list[RewardCaller | None] = []
    for name, pickled, process_reward in start.functions:
        try:
            with paused_garbage_collection():
                function: Any = None if pickled is None else pickle.loads(pickled)
                if (prepare := getattr(function, "reward_prepare", None)) is not None:
                    prepare()
        except BaseException as error:
            message = f"reward {name!r} cannot be loaded in a worker process: it {describe_error(error)}"
            _send(sink, encode_ready(start.nonce, message))
            return
        callers.append(None if pickled is None else RewardCaller(name, function, process_reward))
    memory = MemoryLimit(start.memory)
    for caller in callers:
        if caller is not None:
            caller.hint = memory.hint
    service = _Service(callers, sink, start.nonce, memory)
    _send(sink, encode_ready(start.nonce))
    while not service.stopping:
        try:
            chunk = pickle.load(source)
        except EOFError:
            return
        service.serve(chunk)


@dataclass
class _Service:
    """Replies to the calls of each chunk; `stopping` once the worker has grown too large and must be replaced."""

    callers: list["RewardCaller | None"]
    sink: int
    nonce: bytes
    memory: MemoryLimit
    calls: int = 0  # replied to
    stopping: bool = False

    def serve(self, chunk: Chunk) -> None:
        samples: Samples | None = None
        failure = ""
        try:
            samples = pickle.loads(chunk.samples)
        except BaseException as error:
            failure = f"could not unpickle its samples: it {describe_error(error)}{self.memory.hint(error)}"
        for function, places in chunk.calls:
            caller = self.callers[function]
            assert caller is not None  # a chunk goes to a worker that has all of its functions
            if samples is None:
                texts: Sequence[str] = ["?"] * len(places)
                results = caller.fail("raised", failure, texts)
            else:
                prompts, texts, columns = select_samples(samples, places)
                results = caller(prompts, texts, columns)
            self.stopping = self.memory.is_half_used or process.has_too_many_zombies()
            call = PendingCall(self.calls, tuple(map(len, texts)), caller.process_reward)
            self.calls += 1
            _send(self.sink, encode_reply(self.nonce, call, results, self.stopping))
            if self.stopping:
                return


def _send(sink: int, frame: bytes) -> None:
    data = memoryview(frame)
    while data:
        data = data[os.write(sink, data) :]


class RewardCaller:
    """Calls one reward function, sync or async, and turns whatever it does into one result per sample.

    It always calls from the thread it is used in.
    """

    def __init__(self, name: str, function: Callable[..., Any], process_reward: bool = False) -> None:
        self.name, self.process_reward = name, process_reward
        self.hint: Callable[[BaseException], str] = lambda error: ""  # appended to the message of an exception
        self._function = function
        self._signature = Signature.from_function(function)
        self._runner = AsyncRunner()  # one event loop per function, so that its connections stay open

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], columns: Columns) -> list[SampleResult]:
        """Return one result per completion. Never raises because of the function, except KeyboardInterrupt."""
        try:
            returned = self._signature.call(self._function, (prompts, completions, columns))
            if inspect.isawaitable(returned):

                async def wait() -> Any:
                    return await returned

                returned = self._runner(wait())
        except KeyboardInterrupt:
            raise
        except DataError as error:  # the row is at fault, not the completion: each such row is reported, by its text
            return self.fail("row", f"cannot score a row: {error}", completions, kind=str(error))
        except BaseException as error:
            message = describe_error(error) + self.hint(error)
            if isinstance(error, TypeError) and str(error).startswith("string indices must be integers"):
                message += (
                    "; completions are texts here: TRL's functions for messages, c[0]['content'], are trl:FILE.py:NAME"
                )
            return self.fail("raised", message, completions, kind=type(error).__name__)
        metrics: LoggedMetrics = ()
        if isinstance(returned, LoggedRewards):
            returned, metrics = returned.rewards, returned.metrics
        if not isinstance(returned, (list, tuple)) and hasattr(returned, "tolist"):
            returned = returned.tolist()
        if not isinstance(returned, (list, tuple)):
            each = "one list of (end, score)" if self.process_reward else "one number"
            message = f"returned {quote(returned)}, a {type(returned).__name__}; return a list, {each} per completion"
            return self.fail("type", message, completions, kind="container")
        if len(returned) != len(completions):
            message = f"returned {len(returned)} rewards for {len(completions)} completions; return one per completion"
            return self.fail("length", message, completions)
        results = [self._convert(value, completion) for value, completion in zip(returned, completions, strict=True)]
        return [replace(results[0], metrics=metrics), *results[1:]] if metrics and results else results

    def fail(self, reason: str, what: str, completions: Sequence[str], kind: str = "") -> list[SampleResult]:
        """Return a failure for each of these completions."""
        message = format_failure(self.name, what, completions)
        return [SampleResult(None, reason, message, kind)] * len(completions)

    def _convert(self, value: Any, completion: str) -> SampleResult:
        if isinstance(value, SampleResult):  # from a reward that calls others
            return value
        if isinstance(value, Exception):  # from a batched function that can score all but this one
            what = f"could not score a completion: {value}"
            return self.fail("raised", what, [completion], kind=type(value).__name__)[0]
        number: float | None = None
        steps: StepScores = ()
        feedback = ""
        if self.process_reward:
            steps, reason = to_steps(value, len(completion))
        else:
            score, feedback = split_feedback(value)
            number, reason = to_number(score)
        if reason is None:
            return SampleResult(number, steps=steps, feedback=feedback)
        what = f"returned {quote(value)}" + (f", beyond ±{MAX_ABS_REWARD:g}" if reason == "inf" else "")
        hint = ""
        if reason == "type" and self.process_reward:
            hint = f"; per completion it is a list of (end, score), each end from 1 to its {len(completion)} characters"
        elif reason == "type":
            hint = f"; {explain_type(value)}"
        return SampleResult(None, reason, format_failure(self.name, what, [completion]) + hint)

"""The reward pool: whatever a reward function does costs only its own sample."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

import policygrad as pg
from policygrad.errors import ConfigError, DataError, RewardError
from policygrad.rewards.base import Reward, reward
from policygrad.rewards.workers.messages import to_number
from policygrad.rewards.workers.pool import RewardPool, WorkerSlot

TIMEOUT = 0.5  # seconds, for the functions that overrun it on purpose


def length(prompts, completions, **_):
    return [float(len(completions[0]))]


def number(prompts, completions, **_):
    return [float(completions[0])]


def unruly(prompts, completions, **_):
    """Misbehave as the completion says."""
    deeds = {
        "raise": lambda: 1 / 0,
        "hang": lambda: time.sleep(1000),
        "spin": spin,
        "exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit("bye"),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "nan": lambda: [float("nan")],
        "inf": lambda: [float("-inf")],
        "text": lambda: ["1.0"],
        "bare": lambda: 1.0,
        "two": lambda: [1.0, 2.0],
        "none": lambda: [None],
        "print": lambda: print("x" * 100_000) or [1.0],
        "bool": lambda: [True],
        "read": lambda: [float(len(sys.stdin.read()))],
        "fd": lambda: [float(os.write(1, b"noise\n"))],
    }
    return deeds[completions[0]]()


def spin():
    while True:
        pass


def score(rewards, completions, columns=None, **options):
    with RewardPool(rewards, **options) as pool:
        return pool.score(["p"] * len(completions), completions, columns or {})


@pytest.fixture(scope="module")
def pool():
    with RewardPool([unruly], timeout=60.0, num_workers=1) as pool:
        yield pool


@pytest.mark.parametrize(
    ("deed", "reason", "message"),
    [
        ("raise", "raised", "ZeroDivisionError: division by zero at .*test_pool.py:"),
        ("hang", "timeout", "more than its timeout of 0.5 s"),
        ("spin", "timeout", "more than its timeout of 0.5 s"),
        ("exit", "crashed", "exit code 3"),
        ("sys.exit", "raised", "SystemExit: bye"),
        ("segfault", "crashed", "signal SIGSEGV"),
        ("nan", "nan", "returned nan"),
        ("inf", "inf", "returned -inf"),
        ("text", "type", "returned '1.0'"),
        ("bare", "type", "returned 1.0, a float; return a list"),
        ("two", "length", "returned 2 rewards for 1 completions"),
        ("none", "none", "all functions returned None"),
    ],
)
def test_each_failure_costs_its_sample_only(pool, deed, reason, message):
    completions = ["bool", deed, "bool"]
    if reason == "timeout":
        scores = score([unruly], completions, timeout=TIMEOUT, num_workers=1)
    else:
        scores = pool.score(["p"] * 3, completions, {})
    assert scores.total == [1.0, None, 1.0]
    assert scores.parts == {"unruly": [1.0, None, 1.0]}
    assert scores.failures == {reason: 1}
    (said,) = scores.messages
    assert re.search(message, said)
    assert reason == "none" or "reward 'unruly'" in said
    assert repr(deed) in said


def test_prints_and_reads_do_not_reach_the_pipes():
    scores = score([unruly], ["print", "fd", "read", "bool"], num_workers=1)
    assert scores.total == [1.0, 6.0, 0.0, 1.0]
    assert scores.failures == {}


def chatty(prompts, completions, **columns):
    for line in range(5):
        print(f"line {line} of {completions[0]}")
    print("\x1b[31mred\x1b[0m", file=sys.stderr)
    if completions[0] == "flood":
        print("x" * 1_000_000)
    if completions[0] == "raise":
        raise ValueError("no")
    if completions[0] == "exit":
        os._exit(3)
    if completions[0] == "hang":
        time.sleep(1000)
    return [1.0]


@pytest.mark.parametrize("deed", ["raise", "exit", "hang"])
def test_output_is_captured_and_ends_failure_messages(deed, capfd):
    scores = score([chatty], ["flood", "good", deed], num_workers=1, timeout=TIMEOUT if deed == "hang" else 60.0)
    assert scores.total == [1.0, 1.0, None]
    failed, note = scores.messages
    assert f"line 3 of {deed} / line 4 of {deed} / " in failed
    assert "line 2" not in failed
    assert "\x1b" not in failed
    assert "what rewards print is not shown: --rewards.show-output shows it" in note
    assert capfd.readouterr() == ("", "")


def test_show_output(capfd):
    scores = score([chatty], ["good", "raise"], num_workers=1, show_output=True)
    assert scores.total == [1.0, None]
    assert "printed last" not in scores.messages[0]
    assert len(scores.messages) == 1
    assert "line 4 of good\n" in capfd.readouterr().err


def test_the_note_about_output_comes_once():
    with RewardPool([chatty], num_workers=1) as pool:
        first, second = (pool.score(["p"], ["good"], {}) for _ in range(2))
    assert (len(first.messages), second.messages) == (1, [])


@pytest.mark.full
def test_order_is_kept_when_workers_are_killed_in_the_middle():
    def bad_at_tens(prompts, completions, **_):
        i = int(completions[0])
        if i % 40 == 10:
            os._exit(1)
        if i == 70:
            time.sleep(1000)
        return [float(i)]

    scores = score(
        [bad_at_tens], [str(i) for i in range(150)], timeout=4 * TIMEOUT, num_workers=2
    )  # others wait for a busy machine
    assert scores.total == [None if i % 40 == 10 or i == 70 else float(i) for i in range(150)]
    assert scores.failures == {"crashed": 4, "timeout": 1}
    assert len(scores.messages) == 2


def test_a_worker_that_died_between_calls_is_replaced():
    with RewardPool([number], num_workers=1) as pool:
        assert pool.score(["p"], ["1"], {}).total == [1.0]
        process = pool._slots[0].worker
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait()
        assert pool.score(["p"], ["2"], {}).total == [2.0]
        assert pool._slots[0].worker.pid != process.pid


def test_weighted_sum_skips_what_does_not_apply():
    def even_only(prompts, completions, **_):
        return [1.0 if int(completions[0]) % 2 == 0 else None]

    def never(prompts, completions, **_):
        return [None]

    rewards = [Reward("number", number, 0.5), Reward("even", even_only, 10.0), Reward("never", never)]
    scores = score(rewards, ["1", "2"])
    assert scores.total == [0.5, 11.0]
    assert scores.parts == {"number": [1.0, 2.0], "even": [None, 1.0], "never": [None, None]}
    assert scores.failures == {}


def test_one_failing_part_fails_the_sample():
    scores = score([length, unruly], ["bool", "nan"])
    assert scores.total == [5.0, None]
    assert scores.parts == {"length": [4.0, 3.0], "unruly": [1.0, None]}


def test_async_lambda_and_closure():
    offset = 0.25

    async def later(prompts, completions, **_):
        await asyncio.sleep(0)
        return [len(completions[0]) + offset]

    async def hangs(prompts, completions, **_):
        await asyncio.sleep(1000 if completions[0] == "bb" else 0)
        return [1.0]

    rewards = [later, hangs, Reward("double", lambda p, c, **_: [2 * len(c[0])])]
    scores = score(rewards, ["a", "bb", "ccc"], timeout=TIMEOUT)
    assert scores.parts["later"] == [1.25, 2.25, 3.25]
    assert scores.parts["double"] == [2.0, 4.0, 6.0]
    assert scores.total == [4.25, None, 10.25]


def test_batch_functions_get_everything_at_once():
    @reward(batch=True)
    def rank(prompts, completions, answer, **_):
        order = sorted(completions)
        return [float(order.index(c)) if a else None for c, a in zip(completions, answer, strict=True)]

    @reward(batch=True)
    def one_is_nan(prompts, completions, **_):
        return [float("nan") if c == "b" else 0.0 for c in completions]

    @reward(batch=True)
    def short(prompts, completions, **_):
        return [1.0]

    @reward(batch=True, timeout=TIMEOUT)
    def hang(prompts, completions, **_):
        time.sleep(1000)

    completions, columns = ["c", "a", "b"], {"answer": [1, 1, 1]}
    assert score([rank, length], completions, columns).total == [3.0, 1.0, 2.0]
    assert score([rank, one_is_nan], completions, columns).total == [2.0, 0.0, None]
    assert score([short], completions).failures == {"length": 3}
    hung = score([hang, length], completions)
    assert hung.failures == {"timeout": 3}
    assert hung.parts["length"] == [1.0, 1.0, 1.0]
    assert "(3 completions)" in hung.messages[0]


def test_a_rewards_timeout_overrides_the_pools():
    patient = Reward("patient", lambda p, c, **_: time.sleep(2 * TIMEOUT) or [1.0], timeout=60.0)
    assert score([patient], ["a"], timeout=TIMEOUT).total == [1.0]


def test_preparation_does_not_count_as_call_time():
    @reward(prepare=lambda: time.sleep(2 * TIMEOUT), timeout=TIMEOUT)
    def slow_to_load(prompts, completions, **_):
        return [1.0]

    assert score([slow_to_load], ["a"]).total == [1.0]


def test_unpicklable_functions_run_in_process_with_a_warning():
    lock = threading.Lock()

    def locked(prompts, completions, **_):
        with lock:
            return [float(os.getpid())] if completions[0] == "a" else 1 / 0

    async def locked_later(prompts, completions, **_):
        with lock:
            return [1.0]

    with pytest.warns(UserWarning, match=r"reward 'locked.*without a timeout"):
        pool = RewardPool([locked, locked_later, length])
    with pool:
        scores = pool.score(["p", "p"], ["a", "b"], {})
    assert scores.parts == {"locked": [float(os.getpid()), None], "locked_later": [1.0, 1.0], "length": [1.0, 1.0]}
    assert scores.failures == {"raised": 1}


def test_catastrophic_backtracking_is_stopped():
    scores = score(["format:(a+)+b"], ["ab", "a" * 64, "b"], timeout=TIMEOUT)
    assert scores.total == [1.0, None, 0.0]
    assert scores.failures == {"timeout": 1}


def test_built_ins_in_workers():
    columns = {"answer": ["4", "4"]}
    scores = score(["exact_match", "math*2", "0.5*format"], ["<answer>4</answer>", "it is 4"], columns)
    assert scores.total == [3.5, 2.0]


def test_file_function_in_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("VALUE = 0.25\n")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour import VALUE\n"
        "@dataclass\nclass Result:\n    value: float\n"
        "def judge(prompts, completions, answer):\n    return [Result(VALUE).value]\n"
    )
    scores = score([f"{tmp_path}/mine.py:judge*4"], ["a"], {"answer": ["x"], "level": [1]})
    assert scores.total == [1.0]


def test_samples_may_be_objects_and_large():
    class Mine:
        value = 3.0

    def read(prompts, completions, thing, **_):
        return [thing[0].value]

    scores = score([read, length], ["x" * 1_000_000] * 8, {"thing": [Mine()] * 8})
    assert scores.total == [1_000_003.0] * 8


def test_a_column_that_cannot_be_sent_is_named():
    with pytest.raises(RewardError, match="column 'thing' cannot be sent to a reward worker"):
        score([length], ["a"], {"thing": [threading.Lock()]})


def test_missing_column_and_wrong_lengths_are_errors_of_the_caller():
    with RewardPool(["exact_match"]) as pool:
        with pytest.raises(RewardError, match="'exact_match' needs the column 'answer', and the task has: solution"):
            pool.score(["p"], ["c"], {"solution": ["s"]})
        with pytest.raises(DataError, match="'answer' has 2 values for 1 completions"):
            pool.score(["p"], ["c"], {"answer": ["a", "b"]})
        assert pool.score([], [], {"answer": []}).total == []


def test_a_function_that_no_worker_can_load_is_named():
    def refuse():
        raise OSError("no licence file")

    @reward(prepare=refuse)
    def licensed(prompts, completions, **_):
        return [1.0]

    with pytest.raises(RewardError, match=r"reward 'licensed' cannot be loaded .* OSError: no licence file"):
        score([length, licensed], ["a"])

    @reward(prepare=lambda: os._exit(9))
    def crashes(prompts, completions, **_):
        return [1.0]

    with pytest.raises(RewardError, match=r"ended \(exit code 9\) while it loaded crashes"):
        score([crashes], ["a"])


@pytest.mark.full
@pytest.mark.parametrize("failing", [2, 9])
def test_a_worker_that_ends_while_loading_is_retried(tmp_path, failing):
    """As happens while the machine is short of memory."""
    starts = tmp_path / "starts"

    def prepare():
        with starts.open("a") as file:
            file.write("x")
        if 1 < starts.stat().st_size <= 1 + failing:
            os._exit(9)

    @reward(prepare=prepare)
    def dies_once(prompts, completions, **_):
        return [1.0] if completions[0] != "die" else os._exit(1)

    completions = ["a", "die", "b"]
    if failing == 2:
        scores = score([dies_once], completions, num_workers=1)
        assert scores.total == [1.0, None, 1.0]
        assert starts.stat().st_size == 4
    else:
        with pytest.raises(RewardError, match=r"ended \(exit code 9\) while it loaded dies_once"):
            score([dies_once], completions, num_workers=1)


def test_invalid_pools_are_rejected(monkeypatch):
    monkeypatch.setattr(WorkerSlot, "launch", lambda self: None)  # were one not refused, it would start its workers
    with pytest.raises(ConfigError, match="at least one reward"):
        RewardPool([])
    with pytest.raises(ConfigError, match="2 rewards are called 'length'"):
        RewardPool([length, length])
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        RewardPool([length], num_workers=0)
    with pytest.raises(ConfigError, match=r"rewards.num_workers=100000 .* give at most \d+"):
        RewardPool([length], num_workers=100000)
    with pytest.raises(ConfigError, match="timeout must be a positive"):
        RewardPool([length], timeout=0)


def test_close_kills_the_workers_and_their_children():
    def breed(prompts, completions, **_):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return [float(child.pid)]

    pool = RewardPool([breed], num_workers=2)
    (child,) = pool.score(["p"], ["c"], {}).total
    processes = [slot.worker._process for slot in pool._slots]
    pool.close()
    pool.close()
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2
    assert _gone(int(child))
    with pytest.raises(RuntimeError, match="this RewardPool is closed"):
        pool.score(["p"], ["c"], {})


def _gone(pid):
    """Return whether a process has ended, perhaps as a zombie that was not reaped yet."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except FileNotFoundError:
            return True
        threading.Event().wait(0.01)
    return False


SCRIPT = """
import os, sys
from policygrad.rewards.workers.pool import RewardPool
print("imported", flush=True)
class Box:
    value = 0.5
def mine(prompts, completions, **_):
    if completions[0] == "hang":
        os.write(2, b"busy")
        while True: pass
    return [Box.value]
pool = RewardPool([mine, lambda p, c, **_: [1.0]], timeout=1000.0, show_output=True)
print(pool.score(["p"] * 3, ["a"] * 3, {}).total, flush=True)
"""


def test_an_unguarded_script_runs_once_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "imported\n[1.5, 1.5, 1.5]\n"
    assert done.stderr == ""  # read to its end: no worker holds the pipe any more


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a busy child with its parent")
def test_a_busy_worker_dies_with_its_parent(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + 'pool.score(["p"], ["hang"], {})\n')
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as script:
        assert script.stderr.read(4) == b"busy"
        script.kill()
        assert script.stderr.read() == b""  # the end of the pipe: the worker, which held it too, is gone


@pytest.mark.full
def test_a_garbage_collected_pool_kills_its_workers():
    gc.collect()  # what other tests have left warns now, and not below
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = RewardPool([length], num_workers=1)
        process = pool._slots[0].worker._process
        del pool
    assert process.poll() == -signal.SIGKILL


def huge(prompts, completions, **columns):
    return [1e39]


def large(prompts, completions, **columns):
    return [9e17]


def test_a_finite_reward_that_float32_statistics_cannot_hold_counts_as_infinite() -> None:
    import torch  # workers import this module for each of its functions, and are not to wait for it

    assert to_number(1e39) == (None, "inf")
    assert to_number(-1e19) == (None, "inf")
    assert to_number(1e17) == (1e17, None)
    # the largest that is let through gives finite advantages, also with the other extreme beside it
    group = pg.Batch(
        mask=torch.ones(4, 1, dtype=torch.bool),
        group=torch.zeros(4, dtype=torch.int64),
        reward=torch.tensor([1e18, 1e18, -1e18, 0.0]),
    )
    assert pg.GRPO.compute_advantages(group).isfinite().all()
    with RewardPool([huge], num_workers=1) as pool:
        scores = pool.score(["p"], ["c"], {})
    assert scores.total == [None]
    assert scores.failures == {"inf": 1}
    assert "1e+39, beyond ±1e+18" in scores.messages[0]


def test_a_weighted_sum_beyond_the_largest_reward_is_a_failure_with_a_reason() -> None:
    rewards = [Reward("one", large), Reward("two", large)]
    with RewardPool(rewards, num_workers=1) as pool:
        scores = pool.score(["p"], ["c"], {})
    assert scores.total == [None]
    assert scores.failures == {"inf": 1}
    assert "weighted sum" in scores.messages[0]

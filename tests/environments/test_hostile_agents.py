"""Programs that misbehave cost their episodes and nothing else, learn nothing of others, and leave nothing."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles import hostile_agents
from policygrad.environments import agent_host
from policygrad.environments.agent_episodes import run_agent_episodes
from policygrad.environments.agent_program import AgentProgram
from policygrad.environments.registry import resolve_environment
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.trajectory import TRAIN, EpisodeSpec, Trajectory
from policygrad.samplers.base import Generation, Request
from policygrad.sandbox import landlock

FILE = Path(hostile_agents.__file__)
HOST = Path(agent_host.__file__)
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@cache
def loaded() -> tuple[Any, Tokenizer]:
    from policygrad.models.loading import load_model

    model = load_model("tiny")
    return model, load_tokenizer("tiny", model)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where episodes have their folders, which must be empty in the end."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert [path.name for path in place.iterdir() if path.name.startswith("policygrad")] == []


class Answering(pg.LocalSampler):
    """A sampler with a clock that stands still until it is asked, so that nothing before counts."""

    ticks = 0

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        type(self).ticks = 1
        return await super().generate(requests)

    @classmethod
    def read_clock(cls) -> float:
        cls.ticks += cls.ticks > 0
        return 0.1 * cls.ticks


def play(
    *cases: str,
    program: AgentProgram | None = None,
    sampler_type: type[pg.LocalSampler] = pg.LocalSampler,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> dict[str, Trajectory]:
    """Run an episode of each case, all at once."""
    model, encoder = loaded()
    program = program or AgentProgram(function=f"{FILE}:main", **options)
    specs = [EpisodeSpec(pg.Example("x", {"case": case}), (0, TRAIN, 1, i), 16) for i, case in enumerate(cases)]
    sampler = sampler_type.from_tokenizer(model, encoder)
    sampling = pg.SamplingParams(max_tokens=16)
    try:
        groups = asyncio.run(
            run_agent_episodes(
                specs, 1, sampling, sampler=sampler, encoder=encoder, program=program, timeout=60, clock=clock
            )
        )
    finally:
        program.close()
    return {case: group.trajectories[0] for case, group in zip(cases, groups, strict=True)}


def wrapped_python(folder: Path, *changes: str) -> str:
    """A Python that changes agent_host.py's functions before it runs."""
    file = folder / "python"
    lines = ["import os, sys", f"sys.path.insert(0, {str(HOST.parent)!r})", "import agent_host", "sys.path.pop(0)"]
    lines += ["sys.argv.pop(0)", *changes, "agent_host.main()"]
    file.write_text("\n".join([f"#!{sys.executable}", *lines]))
    file.chmod(0o755)
    return str(file)


WITHOUT_NAMESPACES = "agent_host.enter_namespaces = lambda: (_ for _ in ()).throw(OSError())"
WITHOUT_LANDLOCK = "agent_host.load_file('landlock', agent_host._SANDBOX).get_abi_version = lambda: 0"


def is_running(mark: str) -> bool:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path("/proc", name, "cmdline").read_text(errors="replace") and int(name) != os.getpid():
                return True
        except OSError:
            continue
    return False


RESULTS = {
    "fifo": "cannot be read: it is not a regular file",
    "endless_link": "cannot be read: Too many levels of symbolic links",
    "link": "cannot be read: Too many levels of symbolic links",
    "hard_link": "cannot be read: it is a link to another file",
    "folder": "cannot be read: it is not a regular file",
    "deep": "brackets nested deeper than 100",
    "deep_metrics": "brackets nested deeper than 100",
    "no_text": "is no JSON",
    "not_finite": "nan is not a finite number|NaN is not a finite number",
    "huge": "outside the range of a float",
    "metrics_list": r"its metrics are \[1\], and no object of numbers by name",
    "metrics_text": "its metrics are 'many'",
    "many_metrics": "it has 300000 metrics, and may have 64",
    "odd_metric": r"its metric 'a\\nb' has no name",
    "lone_metric": r"its metric '\\ud800' has no name",
    "large": "it is larger than 100000 bytes",
}


def test_whatever_stands_in_the_result_costs_the_episode_and_the_others_go_on() -> None:
    played = play(*RESULTS, "behaves", max_output=6 * 2**20)
    large = play("large", max_output=100_000)
    for case, reason in RESULTS.items():
        trajectory = (large if case == "large" else played)[case]
        assert trajectory.reward is None, case
        assert trajectory.stop_reason == "failed", case
        assert trajectory.metrics["program_result"] == 1.0, case
        assert re.search(reason, trajectory.failure), (case, trajectory.failure)
    assert played["behaves"].reward == 1.0
    assert played["behaves"].text == "a ? surrogate"
    assert played["behaves"].metrics == {"calls": 1.0, "done": 1.0}


def test_output_and_disk_are_limited_and_the_message_is_plain_text() -> None:
    cases = ("odd_output", "prints_much", "closes_everything", "unlinked_file", "many_files")
    played = play(*cases, max_disk=30 * 2**20, max_output=2**20)
    assert "exit code 3: " in played["odd_output"].failure
    assert played["odd_output"].failure.isprintable()
    assert "printed more than 1048576 bytes (max_output)" in played["prints_much"].failure
    assert played["prints_much"].metrics["program_output"] == 1.0
    assert played["closes_everything"].reward == 1.0
    assert "disk" in played["unlinked_file"].failure or "File too large" in played["unlinked_file"].failure
    assert "wrote more than 31457280 bytes (max_disk)" in played["many_files"].failure
    assert played["many_files"].metrics["program_disk"] == 1.0


def test_folders_that_are_hard_to_delete_are_deleted() -> None:
    played = play("deep_folder", "closed_folder")
    assert [trajectory.reward for trajectory in played.values()] == [1.0, 1.0]


@linux
@pytest.mark.parametrize("changes", [(), (WITHOUT_NAMESPACES,), (WITHOUT_NAMESPACES, WITHOUT_LANDLOCK)])
def test_no_process_is_left_and_too_many_end_the_episode(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """With namespaces, with Landlock, and with neither."""
    played = play("daemon", "fork_bomb", "chain", python=wrapped_python(tmp_path, *changes))
    assert played["daemon"].reward == 1.0
    for case in ("fork_bomb", "chain"):
        assert "had more than 64 processes (max_processes)" in played[case].failure
    assert not is_running(hostile_agents.MARK)
    assert not is_running("sleep\x003600")


@linux
@pytest.mark.parametrize("changes", [(), (WITHOUT_NAMESPACES,), (WITHOUT_NAMESPACES, WITHOUT_LANDLOCK)])
def test_no_episode_is_answered_with_the_key_of_another(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """Where nothing hides the keys of others, the proxy looks whose connection it is."""
    python, variables = wrapped_python(tmp_path, *changes), {"MEETING": str(tmp_path)}
    played = play("has_key_in_program", "peeks", python=python, variables=variables, batch_seconds=0)
    found = played["peeks"].metrics
    assert played["has_key_in_program"].metrics["calls"] == 1.0
    assert found["calls"] == 1.0 + found["answered"]  # as its own
    assert (found["keys"] > 0) is (len(changes) == 2)
    if not changes:
        assert found["folders"] == 0.0


@linux
@pytest.mark.parametrize("changes", [(), (WITHOUT_LANDLOCK,)])
def test_what_hides_other_episodes_cannot_be_unmounted(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """Root's program keeps its capabilities over files and users, and no other."""
    found = play("unmounts", python=wrapped_python(tmp_path, *changes))["unmounts"].metrics
    assert found["unmounted"] == 0.0
    over_files_and_users = (1 << 0) | (1 << 1) | (1 << 3) | (1 << 4) | (1 << 6) | (1 << 7)
    assert int(found["capabilities"]) & ~over_files_and_users == 0


@linux
def test_a_client_that_is_made_at_import_has_no_key_of_the_users_and_reaches_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    played = play("module_level_key", "behaves")
    assert played["module_level_key"].failure == ""
    assert played["module_level_key"].metrics == {"calls": 1.0}
    assert played["module_level_key"].text.startswith("pg-import-")
    assert played["behaves"].metrics["calls"] == 1.0


def test_a_program_that_misses_a_variable_says_which_option_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "secret")
    told = play("tells_variables")["tells_variables"].text.split()
    assert {"PATH", "OPENAI_API_KEY", "POLICYGRAD_RESULT", "TMPDIR", "NO_PROXY"} <= {*told}
    named = play("tells_variables", environment=("NAMED",))["tells_variables"].text.split()
    assert {*named} == {*told, "NAMED"}
    failed = play("needs_a_variable")["needs_a_variable"].failure
    assert (
        "KeyError: 'NAMED'; programs do not get the environment variable NAMED: add --environment.env NAMED" in failed
    )
    resolved = resolve_environment(f"agent:{FILE}:main", None, ("NAMED",))
    assert isinstance(resolved, AgentProgram)
    assert resolved.environment == ("NAMED",)
    with pytest.raises(pg.ConfigError, match=r"--environment\.env passes variables to agents' programs"):
        resolve_environment("calculator", None, ("NAMED",))
    for options in ({"variables": {"OPENAI_API_KEY": "x"}}, {"environment": ("ANTHROPIC_BASE_URL",)}):
        with pytest.raises(pg.ConfigError, match="is set for each episode"):
            AgentProgram("true", **options)


@linux
def test_a_host_that_is_killed_costs_its_episodes_and_the_next_ones_have_another(tmp_path: Path) -> None:
    python = wrapped_python(tmp_path, WITHOUT_NAMESPACES, WITHOUT_LANDLOCK)
    program = AgentProgram(function=f"{FILE}:main", python=python, concurrency=1)
    played = play("kills_the_host", "behaves", program=program)
    assert "the process that starts programs was killed" in played["kills_the_host"].failure
    assert played["behaves"].reward == 1.0


@linux
def test_a_program_that_stops_or_kills_what_it_can_reach_costs_its_own_episode() -> None:
    stopped = play("stops_itself", max_seconds=1, sampler_type=Answering, clock=Answering.read_clock)["stops_itself"]
    assert "exceeded 1 s of its own" in stopped.failure
    assert play("kills_its_parent", "behaves")["behaves"].reward == 1.0


TRAINER = """
import json, sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from policygrad.environments.agent_program import AgentProgram
import policygrad as pg
program = AgentProgram(sys.argv[2:])
program.start(pg.Example("x", {}), "key", {})
print("started", flush=True)
sys.stdin.read()
"""
LEAVES = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execve(sys.executable, [sys.executable, "-c", sys.argv[1] + "; import time; time.sleep(3600)"], {})
    os._exit(0)
os.wait()
open(sys.argv[2], "w").close()
time.sleep(3600)
"""


@linux
def test_nothing_outlives_a_run_that_is_killed(tmp_path: Path, folder: Path) -> None:
    mark, begun = f"'left by {tmp_path.name}'", tmp_path / "begun"
    program = [sys.executable, "-c", LEAVES, mark, str(begun)]
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"started\n"
    wait_for(begun.exists)
    wait_for(lambda: is_running(mark))
    assert len(list(folder.iterdir())) == 1
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    wait_for(lambda: not is_running(mark))
    wait_for(lambda: not list(folder.iterdir()))


def wait_for(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_folder_that_cannot_be_copied_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    os.mkfifo(template / "pipe")
    program = AgentProgram(sys.executable, folder=str(template))
    with program:
        (nest,) = folder.iterdir()
        with pytest.raises(OSError, match="named pipe"):
            program.start(pg.Example("x", {}), "key", {})
        assert list(nest.iterdir()) == []


# Reward commands


PYTEST = "import os\nos._exit(0)\n"


def play_command(script: str, tmp_path: Path, **options: Any) -> Trajectory:
    """An episode of a Python program, which asks first."""
    file = tmp_path / "agent.py"
    ask = f"import sys; sys.path.insert(0, {str(FILE.parent)!r}); from hostile_agents import ask; ask()\n"
    file.write_text(f"{ask}import os\nfrom pathlib import Path\n{script}")
    return play("x", program=AgentProgram([sys.executable, str(file)], **options))["x"]


def test_a_reward_command_is_not_satisfied_by_a_module_that_the_program_wrote(tmp_path: Path) -> None:
    forged = "Path('pytest.py').write_text('')\nPath('sitecustomize.py').write_text('import os; os._exit(0)')\n"
    (tmp_path / "test_it.py").write_text("def test_it(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
    assert play_command(forged, tmp_path, reward_command=command).reward == 0.0


def test_what_is_restored_is_as_it_was_for_the_reward_command(tmp_path: Path) -> None:
    template = tmp_path / "template"
    (template / "tests" / "inner").mkdir(parents=True)
    (template / "tests" / "inner" / "expected").write_text("1")
    (template / "link").symlink_to("tests")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = f"""
import shutil
shutil.rmtree("tests")
os.symlink({str(elsewhere)!r}, "tests")
Path("added.py").write_text("")
os.unlink("link")
"""
    options = {"folder": str(template), "restored": ("tests/inner", "added.py", "link")}
    command = "test -f tests/inner/expected -a ! -e added.py -a -L link -a ! -L tests"
    assert play_command(script, tmp_path, reward_command=command, **options).reward == 1.0
    assert list(elsewhere.iterdir()) == []
    (elsewhere / "tests" / "inner").mkdir(parents=True)
    replaced = f"base = Path.cwd().parent\nos.rename(base / 'work', base / 'old')\nos.symlink({str(elsewhere)!r}, base / 'work')\n"
    failed = play_command(replaced, tmp_path, reward_command="true", **options)
    assert "reward_command cannot be started: the program has replaced the folder" in failed.failure
    assert (elsewhere / "tests" / "inner").is_dir()
    for name in ("/etc", "../x", ".", ""):
        with pytest.raises(pg.ConfigError, match="no name below folder"):
            AgentProgram("true", folder=str(template), reward_command="true", restored=(name,))
    with pytest.raises(pg.ConfigError, match="restored is for a reward_command"):
        AgentProgram("true", restored=("tests",))


def abstract_names(place: Path) -> list[str]:
    """The abstract socket, where the kernel can keep a program from it."""
    return [f"\0{place}"] if landlock.get_abi_version() >= landlock.SCOPES_SINCE else []


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_sandboxed_program_reaches_no_file_outside_by_a_link_and_no_socket(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text('{"answer": "a secret"}')
    place = Path(tempfile.mkdtemp(dir="/opt"))
    try:
        with socket.socket(socket.AF_UNIX) as service, socket.socket(socket.AF_UNIX) as abstract:
            service.bind(str(place / "engine.sock"))
            service.listen()
            abstract.bind(f"\0{place}")
            abstract.listen()
            script = f"""
import socket
base = Path(os.environ["POLICYGRAD_RESULT"]).parent
os.symlink({str(secret)!r}, base / "result.json")
os.symlink({str(secret)!r}, base / "output.log")
reached = []
for name in ({str(place / "engine.sock")!r}, *{abstract_names(place)!r}, *map(str, Path("/run").rglob("*"))):
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
        reached.append(name)
    except OSError:
        pass
print("reached", reached, [str(p) for p in ({str(secret)!r}, "/root/.bashrc") if os.path.exists(p)])
print("siblings", len(list(base.parent.iterdir())))
os._exit(5)
"""
            trajectory = play_command(script, tmp_path, sandbox=True)
    finally:
        shutil.rmtree(place)
    assert "its result cannot be read: Too many levels of symbolic links" in trajectory.failure
    told = play_command(script.replace("os.symlink", "print"), tmp_path, sandbox=True)
    assert "reached [] [] siblings 1" in told.failure
    assert secret.read_text() == '{"answer": "a secret"}'

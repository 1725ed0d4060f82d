"""Tasks in Harbor's format: read, worked on by a shell or an agent's program, scored by their verifier, whatever that does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.harbor_tasks import TOML, write_task, write_tasks
from doubles.scripted_sampler import ScriptedSampler, conversation
from policygrad.commands.doctor import ABSENT, OK, examine_machine
from policygrad.environments.agent_episodes import run_agent_episodes
from policygrad.environments.harbor import Harbor, HarborProgram, use_harbor
from policygrad.environments.harbor_places import fill_root
from policygrad.environments.registry import code_references, resolve_environment
from policygrad.errors import ConfigError, DataError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.row_checks import check_rows
from policygrad.rollout.trajectory import TRAIN, EpisodeSpec
from policygrad.sandbox import containers
from policygrad.sandbox.backends import find_backend
from policygrad.sandbox.commands import CommandLimits, CommandRunner, confine_command
from policygrad.sandbox.containers import Container
from policygrad.tasks.harbor import parse_dockerfile, read_tasks
from policygrad.tasks.registry import load_task
from policygrad.tasks.rows import RowOptions
from policygrad.training.config.paths import with_full_paths


def has_bubblewrap() -> bool:
    try:
        return find_backend("bubblewrap").name == "bubblewrap"
    except ConfigError:
        return False


pytestmark = pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap does not work here")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of a model that reads long texts, since this one's tokens are letters."""
    return replace(load_tokenizer("tiny", load_model("tiny")), context_length=100_000)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose PATH has no container engine."""
    folder = os.pathsep.join(
        name for name in os.environ["PATH"].split(os.pathsep) if not {"docker", "podman"} & set(_list(name))
    )
    monkeypatch.setattr(containers, "ENGINES", ("docker", "podman"))
    monkeypatch.setenv("PATH", folder)
    forget_engines()
    yield
    forget_engines()


def _list(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def forget_engines() -> None:
    containers.find_engine.cache_clear()
    containers.explain_engine.cache_clear()


def bash(command: str) -> str:
    return "<tool_call>" + json.dumps({"name": "bash", "arguments": {"command": command}}) + "</tool_call>"


def example_of(top: Path, name: str) -> pg.Example:
    return next(row for row in load_task(f"harbor:{top}").rows if row.columns["name"] == name)


def play(tokenizer: Tokenizer, top: Path, name: str, *turns: str, **options: Any) -> Any:
    environment = Harbor(str(top), **options)
    with environment:
        group, sampler = conversation(tokenizer, environment, example_of(top, name), turns, max_tokens=2000)
    seen = sampler.tokenizer.hf.decode(sampler.asked[-1].prompt_ids) if sampler.asked else ""
    return group.trajectories[0], seen


@pytest.mark.usefixtures("no_engine")
def test_tasks_are_rows_with_their_instruction_and_what_is_known_of_them(tmp_path: Path) -> None:
    rows = load_task(f"harbor:{write_tasks(tmp_path)}").rows
    assert [row.columns["name"] for row in rows] == ["answer", "broken", "lines"]
    assert rows[0].prompt == ({"role": "user", "content": "Write 42 to /app/answer.txt."},)
    assert dict(rows[0].columns) == {
        "name": "answer",
        "folder": str(tmp_path / "answer"),
        "difficulty": "easy",
        "category": "files",
    }
    (single,) = load_task(f"harbor:{tmp_path / 'answer'}").rows
    assert single.columns == rows[0].columns


@pytest.mark.usefixtures("no_engine")
def test_a_command_that_solves_the_task_earns_its_reward_and_another_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    top = write_tasks(tmp_path)
    solved, seen = play(tokenizer, top, "answer", bash("pwd; ls; echo 42 > answer.txt"), "done")
    assert (solved.reward, solved.failure, solved.metrics["calls"]) == (1.0, "", 1.0)
    assert "/app\nlines.txt" in seen
    wrong, _ = play(tokenizer, top, "answer", bash("echo 41 > answer.txt"), "done")
    assert (wrong.reward, wrong.stop_reason) == (0.0, "answer")
    assert not (top / "answer" / "environment" / "answer.txt").exists()


@pytest.mark.usefixtures("no_engine")
def test_a_verifier_gives_a_fraction_other_numbers_and_feedback(tokenizer: Tokenizer, tmp_path: Path) -> None:
    top = write_tasks(tmp_path)
    command = bash("printf 'right\\nright\\nright\\n' >> lines.txt")
    trajectory, _ = play(tokenizer, top, "lines", command, "done")
    assert trajectory.reward == 0.3
    assert trajectory.metrics["verifier_lines"] == 3.0
    assert trajectory.feedback == "3 of 9 lines"


@pytest.mark.usefixtures("no_engine")
def test_a_verifier_that_fails_costs_its_episode_and_says_why(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trajectory, _ = play(tokenizer, write_tasks(tmp_path), "broken", "I am done")
    assert trajectory.reward is None
    assert "the verifier of broken wrote no /logs/verifier/reward.txt" in trajectory.failure
    assert "exit code 3" in trajectory.failure
    assert "no such module: answers" in trajectory.failure


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("echo soon > /logs/verifier/reward.txt", "'soon', which is no finite number"),
        ("echo nan > /logs/verifier/reward.txt", "'nan', which is no finite number"),
        ("echo 1e400 > /logs/verifier/reward.txt", "no finite number"),
        (": > /logs/verifier/reward.txt", "has '', which is no finite number"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "larger than 65,536 bytes"),
        ("ln -s /app/lines.txt /logs/verifier/reward.txt", "cannot be read"),
        ("ln /app/lines.txt /logs/verifier/reward.txt || mkfifo /logs/verifier/reward.txt", "not a regular file"),
        ("mkdir /logs/verifier/reward.txt", "cannot be read"),
        ("echo '{\"score\": 1}' > /logs/verifier/reward.json", "has no field reward (it has score)"),
        ('echo \'{"reward": "high"}\' > /logs/verifier/reward.json', "no finite number"),
        ("echo '{\"reward\": 1' > /logs/verifier/reward.json", "is no JSON"),
    ],
)
def test_a_reward_file_that_is_none_costs_its_episode(
    tokenizer: Tokenizer, tmp_path: Path, verifier: str, reason: str
) -> None:
    write_task(tmp_path / "one", verifier=verifier)
    trajectory, _ = play(tokenizer, tmp_path, "one", "done")
    assert trajectory.reward is None
    assert reason in trajectory.failure


@pytest.mark.usefixtures("no_engine")
def test_commands_see_neither_tests_nor_solution_nor_this_machines_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    top = write_tasks(tmp_path)
    hunt = f"cat {top}/answer/tests/test.sh; ls /tests /logs /home /root; ls {Path.home()}; touch /usr/x; env | wc -l"
    _, seen = play(tokenizer, top, "answer", bash(hunt), "done")
    shown = seen[seen.rindex("<tool_call>") :]
    assert shown.count("No such file or directory") >= 4
    assert "Read-only file system" in shown
    assert "reward" not in shown.partition("</tool_call>")[2]


@pytest.mark.usefixtures("no_engine")
def test_what_a_command_leaves_does_not_give_the_reward(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_task(tmp_path / "one", verifier="true\n")
    plant = (
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt; ln -s /tmp /app/tests"
    )
    trajectory, _ = play(tokenizer, tmp_path, "one", bash(plant), "done")
    assert trajectory.reward is None
    assert "wrote no /logs/verifier/reward.txt" in trajectory.failure


@pytest.mark.usefixtures("no_engine")
def test_a_command_that_hangs_or_prints_without_end_is_ended_and_the_episode_goes_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    top = write_tasks(tmp_path)
    turns = (bash("yes"), bash("cat < /dev/zero > big"), bash("rm big; echo 42 > answer.txt"), "done")
    limits = CommandLimits(60.0, output=10_000, disk=1 << 20)
    trajectory, seen = play(tokenizer, top, "answer", *turns, limits=limits, max_output_chars=60)
    assert trajectory.reward == 1.0
    assert "exceeded the output limit" in seen
    assert "exceeded the disk limit" in seen
    hung, seen = play(tokenizer, top, "answer", bash("sleep 1000 & wait"), "done", command_seconds=0.5)
    assert "exceeded the time limit" in seen
    assert hung.reward == 0.0


@pytest.mark.usefixtures("no_engine")
def test_the_seconds_of_a_task_are_those_of_all_its_commands(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_task(tmp_path / "one", toml=TOML.replace("timeout_sec = 60.0", "timeout_sec = 0.4", 1))
    _, seen = play(tokenizer, tmp_path, "one", bash("sleep 1000"), bash("echo 42 > answer.txt"), "done")
    assert "exceeded the time limit" in seen
    assert "the 0.4 s of this task are used up" in seen


def test_processes_and_memory_of_a_command_are_limited(tmp_path: Path) -> None:
    mounts = {"/app": tmp_path}
    limits = CommandLimits(30.0, memory=300 << 20, processes=8)

    def run(command: str) -> Any:
        return CommandRunner().run(confine_command(["bash", "-c", command], mounts, "/app", limits), limits)

    assert run("for i in $(seq 20); do sleep 100 & done; wait").exceeded == "processes"
    assert run("x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}; sleep 100").exceeded == "memory"
    assert run("ulimit -v").output.split() == [str(4 * limits.memory // 1024)]


# What cannot be used is said before a run.


@pytest.mark.usefixtures("no_engine")
def test_tasks_that_cannot_be_used_are_all_named_with_the_reason(tmp_path: Path) -> None:
    write_task(tmp_path / "good")
    needy = "FROM ubuntu:24.04\nRUN apt-get update && \\\n    apt-get install -y gcc\nWORKDIR /app\n"
    write_task(tmp_path / "installs", dockerfile=needy)
    write_task(tmp_path / "installs-too", dockerfile=needy)
    write_task(tmp_path / "online", toml=TOML + "[environment]\nallow_internet = true\n")
    write_task(tmp_path / "garbled", toml="[metadata\n")
    write_task(tmp_path / "stepwise", toml=TOML + '[[steps]]\nname = "one"\n')
    write_task(tmp_path / "secret", toml=TOML + '[environment.env]\nKEY = "${OPENAI_API_KEY}"\n')
    write_task(tmp_path / "image", toml=TOML + '[environment]\ndocker_image = "--privileged"\n')
    write_task(tmp_path / "timeless", toml=TOML.replace("60.0", '"soon"'))
    (write_task(tmp_path / "unnamed") / "task.toml").unlink()
    (write_task(tmp_path / "unchecked") / "tests" / "test.sh").unlink()
    (tmp_path / "notes").mkdir()
    with pytest.raises(DataError) as caught:
        load_task(f"harbor:{tmp_path}")
    text = str(caught.value)
    assert "10 of its 11 tasks cannot be used here" in text
    assert "installs, installs-too: its Dockerfile has RUN apt-get update && apt-get install -y gcc" in text
    assert "a container engine is needed (docker: it is not installed; podman: it is not installed)" in text
    for part in (
        "online: it asks for the internet",
        "garbled: its task.toml is no TOML",
        "stepwise: it has several steps",
        "secret: [environment] env in its task.toml takes KEY from this machine",
        "image: [environment] docker_image in its task.toml is '--privileged', which names no image",
        "timeless: [agent] timeout_sec in its task.toml is 'soon'",
        "unnamed: it has no task.toml",
        "unchecked: it has no tests/test.sh",
        "--task.skip-bad-rows",
    ):
        assert part in text
    with pytest.warns(UserWarning, match="10 of 11 rows skipped"):
        task = load_task(f"harbor:{tmp_path}", row_options=RowOptions(skip_bad_rows=True))
    assert [row.columns["name"] for row in task.rows] == ["good"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("harbor:nowhere", "names no folder"),
        ("harbor:.,engine=rkt", "choose one of auto, none, docker, podman"),
        ("harbor:.,engine=docker,agent=true", "an agent's program runs in bubblewrap"),
    ],
)
def test_a_bad_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        resolve_environment(name)


@pytest.mark.usefixtures("no_engine")
def test_an_engine_that_does_not_work_is_refused_and_a_folder_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine=podman cannot be had: it is not installed"):
        use_harbor(f"{write_tasks(tmp_path / 'tasks')},engine=podman")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no folder in it has a task"):
        load_task(f"harbor:{tmp_path / 'empty'}")


@pytest.mark.usefixtures("no_engine")
def test_an_environment_needs_the_tasks_of_its_folder(tmp_path: Path) -> None:
    environment = Harbor(str(write_tasks(tmp_path / "tasks")))
    with pytest.raises(ConfigError, match="give --task harbor:"):
        environment(pg.Example("1+1=", {"answer": "2"}))


def test_a_file_that_names_tasks_needs_permission_for_their_scripts_and_for_a_program() -> None:
    assert code_references("harbor:tasks,engine=none") == ["harbor:tasks"]
    assert code_references("harbor:tasks,agent=./run.sh --fast") == ["harbor:tasks", "program:./run.sh --fast"]


def test_a_runs_file_names_the_folder_from_anywhere(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one")
    options = {"directory": str(tmp_path), "task": "harbor:tasks", "environment": "harbor:tasks,engine=none"}
    full = with_full_paths(options)
    assert full["task"] == f"harbor:{tmp_path}/tasks"
    assert full["environment"] == f"harbor:{tmp_path}/tasks,engine=none"


@pytest.mark.usefixtures("no_engine")
def test_nothing_is_left_of_an_episode(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    top = write_tasks(tmp_path / "tasks")
    turn = bash("mkdir -p deep/er && echo x > deep/er/file && chmod 0 deep/er deep; sleep 1000 & disown; echo left")
    trajectory, seen = play(tokenizer, top, "answer", turn, "done")
    assert (trajectory.reward, "left" in seen) == (0.0, True)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.usefixtures("no_engine")
def test_doctor_says_that_no_container_engine_works() -> None:
    (check,) = [check for check in examine_machine() if check.name == "container engine"]
    assert check.status == ABSENT
    assert "docker: it is not installed; podman: it is not installed" in check.value


@pytest.mark.usefixtures("docker")
def test_doctor_names_the_container_engine() -> None:
    (check,) = [check for check in examine_machine() if check.name == "container engine"]
    assert (check.status, check.value) == (OK, "docker")


def test_dockerfiles_about_files_are_read() -> None:
    recipe = parse_dockerfile(
        'FROM python:3.12 AS base\n# files\nENV LEVEL=2 NAME="a b"\nWORKDIR /srv\nWORKDIR work\nCOPY a.txt \\\n  b.txt data/\n'
        'COPY ["c d.txt", "/opt/c.txt"]\nCMD ["bash"]\n'
    )
    assert recipe.folder == "/srv/work"
    assert recipe.variables == {"LEVEL": "2", "NAME": "a b"}
    assert recipe.copies == (
        ("a.txt", "/srv/work/data/"),
        ("b.txt", "/srv/work/data/"),
        ("c d.txt", "/opt/c.txt"),
    )
    assert not recipe.needs


@pytest.mark.parametrize(
    "line",
    [
        "RUN true",
        "FROM other",
        "COPY --from=builder a b",
        "COPY *.txt /app/",
        "COPY ../a /app/",
        "COPY a /usr/bin/a",
        "COPY a /a",
        "ADD https://example.org/a.txt /app/",
        "ADD a.tar.gz /app/",
        "WORKDIR $HOME",
        "USER nobody",
        'ENTRYPOINT ["/start"]',
        'COPY ["a"',
        "COPY 'a",
    ],
)
def test_other_lines_of_a_dockerfile_need_a_container(line: str) -> None:
    recipe = parse_dockerfile(f"FROM ubuntu:24.04\nWORKDIR /app\n{line}\n")
    assert recipe.needs == f"its Dockerfile has {line}"


@pytest.mark.usefixtures("no_engine")
def test_a_copy_through_a_link_does_not_leave_the_episodes_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    top, outside = tmp_path / "tasks", tmp_path / "outside"
    outside.mkdir()
    task = write_task(top / "one", dockerfile="FROM a\nCOPY links/ /app/\nCOPY data/lines.txt /app/out/lines.txt\n")
    (task / "environment" / "links").mkdir()
    (task / "environment" / "links" / "out").symlink_to(outside)
    trajectory, _ = play(tokenizer, top, "one", "done")
    assert "copies through a link that leads elsewhere" in trajectory.failure
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    ("copies", "files"),
    [
        ("COPY links/ /app/\nCOPY more/ /app/\n", {"more/out/planted": "x"}),
        ("COPY links/ /app/\nCOPY more/ /app/\n", {"more/file": "x"}),
        ("COPY links/out/key /app/key\n", {}),
        ("COPY links/out/inner/ /app/\n", {}),
    ],
)
def test_no_file_of_this_machine_is_read_or_written_through_a_link(
    copies: str, files: dict[str, str], tmp_path: Path
) -> None:
    outside, base = tmp_path / "outside", tmp_path / "episode"
    (outside / "inner").mkdir(parents=True)
    (outside / "key").write_text("secret")
    folder = write_task(tmp_path / "tasks" / "one", dockerfile=f"FROM a\n{copies}")
    links = folder / "environment" / "links"
    links.mkdir()
    (links / "out").symlink_to(outside)
    (links / "file").symlink_to(outside / "key")
    for name, text in files.items():
        path = folder / "environment" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (task,) = read_tasks(str(folder))
    base.mkdir()
    with pytest.raises(OSError, match="copies through a link that leads elsewhere"):
        fill_root(task, base)
    assert sorted(path.name for path in outside.iterdir()) == ["inner", "key"]
    assert (outside / "key").read_text() == "secret"


def test_the_folder_that_a_task_works_in_is_made_in_the_episodes_folder(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "tasks" / "one", dockerfile=None, toml=TOML + '[environment]\nworkdir = "/app/../../../data"\n'
    )
    (task,) = read_tasks(str(folder))
    base = tmp_path / "a" / "episode"
    base.mkdir(parents=True)
    fill_root(task, base)
    assert task.work_folder == "/data"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "tasks"]


# Containers: a stand-in for docker, which keeps each container's files in a folder and runs commands in bubblewrap.

STAND_IN = """#!{python}
import json, os, shutil, subprocess, sys
from pathlib import Path

top, arguments = Path({top!r}), sys.argv[1:]
with (top / "calls.jsonl").open("a") as file:
    file.write(json.dumps(arguments) + "\\n")
command, rest = arguments[0], arguments[1:]

def show(root):
    made = [argument for name in os.listdir(root) for argument in ("--bind", str(root / name), "/" + name)]
    return ["--bind", str(root), "/", *sum((["--ro-bind", p, p] for p in ("/usr", "/bin", "/lib", "/lib64")), [])]

if command == "build":
    if "broken" in rest[-1]:
        sys.exit("no such package: gcc-99")
elif command == "image":
    sys.exit(1)  # none is here yet
elif command == "run":
    root = top / rest[rest.index("--name") + 1]
    for name in ("app", "usr", "bin", "lib", "lib64", "dev", "proc"):
        (root / name).mkdir(parents=True)
elif command == "cp":
    name, _, target = rest[1].partition(":")
    shutil.copytree(rest[0], top / name / target.strip("/"))
elif command == "exec":
    folder = "/app"
    while rest[0].startswith("--"):
        folder = rest[1] if rest[0] == "--workdir" else folder
        rest = rest[2:]
    root, argv = top / rest[0], rest[1:]
    bwrap = ["bwrap", *show(root), "--dev", "/dev", "--proc", "/proc", "--chdir", folder, "--die-with-parent"]
    os.execvp("bwrap", [*bwrap, *argv])
elif command == "rm":
    shutil.rmtree(top / rest[-1])
"""


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine with a docker; the folder of its containers and of the calls that it got."""
    top = tmp_path / "engine"
    (top / "bin").mkdir(parents=True)
    program = top / "bin" / "docker"
    program.write_text(STAND_IN.format(python=sys.executable, top=str(top)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{top / 'bin'}{os.pathsep}{os.environ['PATH']}")
    forget_engines()
    yield top
    forget_engines()


def calls_of(top: Path) -> list[list[str]]:
    return [json.loads(line) for line in (top / "calls.jsonl").read_text().splitlines()]


NEEDY = "FROM ubuntu:24.04\nRUN apt-get install -y gcc\nWORKDIR /app\n"


def test_a_task_that_installs_something_runs_in_a_container(tokenizer: Tokenizer, tmp_path: Path, docker: Path) -> None:
    toml = (
        TOML + '[environment]\nmemory_mb = 512\ncpus = 2\n[environment.env]\nLEVEL = "3"\n[verifier.env]\nSEED = "7"\n'
    )
    write_task(tmp_path / "tasks" / "one", dockerfile=NEEDY, toml=toml)
    trajectory, seen = play(tokenizer, tmp_path / "tasks", "one", bash("pwd; echo 42 > answer.txt; false"), "done")
    assert trajectory.reward == 1.0
    assert "/app\n(exit code 1)" in seen
    calls = calls_of(docker)
    build = next(call for call in calls if call[0] == "build")
    assert build[-1] == str(tmp_path / "tasks" / "one" / "environment")
    run = next(call for call in calls if call[0] == "run")
    for name, value in (("--network", "none"), ("--memory", str(512 << 20)), ("--cpus", "2"), ("--env", "LEVEL=3")):
        assert run[run.index(name) + 1] == value
    assert not {"--privileged", "--volume", "-v", "--mount"} & set(run)
    verifier = next(call for call in calls if call[0] == "exec" and call[-1] == "/tests/test.sh")
    assert "SEED=7" in verifier
    assert calls[-1][0] == "rm"
    assert not list(docker.glob("policygrad-*"))  # nothing of it is left


def test_a_task_has_the_internet_only_where_it_says_so(tokenizer: Tokenizer, tmp_path: Path, docker: Path) -> None:
    toml = TOML + '[environment]\nallow_internet = true\ndocker_image = "example/image:1"\n'
    write_task(tmp_path / "tasks" / "one", toml=toml)
    play(tokenizer, tmp_path / "tasks", "one", "done")
    calls = calls_of(docker)
    run = next(call for call in calls if call[0] == "run")
    assert run[run.index("--network") + 1] == "bridge"
    assert "example/image:1" in run
    assert not [call for call in calls if call[0] == "build"]
    assert ["pull", "example/image:1"] in calls
    write_task(tmp_path / "silent" / "one", dockerfile=NEEDY)
    for network, expected in ((None, "none"), (True, "bridge")):
        play(tokenizer, tmp_path / "silent", "one", "done", network=network)
        run = [call for call in calls_of(docker) if call[0] == "run"][-1]
        assert run[run.index("--network") + 1] == expected


def test_an_image_that_cannot_be_built_costs_its_tasks_episodes(
    tokenizer: Tokenizer, tmp_path: Path, docker: Path
) -> None:
    for name in ("broken", "fine"):
        write_task(tmp_path / "tasks" / name, dockerfile=NEEDY)
    with pytest.warns(UserWarning, match=r"1 of 2 images cannot be had.*no such package: gcc-99"):
        lost, _ = play(tokenizer, tmp_path / "tasks", "broken", "done")
    assert "the image of broken could not be had" in lost.failure
    with pytest.warns(UserWarning, match="1 of 2 images"):
        kept, _ = play(tokenizer, tmp_path / "tasks", "fine", "done")
    assert kept.reward == 0.0


def test_a_command_that_hangs_in_a_container_ends_with_what_else_runs_there(
    tokenizer: Tokenizer, tmp_path: Path, docker: Path
) -> None:
    write_task(tmp_path / "tasks" / "one", dockerfile=NEEDY)
    turns = (bash("sleep 1000"), bash("echo 42 > answer.txt"), "done")
    trajectory, seen = play(tokenizer, tmp_path / "tasks", "one", *turns, command_seconds=1.0)
    assert "exceeded the time limit" in seen
    assert trajectory.reward == 1.0
    assert [call[0] for call in calls_of(docker)].count("restart") == 1


def test_a_container_that_starts_as_its_episode_is_closed_is_removed(
    docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = Container("docker", "policygrad-late", "image")
    container.close()
    (docker / "policygrad-late").mkdir()  # the engine has made it meanwhile
    with pytest.raises(OSError, match="the episode is over"):
        container.start(1 << 30, 1.0, 10, network=False, variables={})
    assert not list(docker.glob("policygrad-*"))


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("true", "wrote no /logs/verifier/reward.txt"),
        ("echo soon > /logs/verifier/reward.txt", "'soon', which is no finite number"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "larger than 65,536 bytes"),
    ],
)
def test_a_reward_that_a_container_does_not_have_costs_its_episode(
    tokenizer: Tokenizer, tmp_path: Path, docker: Path, verifier: str, reason: str
) -> None:
    write_task(tmp_path / "tasks" / "one", dockerfile=NEEDY, verifier=verifier)
    planted = bash("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    trajectory, _ = play(tokenizer, tmp_path / "tasks", "one", planted, "done")
    assert trajectory.reward is None
    assert reason in trajectory.failure


# Agents' programs.

AGENT = """import json, os, urllib.request
example = json.load(open(os.environ["POLICYGRAD_EXAMPLE"]))
body = {{"model": "policy", "messages": example["prompt"], "max_tokens": 4}}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
)
urllib.request.urlopen(request).read()
{work}
"""


def play_program(tokenizer: Tokenizer, example: pg.Example, program: Any) -> Any:
    sampler = ScriptedSampler(tokenizer, lambda key, context: "ok")
    spec = EpisodeSpec(example, (0, TRAIN, 1, 0), 1000)
    try:
        work = run_agent_episodes(
            [spec], 1, pg.SamplingParams(max_tokens=1000), sampler=sampler, encoder=tokenizer, program=program
        )
        (group,) = asyncio.run(work)
    finally:
        program.close()
    return group.trajectories[0]


def agent_of(tmp_path: Path, work: str) -> Path:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT.format(work=work))
    return folder / "agent.py"


@pytest.mark.usefixtures("no_engine")
def test_an_agents_program_works_in_the_tasks_files_and_the_verifier_scores_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    top = write_tasks(tmp_path / "tasks")
    agent = agent_of(tmp_path, 'assert os.getcwd() == "/app"; open("answer.txt", "w").write("42")')
    program = use_harbor(f"{top},agent={sys.executable} {agent}")
    assert isinstance(program, HarborProgram)
    trajectory = play_program(tokenizer, example_of(top, "answer"), program)
    assert (trajectory.failure, trajectory.reward) == ("", 1.0)
    assert trajectory.metrics["calls"] == 1.0


@pytest.mark.usefixtures("no_engine")
def test_an_agents_program_sees_no_tests_and_cannot_give_itself_a_reward(tokenizer: Tokenizer, tmp_path: Path) -> None:
    top = write_tasks(tmp_path / "tasks")
    hunt = f"""
seen = [path for path in ({str(top)!r}, "/tests", "/logs") if os.path.exists(path) and os.listdir(path)]
base = os.path.dirname(os.environ["POLICYGRAD_EXAMPLE"])
for name in ("verifier", "tests", "root", "logs"):
    try:
        os.symlink("/", os.path.join(base, name))
    except OSError:
        pass
open(os.environ["POLICYGRAD_RESULT"], "w").write(json.dumps({{"reward": 1, "metrics": {{"seen": len(seen)}}}}))
"""
    program = use_harbor(f"{top},agent={sys.executable} {agent_of(tmp_path, hunt)}")
    trajectory = play_program(tokenizer, example_of(top, "answer"), program)
    assert (trajectory.failure, trajectory.reward) == ("", 0.0)
    assert trajectory.metrics["seen"] == 0.0


@pytest.mark.usefixtures("no_engine")
def test_an_agents_episode_without_a_reward_has_failed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    top = write_tasks(tmp_path / "tasks")
    program = use_harbor(f"{top},agent={sys.executable} {agent_of(tmp_path, '')}")
    trajectory = play_program(tokenizer, example_of(top, "broken"), program)
    assert trajectory.reward is None
    assert "has no reward file; reward_command ended with exit code 3: no such module: answers" in trajectory.failure


@pytest.mark.usefixtures("docker")
def test_a_task_that_needs_a_container_is_refused_for_an_agents_program(tokenizer: Tokenizer, tmp_path: Path) -> None:
    top = tmp_path / "tasks"
    write_task(top / "files")
    write_task(top / "installs", dockerfile=NEEDY)
    task, program = load_task(f"harbor:{top}"), use_harbor(f"{top},agent={sys.executable}")
    with pytest.raises(DataError, match="RUN apt-get install -y gcc, which agent= cannot have"):
        check_rows(task, tokenizer, 100, program)
    with pytest.warns(UserWarning, match="1 of 2 rows skipped"):
        kept = check_rows(task, tokenizer, 100, program, skip_bad_rows=True)
    assert [row.columns["name"] for row in kept.rows] == ["files"]
    for name in (f"agent={sys.executable}", "engine=none"):
        with (
            pytest.raises(ConfigError, match=r"none of the 1 tasks of harbor:.*can be run: its Dockerfile has RUN"),
            use_harbor(f"{top / 'installs'},{name}"),
        ):
            pass

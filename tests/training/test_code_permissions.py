"""A run's folder may come from anybody: what its file names is imported where whoever goes on has said so, or wrote it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from policygrad.errors import ConfigError
from policygrad.rewards.resolve import resolve_reward
from policygrad.samplers.config import SamplerConfig
from policygrad.training.config.run import UncheckedRun
from policygrad.training.config.serialization import load_config, load_eval_options
from policygrad.training.config.trust import CodePermissions, code_in_argv, missing_permissions
from policygrad.utils.user_code import FILE_MODULE

GATE = """
from dataclasses import dataclass
from pathlib import Path
import policygrad as pg
(Path(__file__).parent / "ran").write_text("")
@dataclass(frozen=True)
class Gate(pg.Clip):
    pass
LIKE_GRPO = pg.GRPO
def score(prompts, completions, **columns): return [1.0 for c in completions]
"""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; modules that tests load are forgotten afterwards."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    monkeypatch.setattr(sys, "modules", sys.modules)
    yield work  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if name.startswith(FILE_MODULE) or "stranger" in name:
            del sys.modules[name]


def code(folder: Path, name: str = "stranger.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(GATE)
    return folder / name


def run_file(folder: Path, text: str, name: str = "run.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def ways(file: object) -> list[str]:
    """Every place of a file in which code can be named."""
    return [
        f"[algorithm.gate]\npart = '{file}:Gate'\n",
        f"[algorithm]\ngate = '{file}:Gate'\n",
        f"[algorithm]\nadvantage = ['{file}:Gate']\n",
        f"[[algorithm.advantage]]\npart = '{file}:Gate'\n",
        f"[algorithm.update_rule]\npart = 'GradientSteps'\n[algorithm.update_rule.inner]\npart = '{file}:Gate'\n",
        f"algorithm = '{file}:LIKE_GRPO'\n",
        f"reward = ['exact_match', '{file}:score']\n",
        f"reward = ['0.5 * {file}:score']\n",
        f"reward = ['{file}:score*0.5']\n",
        f"environment = '{file}:World'\n",
    ]


PLACES = ("runs/x", "bundle", "../elsewhere", "runs/other")
CASES = [
    pytest.param(place, way, marks=[] if place == PLACES[0] or way == 0 else pytest.mark.full)
    for place in PLACES
    for way in range(len(ways("")))
]


@pytest.mark.parametrize(("place", "way"), CASES)
def test_foreign_code_is_refused_and_not_imported(run_command: Command, here: Path, place: str, way: int) -> None:
    run = "bundle/runs/x" if place == "bundle" else "runs/x"
    file = code(here / place)
    run_file(here / run, ways(file)[way])
    message, _, err = run_command("train", "--resume", run, "--dry-run")
    assert message == 2
    assert f"--allow-code {file}" in err
    assert "is a program" in err
    message, _, err = run_command("train", "--config", f"{run}/run.toml", "--dry-run")
    assert (message, f"--allow-code {file}" in err) == (2, True)
    assert not (file.parent / "ran").exists()


def test_custom_parts_in_the_current_folder_need_no_permission(run_command: Command, here: Path) -> None:
    for file in (code(here), code(here / "parts", "stranger_too.py")):
        run_file(here / "runs" / "x", f"[algorithm.gate]\npart = '{file.relative_to(here)}:Gate'\n")
        message, _, err = run_command("train", "--resume", "runs/x", "--dry-run")
        assert message == 0, err
        assert (file.parent / "ran").exists()
    run_file(here / "runs" / "x", "[algorithm.gate]\npart = 'stranger:Gate'\n")
    assert run_command("train", "--resume", "runs/x", "--dry-run")[0] == 0
    run_file(here, "[algorithm.gate]\npart = 'stranger:Gate'\n", "mine.toml")
    assert run_command("train", "--config", "mine.toml", "--dry-run")[0] == 0


def test_code_in_the_runs_own_folder_is_refused(
    run_command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = code(here / "runs" / "x")
    run_file(file.parent, "[algorithm.gate]\npart = 'stranger:Gate'\n")
    for inside in (file.parent, file.parent / "deeper"):
        inside.mkdir(exist_ok=True)
        monkeypatch.chdir(inside)
        assert run_command("train", "--resume", str(file.parent), "--dry-run")[0] == 2
    assert not (file.parent / "ran").exists()


@pytest.mark.parametrize("allowed", ["../elsewhere/stranger.py", "../elsewhere", "../elsewhere/stranger.py:Gate"])
def test_allowed_code_is_imported(run_command: Command, here: Path, allowed: str) -> None:
    file = code(here.parent / "elsewhere")
    run_file(here / "runs" / "x", f"[algorithm.gate]\npart = '{file}:Gate'\n")
    assert run_command("train", "--resume", "runs/x", "--allow-code", "nobody", "--dry-run")[0] == 2
    assert not (file.parent / "ran").exists()
    message, out, err = run_command("train", "--resume", "runs/x", "--allow-code", "nobody", allowed, "--dry-run")
    assert message == 0, err
    assert "stranger.py:Gate" in out


@pytest.mark.parametrize(
    ("name", "missing"), [("json", []), ("json.tool", []), ("js", ["json.tool"]), ("tool", ["json.tool"])]
)
def test_allowing_a_package_allows_its_submodules(name: str, missing: list[str]) -> None:
    options = {"algorithm": {"gate": "json.tool:Gate"}}
    assert missing_permissions(options, Path("run.toml"), CodePermissions((name,))) == missing


def test_installed_packages_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming `shutil.rmtree` as a reward would have it called."""
    for reward in ("shutil.rmtree", "os.system", "sys.exit", "torch.load"):
        file = run_file(here / "runs" / "x", f"reward = ['{reward}']\n")
        with pytest.raises(ConfigError, match=rf"names code of its own, {reward.partition('.')[0]}"):
            load_config(file, UncheckedRun())
    monkeypatch.syspath_prepend(str(code(here / "lib" / "site-packages").parent))
    file = run_file(here / "runs" / "x", "[algorithm.gate]\npart = 'stranger:Gate'\n")
    with pytest.raises(ConfigError, match="--allow-code stranger"):
        load_config(file, UncheckedRun())


def test_imported_modules_need_no_permission(here: Path) -> None:
    file = code(here.parent / "elsewhere")
    options = run_file(here / "runs" / "x", f"algorithm = '{file}:LIKE_GRPO'\n")
    with pytest.raises(ConfigError, match="--allow-code"):
        load_config(options, UncheckedRun())
    resolve_reward(f"{file}:score")
    assert load_config(options, UncheckedRun()).algorithm == pg.GRPO


def test_a_file_cannot_allow_remote_code(run_command: Command, here: Path) -> None:
    run_file(here / "runs" / "x", "trust_remote_code = true\n")
    message, _, err = run_command("train", "--resume", "runs/x", "--dry-run")
    assert (message, "which a file cannot allow" in err) == (2, True)
    assert run_command("train", "--resume", "runs/x", "--trust-remote-code", "--dry-run")[0] == 0


SAMPLER = "[sampler]\nengine = 'vllm'\nurls = ['http://{}']\n"


@pytest.mark.parametrize("server", ["elsewhere:8000", "localhost@elsewhere:8000", "127.0.0.1\\@elsewhere", "[::1"])
def test_a_file_cannot_send_prompts_to_a_remote_server(run_command: Command, here: Path, server: str) -> None:
    urls = f"['http://127.0.0.1:1', 'http://{server}']"
    run_file(here / "runs" / "x", f"[sampler]\nengine = 'vllm'\nurls = {urls}\n")
    for argv in (("--resume", "runs/x"), ("--config", "runs/x/run.toml")):
        message, _, err = run_command("train", *argv, "--dry-run")
        assert (message, "servers on another machine" in err) == (2, True), err
        assert "127.0.0.1:1" not in err
    with pytest.raises(ConfigError, match="servers on another machine"):
        pg.train(resume="runs/x", display=False)


def test_a_file_cannot_write_weights_outside_its_folder(run_command: Command, here: Path) -> None:
    run, other = here / "runs" / "x", here.parent / "other"
    for folder in (str(other), "../other", "weights", ".", f"{run}/../y", "~/weights"):
        run_file(run, f"[sampler]\nengine = 'llama_cpp'\nfolder = '{folder}'\n")
        message, _, err = run_command("train", "--resume", "runs/x", "--dry-run")
        assert (message, f"--allow-code {shlex.quote(folder)}" in err) == (2, True), err
    assert run_command("train", "--resume", "runs/x", "--allow-code", folder, "--dry-run")[0] == 0
    for folder in (f"{run}/weights", "runs/x/deeper/weights"):
        run_file(run, f"[sampler]\nengine = 'llama_cpp'\nfolder = '{folder}'\n")
        assert run_command("train", "--resume", "runs/x", "--dry-run")[0] == 0
    assert not other.exists()


def test_a_file_cannot_choose_a_program_to_run(run_command: Command, here: Path) -> None:
    for python in (str(here.parent / "venv"), "runs/x/venv", "runs/venv/bin/python", "../venv"):
        run_file(here / "runs" / "x", f"[sampler]\nengine = 'vllm'\npython = '{python}'\n")
        code, _, err = run_command("train", "--resume", "runs/x", "--dry-run")
        assert (code, "a program would be run" in err, f"--allow-code {python}" in err) == (2, True, True), err
    for argv in (("--allow-code", python), ("--sampler.python", "venv")):
        assert run_command("train", "--resume", "runs/x", *argv, "--dry-run")[0] == 0
    run_file(here / "runs" / "x", "[sampler]\nengine = 'vllm'\npython = 'venv'\n")  # the user's own
    assert run_command("train", "--resume", "runs/x", "--dry-run")[0] == 0


def test_local_servers_and_those_of_the_command_line_need_no_permission(run_command: Command, here: Path) -> None:
    run_file(here / "runs" / "x", SAMPLER.format("localhost:8000"))
    assert run_command("train", "--resume", "runs/x", "--dry-run")[0] == 0
    run_file(here / "runs" / "x", SAMPLER.format("gpu-1:8000"))
    for argv in (
        ("--allow-code", "http://gpu-1:8000"),
        ("--sampler.urls", "http://gpu-2:8000"),
        ("--sampler.urls=http://b",),
    ):
        message, out, err = run_command("train", "--resume", "runs/x", *argv, "--dry-run")
        assert message == 0, err
        assert (argv[0] == "--allow-code") == ("gpu-1" in out)
    message, _, err = run_command("train", "--resume", "runs/x", "--sampler.folder", "elsewhere", "--dry-run")
    assert (message, "--allow-code http://gpu-1:8000" in err) == (2, True), err
    argv = ("train", "grpo", "--sampler.engine", "vllm", "--sampler.urls", "http://gpu-1:8000", "--dry-run")
    assert run_command(*argv)[0] == 0


TAUGHT = "[algorithm]\nname = 'distill'\n[algorithm.reference]\n{}\n"


@pytest.mark.parametrize("names", ["model = 'http://far:8000/v1'", "teachers = ['a=tiny', 'b=http://far:8000/v1']"])
def test_a_file_cannot_send_completions_to_a_remote_teacher(run_command: Command, here: Path, names: str) -> None:
    """Nor the API key; on this machine, and where the command line names it, it needs no permission."""
    base = ("train", "distill", "--resume", "runs/x", "--dry-run")
    run_file(here / "runs" / "x", TAUGHT.format(names))
    code, _, err = run_command(*base)
    assert (code, "--allow-code http://far:8000/v1" in " ".join(err.split())) == (2, True), err
    assert "the API key would go to a teacher on another machine" in " ".join(err.split())
    for argv in (("--allow-code", "http://far:8000/v1"), ("--teacher", "tiny"), ("--teacher", "b=http://far:8000/v1")):
        assert "API key" not in run_command(*base, *argv)[2]
    run_file(here / "runs" / "x", TAUGHT.format(names.replace("far", "localhost")))
    assert "API key" not in run_command(*base)[2]


def test_an_evaluation_ignores_the_runs_servers(here: Path) -> None:
    """`eval RUN` draws by itself, or by what its own command line names."""
    file = run_file(here / "runs" / "x", SAMPLER.format("gpu-1:8000"))
    assert load_eval_options(file, CodePermissions())[0].sampler == SamplerConfig()


def test_missing_code_is_reported_as_missing(run_command: Command, here: Path) -> None:
    for name, says in (("nobody:Gate", "there is no module 'nobody'"), ("nobody.py:Gate", "there is no file")):
        run_file(here / "runs" / "x", f"[algorithm.gate]\npart = '{name}'\n")
        message, _, err = run_command("train", "--resume", "runs/x", "--dry-run")
        assert (message, says in err) == (2, True), err


def test_the_resume_command_allows_custom_code_remote_servers_and_folders(small: pg.Run, tmp_path: Path) -> None:
    file = str(small.reward[0]).rpartition(":")[0]
    there = SamplerConfig(engine="llama_cpp", urls=("http://gpu-1:8000", "http://localhost:1"), folder="a folder")
    run = replace(small, prompts_per_step=1, samples_per_prompt=2, output=str(tmp_path / "run"))
    trainer = pg.Trainer(run, display=False)
    trainer.train(stop_after=1)
    assert trainer.resume_command == f"policygrad train --resume {tmp_path / 'run'} --allow-code {file}"
    trainer.config = replace(trainer.config, sampler=there)
    assert trainer.resume_command.endswith(f" --allow-code {file} 'a folder' http://gpu-1:8000")


def test_a_comparison_allows_code_of_its_own_command_line() -> None:
    argv = ["train", "a/b.py:X", "--algorithm.gate", "mine:Gate", "--reward", "exact_match", "pkg.mod.f", "format:a:b"]
    assert code_in_argv(argv) == ["a/b.py", "mine", "pkg.mod"]
    assert code_in_argv(["train", "--sampler.urls", "http://a:8000", "http://localhost:1"]) == ["http://a:8000"]
    assert code_in_argv(["--reward=a.b.f", "--algorithm.terms=KL,c.py:T", "--directory", "d"]) == [
        "a.b",
        "c.py",
        "d/c.py",
    ]

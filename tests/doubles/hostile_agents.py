"""Agents that misbehave: each episode does what its example's `case` names, with nothing but the standard library."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

KEY_AT_IMPORT = os.environ.get("OPENAI_API_KEY", "")
URL_AT_IMPORT = os.environ.get("OPENAI_BASE_URL", "")


def ask(key: str = "", url: str = "") -> None:
    """Request one token."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url or os.environ['OPENAI_BASE_URL']}/completions", body, headers)
    urllib.request.urlopen(request).read()


def main(example: dict) -> object:
    if example["case"] != "module_level_key":
        ask()
    return globals()[example["case"]]()


def write(data: str | bytes) -> None:
    Path(os.environ["POLICYGRAD_RESULT"]).write_bytes(data.encode() if isinstance(data, str) else data)


# Results


def behaves() -> dict:
    return {"reward": 1.0, "answer": "a \ud800 surrogate", "metrics": {"done": 1}}


def fifo() -> None:
    os.mkfifo(os.environ["POLICYGRAD_RESULT"])


def endless_link() -> None:
    os.symlink("/dev/zero", os.environ["POLICYGRAD_RESULT"])


def link() -> None:
    Path("other.json").write_text('{"reward": 1}')
    os.symlink(os.path.abspath("other.json"), os.environ["POLICYGRAD_RESULT"])


def hard_link() -> None:
    Path("other.json").write_text('{"reward": 1}')
    os.link("other.json", os.environ["POLICYGRAD_RESULT"])


def folder() -> None:
    os.mkdir(os.environ["POLICYGRAD_RESULT"])


def deep() -> None:
    write("[" * 100_000 + "]" * 100_000)


def deep_metrics() -> None:
    write('{"metrics": ' + "[" * 500 + "]" * 500 + "}")


def no_text() -> None:
    write(b'{"answer": "\xff"}')


def not_finite() -> None:
    write('{"reward": NaN}')


def huge() -> None:
    write('{"reward": 1' + "0" * 500 + "}")


def metrics_list() -> None:
    write('{"metrics": [1]}')


def metrics_text() -> None:
    write('{"metrics": "many"}')


def many_metrics() -> None:
    write(json.dumps({"metrics": {str(i): i for i in range(300_000)}}))


def odd_metric() -> None:
    write('{"metrics": {"a\\nb": 1}}')


def lone_metric() -> None:
    write('{"metrics": {"\\ud800": 1}}')


def large() -> None:
    write("[" + "1," * 200_000 + "1]")


# Output and disk


def odd_output() -> None:
    os.write(1, b"\x1b[2J\xff\xfe the end")
    os._exit(3)


def prints_much() -> None:
    while True:
        os.write(1, b"x" * 65536)


def closes_everything() -> float:
    os.closerange(0, 100)
    return 1.0


def unlinked_file() -> None:
    file = open("big", "wb")  # noqa: SIM115
    os.unlink("big")
    while True:
        file.write(b"x" * 2**20)
        file.flush()
        time.sleep(0.001)


def many_files() -> None:
    for i in range(10**6):
        Path(str(i)).write_bytes(b"x" * 2**20)
        time.sleep(0.001)


# Folders that are hard to delete


def deep_folder() -> float:
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    return 1.0


def closed_folder() -> float:
    os.makedirs("closed/inner/inner")
    Path("closed/inner/file").write_text("x")
    os.chmod("closed/inner", 0)
    os.chmod("closed", 0)
    return 1.0


# Processes


def daemon() -> float:
    """One that keeps nothing by which it could be known: neither parent, group, session nor variables."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.execve(sys.executable, [sys.executable, "-c", f"{MARK!r}; import time; time.sleep(3600)"], {})
        os._exit(0)
    os.wait()
    return 1.0


MARK = "a daemon of the tests of policygrad"


def fork_bomb() -> None:
    for _ in range(300):
        if not os.fork():
            os.execve("/bin/sleep", ["sleep", "3600"], {})
    time.sleep(3600)


def chain() -> None:
    """A fork that forks, and so on."""
    while True:
        if os.fork():
            time.sleep(3600)


def stops_itself() -> None:
    os.kill(os.getpid(), 19)


def kills_its_parent() -> float:
    """Its keeper, or the first process of its namespace, which no signal reaches."""
    os.kill(os.getppid(), 9)
    return 1.0


def kills_the_host() -> None:
    """The process that starts programs, where it can be seen."""
    keeper = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, 9)
    time.sleep(3600)


# Other episodes


def peeks() -> dict:
    """What it can find of others: keys in variables, folders, processes; and whether another's key is answered."""
    keys = set()
    wait_for(Path(os.environ["MEETING"], "began"))
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            keys |= {v.partition(b"=")[2].decode() for v in variables if v.startswith(b"OPENAI_API_KEY=")}
    keys -= {os.environ["OPENAI_API_KEY"], KEY_AT_IMPORT, ""}
    answered = 0
    for key in keys:
        try:
            ask(key)
        except OSError:
            continue
        answered += 1
    Path(os.environ["MEETING"], "looked").touch()
    own = Path(os.environ["POLICYGRAD_RESULT"]).parent
    others = len(list(own.parent.iterdir())) - 1
    return {"reward": 1.0, "metrics": {"keys": len(keys), "answered": answered, "folders": others}}


def unmounts() -> dict:
    """Takes away what hides the folders of others, itself and by a program."""
    hidden = Path(os.environ["POLICYGRAD_RESULT"]).parent.parent
    unmounted = not ctypes.CDLL(None).umount2(os.fsencode(hidden), 2)  # at once, though it is in use
    unmounted |= shutil.which("umount") is not None and not subprocess.run(["umount", "--lazy", hidden]).returncode
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return {"reward": 1.0, "metrics": {"unmounted": float(unmounted), "capabilities": held}}


def has_key_in_program() -> float:
    """Its key in a program's variables, which stays until the others have looked."""
    code = "import time; time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    Path(os.environ["MEETING"], "began").touch()
    wait_for(Path(os.environ["MEETING"], "looked"))
    return 1.0


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def module_level_key() -> dict:
    """As a client does that is made when the file is imported."""
    ask(KEY_AT_IMPORT, URL_AT_IMPORT)
    return {"reward": 1.0, "answer": KEY_AT_IMPORT}


def tells_variables() -> str:
    return " ".join(sorted(os.environ))


def needs_a_variable() -> None:
    print(os.environ["NAMED"])

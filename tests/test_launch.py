"""Files in launch/ are valid for Accelerate or bash."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import accelerate.commands.launch
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from tests.processes.sharded_on_cpu import launch_environment

LAUNCH = Path(__file__).parents[1] / "launch"
FILES = sorted(LAUNCH.glob("*.yaml"))
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
OWN_FIELDS = {"compute_environment", "distributed_type", "use_cpu"}
"""Fields of Accelerate's files that are no options of `accelerate launch`."""
DEEPSPEED = accelerate.commands.launch.is_deepspeed_available()
WANTED = {
    "cpu.yaml": {"ACCELERATE_MIXED_PRECISION": "no"},
    "ddp.yaml": {"ACCELERATE_MIXED_PRECISION": "no"},
    "fsdp2.yaml": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_accelerate_reads_the_file_and_knows_every_field(file):
    config = load_config_from_file(str(file))
    values = yaml.safe_load(file.read_text())
    known = {action.dest for action in launch_command_parser()._actions}
    for name, value in values.items():
        if name.endswith("_config"):
            prefix = "fsdp_" if name == "fsdp_config" else ""
            for key in value:
                assert key in known and key.startswith(prefix), f"{file.name}: {name}.{key}"
        else:
            assert name in known | OWN_FIELDS, f"{file.name}: {name}"
    assert config.num_processes == values["num_processes"]
    assert values["mixed_precision"] == "no", "precision is the recipe's setting"


@pytest.mark.parametrize("name", WANTED)
def test_accelerate_passes_the_file_to_the_processes(name):
    environment = launch_environment(str(LAUNCH / name))
    assert environment | WANTED[name] == environment


@pytest.mark.skipif(not DEEPSPEED, reason="needs the extra deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_files_ask_for_their_stage(stage):
    environment = launch_environment(str(LAUNCH / f"deepspeed_zero{stage}.yaml"))
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(stage)


def test_every_file_is_in_the_guide():
    guide = (LAUNCH / "README.md").read_text()
    for file in FILES + SCRIPTS:
        assert f"`{file.name}`" in guide, file.name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_bash_reads_the_script(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.fixture
def cluster(tmp_path) -> Path:
    """A folder with the scripts and stubs of Slurm and Accelerate, which record their arguments;
    `accelerate` works until SIGTERM, on which it ends with exit code 130."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    commands = {
        "srun": 'while [[ "$1" == -* ]]; do shift; done; SLURM_NODEID=1 "$@" & echo $! > step\n'
        "trap 'kill -KILL $!' TERM; wait $!",  # on SIGTERM it kills its step
        "scancel": 'echo "scancel $*" >> done.txt; kill -TERM "$(cat step)"',
        "scontrol": '[[ "$1" == show ]] && printf "n1\\nn2\\n" || echo "scontrol $*" >> done.txt',
        "accelerate": 'echo "accelerate $*" >> done.txt; trap "exit 130" TERM\n'
        'for i in $(seq "$WORK"); do sleep 0.1; done; echo finished >> done.txt',
    }
    place = tmp_path / ".venv" / "bin"
    place.mkdir(parents=True)
    for name, text in commands.items():
        (place / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (place / name).chmod(0o755)
    return tmp_path


def submit(cluster: Path, *arguments: str, work: int, **settings: str) -> subprocess.Popen:
    """Runs the script as sbatch does, with SLURM_ variables and in the submission folder."""
    slurm = {"CPUS_PER_TASK": "8", "SUBMIT_DIR": str(cluster), "JOB_ID": "77", "NNODES": "2"}
    slurm |= {"GPUS_ON_NODE": "8", "JOB_NODELIST": "n[1-2]"}
    settings = {f"SLURM_{name}": value for name, value in slurm.items()} | settings
    path = f"{cluster / '.venv' / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(cluster / "launch" / "slurm_train.sh"), *arguments],
        env=os.environ | settings | {"PATH": path, "WORK": str(work)},
        stdout=subprocess.PIPE,
        text=True,
    )


def done(cluster: Path) -> list[str]:
    return (cluster / "done.txt").read_text().splitlines()


def test_slurm_starts_every_machine_with_its_rank(cluster):
    assert submit(cluster, "recipes/r.py", "data.prefix=to German: ", work=1).wait(60) == 0
    started, finished = done(cluster)
    assert "--config_file launch/ddp.yaml --num_machines 2 --num_processes 16" in started
    assert "--main_process_ip n1 --main_process_port 20077 --machine_rank 1" in started
    assert started.endswith("recipes/r.py data.prefix=to German: ")
    assert finished == "finished"


def test_a_pre_empted_job_stops_its_processes_and_is_queued_again(cluster):
    running = submit(cluster, "-m", "drafttrain", "distill", work=600)
    deadline = time.monotonic() + 60
    while not (cluster / "done.txt").exists():
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert done(cluster)[1:] == ["scancel --quiet --signal=TERM 77", "scontrol requeue 77"]
    assert "queued again" in printed


def test_processes_are_counted_by_hand_without_gpus(cluster):
    none = {"work": 1, "SLURM_GPUS_ON_NODE": ""}
    assert submit(cluster, "recipes/r.py", **none, PROCESSES="2").wait(60) == 0
    assert "--num_processes 4" in done(cluster)[0]
    assert submit(cluster, "r.py", **none, PROCESSES="").wait(60) != 0


def test_a_file_whose_launcher_would_die_of_the_signal_is_refused(cluster):
    for file in ("launch/cpu.yaml", "launch/gpu.yaml"):
        assert submit(cluster, "r.py", work=1, LAUNCH_FILE=file).wait(60) == 2
    assert not (cluster / "done.txt").exists()

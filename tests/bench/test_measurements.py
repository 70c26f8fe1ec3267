"""The measurements themselves, at tiny sizes: each runs through on real servers, and what it says can be true."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from bench import fence, recovery
from bench.house import open_house
from bench.scans import scan_figure

_HEARTBEAT_SECONDS = 1


async def test_what_the_fence_costs_is_measured(home: Path) -> None:
    """A few appends and steps of both kinds: a fenced append sends no more statements, a fenced step does."""
    async with open_house(home) as house:
        figures = await fence.measure(house, count=fence.BLOCK)

    assert [figure.subject for figure in figures] == ["fence"] * 2
    for figure in figures:
        assert figure.value == figure.detail["fenced ms"] / figure.detail["bare ms"] > 0
    append, step = ((figure.detail["fenced statements"], figure.detail["bare statements"]) for figure in figures)
    assert append[0] >= append[1] > 0
    assert step[0] > step[1] > append[1]
    json.dumps([figure.as_json() for figure in figures], allow_nan=False)


async def test_how_soon_a_turn_goes_on_or_stops_is_measured(home: Path) -> None:
    """Once each, with real workers: a killed one is missed after the heartbeat time-out, which here is short.

    `recovery.measure` does the same for every signal and scene, which is too long for here.
    """
    async with open_house(home) as house:
        scenes = recovery.Scenes(house, _HEARTBEAT_SECONDS)
        async with scenes.provider:
            [killed] = await recovery.gone_on(scenes, signal.SIGKILL, 1)
            async with scenes.worker():
                directory = Path(house.location.directory)
                [stopped] = await recovery.stopped(house, scenes, lambda: recovery.in_a_tool(scenes, directory), 1)
                [silenced] = await recovery.stopped(house, scenes, lambda: recovery.silent(scenes), 1)
        scan = await scan_figure(house, 1, rows=200, waiting=60)

    # The time-out runs from the last heartbeat, which was before the kill.
    assert _HEARTBEAT_SECONDS * 500 < killed < 60_000
    assert 0 < stopped < 60_000
    assert 0 < silenced < 60_000
    assert 0 < scan.detail["its queries, worst"] < scan.value
    assert scan.detail["times"] == 1
    json.dumps(scan.as_json(), allow_nan=False)

"""`fencepost run` beside `fencepost dev`: what it shows, and how it ends."""

from __future__ import annotations

import json
import signal

from fencepost.local.processes import end
from tests.cli.command import Command, ended, read_until
from tests.cli.nursery import Nursery

_SLOW = "delay_ms: 50\nwords: 400"


def test_a_prompt_is_shown_to_its_settled_end(beside: Command) -> None:
    """Text, tool calls with what came of them, tokens; standard output holds no control characters."""
    (beside.directory / "note.txt").write_text("the word is heron\n")
    done = beside("run", "Read note.txt and write down what it says in WORD.md")

    assert done.code == 0
    assert "● read note.txt\n  └ the word is heron\n" in done.out
    assert "● write WORD.md\n" in done.out
    assert "step 3 settled, stop" in done.out
    assert "tokens in" in done.out
    assert "\x1b" not in done.out
    assert "heron" in (beside.directory / "WORD.md").read_text()
    assert done.complaint().startswith("session ses_")


def test_programs_get_an_object_a_line_and_the_result_last(nursery: Nursery, beside: Command) -> None:
    """Durable events as they are stored, the pieces of text between them. Another call goes on with the session."""
    first = nursery(beside, "run", "--json", "say: hello there")
    session = first.objects()[-1]["sessionID"]
    second = nursery(beside, "run", "--session", session, "--json", "-", stdin="say: and again")

    types = [each["type"] for each in first.objects()]
    assert (first.code, second.code) == (0, 0)
    assert types[0] == "session.created.1"
    assert types[-2:] == ["session.next.step.ended.2", "result"]
    assert "".join(each["text"] for each in first.objects() if each["type"] == "delta") == "hello there"
    assert first.objects()[-1] | {"outcome": "done", "steps": 1} == first.objects()[-1]
    assert second.objects()[0]["type"] == "session.next.prompt.admitted.1"
    assert second.objects()[-1]["sessionID"] == session


def test_a_failed_turn_says_why(nursery: Nursery, beside: Command) -> None:
    """The provider's words, in one line, and exit code 1."""
    done = nursery(beside, "run", "fail: 401")

    assert done.code == 1
    assert "failed: scripted failure 401" in done.complaint()
    assert "step 1 failed" in done.out


def test_ctrl_c_interrupts_the_turn_and_waits_for_it(beside: Command) -> None:
    """The text that was streamed stays, and the session is settled."""
    with beside.started("run", "--json", _SLOW) as process:
        read_until(process.stdout, '"delta"')
        process.send_signal(signal.SIGINT)
        done = ended(process)

    assert done.code == 130
    assert done.objects()[-1]["outcome"] == "interrupted"
    assert "press Ctrl-C again" in done.err
    assert "Traceback" not in done.err


def test_a_second_ctrl_c_leaves_without_waiting(beside: Command) -> None:
    """Even when the turn does not come to its end."""
    with beside.started("run", "--json", _SLOW) as process:
        read_until(process.stdout, '"delta"')
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "press Ctrl-C again")
        process.send_signal(signal.SIGINT)
        done = ended(process)

    assert done.code == 130
    assert "Traceback" not in done.err


def test_a_reader_that_leaves_ends_it_quietly(beside: Command) -> None:
    """As in `fencepost run ... | head -1`: the turn is interrupted, and how to go on is said."""
    with beside.started("run", "--json", _SLOW) as process:
        read_until(process.stdout, '"delta"')
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        code = process.wait(timeout=50)

    assert code == 130
    assert said.startswith("session ses_")
    assert len(said.splitlines()) == 1


def test_a_worker_that_is_killed_is_started_again(beside: Command) -> None:
    """By whichever command sees it first; the turn goes on by itself, after the text that was there."""
    file = beside.home / "workers" / "fencepost" / "worker.json"
    killed = json.loads(file.read_text())["pid"]
    with beside.started("run", "--json", "delay_ms: 40\nwords: 50") as process:
        read_until(process.stdout, '"delta"')
        end(killed, [(signal.SIGKILL, 5)])
        done = ended(process)

    assert done.code == 0
    assert json.loads(file.read_text())["pid"] != killed
    assert [each["data"]["reason"] for each in done.objects() if "interrupted" in each["type"]] == ["lost"]
    assert done.objects()[-1]["outcome"] == "done"


def test_other_settings_get_a_worker_of_their_own(nursery: Nursery, beside: Command) -> None:
    """The one that is there would not know the model. A file named worker.py in the directory is not taken for ours."""
    (beside.directory / "worker.py").write_text("raise SystemExit('wrong worker')\n")
    own = Command(beside.home, beside.directory, {})
    done = nursery(own, "run", "--model", "scripted/test", "say: fine")

    assert (done.code, done.out.splitlines()[0]) == (0, "fine")


def test_an_unknown_session_is_one_line(nursery: Nursery, beside: Command) -> None:
    """The database has to be asked."""
    done = nursery(beside, "run", "--session", "ses_nope", "hi")

    assert done.code == 2
    assert "no session ses_nope" in done.complaint()

"""Hosts in namespaces, on which tests of clusters run: what they share, how they are cut off; and nothing stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts.network import Host, Network, network, why_not

LONG = 60.0
ROOT = Path(__file__).parents[2]

if (reason := why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)

# Where nobody listens, a host that is reached says so at once.
KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 22), 1)
except OSError as error:
    print(type(error).__name__)
"""

KEEPER = """
import sys
from pathlib import Path
from tests.hosts.network import network

folder = Path(sys.argv[1])
with network(folder / "hosts", folder / "shared", folder / "software") as joined:
    print(joined.add("one").first, joined.add("two").first, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Network]:
    for name in ("shared", "software"):
        (tmp_path / name).mkdir()
    with network(tmp_path / "hosts", tmp_path / "shared", tmp_path / "software") as joined:
        yield joined


def knock(source: Host, target: Host) -> str:
    return source.run(sys.executable, "-c", KNOCK, target.address).strip()


def test_hosts_share_one_folder_and_see_only_their_own_processes(joined: Network) -> None:
    own = joined.shared / "own"
    own.mkdir()
    one, two = joined.add("one"), joined.add("two", private=[own])
    one.run("touch", str(joined.shared / "file"))
    two.run("touch", str(own / "file"))
    assert two.run("ls", str(joined.shared)).split() == ["file", "own"]
    assert list(own.iterdir()) == []
    assert two.run("hostname") == "two\n"
    assert len(two.processes()) == 1


@pytest.mark.long
def test_cuts_and_firewalls_lose_what_is_sent_until_they_are_taken_back(joined: Network) -> None:
    one, two, three = (joined.add(name) for name in ("one", "two", "three"))
    assert knock(one, two) == "ConnectionRefusedError"
    with joined.cut(one, two):
        assert knock(one, two) == knock(two, one) == "TimeoutError"
        assert knock(one, three) == "ConnectionRefusedError"
    with joined.closed_ports(one, two, "20-30"):
        assert knock(one, two) == "TimeoutError"
        assert knock(two, one) == "ConnectionRefusedError"
    assert knock(one, two) == "ConnectionRefusedError"
    joined.unplug(two)
    assert knock(one, two) == "TimeoutError"


@pytest.mark.long
def test_nothing_stays_of_hosts_whose_test_was_killed(tmp_path: Path) -> None:
    for name in ("shared", "software"):
        (tmp_path / name).mkdir()
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert keeper.stdout is not None
    firsts = [psutil.Process(int(number)) for number in keeper.stdout.readline().split()]
    assert len(firsts) == 2
    family = psutil.Process(keeper.pid).children(recursive=True)
    keeper.kill()
    keeper.communicate()
    assert psutil.wait_procs(family, timeout=LONG)[1] == []
    assert set(firsts) <= set(family)

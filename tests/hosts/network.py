"""Hosts in namespaces of the kernel, joined by a switch, for tests that break a network.

Each host has its own network, host name, processes and folder for temporary files. All see the same software (Spark,
Python), and one folder as storage that hosts share. Nothing is made outside these namespaces and nothing has a name
there, so there is nothing to clean up: a namespace is gone with its last process, and its first process dies with the
test's, even if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["TEMPORARY", "Host", "Network", "network", "why_not"]

PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
"""The programs that are needed, and Debian's packages of them."""

TEMPORARY = tempfile.gettempdir()
"""Where each host has files of its own."""

SUBNET = "10.77.0"
NOWHERE = "02:00:00:00:00:fe"
"""The hardware address of no interface: what is sent there is lost without a word."""

_FIREWALL = 77
"""A routing table of the kernel."""

# Dies with the process that starts it; then its child, which is the first process of the namespaces, dies too, and
# with that all others in them.
_NEW = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount"]
_NEW += ["--mount-proc", "--uts"]


def why_not() -> str | None:
    """Why this machine cannot have such hosts, or None."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"there is no program {program!r}; on Debian: apt-get install {package}"
    if os.geteuid() != 0:
        return "namespaces of a network are for root only"
    command = [*_NEW, "sh", "-c", "ip link add switch type bridge && ip link add port1 type veth peer name eth0"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"this machine does not allow namespaces with a bridge: {tried.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Host:
    """A host. ``first`` is the first of its processes, by its number outside."""

    name: str
    address: str
    first: int
    network: Network

    def command(self, *command: str) -> list[str]:
        """A command as it is to be started here, to run on this host."""
        return ["nsenter", "--target", str(self.first), "--net", "--pid", "--mount", "--uts", "--", *command]

    def beside(self, *command: str) -> list[str]:
        """The same for a process that uses this host's network, but sees the files and processes of the test."""
        return ["nsenter", "--target", str(self.first), "--net", "--", *command]

    def run(self, *command: str) -> str:
        """Run a command on this host, and return what it prints."""
        return _run(self.command(*command))

    def processes(self, *words: str) -> list[psutil.Process]:
        """Its processes whose command lines have all of these words."""
        namespace = os.stat(f"/proc/{self.first}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == namespace:
                    line = " ".join(process.cmdline())
                    if all(word in line for word in words):
                        found.append(process)
        return found

    def freeze(self) -> Callable[[], None]:
        """Stop all its processes, as a hypervisor does with a machine; returns what lets them go on."""
        stopped = self.processes()
        for process in stopped:
            process.suspend()

        def thaw() -> None:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

        return thaw

    def kill(self) -> None:
        """End all its processes at once, as a loss of power does."""
        victims = self.processes()
        os.kill(self.first, signal.SIGKILL)
        psutil.wait_procs(victims, timeout=30)


class Network:
    """A switch and the hosts that are joined by it. ``switch`` is the first process in the switch's namespaces."""

    def __init__(self, switch: int, folder: Path, shared: Path, software: Path) -> None:
        self._switch = switch
        self._folder = folder
        self.shared = shared
        self._software = software
        self.hosts: dict[str, Host] = {}
        self._stack = contextlib.ExitStack()
        self._at_switch("ip", "link", "add", "switch", "type", "bridge")
        self._at_switch("ip", "link", "set", "switch", "up")

    def add(self, name: str, private: Sequence[Path] = (), links: Mapping[Path, Path] | None = None) -> Host:
        """A new host. At the paths ``private`` it has folders of its own, in the place of shared ones.

        Where ``links`` says so, it finds another folder in the place of one.
        """
        number = len(self.hosts) + 1
        first = self._stack.enter_context(_namespaces())
        host = Host(name, f"{SUBNET}.{number}", first, self)
        port = f"port{number}"
        inside = ["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(first)]
        self._at_switch(*inside)
        self._at_switch("ip", "link", "set", port, "master", "switch", "up")
        for command in (
            f"hostname {name}",
            "ip link set lo up",
            f"ip addr add {host.address}/24 dev eth0",
            "ip link set eth0 up",
        ):
            host.run(*command.split())
        self._own_files(host, private, links or {})
        self.hosts[name] = host
        return host

    def _own_files(self, host: Host, private: Sequence[Path], links: Mapping[Path, Path]) -> None:
        """Give a host temporary files and names of hosts of its own.

        Of the test's temporary files it sees what hosts share, and the Python that runs the tests if that is there.
        """
        own = self._folder / host.name
        (own / "temporary").mkdir(parents=True)
        names = {"127.0.0.1": "localhost", **{each.address: each.name for each in (*self.hosts.values(), host)}}
        (own / "names").write_text("".join(f"{address} {name}\n" for address, name in names.items()))
        script = ["mount --make-rprivate /", f"mount --bind {own / 'names'} /etc/hosts"]
        for path in (self.shared, self._software, Path(sys.prefix)):
            if path.is_relative_to(TEMPORARY):
                place = own / "temporary" / path.relative_to(TEMPORARY)
                script.append(f"mkdir -p {place} && mount --bind {path} {place}")
        script.append(f"mount --rbind {own / 'temporary'} {TEMPORARY}")
        script += [f"mount -t tmpfs none {path}" for path in private]
        script += [f"mount --bind {other} {path}" for path, other in links.items()]
        host.run("sh", "-ec", "\n".join(script))

    def _at_switch(self, *command: str) -> str:
        return _run(["nsenter", "--target", str(self._switch), "--net", "--", *command])

    # ── what breaks ───────────────────────────────────────────────────────────────────────────────────────────────

    def unplug(self, host: Host) -> None:
        """Pull the cable of a host: it loses everybody, and its link goes down."""
        self._at_switch("ip", "link", "set", self._port(host), "down")

    @contextlib.contextmanager
    def cut(self, one: Host, other: Host) -> Iterator[None]:
        """Within this block, whatever two hosts send each other is silently lost. They reach all others."""
        pairs = (one, other), (other, one)
        for host, peer in pairs:
            _run(host.beside(*f"ip neigh replace {peer.address} lladdr {NOWHERE} nud permanent dev eth0".split()))
        try:
            yield
        finally:
            for host, peer in pairs:
                _run(host.beside(*f"ip neigh del {peer.address} dev eth0".split()))

    @contextlib.contextmanager
    def closed_ports(self, source: Host, target: Host, ports: str) -> Iterator[None]:
        """Within this block, a firewall drops what one host sends to these TCP ports of another one, such as
        ``"7100-7200"``."""
        lost = f"{SUBNET}.250"
        for command in (
            f"ip neigh replace {lost} lladdr {NOWHERE} nud permanent dev eth0",
            f"ip route replace {target.address} via {lost} dev eth0 table {_FIREWALL}",
            f"ip rule add to {target.address} ipproto tcp dport {ports} lookup {_FIREWALL}",
        ):
            _run(source.beside(*command.split()))
        try:
            yield
        finally:
            _run(source.beside(*f"ip rule del lookup {_FIREWALL}".split()))

    def _port(self, host: Host) -> str:
        return f"port{host.address.rpartition('.')[2]}"

    def close(self) -> None:
        """End all hosts."""
        self._stack.close()


@contextlib.contextmanager
def network(folder: Path, shared: Path, software: Path) -> Iterator[Network]:
    """A network without hosts. Hosts keep their own files in ``folder``."""
    with _namespaces() as switch:
        made = Network(switch, folder, shared, software)
        with contextlib.closing(made):
            yield made


@contextlib.contextmanager
def _namespaces() -> Iterator[int]:
    """New namespaces; gives their first process."""
    keeper = subprocess.Popen(
        [*_NEW, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        [first] = psutil.Process(keeper.pid).children()
        yield first.pid
    finally:
        keeper.kill()
        keeper.communicate()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr}"
    return done.stdout

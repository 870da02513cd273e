"""`allranks train --nodes` on hosts of their own: addresses, names, processes, and a network between them that fails.

A host is a set of Linux namespaces (network, name, processes, mounts) that lives as long as its first process. Its only
way out is a TUN device; a thread of the test holds the other ends and carries packets between them, or does not. None
of it has a name outside of these processes, which the kernel kills with the test: nothing can be left behind.
"""

import ctypes
import fcntl
import heapq
import itertools
import math
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from string import ascii_lowercase
from typing import Any, final

import psutil
import pytest

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.run import Run
from tests.cli.test_running_hosts import check_ledgers, events, step_of
from tests.commands import POINTS, allranks, environment, steps, wait_for
from tests.etcd_server import BINARY, needs_etcd
from tests.hosts import SECRET

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

LIMIT_SECONDS = 900.0  # a net: three hosts on one busy machine are slow
LONG = ("train.steps=5000", "checkpoint.every=5", "checkpoint.keep=1000", "task.pause=0.1")
PORT = 29500
MEETING_SECONDS = 15.0  # about how long three hosts take here to their first step
DEVICE = "wire0"
CLONE_NEWNET = 0x40000000  # linux/sched.h
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
NEEDED = ("ip", "unshare", "setpriv", "hostname")
ALONE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--pid", "--fork", "--kill-child")
ADDRESSES = {4: "10.77.0.%d", 6: "fd77::%d"}
BOOT = f"""
hostname "$0" && read -r _ && ip link set lo up && ip link set {DEVICE} addrgenmode none &&
ip addr add "$1/24" dev {DEVICE} && ip link set {DEVICE} up && shift && "$@" < /dev/null
exit $?
"""
BOOT_6 = BOOT.replace('"$1/24"', '"$1/64" nodad')
Record = Callable[[str, object], None]


@cache
def what_is_missing() -> str:
    """Why no host can be made here; "": it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"there is no {' and no '.join(missing)} here (Debian: iproute2, util-linux, hostname)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun here"
    tried = subprocess.run([*ALONE, "--mount-proc", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@final
@dataclass(frozen=True)
class Link:
    """What becomes of packets in one direction between two hosts.

    Attributes:
        loss: the share that is lost; 1: a cut.
        twice: the share that comes twice.
        seconds: the delay.
        jitter: up to so many seconds more, for each packet by itself: they overtake each other.
        rate: bytes a second; half a second of them may wait, what is more is lost.
        port: what has another TCP port on both sides is lost; 0: nothing is.
        damaged: the share whose last byte is another one.
    """

    loss: float = 0.0
    twice: float = 0.0
    damaged: float = 0.0
    seconds: float = 0.0
    jitter: float = 0.0
    rate: float = math.inf
    port: int = 0

    def lets_through(self, packet: bytes) -> bool:
        """Whether a firewall does: TCP's two ports are behind IPv4's header, of so many words."""
        return not self.port or self.port in struct.unpack_from("!HH", packet, 4 * (packet[0] & 15))


def ends_of(packet: bytes) -> tuple[bytes, bytes]:
    """From where to where a packet goes: IPv4's addresses are at bytes 12 and 16, IPv6's at 8 and 24."""
    return (packet[8:24], packet[24:40]) if packet[0] >> 4 == 6 else (packet[12:16], packet[16:20])


CLEAR, CUT = Link(), Link(loss=1.0)


def open_end(pid: int) -> int:
    """Make a TUN device in the network namespace of a process, into which the calling thread goes: the other end."""
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return end


@final
class Wire:
    """Carries packets between hosts.

    Attributes:
        rule: the link from a host to another one, by their names; may be replaced at any time.
        lost, damaged: how many packets were.
    """

    def __init__(self) -> None:
        self.rule: Callable[[str, str], Link] = lambda source, target: CLEAR
        self.lost = self.damaged = 0
        self._names: dict[bytes, str] = {}
        self._ends: dict[str, int] = {}
        self._under_way: list[tuple[float, int, str, bytes]] = []
        self._busy_until: dict[tuple[str, str], float] = {}
        self._number = itertools.count()
        self._random = random.Random(0)
        self._poll = select.epoll()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._thread.start()

    def attach(self, name: str, address: str, pid: int) -> None:
        """Lay the wire to a host, which a process of it stands for."""
        with ThreadPoolExecutor(1) as thread:  # one that ends in that namespace
            end = thread.submit(open_end, pid).result()
        self._names[ip_address(address).packed], self._ends[name] = name, end
        self._poll.register(end, select.EPOLLIN)

    def close(self) -> None:
        """Carry nothing any more; the devices go."""
        self._over.set()
        self._thread.join()
        self._poll.close()
        while self._ends:
            os.close(self._ends.popitem()[1])

    def _carry(self) -> None:
        while not self._over.is_set():
            now = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now:
                _, _, target, packet = heapq.heappop(self._under_way)
                with suppress(OSError):  # its queue is full
                    os.write(self._ends[target], packet)
            wait = min(0.05, self._under_way[0][0] - now) if self._under_way else 0.05
            for end, _ in self._poll.poll(wait):
                with suppress(OSError):  # there is no more to read
                    for _ in range(64):
                        self._take(os.read(end, 1 << 16))

    def _take(self, packet: bytes) -> None:
        """One packet that a host has sent."""
        source, target = map(self._names.get, ends_of(packet))
        if source is None or target is None:
            return
        link, now, chance = self.rule(source, target), time.monotonic(), self._random.random
        free_at = max(now, self._busy_until.get((source, target), 0.0))
        if chance() < link.loss or free_at > now + 0.5 or not link.lets_through(packet):
            self.lost += 1
            return
        if chance() < link.damaged:
            packet = packet[:-1] + bytes([packet[-1] ^ 0xFF])
            self.damaged += 1
        self._busy_until[source, target] = sent_at = free_at + len(packet) / link.rate
        for _ in range(1 + (chance() < link.twice)):
            comes_at = sent_at + link.seconds + link.jitter * chance()
            heapq.heappush(self._under_way, (comes_at, next(self._number), target, packet))


@final
class Machine:
    """One host and the command that runs there."""

    def __init__(self, name: str, address: str, folder: Path, words: list[str]) -> None:
        self.name, self.address = name, address
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*ALONE, "--mount-proc", "sh", "-c", BOOT_6 if ":" in address else BOOT, name, address, *words],
                cwd=folder,
                env=environment() | {"OMP_NUM_THREADS": "1", "ALLRANKS_SECRET": SECRET},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def boot(self, wire: Wire) -> None:
        """Lay the wire, and let the command begin."""
        wait_for(self.processes, f"a first process of {self.name}", 60)  # then it is in its own namespaces
        wire.attach(self.name, self.address, self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def processes(self) -> list[psutil.Process]:
        """All that runs there, its first process first."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def freeze(self) -> None:
        """Stop all of its processes, also those that begin meanwhile."""
        stopped = set[psutil.Process]()
        while new := set(self.processes()) - stopped:
            stopped |= new
            self._signal(new, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all of them go on."""
        self._signal(self.processes(), signal.SIGCONT)

    def stop(self) -> None:
        """Ask the command to stop, as a scheduler does."""
        first = self.processes()[0]  # the command is its first child
        self._signal(sorted(first.children(), key=psutil.Process.create_time)[:1], signal.SIGTERM)

    @staticmethod
    def _signal(processes: Any, number: signal.Signals) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def power_off(self) -> None:
        """Nothing of it runs any more: its first process takes all others along."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def end(self) -> int:
        """The command's exit code."""
        return self.process.wait(LIMIT_SECONDS)

    def said(self) -> str:
        """Its screen."""
        return self._log.read_text(encoding="utf-8", errors="replace")


@final
class Laboratory:
    """Hosts in one folder, where they see each other's files; the first one leads.

    Attributes:
        version: of the Internet protocol that they speak, and no other.
    """

    version = 4

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.wire = Wire()
        self.machines: list[Machine] = []

    def start(self, *words: str) -> Machine:
        """One more host, hosta, hostb and so on, that runs this command."""
        number = len(self.machines)
        address = ADDRESSES[self.version] % (number + 1)
        self.machines.append(Machine(f"host{ascii_lowercase[number]}", address, self.folder, list(words)))
        self.machines[-1].boot(self.wire)
        return self.machines[-1]

    def begin(self, number: int, nodes: str, *words: str, scheme: str = "c10d") -> list[Machine]:
        """So many hosts of one run, which start all at once and meet at hosta."""
        first = ADDRESSES[self.version] % 1
        place = f"[{first}]:{PORT}" if self.version == 6 else f"{first}:{PORT}"
        meet = ("--nodes", nodes, "--rendezvous", f"{scheme}://{place}", "--nproc", "1")
        command = [sys.executable, "-m", "allranks", "train", POINTS, "--device", "cpu", "--run", str(self.run)]
        return [self.start(*command, *meet, *words) for _ in range(number)]

    def train(self, number: int, nodes: str, *words: str, scheme: str = "c10d") -> list[Machine]:
        """The same, some steps into what all of them do together."""
        machines = self.begin(number, nodes, *words, scheme=scheme)
        self.go_on_as(number)
        return machines

    def worlds(self) -> list[int]:
        """How many workers each attempt had."""
        return [event["world_size"] for event in events(self.run, "start")] if (self.run / "run.json").exists() else []

    def verdicts(self, since: float = 0.0) -> list[dict[str, Any]]:
        """What the leader told."""
        return [event for event in events(self.run, "verdict") if event["t"] >= since]

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Until it has held once; who waits in vain sees all screens."""
        first, held = self.machines[0].process, list[bool]()

        def is_over() -> bool:
            held.append(bool(condition()))  # asked once each time: what holds now may not a moment later
            return held[-1] or first.poll() is not None

        try:
            wait_for(is_over, what, LIMIT_SECONDS)
            assert held[-1], f"{what}: the first host has ended"
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n" + "\n".join(f"{one.name}:\n{one.said()}" for one in self.machines)
            ) from None

    def go_on(self, more: int = 6) -> None:
        """Wait for some steps more."""
        before = step_of(self.run)
        self.wait(lambda: step_of(self.run) >= before + more, f"step {before + more}")

    def go_on_as(self, number: int) -> None:
        """Wait for an attempt of so many hosts, and some steps of it."""
        self.wait(lambda: self.worlds()[-1:] == [number], f"an attempt on {number} hosts")
        self.go_on()

    def check_one_is_lost(self, machine: Machine, since: float) -> None:
        """That is all that was told, once, with the host's name."""
        told = [(verdict["kind"], verdict["what"]) for verdict in self.verdicts(since)]
        assert [kind for kind, _ in told] == ["restart"] and f"on {machine.name}: its host is lost" in told[0][1], told

    def seconds_lost(self, since: float) -> float:
        """From a finished step to the next one: the longest of the times that end after a moment."""
        at: list[float] = [event["t"] for event in events(self.run, "step")]
        return round(max(after - before for before, after in itertools.pairwise(at) if after > since), 2)

    def close(self) -> None:
        """End everything."""
        for machine in self.machines:
            machine.power_off()
        self.wire.close()


@pytest.fixture
def laboratory(tmp_path: Path) -> Iterator[Laboratory]:
    """One whose hosts end with the test; skips where none can be made."""
    if missing := what_is_missing():
        pytest.skip(missing)
    found = Laboratory(tmp_path)
    try:
        yield found
    finally:
        found.close()


def around(machine: Machine, link: Link) -> Callable[[str, str], Link]:
    """The rule that this link is all that a host has, in both directions."""
    return lambda source, target: link if machine.name in (source, target) else CLEAR


def stop_all(machines: list[Machine]) -> None:
    """Ask the leader to stop: it does so for all."""
    machines[0].stop()
    assert [one.end() for one in machines] == [75] * len(machines), "\n".join(one.said() for one in machines)


def check_samples_of_one_process(laboratory: Laboratory) -> None:
    """Every step had the samples that it has in a run of one process: the same global batch, none twice, none left."""
    last = step_of(laboratory.run)
    alone = ("--device", "cpu", "--run", "alone", "--layout", "single", f"train.steps={last}")
    allranks("train", POINTS, *alone, folder=laboratory.folder)
    runs = (laboratory.run, laboratory.folder / "alone")
    ours, theirs = ([line["ledger"] for line in steps(run).values()] for run in runs)
    assert ours == theirs
    check_ledgers(laboratory.run, last)


SPEAKER = """
import socket, sys, time
own, other = sys.argv[1:]
print(socket.gethostname(), flush=True)
ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ear.bind((own, 9))
ear.settimeout(0.02)
while True:
    try:
        ear.sendto(b"%f" % time.monotonic(), (other, 9))
        print(time.monotonic() - float(ear.recv(99)), flush=True)
    except OSError:
        pass
"""


def test_the_network_of_these_tests_fails_as_it_is_told_to_and_leaves_nothing(laboratory: Laboratory) -> None:
    def heard(machine: Machine) -> list[float]:
        return [float(line) for line in machine.said().split("\n")[1:-1]]

    def hears_more(machine: Machine, more: int = 12) -> bool:
        before = len(heard(machine))
        laboratory.wait(lambda: len(heard(machine)) >= before + more, f"{machine.name} hears")
        return True

    speak = (sys.executable, "-I", "-S", "-c", SPEAKER)
    first, second = (
        laboratory.start(*speak, "10.77.0.1", "10.77.0.2"),
        laboratory.start(*speak, "10.77.0.2", "10.77.0.1"),
    )
    assert hears_more(first) and hears_more(second) and second.said().startswith("hostb\n")
    laboratory.wire.rule = lambda source, target: CUT if source == "hosta" else CLEAR
    assert hears_more(first)  # by then all has come that was under way
    before = len(heard(second))
    assert hears_more(first) and len(heard(second)) == before, "in one direction"
    laboratory.wire.rule = lambda source, target: Link(seconds=0.5)
    laboratory.wait(lambda: heard(first)[-1] >= 0.5 and heard(second)[-1] >= 0.5, "a delay")
    laboratory.wire.rule = lambda source, target: Link(rate=200.0)  # a datagram has 28 bytes and a time
    laboratory.wait(lambda: heard(first)[-1] < 0.5, "no delay")
    laboratory.wait(lambda: heard(first)[-1] >= 0.2, "a queue")
    laboratory.wire.rule = around(second, CLEAR)
    second.freeze()
    assert {one.status() for one in second.processes()} == {psutil.STATUS_STOPPED}
    second.thaw()
    assert hears_more(first)
    network = os.readlink(f"/proc/{second.process.pid}/ns/net")
    family = second.processes()
    second.power_off()
    laboratory.close()
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)
    left = [os.readlink(path) for path in Path("/proc").glob("[0-9]*/ns/net") if path.is_symlink()]
    assert network not in left


def check_commits(laboratory: Laboratory, newest: Path) -> None:
    """The last attempt alone has committed since there was this checkpoint, but for one that was under way."""
    later = [path for path in sorted(laboratory.run.glob("checkpoints/step-*")) if path > newest]
    attempts = {Checkpoint.open(path).manifest.generation for path in later[1:]}
    assert attempts == {Run.open(laboratory.run).attempts}
    assert not list(laboratory.run.glob("checkpoints/*.tmp-*"))


@pytest.mark.full
@pytest.mark.parametrize("goodbye", [False, True])
def test_a_host_without_power_is_missed_and_the_others_go_on(
    laboratory: Laboratory, record_property: Record, goodbye: bool
) -> None:
    *others, third = laboratory.train(3, "1:3", *LONG)
    at = time.time()
    if not goodbye:  # which its kernel says for processes that end
        laboratory.wire.rule = around(third, CUT)
    third.power_off()
    laboratory.go_on_as(2)
    stop_all(others)
    record_property("restart_seconds", laboratory.seconds_lost(at))
    laboratory.check_one_is_lost(third, at)
    check_samples_of_one_process(laboratory)


@pytest.mark.full
def test_four_hosts_lose_two_at_once_and_one_more_joins(laboratory: Laboratory, record_property: Record) -> None:
    *others, third, fourth = laboratory.train(4, "2:4", *LONG)
    at = time.time()
    lost = {third.name, fourth.name}
    laboratory.wire.rule = lambda source, target: CUT if lost & {source, target} else CLEAR
    for machine in (third, fourth):
        machine.power_off()
    laboratory.go_on_as(2)
    record_property("restart_seconds", laboratory.seconds_lost(at))
    assert {verdict["kind"] for verdict in laboratory.verdicts(at)} == {"restart"}
    asked_at = time.time()
    others += laboratory.begin(1, "2:4", *LONG)
    laboratory.go_on_as(3)
    started = events(laboratory.run, "start")[-1]["t"]
    joined = next(event["t"] for event in events(laboratory.run, "step") if event["t"] > started)
    record_property("join_seconds", round(joined - asked_at, 2))
    stop_all(others)
    assert 4 in laboratory.worlds()
    assert laboratory.verdicts(asked_at)[0]["kind"] == "join"
    check_samples_of_one_process(laboratory)


@pytest.mark.full
def test_who_is_cut_off_from_the_leader_ends_and_commits_nothing(
    laboratory: Laboratory, record_property: Record
) -> None:
    *others, third = laboratory.train(3, "1:3", *LONG)
    newest, at = max(laboratory.run.glob("checkpoints/step-*")), time.time()
    laboratory.wire.rule = around(third, CUT)
    laboratory.go_on_as(2)
    assert third.end() == 76, third.said()
    assert "the host at 10.77.0.1:29500, where the others meet, is gone" in third.said().strip().splitlines()[-1]
    laboratory.go_on()
    stop_all(others)
    record_property("restart_seconds", laboratory.seconds_lost(at))
    laboratory.check_one_is_lost(third, at)
    check_commits(laboratory, newest)
    check_samples_of_one_process(laboratory)


@pytest.mark.full
def test_without_the_majority_a_leader_waits_and_commits_nothing(laboratory: Laboratory) -> None:
    first, *others = laboratory.train(3, "2:3", *LONG)
    laboratory.wire.rule = around(first, CUT)
    assert [one.end() for one in others] == [76, 76], "".join(one.said() for one in others)
    made = sorted(laboratory.run.glob("checkpoints/step-*"))
    laboratory.wait(lambda: "1 of 3 hosts are here (hosta): waiting up to" in first.said(), "a leader that waits")
    first.stop()
    assert first.end() == 76, first.said()
    assert sorted(laboratory.run.glob("checkpoints/step-*")) == made
    assert not list(laboratory.run.glob("checkpoints/*.tmp-*"))


@needs_etcd
@pytest.mark.full
def test_a_leader_that_is_cut_off_from_etcd_ends_and_commits_nothing(
    laboratory: Laboratory, record_property: Record
) -> None:
    serve = ("--listen-client-urls", f"http://0.0.0.0:{PORT}", "--advertise-client-urls", f"http://10.77.0.1:{PORT}")
    laboratory.start(str(BINARY), "--data-dir", str(laboratory.folder / "etcd"), "--log-level", "error", *serve)
    machines = laboratory.train(2, "1:2", *LONG, scheme="etcd")
    led = events(laboratory.run, "start")[-1]["host"]
    first, second = sorted(machines, key=lambda one: one.name != led)
    newest, at = max(laboratory.run.glob("checkpoints/step-*")), time.time()
    laboratory.wire.rule = around(first, CUT)
    assert first.end() == 76, first.said()
    laboratory.go_on_as(1)
    stop_all([second])
    record_property("restart_seconds", laboratory.seconds_lost(at))
    (told,) = laboratory.verdicts(at)
    assert (
        told["kind"] == "restart" and f"on {led}: its host led the run, and is lost; {second.name} le" in told["what"]
    )
    check_commits(laboratory, newest)
    check_ledgers(laboratory.run, step_of(laboratory.run))


@pytest.mark.full
@pytest.mark.parametrize("seconds", [3.0, 10.0])
def test_a_network_that_is_away_for_ten_seconds_costs_no_restart(
    laboratory: Laboratory, record_property: Record, seconds: float
) -> None:
    machines = laboratory.train(2, "1:2", *LONG)
    before, at = laboratory.worlds(), time.time()
    laboratory.wire.rule = around(machines[1], CUT)
    time.sleep(seconds)
    laboratory.wire.rule = around(machines[1], CLEAR)
    laboratory.go_on()
    stop_all(machines)
    record_property("restart_seconds", laboratory.seconds_lost(at))
    assert laboratory.seconds_lost(at) > seconds - 1.0, "it was away"
    assert (laboratory.worlds(), laboratory.verdicts(at)) == (before, [])
    check_ledgers(laboratory.run, step_of(laboratory.run))


@pytest.mark.full
def test_a_frozen_host_is_missed_and_comes_back(laboratory: Laboratory, record_property: Record) -> None:
    first, second = laboratory.train(2, "1:2", *LONG)
    at = time.time()
    second.freeze()
    laboratory.go_on_as(1)
    record_property("restart_seconds", laboratory.seconds_lost(at))
    laboratory.check_one_is_lost(second, at)
    second.thaw()
    laboratory.go_on_as(2)
    stop_all([first, second])
    assert [verdict["kind"] for verdict in laboratory.verdicts(at)] == ["restart", "join"]
    check_ledgers(laboratory.run, step_of(laboratory.run))


@pytest.mark.full
@pytest.mark.parametrize("heard", [False, True])
def test_a_host_that_is_not_heard_or_hears_nobody_is_missed(
    laboratory: Laboratory, record_property: Record, heard: bool
) -> None:
    first, second = laboratory.train(2, "1:2", *LONG)
    at = time.time()
    laboratory.wire.rule = lambda source, target: CUT if (source == first.name) is heard else CLEAR
    laboratory.go_on_as(1)
    assert second.end() == 76, second.said()
    stop_all([first])
    record_property("restart_seconds", laboratory.seconds_lost(at))
    laboratory.check_one_is_lost(second, at)
    check_ledgers(laboratory.run, step_of(laboratory.run))


@pytest.mark.full
def test_two_hosts_that_do_not_reach_each_other_are_waited_for_and_told_of(
    laboratory: Laboratory, record_property: Record
) -> None:
    machines = laboratory.train(3, "1:3", *LONG)
    before, at = laboratory.worlds(), time.time()
    laboratory.wire.rule = lambda source, target: CUT if "hosta" not in (source, target) else CLEAR
    laboratory.wait(lambda: len(laboratory.verdicts(at)) == 2, "verdicts")
    laboratory.wait(lambda: "waiting for the network: " in machines[0].said(), "a look at all ways")
    laboratory.wire.rule = lambda source, target: CLEAR
    laboratory.wait(lambda: laboratory.worlds() == [*before, 3], "another attempt of all three")
    laboratory.go_on()
    stop_all(machines)
    record_property("restart_seconds", laboratory.seconds_lost(at))
    told = laboratory.verdicts(at)
    assert [verdict["kind"] for verdict in told] == ["network", "restart", "network"], told
    assert "hostb does not reach hostc at 10.77.0.3:" in told[2]["what"] and "hosta" not in told[2]["what"], told
    assert "all ranks wait in all_reduce" in told[0]["what"] and "see whether the ranks reach each" in told[0]["next"]
    check_ledgers(laboratory.run, step_of(laboratory.run))


@pytest.mark.full
def test_a_firewall_before_all_ports_but_one_is_told_of_with_the_address(laboratory: Laboratory) -> None:
    laboratory.wire.rule = lambda source, target: Link(port=PORT)
    machines = laboratory.begin(2, "2", *LONG)
    assert [one.end() for one in machines] == [76, 76]
    for one in machines:
        said = one.said()
        assert "2 of 2 ways between 2 hosts are closed: hosta does not reach hostb at 10.77.0.2:" in said, said
        assert "hostb does not reach hosta at 10.77.0.1:" in said and "net.ipv4.ip_local_port_range" in said, said
        assert "Traceback" not in said, said
    assert laboratory.worlds() == [], "no worker was started"


@pytest.mark.full
def test_a_host_that_joins_behind_a_firewall_is_sent_away_and_the_run_goes_on(laboratory: Laboratory) -> None:
    machines = laboratory.train(2, "2:3", *LONG)
    laboratory.wire.rule = lambda source, target: Link(port=PORT) if "hostc" in (source, target) else CLEAR
    (third,) = laboratory.begin(1, "2:3", *LONG)
    assert third.end() == 76, third.said()
    assert "hostc does not reach hosta at 10.77.0.1:" in third.said() and "Traceback" not in third.said()
    assert "ways between 3 hosts are closed" in third.said().strip().splitlines()[-1]
    laboratory.go_on()
    stop_all(machines)
    assert "hostc cannot join: " in machines[0].said(), machines[0].said()
    assert laboratory.worlds() == [2, 2] and [one["kind"] for one in laboratory.verdicts()] == ["join", "network"]
    check_samples_of_one_process(laboratory)


@pytest.mark.full
@pytest.mark.parametrize("joins", [False, True])
def test_hosts_that_have_ipv6_alone_train_and_go_on_without_one(
    laboratory: Laboratory, record_property: Record, joins: bool
) -> None:
    laboratory.version = 6
    first, second = laboratory.train(2, "1:2", *LONG)
    at = time.time()
    laboratory.wire.rule = around(second, CUT)
    second.power_off()
    laboratory.go_on_as(1)
    laboratory.check_one_is_lost(second, at)
    record_property("restart_seconds", laboratory.seconds_lost(at))
    rest = [first]
    if joins:
        laboratory.wire.rule = lambda source, target: CLEAR
        rest += laboratory.begin(1, "1:2", *LONG)
        laboratory.go_on_as(2)
    stop_all(rest)
    check_samples_of_one_process(laboratory)


@pytest.mark.full
def test_hosts_that_start_seconds_apart_begin_together(laboratory: Laboratory) -> None:
    machines = list[Machine]()
    for _ in range(3):
        machines += laboratory.begin(1, "3", *LONG)
        time.sleep(4)
    laboratory.go_on_as(3)
    stop_all(machines)
    assert laboratory.worlds() == [3]
    check_samples_of_one_process(laboratory)


@pytest.mark.full
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_host_that_goes_while_the_hosts_meet_holds_nobody_up(laboratory: Laboratory, share: float) -> None:
    """At a share of the time from the start of the commands to the first step."""
    began = time.monotonic()
    *others, third = laboratory.begin(3, "2:3", *LONG)
    time.sleep(share * MEETING_SECONDS - min(share * MEETING_SECONDS, time.monotonic() - began))
    third.power_off()
    laboratory.wait(lambda: laboratory.worlds()[-1:] == [2], "an attempt of two hosts")
    laboratory.go_on()
    stop_all(others)
    assert set(laboratory.worlds()) <= {2, 3}
    check_samples_of_one_process(laboratory)


@pytest.mark.full
def test_at_a_fifth_of_all_packets_lost_a_run_still_ends(laboratory: Laboratory) -> None:
    laboratory.wire.rule = lambda source, target: Link(loss=0.2)
    machines = laboratory.begin(2, "2", "train.steps=40", "checkpoint.every=5", "task.pause=0.1")
    assert [one.end() for one in machines] == [0, 0], "".join(one.said() for one in machines)
    assert laboratory.worlds() == [2] and laboratory.wire.lost > 0
    assert {one["kind"] for one in laboratory.verdicts()} <= {"network"}
    check_samples_of_one_process(laboratory)


@pytest.mark.full
@pytest.mark.parametrize(
    ("link", "told"),
    [
        (
            Link(seconds=0.05, rate=250_000.0),
            (r"a round trip takes \d{3} ms at best", r"in use .*, it carries .* MB/s"),
        ),
        (Link(seconds=0.01, jitter=0.02, twice=0.1), (r"a round trip takes \d\d ms at best",)),
        (Link(loss=0.01), ()),
        (Link(loss=0.05), (r"\d\.\d% of what was sent was lost, and sent again",)),
        (Link(damaged=0.05), (r"\d\.\d% of what was sent was lost, and sent again",)),
    ],
    ids=["slow", "out of order and twice", "one percent lost", "five percent lost", "five percent damaged"],
)
def test_a_bad_network_is_no_fault_and_is_told_of(laboratory: Laboratory, link: Link, told: tuple[str, ...]) -> None:
    laboratory.wire.rule = lambda source, target: link
    machines = laboratory.train(2, "2", "train.steps=120", "checkpoint.every=5", "task.width=20000", "task.pause=0.3")
    assert [one.end() for one in machines] == [0, 0], "".join(one.said() for one in machines)
    assert laboratory.worlds() == [2]
    assert laboratory.wire.lost > 0 or not link.loss
    assert laboratory.wire.damaged > 0 or not link.damaged
    check_ledgers(laboratory.run, 120)
    verdicts = laboratory.verdicts()
    assert {one["kind"] for one in verdicts} <= {"network"} and len(verdicts) <= 4, "each fault of a way once at most"
    for fault in told:  # in one verdict, or the second one in the next window
        line = rf"the network is bad from \S+ to \S+: .*{fault}"
        assert any(re.search(line, one["what"]) for one in verdicts), verdicts
        assert re.search(line, machines[1].said()), "each host tells of what it sends"


@pytest.mark.full
def test_nobody_looks_at_a_bad_network_where_that_is_off(laboratory: Laboratory) -> None:
    laboratory.wire.rule = lambda source, target: Link(seconds=0.02)
    words = ("train.steps=120", "checkpoint.every=5", "task.width=20000", "task.pause=0.3", "guard.bad_link=off")
    machines = laboratory.train(2, "2", *words)
    assert [one.end() for one in machines] == [0, 0], "".join(one.said() for one in machines)
    assert laboratory.verdicts() == [] and not list(laboratory.run.glob("logs/*.links.*"))
    assert "the network is bad" not in machines[1].said()


@pytest.mark.full
def test_a_good_network_is_not_told_of(laboratory: Laboratory) -> None:
    """The same run, for longer."""
    machines = laboratory.train(2, "2", "train.steps=150", "checkpoint.every=5", "task.width=20000", "task.pause=0.3")
    assert [one.end() for one in machines] == [0, 0], "".join(one.said() for one in machines)
    assert (laboratory.worlds(), laboratory.verdicts()) == ([2], [])

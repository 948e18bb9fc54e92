"""Two nodes on this machine, each with its own network, host name and /etc/hosts, reached by ssh.

A node is a shell in its own namespaces (network, host name, mounts), connected to the other by a veth pair. The
machine's own configuration is untouched: the addresses exist only in the nodes' networks, and their mounts are
invisible to other processes. Everything disappears with the processes in the namespaces, even if the test is killed
(`--kill-child`; the kernel removes an unused network).
"""

import ctypes
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .conftest import PATH, ROOT, until

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "mpirun", "ip", "unshare", "nsenter")
NAMES = ("farfield-a", "farfield-b")
ADDRESSES = ("198.18.31.1", "198.18.31.2")  # RFC 2544: reserved for network benchmarks
# Script of a node, given the test's folder, its name and its address: sshd with the test's own configuration.
NODE = r"""
set -e
folder=$1 name=$2 address=$3
hostname "$name"
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs none /run
mkdir /run/sshd
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
if test -d /root/.ssh; then mount -t tmpfs none /root/.ssh; fi
ip link set lo up
while ! ip link show card >/dev/null 2>&1; do sleep 0.05; done
ip address add "$address/24" dev card
ip link set card up
exec "$(command -v sshd)" -D -e -f "$folder/sshd_config"
"""


@dataclass
class TwoNodes:
    """Two nodes for the commands of a test that are typed on the first."""

    folder: Path
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a user on a node."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_"))}
        return {**own, "PATH": PATH, "HOME": "/root", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self) -> None:
        """Create the nodes and wait until both answer. Raises AssertionError with the nodes' output."""
        folder = self.folder
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        lines = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (folder / "known_hosts").write_text(
            "".join(f"{name} {(folder / 'host_key.pub').read_text()}" for name in (*NAMES, *ADDRESSES))
        )
        (folder / "sshd_config").write_text(
            f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nPidFile none\n"
        )
        (folder / "ssh_config").write_text(
            f"Host *\n  User root\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile none\n"
        )
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
            command += ["--propagation", "private", "sh", "-c", NODE, "node", str(folder), name, address]
            with open(folder / f"{name}.log", "wb") as log:
                self.nodes.append(
                    subprocess.Popen(
                        command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True, preexec_fn=_die_with_parent,
                    )
                )  # fmt: skip
        first, second = (str(self._inside(node)) for node in self.nodes)
        link = ["ip", "link", "add", "card", "netns", first, "type", "veth", "peer", "name", "card", "netns", second]
        subprocess.run(link, env=self.environment, check=True)
        for name in NAMES:
            until(partial(self._answers, name), self, f"answer of {name}")

    def on(self, node: int, *command: str, cwd: Path | None = None, output: Path | None = None) -> subprocess.Popen:
        """Start a command on a node as from its terminal."""
        inside = str(self._inside(self.nodes[node]))
        enter = ["nsenter", "--target", inside, "--net", "--uts", "--mount", "--pid", f"--wdns={cwd or ROOT}"]
        with open(output or os.devnull, "wb") as stream:
            return subprocess.Popen(
                [*enter, *command], env=self.environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip

    def ask_to_end(self, command: subprocess.Popen) -> None:
        """Send SIGTERM to a command started by `on`, the only child of nsenter."""
        os.kill(self._inside(command), signal.SIGTERM)

    def kill_rank(self, node: int, rank: int) -> None:
        """Send SIGKILL to the process of a rank, identified by its environment."""
        marks = {f"{name}={rank}".encode() for name in ("RANK", "OMPI_COMM_WORLD_RANK")}
        ranks = [
            process
            for process in self.processes(node, "deepy.py") + self.processes(node, "megatron.launch.worker")
            if marks & set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0"))
        ]
        assert ranks, f"rank {rank} does not run on {NAMES[node]}"
        os.kill(min(ranks), signal.SIGKILL)

    def processes(self, node: int, mark: str) -> list[int]:
        """List the processes of a node whose command line contains a mark, by their process IDs on this machine."""
        space = os.readlink(f"/proc/{self._inside(self.nodes[node])}/ns/net")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if os.readlink(folder / "ns/net") == space and any(mark.encode() in word for word in words):
                    found.append(int(folder.name))
            except OSError:
                continue  # the process has ended
        return found

    def logs(self) -> str:
        """Return the end of each node's sshd log."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))

    def stop(self) -> None:
        """End the nodes with all their processes, and wait for their end."""
        for node in self.nodes:
            node.kill()  # --kill-child ends the node's first process, and thus all others
            node.wait()

    def _answers(self, name: str) -> bool:
        return self.on(0, "ssh", "-o", "BatchMode=yes", name, "true").wait(20) == 0

    def _inside(self, node: subprocess.Popen[bytes]) -> int:
        """Return the first process in a node's namespaces."""
        children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
        until(lambda: children.read_text().split(), self, "first process")
        return int(children.read_text().split()[0])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def missing() -> str | None:
    """Return the reason why such nodes are unavailable here, for skipping; None if they are available."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "two nodes need root, for network namespaces of their own"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"no two nodes on this machine ({', '.join(absent)}); as root, make launchers installs Debian's packages"
    try:
        done = subprocess.run(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else None

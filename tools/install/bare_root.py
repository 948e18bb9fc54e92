"""Bare Debian systems in a folder: built by debootstrap, entered by chroot, gone with the folder.

Programs run in mount and process namespaces of their own, so every mount and every process ends with them, or with this
process, and nothing is left to unmount. This needs Linux, root, `debootstrap`, and a network or a mirror.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIRROR = "http://deb.debian.org/debian"
USER = "newcomer"
USER_ID = 1000
HOME = f"/home/{USER}"
PASSED_ON = (
    *("http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_DEFAULT_TIMEOUT"),
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
)
"""Variables that programs in a root get from this process, if they are set: the network, and pytest's processes."""
CERTIFICATES = "/etc/ssl/certs/of-this-machine.crt"
TRUSTED = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO")
"""Variables that name a file of certificates. A root gets a copy of the file, for networks with their own."""
WHEELS = "/opt/wheels"
# The shell stays: it keeps root's identity, and with it the signal that ends it, and so all others, with this process.
ENTER = """
set -e
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
if test -n "$2"; then mkdir -p "$1$3"; mount --bind -o ro "$2" "$1$3"; fi
root=$1; shift 3
chroot "$root" /usr/bin/env -i "$@"
exit
"""


@dataclass(frozen=True)
class Finished:
    """Result of a command: its duration in seconds, its exit code, and what it printed."""

    command: str
    seconds: float
    exit_code: int
    printed: list[str]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 1)}


class BareRoot:
    """A bare Debian in a folder.

    Attributes:
        folder: the root folder of the system.
        wheels: folder of wheels on this machine that pip also looks at, or None.
    """

    def __init__(self, folder: Path, wheels: Path | None = None) -> None:
        self.folder = folder
        self.wheels = wheels

    @classmethod
    def build(cls, folder: Path, release: str, wheels: Path | None = None) -> "BareRoot":
        """Build a release of Debian in a folder, unless the folder has one, and add a user.

        Raises:
            SystemExit: if this process is not root, if debootstrap is not installed or fails, or if the folder
                contains something else.
        """
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            raise SystemExit("error: a bare root needs root and debootstrap: sudo apt install debootstrap")
        root = cls(folder, wheels)
        if not (folder / "etc" / "debian_version").exists():
            if folder.exists() and any(folder.iterdir()):
                raise SystemExit(f"error: {folder} contains something else than a Debian; choose an empty folder")
            print(f"building Debian {release} in {folder} (a minute or more)", flush=True)
            done = subprocess.run(
                ["debootstrap", "--variant=minbase", release, folder, MIRROR], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(f"error: debootstrap {release} failed: {(done.stdout + done.stderr).strip()[-300:]}")
        root._connect()
        return root

    def run(self, command: str, *, as_root: bool = False, working_folder: str = HOME, **variables: str) -> Finished:
        """Run a shell command in the root, show what it prints, and return its result.

        Args:
            as_root: run as root instead of as the user.
            working_folder: current folder of the command, in the root.
            variables: further environment variables.
        """
        environment = {**self._list_variables(as_root), **variables}
        identity = "0:0" if as_root else f"{USER_ID}:{USER_ID}"
        inner = [f"{name}={value}" for name, value in environment.items()]
        inner += ["chroot", f"--userspec={identity}", "--skip-chdir", "/", "sh", "-c", command]
        started = time.monotonic()
        process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"),
                *(str(self.folder.resolve()), str(self.wheels or ""), WHEELS, f"--chdir={working_folder}", *inner),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line.rstrip().rpartition("\r")[2])
        exit_code = process.wait()
        return Finished(command, time.monotonic() - started, exit_code, printed)

    def add_packages(self, names: list[str]) -> Finished:
        """Install Debian packages without recommended ones."""
        install = f"apt-get install -qq -y --no-install-recommends {' '.join(names)} >/dev/null"
        return self.run(f"apt-get -qq update && {install}", as_root=True, DEBIAN_FRONTEND="noninteractive")

    def add_python(self, folder: Path) -> None:
        """Copy a Python of this machine, built for an older or the same Debian, into /usr/local, unless it has one."""
        if (self.folder / "usr" / "local" / "bin" / "python3").exists():
            return
        shutil.copytree(folder, self.folder / "usr" / "local", symlinks=True, dirs_exist_ok=True)
        self.run("ldconfig", as_root=True)

    def add_repository(self, source: Path) -> str:
        """Copy the commits of a checkout into the root, and return the path to clone from, in the root."""
        target = self.folder / "srv" / "farfield.git"
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", "--bare", "--no-local", source, target], check=True)
        for path in (target, *target.rglob("*")):  # git refuses to clone what another user owns
            os.chown(path, USER_ID, USER_ID)
        return "/srv/farfield.git"

    def _connect(self) -> None:
        """Give the root this machine's name servers and certificates, the name `localhost`, and a user."""
        # Lists of Debian testing expire after a week, and a mirror may lag behind.
        settings = self.folder / "etc" / "apt" / "apt.conf.d" / "99-old-lists"
        settings.write_text('Acquire::Check-Valid-Until "false";\n', encoding="utf-8")
        shutil.copy("/etc/resolv.conf", self.folder / "etc" / "resolv.conf")
        # Debian's installer and container engines write this file, debootstrap does not.
        (self.folder / "etc" / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n", encoding="utf-8")
        if trusted := self._find_certificates(os.environ):
            target = self.folder / CERTIFICATES.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(trusted, target)
        if not (self.folder / HOME.lstrip("/")).exists():
            self.run(f"useradd --create-home --uid {USER_ID} {USER}", as_root=True, working_folder="/")

    def _list_variables(self, as_root: bool) -> dict[str, str]:
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        if self._find_certificates(os.environ):
            variables |= dict.fromkeys(TRUSTED, CERTIFICATES)
        if self.wheels is not None:
            variables["PIP_FIND_LINKS"] = WHEELS
        home = "/root" if as_root else HOME
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return variables | {"HOME": home, "PATH": path, "LANG": "C.UTF-8", "PIP_NO_CACHE_DIR": "1"}

    @staticmethod
    def _find_certificates(environment: Mapping[str, str]) -> str | None:
        return next((environment[name] for name in TRUSTED if name in environment), None)

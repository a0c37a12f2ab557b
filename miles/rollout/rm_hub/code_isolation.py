"""Taking rights away from programs that a model wrote. Standard library only.

Each protection is tried by itself and what holds is told, since containers often forbid some: `user`, `net`, `ipc`,
`mount` and `pid` are namespaces of Linux, `uid` is a user without files or other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

_NEW_USER, _NEW_PID = 0x10000000, 0x20000000
_NAMESPACES = {"mount": 0x00020000, "net": 0x40000000, "ipc": 0x08000000}
_MS_NOSUID_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 6, 0x1000, 0x4000, 1 << 18, 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_SCRATCH, _LIBRARY = "/dev/shm", "/mnt"
_FIRST_UID = 64_000
_FORBIDDEN = ("socket.", "ctypes.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class Isolation:
    """What a worker does once, for all programs that it will start: `holds` names the protections that it got."""

    def __init__(self, level: str, scratch_bytes: int, root: str) -> None:
        """`level`: `auto`, or `basic` for no namespace and no other user. `root`: where folders are made without `mount`."""
        self.holds: set[str] = set()
        self._scratch_bytes, self._root = scratch_bytes, root
        self._uid: int | None = None
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        if not sys.platform.startswith("linux"):
            return
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what leaves its group still ends up as a child here
        if level == "auto":
            if os.geteuid() == 0 and self._show_library():
                self._uid = _FIRST_UID + os.getpid() % 1000
                self.holds.add("uid")
            self._enter_namespaces()

    def _show_library(self) -> bool:
        """Whether other users can read Python's library; where they cannot, it is shown at another place to children."""
        library = os.path.dirname(os.__file__)
        if _readable_by_all(library):
            return True
        if not os.path.isdir(_LIBRARY) or self._libc.unshare(_NAMESPACES["mount"]) != 0:
            return False
        self._libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        if self._libc.mount(library.encode(), _LIBRARY.encode(), None, _MS_BIND, None) != 0:
            return False
        packages = [module.__path__ for module in list(sys.modules.values()) if hasattr(module, "__path__")]
        for paths in (sys.path, *packages):
            paths[:] = [path.replace(library, _LIBRARY, 1) for path in paths]
        return True

    def _enter_namespaces(self) -> None:
        if not self._works_in_child(self._enter_user_namespace):
            return
        self._enter_user_namespace()
        self.holds.add("user")
        for name, flag in _NAMESPACES.items():
            if self._libc.unshare(flag) == 0:
                self.holds.add(name)
        if self._works_in_child(self.enter_pid_namespace):
            self.holds.add("pid")
        if "mount" in self.holds and not self._make_files_read_only():
            self.holds.discard("mount")

    def _works_in_child(self, function: Any) -> bool:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(OSError):
                function()
                code = 0
            os._exit(code)
        return os.waitpid(pid, 0)[1] == 0

    def _enter_user_namespace(self) -> None:
        """Raises OSError where that is forbidden."""
        parent = os.getppid()
        if self._uid is not None:
            self._become_other_user()
            self._libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # another user starts without it
            if os.getppid() != parent:
                os._exit(0)
        uid, gid = os.geteuid(), os.getegid()
        self._check(self._libc.unshare(_NEW_USER))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)

    def _become_other_user(self) -> None:
        assert self._uid is not None
        os.setgroups([])
        os.setresgid(self._uid, self._uid, self._uid)
        os.setresuid(self._uid, self._uid, self._uid)

    def enter_pid_namespace(self) -> None:
        """The next child will be the first process of a namespace, whose end ends all others in it."""
        self._check(self._libc.unshare(_NEW_PID))

    def _make_files_read_only(self) -> bool:
        """Everything read-only; the scratch folder is mounted afresh for each program."""
        if not os.path.isdir(_SCRATCH):
            return False
        self._libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        wanted = _MountAttributes(set=1)
        size = ctypes.sizeof(wanted)
        call = self._libc.syscall
        if call(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(wanted), ctypes.c_size_t(size)) != 0:
            return False
        try:
            shutil.rmtree(self.make_folder(), ignore_errors=True)
        except OSError:
            return False
        self._libc.umount2(_SCRATCH.encode(), _MNT_DETACH)
        return True

    def _check(self, result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    # -- for each program

    def make_folder(self) -> str:
        """An empty folder that the program may write to. Raises OSError."""
        if "mount" in self.holds:
            options = f"size={self._scratch_bytes},mode=700".encode()
            self._check(self._libc.mount(b"scratch", _SCRATCH.encode(), b"tmpfs", _MS_NOSUID_NODEV, options))
            return _SCRATCH
        folder = tempfile.mkdtemp(dir=self._root)
        if self._uid is not None and os.geteuid() == 0:
            os.chown(folder, self._uid, self._uid)
        return folder

    def remove_folder(self, folder: str) -> None:
        """Forget the folder and all that is in it."""
        if "mount" in self.holds:
            self._libc.umount2(folder.encode(), _MNT_DETACH)
            return
        for path, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)

    def give_up_rights(self, limits: dict[str, Any], die_with_keeper: Callable[[], None]) -> None:
        """Called in the program's process, last: limits, no capabilities, none to be had. Raises OSError."""
        if self._uid is not None and os.geteuid() == 0:
            self._become_other_user()
        die_with_keeper()  # another user starts without it
        cpu_s = int(limits["time_s"]) + 1
        wanted = {
            resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
            resource.RLIMIT_AS: (limits["memory_bytes"],) * 2,
            resource.RLIMIT_FSIZE: (limits["file_bytes"],) * 2,
            resource.RLIMIT_NOFILE: (limits["open_files"],) * 2,
            resource.RLIMIT_CORE: (0, 0),
        }
        shared = 0 if {"user", "uid"} & self.holds else _count_tasks_of(os.getuid())
        wanted[resource.RLIMIT_NPROC] = (shared + limits["processes"],) * 2
        for kind, values in wanted.items():
            with contextlib.suppress(ValueError, OSError):  # beyond what is allowed already, or not known here
                resource.setrlimit(kind, values)
        if sys.platform.startswith("linux"):
            self._drop_capabilities()
        if "net" not in self.holds:
            sys.addaudithook(_refuse)

    def _drop_capabilities(self) -> None:
        self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        self._check(self._libc.capset(header, nothing))


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith(_FORBIDDEN):
        raise PermissionError(f"{event} is not allowed here")


def _readable_by_all(path: str) -> bool:
    while os.stat(path).st_mode & 0o5 == 0o5:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def _count_tasks_of(uid: int) -> int:
    """Threads and processes of a user, which `RLIMIT_NPROC` counts together."""
    count = 0
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == uid:
                count += len(os.listdir(f"/proc/{entry}/task"))
    return count

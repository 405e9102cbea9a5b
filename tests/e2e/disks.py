"""What tests of the store share: disks that are small, full or slow, and text for long prompts."""
import os
import pathlib
import subprocess
import unittest

from harness import temporary_directory


def document(rng, words):
    few = "when the server reads a new row of the table it checks every value before the cache is closed".split()
    return " ".join(rng.choice(few) for _ in range(words))


class Disks(unittest.TestCase):
    """Directories for stores: on a file system of their own, on a disk that the kernel slows down."""

    def setUp(self):
        directory = temporary_directory()
        self.directory = directory.__enter__()
        self.addCleanup(directory.__exit__, None, None, None)
        self.store = self.directory / "store"

    def mount(self, *arguments):
        """A small file system of its own, for the store. Its directory."""
        room = self.directory / "room"
        room.mkdir()
        if subprocess.run(["mount", *arguments, room], capture_output=True).returncode:
            self.skipTest("may not mount a small file system")
        self.addCleanup(subprocess.run, ["umount", "-l", room])
        self.store = room / "store"
        return room

    def mount_tmpfs(self, size):
        return self.mount("-t", "tmpfs", "-o", f"size={size}", "none")

    def mount_ext4(self, size_bytes):
        """On a loop device: with extents, a block bitmap and O_DIRECT, as on a disk."""
        image = self.directory / "image"
        with open(image, "wb") as file:
            file.truncate(size_bytes)
        try:
            made = subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], capture_output=True)
        except FileNotFoundError:
            self.skipTest("mkfs.ext4 is not installed")
        self.assertEqual(made.returncode, 0, made.stderr)
        return self.mount("-o", "loop", image)

    def slow_down(self, server, reads_per_s):
        """The kernel lets the server read so many times a second from the disk that its store is on. Undoes it."""
        device = os.stat(self.directory).st_dev
        device = f"{os.major(device)}:{os.minor(device)}"
        v1, v2 = pathlib.Path("/sys/fs/cgroup/blkio"), pathlib.Path("/sys/fs/cgroup")
        name = f"winnow-test-{server.process.pid}"
        group, limit, line = v2 / name, "io.max", f"{device} riops={{}}"
        if v1.is_dir():
            group, limit, line = v1 / name, "blkio.throttle.read_iops_device", f"{device} {{}}"
        unlimited = "0" if v1.is_dir() else "max"
        try:
            group.mkdir()
            self.addCleanup(lambda: group.is_dir() and group.rmdir())
            (group / limit).write_text(line.format(reads_per_s))
            (group / "cgroup.procs").write_text(str(server.process.pid))
        except OSError as error:
            self.skipTest(f"may not slow down the disk: {error}")

        def undo():
            (group / limit).write_text(line.format(unlimited))
        return undo

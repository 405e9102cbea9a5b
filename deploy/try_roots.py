#!/usr/bin/env python3
"""Runs the image's steps and the Debian package in fresh Debian roots, without a container runtime:

    deploy/try_roots.py --package build/release/winnow_VERSION_amd64.deb --base DIR [--model models/needle-5m]

As root, with debootstrap's result in --base (made there if it is empty). In a copy of it

  image    runs the RUN instructions of the stages `runtime` and `cpu` of deploy/docker/Dockerfile (the package stands for what the
           build stage makes), then ENTRYPOINT as USER, with ENV, without capabilities, new privileges or a writable root, with
           a volume at VOLUME; in a network of its own, so nothing outside is reached;
  package  installs the package, starts what the unit starts as the user that it names, with the configuration as installed.

Each asks the server for an answer and prints sizes and the time from exec to the first token. Only mounts of its own namespace are
made; the copies are deleted at the end.
"""
import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(__file__).resolve().parents[1]
DOCKERFILE = SOURCE / "deploy/docker/Dockerfile"


def stage(name):
    """The instructions of a stage of the Dockerfile, continued lines joined: [(word, rest)]."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text())
    text = re.sub(r"\\\n\s*", " ", text)
    part, = [part for part in re.split(r"(?m)^(?=FROM )", text) if re.match(rf"FROM \S+ AS {name}\n", part)]
    return [tuple(line.split(" ", 1)) for line in part.splitlines()[1:] if line.strip()]


def in_root(root, command, **kwargs):
    return subprocess.run(["chroot", root, "sh", "-euc", command], check=True, **kwargs)


def size_mib(path):
    return int(subprocess.run(["du", "-smx", path], capture_output=True, text=True, check=True).stdout.split()[0])


def gzip_mib(path):
    """Of all files in one archive, as registries keep and send them, but in one layer."""
    packed = f"tar --one-file-system -C {shlex.quote(str(path))} -c . | gzip | wc -c"
    return int(subprocess.run(["bash", "-o", "pipefail", "-c", packed], capture_output=True, text=True, check=True).stdout) / 2 ** 20


class Root:
    """A copy of the base, with what apt needs, mounted where a process looks for it."""

    def __init__(self, base, work, name):
        self.path = work / name
        subprocess.run(["cp", "-a", base, self.path], check=True)
        for cache in ("var/cache/apt/archives", "var/lib/apt/lists"):  # of debootstrap; images have none
            shutil.rmtree(self.path / cache)
            (self.path / cache / "partial").mkdir(parents=True)
        self.base_mib = size_mib(self.path)
        for file in ("etc/resolv.conf", "etc/hosts"):
            shutil.copy("/" + file, self.path / file)
        for source in ("/proc", "/dev"):
            subprocess.run(["mount", "--rbind", source, self.path / source.lstrip("/")], check=True)

    def bind(self, source, target, *options):
        where = self.path / target.lstrip("/")
        if pathlib.Path(source).is_dir() or source == "tmpfs":
            where.mkdir(parents=True, exist_ok=True)
        else:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.touch()
        kind = ["-t", "tmpfs", "-o", ",".join(options) or "rw", "tmpfs"] if source == "tmpfs" else ["--bind", source]
        subprocess.run(["mount", *kind, where], check=True)
        if source != "tmpfs" and "ro" in options:
            subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)

    def make_read_only(self, mounts):
        """`mounts`: (source, target), read-only, whose targets do not exist yet."""
        for source, target in mounts:
            self.bind(str(source), target, "ro")
        subprocess.run(["mount", "--rbind", self.path, self.path], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", self.path], check=True)


def serve_and_ask(root, user, group, environment, command, port):
    """Starts it without rights in a network of its own, asks, stops. (seconds to the first token, its log)"""
    log = tempfile.TemporaryFile("w+")
    # ip is not in a minimal root, and loopback must be up: the outer unshare's Python does that.
    loopback = ("import fcntl,socket,struct; s=socket.socket(); fcntl.ioctl(s, 0x8914, struct.pack('16sH22x', b'lo', 0x1 | 0x40))")
    inner = ["chroot", root.path, "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
             "--no-new-privs", "env", "-i", *(f"{k}={v}" for k, v in environment.items()), "PATH=/usr/bin:/bin"]
    wrapper = f"{shlex.quote(sys.executable)} -c {shlex.quote(loopback)} && exec " + " ".join(shlex.quote(str(word)) for word in inner + command)
    begin = time.monotonic()
    process = subprocess.Popen(["unshare", "--net", "sh", "-c", wrapper], stdout=log, stderr=log)
    enter = ["nsenter", f"--net=/proc/{process.pid}/ns/net", *inner]
    try:
        while True:
            if process.poll() is not None:
                log.seek(0)
                sys.exit(f"it did not start ({process.returncode}):\n{log.read()}")
            if subprocess.run([*enter, "winnow", "healthcheck", "--server", f"127.0.0.1:{port}", "--timeout", "2s"], capture_output=True).returncode == 0:
                break
            if time.monotonic() - begin > 300:
                sys.exit("it never served")
            time.sleep(0.05)
        answer = subprocess.run([*enter, "winnow", "generate", "--server", f"127.0.0.1:{port}", "--prompt", "The quick brown fox", "--max-tokens", "1",
                                 "--json"], capture_output=True, text=True, check=True)
        first = time.monotonic() - begin
        assert json.loads(answer.stdout)["usage"]["generated_tokens"] == 1, answer.stdout
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(rf"^Uid:\s+{user}\s+{user}\s+{user}\s+{user}$", status, re.M), "it runs as another user"
        assert re.search(r"^CapEff:\s+0+$", status, re.M) and re.search(r"^NoNewPrivs:\s+1$", status, re.M)
        written = subprocess.run([*enter, "sh", "-c", "touch /usr/x || touch /etc/x || touch /tmp/x"], capture_output=True)
        return first, written.returncode != 0, process
    except BaseException:
        process.kill()
        raise


def stop(process):
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=60)
    assert code == 0, f"exit code {code} after SIGTERM"


def try_image(base, work, package, model):
    root = Root(base, work, "image")
    (root.path / "out").mkdir()
    shutil.copy(package, root.path / "out")
    environment, user, volume, entry, default = {}, None, None, None, None
    for word, rest in stage("runtime") + stage("cpu"):
        if word == "ENV":
            environment.update(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "RUN":
            in_root(root.path, "export DEBIAN_FRONTEND=noninteractive; " + re.sub(r"^--mount=\S+ ", "", rest), stdout=subprocess.DEVNULL)
        elif word == "USER":
            user = rest.split(":")
        elif word == "VOLUME":
            volume = rest
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
        elif word == "CMD":
            default = json.loads(rest)
    shutil.rmtree(root.path / "out")
    whole, packed = size_mib(root.path), gzip_mib(root.path)
    root.make_read_only(mounts=[(model, "/model")])
    root.bind("tmpfs", volume, f"uid={user[0]}", f"gid={user[1]}", "mode=0750")
    command = [*entry, *default, "--model", "/model", "--listen", "127.0.0.1:50051", "--http", "0.0.0.0:8000", "--insecure", "--kv-bytes", "512MiB",
               "--disk-bytes", "1GiB", "--store-dir", volume + "/store"]
    times = []
    for _ in range(2):  # the first start measures and fits, the second one remembers
        first, read_only, process = serve_and_ask(root, *user, environment, command, 50051)
        assert read_only, "the root could be written"
        stop(process)
        times.append(f"{first:.2f}")
    print(f"image: {whole} MiB unpacked, {whole - root.base_mib} MiB over the base, {packed:.0f} MiB compressed; as {':'.join(user)} with a read-only root, exec to first token "
          f"{times[0]} s, at the second start {times[1]} s; drained with 0")


def try_package(base, work, package, model):
    root = Root(base, work, "package")
    shutil.copy(package, root.path / "winnow.deb")
    in_root(root.path, "export DEBIAN_FRONTEND=noninteractive; apt-get -q update; apt-get -q install -y --no-install-recommends /winnow.deb; rm /winnow.deb; apt-get clean; rm -rf /var/lib/apt/lists/*",
            stdout=subprocess.DEVNULL)
    whole = size_mib(root.path)
    unit = (root.path / "usr/lib/systemd/system/winnow.service").read_text()
    user = re.search(r"^User=(\S+)", unit, re.M).group(1)
    ids = subprocess.run(["chroot", root.path, "sh", "-c", f"id -u {user}; id -g {user}"], capture_output=True, text=True, check=True).stdout.split()
    # As StateDirectory= does.
    for name in re.search(r"^StateDirectory=(.*)$", unit, re.M).group(1).split():
        in_root(root.path, f"install -d -o {user} -g {user} -m 0750 /var/lib/{name}")
    environment = dict(pair.split("=", 1) for pair in re.findall(r"^Environment=(\S+)$", unit, re.M))
    root.bind(str(model), "/var/lib/winnow/model", "ro")
    in_root(root.path, re.search(r"^ExecStartPre=(.*)$", unit, re.M).group(1), stderr=subprocess.DEVNULL)
    command = re.search(r"^ExecStart=(.*)$", unit, re.M).group(1).split()
    first, _, process = serve_and_ask(root, *ids, environment, command, 50051)
    stop(process)
    package_mib = package.stat().st_size / 2 ** 20
    in_root(root.path, "export DEBIAN_FRONTEND=noninteractive; apt-get -q remove -y winnow; test ! -e /usr/bin/winnow; test -e /etc/winnow/winnow.yaml", stdout=subprocess.DEVNULL)
    print(f"package: {package_mib:.1f} MiB, {whole - root.base_mib} MiB installed with its libraries; as {user} with the configuration as installed, "
          f"exec to first token {first:.2f} s, drained with 0, removed again")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=pathlib.Path, required=True)
    parser.add_argument("--base", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, default=SOURCE / "models/needle-5m")
    parser.add_argument("--only", choices=["image", "package"])
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("try_roots.py: must be root, for chroot and mounts")
    work = os.environ.get("WINNOW_TRY_ROOTS")
    if work is None:
        if not (args.base / "usr").exists():
            subprocess.run(["debootstrap", "--variant=minbase", "bookworm", args.base], check=True, stdout=subprocess.DEVNULL)
        # All mounts are of the child's own namespace and go with it: nothing is mounted where this deletes.
        with tempfile.TemporaryDirectory(prefix="winnow-roots-") as directory:
            sys.exit(subprocess.run(["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv],
                                    env={**os.environ, "WINNOW_TRY_ROOTS": directory}).returncode)
    for name, run in (("image", try_image), ("package", try_package)):
        if args.only in (None, name):
            run(args.base.resolve(), pathlib.Path(work), args.package.resolve(), args.model.resolve())


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Runs a command under the seccomp profile of deploy/kubernetes/overlays/io-uring, as a container runtime would apply it:

    tests/deploy/seccomp.py [--without-io-uring] COMMAND...

Through libseccomp (libseccomp2 is in every Debian), without new privileges. --without-io-uring is the same profile less
io_uring's calls, which is what runtimes apply by default.
"""
import ctypes
import errno
import importlib.util
import os
import sys

import manifests

ALLOW, NO_NEW_PRIVS = 0x7FFF0000, 38


def load_profile(without):
    path = manifests.DEPLOY / "kubernetes/overlays/io-uring/make_profile.py"
    spec = importlib.util.spec_from_file_location("make_profile", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.profile(without)


def apply(profile):
    seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    seccomp.seccomp_load.argtypes = [ctypes.c_void_p]
    libc = ctypes.CDLL(None, use_errno=True)
    context = seccomp.seccomp_init(0x00050000 | profile["defaultErrnoRet"])
    unknown = []
    for group in profile["syscalls"]:
        for name in group["names"]:
            number = seccomp.seccomp_syscall_resolve_name(name.encode())
            if number == -1:
                unknown.append(name)
            elif seccomp.seccomp_rule_add(context, ALLOW, number, 0) not in (0, -errno.EDOM):
                sys.exit(f"seccomp: no rule for {name}")
    if unknown:
        print("seccomp: this libseccomp does not know", *unknown, file=sys.stderr)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or seccomp.seccomp_load(context) != 0:
        sys.exit("seccomp: the kernel does not take the filter")


def main():
    args = sys.argv[1:]
    without = ("io_uring",) if args[:1] == ["--without-io-uring"] else ()
    command = args[len(without):]
    if not command:
        sys.exit(__doc__)
    apply(load_profile(without))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes io-uring.json, the seccomp profile of this overlay: what winnow calls, and nothing else.

    deploy/kubernetes/overlays/io-uring/make_profile.py [--check]

The list is by purpose, so that a reader can judge it. tests/deploy/seccomp.py serves under the profile, and under one without
io_uring's calls.
"""
import json
import pathlib
import sys

CALLS = {
    "start and end of a process": "execve exit exit_group brk arch_prctl set_tid_address set_robust_list rseq prlimit64 getrlimit setrlimit uname "
                                  "sysinfo getrandom prctl capget capset umask getcwd chdir fchdir setgroups setuid setgid setresuid setresgid",
    "threads and signals": "clone clone3 futex futex_waitv gettid getpid getppid getpgrp getpgid tgkill tkill kill sched_yield sched_getaffinity "
                           "sched_setaffinity sched_getparam sched_getscheduler rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait rt_sigsuspend "
                           "rt_sigpending sigaltstack signalfd4 restart_syscall get_robust_list membarrier wait4 waitid getcpu getpriority setpriority "
                           "ioprio_set ioprio_get",
    "memory": "mmap munmap mprotect mremap madvise mlock mlock2 munlock mincore msync memfd_create mbind get_mempolicy set_mempolicy",
    "clocks": "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage timerfd_create timerfd_settime timerfd_gettime "
              "timer_create timer_settime timer_delete setitimer getitimer alarm",
    "files": "openat open close close_range read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 lseek fstat stat lstat newfstatat "
             "statx statfs fstatfs access faccessat faccessat2 fcntl flock fsync fdatasync sync_file_range fallocate ftruncate truncate fadvise64 "
             "readahead rename renameat renameat2 unlink unlinkat mkdir mkdirat rmdir link linkat symlink symlinkat readlink readlinkat getdents64 chmod "
             "fchmod fchmodat chown fchown fchownat lchown utimensat dup dup2 dup3 pipe pipe2 ioctl sendfile splice copy_file_range inotify_init1 "
             "inotify_add_watch inotify_rm_watch",
    "identity": "getuid geteuid getgid getegid getgroups getresuid getresgid",
    "network": "socket socketpair bind listen accept accept4 connect getsockname getpeername getsockopt setsockopt shutdown sendto recvfrom sendmsg "
               "recvmsg sendmmsg recvmmsg",
    "waiting": "poll ppoll select pselect6 epoll_create1 epoll_create epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd2 eventfd",
    "io_uring": "io_uring_setup io_uring_enter io_uring_register",
}


def profile(without=()):
    # Calls that are not listed fail as if the kernel did not have them: libraries then take their other way.
    return {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []}, {
        "architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []}], "syscalls": [
            {"names": sorted(calls.split()), "action": "SCMP_ACT_ALLOW", "comment": purpose} for purpose, calls in CALLS.items() if purpose not in without]}


def main():
    path = pathlib.Path(__file__).with_name("io-uring.json")
    text = json.dumps(profile(), indent=1) + "\n"
    if sys.argv[1:] == ["--check"]:
        if path.read_text() != text:
            sys.exit(f"not current, run {path.with_name('make_profile.py')}")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        path.write_text(text)


if __name__ == "__main__":
    main()

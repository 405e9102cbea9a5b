#!/usr/bin/env python3
"""The Debian package, made by CPack of the build that WINNOW_BIN lies in: what is in it, where, and what it asks for.

Without dpkg-deb it is left out: exit code 77, which CTest shows as skipped. Installing it into a fresh root: deploy/try_roots.py.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import yaml

import manifests

BIN = pathlib.Path(os.environ.get("WINNOW_BIN", manifests.SOURCE / "build/release/winnow"))


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="winnow-package-")
        made = subprocess.run(["cpack", "--config", BIN.parent / "CPackConfig.cmake", "-B", cls.directory.name], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
        cls.package, = pathlib.Path(cls.directory.name).glob("*.deb")
        cls.root = pathlib.Path(cls.directory.name, "root")
        subprocess.run(["dpkg-deb", "-x", cls.package, cls.root], check=True)
        cls.files = {str(path.relative_to(cls.root)) for path in cls.root.rglob("*") if path.is_file()}

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def field(self, name):
        return subprocess.run(["dpkg-deb", "-f", self.package, name], capture_output=True, text=True, check=True).stdout.strip()

    def test_it_has_what_is_listed(self):
        """Each rule of deploy/install.cmake, read by other means than CMake, and nothing besides."""
        docs = {f"usr/share/doc/winnow/{path.relative_to(manifests.SOURCE / 'docs')}" for path in (manifests.SOURCE / "docs").rglob("*.md")
                if "results" not in path.parts}
        protos = {f"usr/share/winnow/proto/{path.relative_to(manifests.SOURCE / 'proto')}" for path in (manifests.SOURCE / "proto/winnow").rglob("*.proto")}
        expected = {"usr/bin/winnow", "etc/winnow/winnow.yaml", "usr/lib/systemd/system/winnow.service", "usr/lib/sysusers.d/winnow.conf",
                    "usr/share/doc/winnow/copyright", "usr/share/doc/winnow/README.md", "usr/share/winnow/alerts.yaml",
                    "usr/share/winnow/dashboards/overview.json", "usr/share/winnow/dashboards/reads.json"} | docs | protos
        self.assertEqual(self.files, expected)

    def test_the_unit_names_files_that_are_there(self):
        unit = (self.root / "usr/lib/systemd/system/winnow.service").read_text()
        for path in re.findall(r"(/(?:usr|etc)/[\w./-]+)", unit):
            self.assertTrue((self.root / path.lstrip("/")).exists(), path)
        config = yaml.safe_load((self.root / "etc/winnow/winnow.yaml").read_text())
        state = "/var/lib/winnow"
        for value in (config["model"], config["store_dir"]):
            self.assertTrue(value.startswith(state + "/"))

    def test_the_configuration_is_a_file_that_its_owner_keeps(self):
        subprocess.run(["dpkg-deb", "-e", self.package, self.root / "DEBIAN"], check=True)
        self.assertEqual((self.root / "DEBIAN/conffiles").read_text(), "/etc/winnow/winnow.yaml\n")
        for script in ("postinst", "prerm"):
            self.assertTrue(os.access(self.root / "DEBIAN" / script, os.X_OK))
            subprocess.run(["sh", "-n", self.root / "DEBIAN" / script], check=True)

    def test_it_asks_for_the_libraries_that_the_program_has(self):
        depends = self.field("Depends")
        for library in ("libgrpc++1.51", "libssl3", "libyaml-cpp", "librocksdb", "liburing2", "libc6", "passwd"):
            self.assertIn(library, depends)
        self.assertNotIn("-dev", depends)

    def test_the_program_runs_and_is_stripped(self):
        program = self.root / "usr/bin/winnow"
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        self.assertEqual(self.field("Version"), said)
        self.assertNotIn(" .symtab", subprocess.run(["readelf", "-SW", program], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    if shutil.which("dpkg-deb") is None:
        print("LEFT OUT: this is no Debian, and the package cannot be read")
        sys.exit(77)
    unittest.main(verbosity=2)

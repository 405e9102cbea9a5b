#!/usr/bin/python3
"""What the program says to wrong flags, files, environments, certificates and models."""
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import unittest

from harness import BIN, MODEL, PATIENCE, SOURCE, Api, Server, counting_request, eventually, main, run, temporary_directory

sys.path.insert(0, str(SOURCE / "clients/python"))
from winnow_client import Admin  # noqa: E402


class Configuration(unittest.TestCase):
    def assert_usage_error(self, result, *texts):
        self.assertEqual(result.returncode, 2, result.stderr)
        for text in texts:
            self.assertIn(text, result.stderr)

    def test_unknown_flag_and_command_suggest(self):
        self.assert_usage_error(run("serve", "--modle", "x"), "unknown argument --modle", "did you mean --model?")
        self.assert_usage_error(run("serv"), "did you mean serve?")
        self.assert_usage_error(run("bench", "decod"), "unknown argument decod", "did you mean decode?")
        self.assert_usage_error(run("bench"), "subcommand")

    def test_an_option_too_small_for_the_model_is_a_usage_error(self):
        self.assert_usage_error(run("serve", "--model", MODEL, "--listen", "127.0.0.1:0", "--metrics", "off", "--kv-bytes", "1"),
                                "kv_bytes is 1", "at least")

    def test_generate_takes_no_endless_file_and_says_when_output_is_lost(self):
        endless = run("generate", "--server", "127.0.0.1:1", "--prompt-file", "/dev/zero")
        self.assert_usage_error(endless, "/dev/zero: more than 268435456 bytes")
        with Server() as server, open("/dev/full", "w") as full:
            result = subprocess.run([BIN, "generate", "--server", server.address, "--prompt", "x", "--max-tokens", "2"],
                                    stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual(result.returncode, 1)
            self.assertIn("standard output took no more", result.stderr)
            for arguments in (["--version"], ["--help"], ["serve", "--help"]):
                with self.subTest(arguments=arguments):
                    said = subprocess.run([BIN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
                    self.assertEqual((said.returncode, said.stderr), (1, "winnow: standard output took no more\n"))
        self.assert_usage_error(run())

    def test_bad_values_say_where_they_come_from(self):
        self.assert_usage_error(run("serve", "--model", MODEL, "--threads", "many"), "flag --threads", "integer")
        self.assert_usage_error(run("serve", "--model", MODEL, env={**os.environ, "WINNOW_LISTEN": "here"}),
                                "environment WINNOW_LISTEN", "HOST:PORT")
        with temporary_directory() as directory:
            path = directory / "winnow.yaml"
            path.write_text("model: x\nlisten_adress: 127.0.0.1:1\n")
            self.assert_usage_error(run("serve", "--config", path), ":2: unknown option listen_adress")
            path.write_text("queue_request: 1\n")
            self.assert_usage_error(run("serve", "--config", path), "did you mean queue_requests?")

    def test_print_config_shows_values_and_origins(self):
        with temporary_directory() as directory:
            path = directory / "winnow.yaml"
            path.write_text("queue_requests: 7\nthreads: 3\n")
            result = run("serve", "--model", MODEL, "--config", path, "--print-config", "--threads", "1",
                         env={**os.environ, "WINNOW_MAX_RUNNING": "5", "WINNOW_THREADS": "2"})
            self.assertEqual(result.returncode, 0, result.stderr)
            lines = {line.split(":")[0]: line for line in result.stdout.splitlines()}
            self.assertRegex(lines["threads"], r"threads: 1 +# flag --threads")
            self.assertRegex(lines["max_running"], r"max_running: 5 +# environment WINNOW_MAX_RUNNING")
            self.assertRegex(lines["queue_requests"], r"queue_requests: 7 +# .*winnow.yaml:1")
            self.assertRegex(lines["step_tokens"], r"step_tokens: 512 +# default")

    def test_check_config(self):
        self.assertEqual(run("serve", "--model", MODEL, "--check-config").returncode, 0)
        self.assert_usage_error(run("serve", "--check-config"), "--model is required")
        self.assert_usage_error(run("serve", "--model", MODEL, "--check-config", "--listen", "0.0.0.0:1"), "--insecure")
        self.assert_usage_error(run("serve", "--model", MODEL, "--check-config", "--tls-cert", "x"), "--tls-key")
        on_cuda = "serve", "--model", MODEL, "--check-config", "--device", "cuda"
        self.assertEqual(run(*on_cuda).returncode, 0)
        self.assertEqual(run(*on_cuda, "--host-bytes", "64MiB").returncode, 0)
        on_disk = ["--disk-bytes", "64MiB", "--store-dir", "x"]
        for flags in ([*on_disk, "--prefix-cache", "off"], ["--prefetch", "on"], ["--host-bytes", "64MiB", "--kv-bytes", "64MiB"]):
            self.assert_usage_error(run(*on_cuda, *flags), "with --device cuda")
        self.assert_usage_error(run(*on_cuda, *on_disk, "--spill", "on"), "--spill")
        self.assertEqual(run(*on_cuda, *on_disk, "--spill", "on", "--host-bytes", "64MiB", "--prefix-cache", "off").returncode, 0)
        self.assert_usage_error(run("serve", "--model", MODEL, "--check-config", "--device", "tpu"), "tpu")

    def test_help_shows_environment_and_default_of_every_option(self):
        text = run("serve", "--help").stdout
        for name in ("WINNOW_MODEL", "WINNOW_KV_BYTES", "WINNOW_DRAIN_GRACE", "[default: 30s]", "[default: 512]"):
            self.assertIn(name, text)

    def test_taken_port_is_an_error(self):
        with Server() as server:
            result = run("serve", "--model", MODEL, "--listen", server.address, "--metrics", "off", "--http", "off")
            self.assertEqual(result.returncode, 1)
            self.assertIn(f"cannot listen on {server.address}", result.stderr)
            result = run("serve", "--model", MODEL, "--listen", "127.0.0.1:0", "--http", "off", "--metrics",
                         f"127.0.0.1:{server.metrics_port}")
            self.assertEqual(result.returncode, 1)
            self.assertIn("metrics", result.stderr)


class Hangup(unittest.TestCase):
    """SIGHUP and the log level of the configuration file."""

    def reloaded(self, server, lines):
        """The lines about it, when there are so many."""
        seen = lambda: [e for e in server.events() if e["event"] == "reload" and e.get("what") == "log_level"]
        eventually(lambda: len(seen()) == lines, f"{lines} lines")
        return seen()

    def heard(self, server):
        """Whether a request has a line: at level info."""
        before = sum(e["event"] == "request" for e in server.events())
        list(Api(server.address).generate(counting_request("Hello", 1), timeout=PATIENCE))
        return sum(e["event"] == "request" for e in server.events()) > before

    def test_the_level_of_the_file_is_read_again(self):
        with temporary_directory() as directory:
            file = directory / "winnow.yaml"
            file.write_text("log_level: info\nmax_running: 3\n")
            with Server("--config", file) as server:
                self.assertTrue(self.heard(server))
                file.write_text("log_level: warn\nmax_running: 5\n")
                server.signal(signal.SIGHUP)
                self.assertEqual(self.reloaded(server, 1)[-1]["log_level"], "warn")
                # The level changes after that line, which it would keep out.
                eventually(lambda: not self.heard(server), "requests have no lines")
                self.assertFalse(self.heard(server))
                file.write_text("log_level: loud\n")
                server.signal(signal.SIGHUP)
                bad = self.reloaded(server, 2)[-1]
                self.assertEqual((bad["level"], bad["text"]), ("warn", "what was read before holds"))
                self.assertIn("loud", bad["message"])
                file.unlink()
                server.signal(signal.SIGHUP)
                self.assertEqual(self.reloaded(server, 3)[-1]["text"], "what was read before holds")
                file.write_text("log_level: debug\n")
                server.signal(signal.SIGHUP)
                self.assertEqual(self.reloaded(server, 4)[-1]["log_level"], "debug")
                self.assertTrue(self.heard(server))
                self.assertEqual(server.terminate(), 0)

    def test_a_flag_wins_and_the_administrators_level_stays_until_the_file_changes(self):
        with temporary_directory() as directory:
            file = directory / "winnow.yaml"
            file.write_text("log_level: info\n")
            with Server("--config", file, "--log-level", "info") as server:
                file.write_text("log_level: error\n")
                server.signal(signal.SIGHUP)
                self.reloaded(server, 1)
                self.assertTrue(self.heard(server))
            file.write_text("log_level: info\n")
            with Server("--config", file, "--admin-listen", "127.0.0.1:0") as server:
                port = next(e for e in server.events() if e["event"] == "listening")["admin_port"]
                with Admin(f"127.0.0.1:{port}") as admin:
                    self.assertEqual(admin.set_log_level("debug"), "info")
                    server.signal(signal.SIGHUP)
                    self.reloaded(server, 1)
                    self.assertEqual(admin.state().log_level, "debug")
                    file.write_text("log_level: warn\n")
                    server.signal(signal.SIGHUP)
                    self.reloaded(server, 2)
                    eventually(lambda: admin.state().log_level == "warn", "the file's level")

    def test_without_a_file_there_is_nothing_to_read(self):
        with Server() as server:
            server.signal(signal.SIGHUP)
            eventually(lambda: any(e["event"] == "reload" and "--config" in e["text"] for e in server.events()), "a line")


class Models(unittest.TestCase):
    """A model directory that cannot be used: exit 78, and the log names the file and what is wrong with it."""

    def setUp(self):
        context = temporary_directory()
        self.directory = context.__enter__() / "model"
        self.addCleanup(context.__exit__, None, None, None)
        shutil.copytree(MODEL, self.directory)

    def assert_model_error(self, *texts):
        result = run("serve", "--model", self.directory, "--listen", "127.0.0.1:0", "--metrics", "off", "--http", "off")
        self.assertEqual(result.returncode, 78, result.stderr)
        for text in texts:
            self.assertIn(text, result.stderr)

    def test_missing_directory_and_files(self):
        (self.directory / "tokenizer.json").unlink()
        self.assert_model_error("tokenizer.json")
        (self.directory / "config.json").unlink()
        self.assert_model_error("config.json")
        shutil.rmtree(self.directory)
        self.assert_model_error("config.json")

    def test_truncated_weights_name_file_tensor_and_offset(self):
        path = self.directory / "model.safetensors"
        size = path.stat().st_size
        os.truncate(path, size - 1000)
        self.assert_model_error("model.safetensors", "model.", str(size - 1000))

    def test_hostile_header_is_refused(self):
        path = self.directory / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 1 << 63) + path.read_bytes()[8:])
        self.assert_model_error("model.safetensors")

    def test_unknown_architecture_is_refused_by_name(self):
        config = json.loads((self.directory / "config.json").read_text())
        config["architectures"] = ["MambaForCausalLM"]
        (self.directory / "config.json").write_text(json.dumps(config))
        self.assert_model_error("MambaForCausalLM", "LlamaForCausalLM")

    def test_gguf_files_that_cannot_be_used_are_refused_by_name(self):
        def string(text):
            return struct.pack("<Q", len(text)) + text

        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
        architecture = string(b"general.architecture") + struct.pack("<I", 8) + string(b"mamba")
        for file, texts in ((head + architecture, ("general.architecture", "mamba", "llama, mistral3, qwen2, qwen3")),
                            ((head + architecture)[:-1], ("general.architecture", "byte 64", "beyond the end of the file")),
                            (head[:-8] + b"\xff" * 8, ("keys", "the most")),
                            (b"once upon a time", ("not a GGUF file",))):
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = self.directory.with_name("model.gguf")
            self.directory.write_bytes(file)
            self.assert_model_error("model.gguf: ", *texts)
            self.directory.unlink()
        self.assert_model_error("model.gguf")

    def test_weights_that_are_not_finite_name_the_tensor(self):
        (self.directory / "winnow-artifact.safetensors").unlink()  # it would be another model's, and say so first
        path = self.directory / "model.safetensors"
        data = bytearray(path.read_bytes())
        length = struct.unpack("<Q", data[:8])[0]
        begin = json.loads(data[8:8 + length])["model.layers.3.mlp.up_proj.weight"]["data_offsets"][0] + 8 + length
        data[begin:begin + 2] = struct.pack("<H", 0x7FC0)
        path.write_bytes(data)
        self.assert_model_error("model.safetensors", "model.layers.3.mlp.up_proj.weight", "has NaN at [0, 0]")

    def test_a_tokenizer_of_another_size_is_refused(self):
        config = json.loads((self.directory / "config.json").read_text())
        config["vocab_size"] = 49152
        (self.directory / "config.json").write_text(json.dumps(config))
        self.assert_model_error("model.embed_tokens.weight")  # the weights disagree first
        shutil.rmtree(self.directory)
        like = self.directory.parent / "like.json"
        config.update(num_hidden_layers=1)
        like.write_text(json.dumps(config))
        made = run("make-model", "--like", like, "--out", self.directory)
        self.assertEqual(made.returncode, 0, made.stderr)
        shutil.copy(pathlib.Path(MODEL) / "tokenizer.json", self.directory)
        self.assert_model_error("tokenizer.json: has ids up to 4095 only", "49152")

    def test_links_that_lead_nowhere_are_named_with_their_targets(self):
        for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja", "winnow-artifact.safetensors"):
            with self.subTest(name):
                path = self.directory / name
                kept = path.read_bytes() if path.exists() else None
                path.unlink(missing_ok=True)
                path.symlink_to("../blobs/gone")
                self.assert_model_error(f"{name}: a link to ../blobs/gone, which does not exist")
                path.unlink()
                if kept is not None:
                    path.write_bytes(kept)

    def test_bad_generation_defaults_are_refused(self):
        (self.directory / "generation_config.json").write_text('{"do_sample": true, "top_p": 3}')
        self.assert_model_error("generation_config.json", "top_p")

    def test_generation_defaults_are_honoured(self):
        (self.directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 2.0, "top_k": 0}')
        with Server(model=str(self.directory)) as server:
            api = Api(server.address)
            request = counting_request("Once", 30)
            texts = {"".join(r.text for r in api.generate(request, timeout=PATIENCE)) for _ in range(4)}
            self.assertGreater(len(texts), 1)
            self.assertEqual(server.terminate(), 0)

    def test_unknown_chat_template_is_an_error_only_for_chat(self):
        path = self.directory / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config["chat_template"] = "{{ something else }}"
        path.write_text(json.dumps(config))
        with Server(model=str(self.directory)) as server:
            self.assertEqual(run("generate", "--server", server.address, "--prompt", "x", "--max-tokens", 2).returncode, 0)
            chat = run("generate", "--server", server.address, "--chat-file", "-",
                       input='[{"role": "user", "content": "x"}]')
            self.assertEqual(chat.returncode, 1)
            self.assertIn("NO_CHAT_TEMPLATE", chat.stderr)


class Tls(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        context = temporary_directory()
        cls.directory = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        cls.make_ca("ca")
        cls.make_ca("other_ca")
        cls.sign("server", "ca", "127.0.0.1", days=30)
        cls.sign("client", "ca", "team-7", days=30)
        cls.sign("stranger", "other_ca", "team-7", days=30)
        cls.sign("expired", "ca", "127.0.0.1", days=-1)

    @classmethod
    def openssl(cls, *args):
        subprocess.run(["openssl", *args], cwd=cls.directory, check=True, capture_output=True)

    @classmethod
    def make_ca(cls, name):
        cls.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
                    f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", "-days", "30")

    @classmethod
    def sign(cls, name, ca, common_name, days):
        cls.openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key",
                    "-out", f"{name}.csr", "-subj", f"/CN={common_name}")
        pathlib.Path(cls.directory, "ext").write_text("subjectAltName=IP:127.0.0.1\n")
        cls.openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial",
                    "-out", f"{name}.pem", "-days", str(days), "-extfile", "ext")

    def path(self, name):
        return str(self.directory / name)

    def server_flags(self, name="server", key=None):
        return ["--tls-cert", self.path(f"{name}.pem"), "--tls-key", self.path(f"{key or name}.key")]

    def assert_refused(self, *flags, text):
        # Before the model is loaded, which may take minutes: here there is none.
        result = run("serve", "--model", self.path("no_model"), "--listen", "127.0.0.1:0", "--metrics", "off", "--http", "off", *flags)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(text, result.stderr)

    def test_bad_files_do_not_start(self):
        self.assert_refused(*self.server_flags("expired"), text="has expired")
        self.assert_refused(*self.server_flags("server", key="client"), text="not the private key")
        self.assert_refused("--tls-cert", self.path("nothing.pem"), "--tls-key", self.path("server.key"),
                            text="nothing.pem")
        self.assert_refused("--tls-cert", self.path("server.key"), "--tls-key", self.path("server.key"),
                            text="no PEM certificate")
        self.assert_refused(*self.server_flags(), "--tls-client-ca", self.path("ca.key"), text="no PEM certificate")

    def test_encrypted_server_answers_those_who_trust_it_and_nobody_in_the_clear(self):
        with Server(*self.server_flags()) as server:
            ask = ["generate", "--server", server.address, "--prompt", "x", "--max-tokens", 2, "--timeout", "20s"]
            good = run(*ask, "--tls-ca", self.path("ca.pem"))
            self.assertEqual(good.returncode, 0, good.stderr)
            self.assertNotEqual(run(*ask, "--tls-ca", self.path("other_ca.pem")).returncode, 0)
            self.assertNotEqual(run(*ask).returncode, 0)
            self.assertEqual(server.terminate(), 0)

    def served(self, port, protocols):
        """The certificate that a new connection is shown."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(protocols)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain, context.wrap_socket(plain) as tls:
            return ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True))

    def test_sighup_serves_new_certificates_at_once_and_bad_ones_never(self):
        self.sign("renewed", "ca", "127.0.0.1", days=20)
        pem = lambda name: (self.directory / f"{name}.pem").read_text()

        def put(cert, key=None):
            (self.directory / "live.pem").write_text(pem(cert))
            (self.directory / "live.key").write_text((self.directory / f"{key or cert}.key").read_text())

        put("server")
        with Server(*self.server_flags("live")) as server:
            def hang_up(level):
                """The lines that the signal made: of both ports."""
                before = len([e for e in server.events() if e["event"] == "reload"])
                server.signal(signal.SIGHUP)
                lines = lambda: [e for e in server.events() if e["event"] == "reload"][before:]
                eventually(lambda: len(lines()) == 2, "a line for each port")
                self.assertEqual([(line["what"], line["level"]) for line in lines()],
                                 [("certificates of gRPC", level), ("certificates of HTTP", level)])
                return lines()

            def shown():
                both = {self.served(server.port, ["h2"]), self.served(server.http_port, ["http/1.1"])}
                self.assertEqual(len(both), 1)
                return both.pop()

            self.assertEqual(shown(), pem("server"))
            put("renewed")
            self.assertEqual(shown(), pem("server"))  # not yet: its minute is not over
            hang_up("info")
            self.assertEqual(shown(), pem("renewed"))
            for bad, text in ((("expired",), "has expired"), (("server", "client"), "--tls-key"), (("server", "ca"), "--tls-key")):
                put(*bad)
                for line in hang_up("warn"):
                    self.assertIn(text, line["message"])
                self.assertEqual(shown(), pem("renewed"), bad)
            put("server")
            hang_up("info")
            self.assertEqual(shown(), pem("server"))
            self.assertEqual(server.terminate(), 0)

    def test_client_certificates_are_asked_for_and_name_the_tenant(self):
        with Server(*self.server_flags(), "--tls-client-ca", self.path("ca.pem")) as server:
            ask = ["generate", "--server", server.address, "--prompt", "x", "--max-tokens", 2, "--timeout", "20s",
                   "--tls-ca", self.path("ca.pem")]
            me = ["--tls-cert", self.path("client.pem"), "--tls-key", self.path("client.key")]
            stranger = ["--tls-cert", self.path("stranger.pem"), "--tls-key", self.path("stranger.key")]
            good = run(*ask, *me)
            self.assertEqual(good.returncode, 0, good.stderr)
            self.assertEqual(run(*ask, *me, "--tenant", "team-7").returncode, 0)
            other = run(*ask, *me, "--tenant", "team-8")
            self.assertEqual(other.returncode, 1)
            self.assertIn("TENANT_MISMATCH", other.stderr)
            self.assertNotEqual(run(*ask).returncode, 0)
            self.assertNotEqual(run(*ask, *stranger).returncode, 0)
            self.assertEqual(server.terminate(), 0)
            tenants = [e["tenant"] for e in server.events() if e["event"] == "request" and e["status"] == "OK"]
            self.assertEqual(tenants, ["team-7", "team-7"])


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""scripts/gpu.py, on a machine without a GPU: its programs are replaced by some that write down how they were called."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "scripts"))
import gpu  # noqa: E402  (the path comes first)

# Stands for winnow, nvidia-smi, the CUDA tests and the sanitizer.
FAKE = f"""#!{sys.executable}
import json, os, pathlib, signal, sys
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([name, *words]) + "\\n")
if name == "nvidia-smi":
    print("9.0" if "--query-gpu=compute_cap" in words else "A card, 1.0, 9.0")
if os.environ.get("FAIL") and os.environ["FAIL"] in [name, *words]:
    print("it is broken")
    sys.exit(3)
if words[:2] == ["bench", "decode"] and os.environ.get("WINNOW_TIMELINE"):
    sys.exit(0)  # writes nothing down
if words[:1] == ["generate"]:
    sys.exit(1)
if words[:1] == ["serve"]:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    print("metrics_port=1", flush=True)
    pathlib.Path(words[words.index("--port-file") + 1]).write_text("12345")
    while not stopped:
        signal.pause()
"""


class GpuTest(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.bin = pathlib.Path(self.directory.name)
        for name in ("winnow", "nvidia-smi", "winnow_cuda_test", "winnow_cuda_bench", "compute-sanitizer"):
            (self.bin / name).write_text(FAKE)
            (self.bin / name).chmod(0o755)
        self.calls_file = self.bin / "calls"

    def run_gpu(self, *arguments, **environment):
        return subprocess.run(
            [sys.executable, SOURCE / "scripts/gpu.py", *arguments], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "CALLS": str(self.calls_file),
                 "WINNOW_CUDA_BIN": str(self.bin), "WINNOW_BIN": str(self.bin / "winnow"), "WINNOW_SEED": "7", **environment})

    def calls(self, name):
        with open(self.calls_file) as lines:
            return [call[1:] for call in map(json.loads, lines) if call[0] == name]

    def test_wrong_arguments_are_refused_with_the_usage(self):
        for arguments in ([], ["fly"]):
            result = self.run_gpu(*arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn("scripts/gpu.py tokens", result.stderr)
        self.assertEqual(self.run_gpu("rounding", "--isa", "avx2").returncode, 2)

    def test_every_command_is_in_the_usage(self):
        for command in gpu.COMMANDS:
            self.assertIn(f"scripts/gpu.py {command} ", gpu.__doc__.replace("\n", " "))
        self.assertEqual(len(gpu.COMMANDS), 14)

    def test_without_a_card_nothing_runs(self):
        result = self.run_gpu("test", FAIL="nvidia-smi")
        self.assertEqual(result.returncode, 1)
        self.assertIn("no GPU here", result.stderr)
        self.assertEqual(self.calls("winnow_cuda_test"), [])

    def test_tests_get_their_flags_and_their_failure_is_ours(self):
        result = self.run_gpu("test", "--gtest_filter=X.*")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.startswith("A card, 1.0, 9.0, "))
        self.assertEqual(self.calls("winnow_cuda_test"), [["--gtest_filter=X.*"]])
        result = self.run_gpu("test", FAIL="winnow_cuda_test")
        self.assertEqual(result.returncode, 1)
        self.assertIn("winnow_cuda_test exited with 3", result.stderr)

    def test_sanitize_runs_the_named_tools_or_all(self):
        self.assertEqual(self.run_gpu("sanitize", "memcheck", "--gtest_filter=X").returncode, 0)
        [call] = self.calls("compute-sanitizer")
        self.assertEqual(call[:2], ["--tool", "memcheck"])
        self.assertEqual(call[-2:], ["--gtest_brief=1", "--gtest_filter=X"])
        self.calls_file.unlink()
        self.assertEqual(self.run_gpu("sanitize").returncode, 0)
        self.assertEqual([call[1] for call in self.calls("compute-sanitizer")], gpu.SANITIZERS)
        self.calls_file.unlink()
        self.assertEqual(self.run_gpu("sanitize", FAIL="racecheck").returncode, 1)
        self.assertEqual(len(self.calls("compute-sanitizer")), 2, "the first failure ends it")

    def test_steps_are_the_readmes(self):
        self.assertEqual(self.run_gpu("steps", "--steps", "3").returncode, 0)
        calls = self.calls("winnow")
        self.assertEqual(len(calls), 3)
        for call in calls:
            self.assertEqual(call[:6], ["bench", "decode", "--like", gpu.SHAPE, "--device", "cuda"])
            self.assertEqual(call[-2:], ["--steps", "3"])
        self.assertIn("8192,32768,131072", calls[0])
        self.assertEqual([call[call.index("--batch") + 1] for call in calls[1:]], ["8", "24"])

    def test_a_timeline_of_kernels_that_write_nothing_is_a_failure(self):
        result = self.run_gpu("timeline")
        self.assertEqual(result.returncode, 1)
        self.assertIn("write nothing down", result.stderr)

    def test_architectures(self):
        self.assertEqual(gpu.architectures("9.0\n9.0\n8.9\n"), "89;90a")

    def test_spill_and_pinned_need_the_hosts_bytes(self):
        for command in ("spill", "pinned"):
            result = self.run_gpu(command, "--kv-bytes", "1GiB")
            self.assertEqual(result.returncode, 1)
            self.assertIn(f"{command}: --host-bytes", result.stderr)

    def served(self):
        """Flags of each server, but for what all have."""
        return [call[call.index("--port-file") + 2:] for call in self.calls("winnow") if call[0] == "serve"]

    def compare(self, command, *flags):
        # The fake answers nothing, so that the comparison itself fails; all before it must be right.
        result = self.run_gpu(command, *flags)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("a document of seed 7", result.stdout)
        return self.served()

    def test_shapes_are_computed_on_the_cpu_and_on_the_card(self):
        # The fake computes nothing, so that the comparison ends with its first evaluation.
        result = self.run_gpu("shapes", "--shape", "qwen3-0.6b", "--draft-weights", "int8", "--kv-dtype", "int8", FAIL="eval")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("exited with 3", result.stdout)
        made, evaluated = self.calls("winnow")
        self.assertEqual(made[0], "make-model")
        self.assertIn("qwen3-0.6b.json", made[made.index("--like") + 1])
        self.assertEqual(evaluated[0], "eval")
        self.assertEqual(evaluated[-4:], ["--device", "cpu", "--kv-dtype", "int8"])

    def test_tokens_compares_the_cpu_with_the_card(self):
        self.assertEqual(self.compare("tokens", "--host-bytes", "1GiB"),
                         [["--device", "cpu"], ["--device", "cuda", "--host-bytes", "1GiB"]])
        generated = [call for call in self.calls("winnow") if call[0] == "generate"]
        self.assertTrue(generated)
        self.assertIn("127.0.0.1:12345", generated[0])

    def test_servers_keep_transform_codes_also_beside_an_artifact(self):
        self.compare("graphs")
        [first, _] = [call for call in self.calls("winnow") if call[0] == "serve"]
        self.assertEqual(first[first.index("--index") + 1], gpu.EVERY_INDEX)
        self.calls_file.unlink()
        with tempfile.TemporaryDirectory() as without:
            self.run_gpu("graphs", WINNOW_MODEL=without)
        self.assertNotIn("--index", self.calls("winnow")[0])

    def test_graphs_and_rounding_compare_two_of_a_kind(self):
        self.assertEqual(self.compare("graphs"), [["--device", "cuda"], ["--device", "cuda", "--cuda-graphs", "off"]])
        self.calls_file.unlink()
        self.assertEqual(self.compare("rounding"),
                         [["--device", "cpu", "--isa", "avx512"], ["--device", "cpu", "--isa", "avx2"]])

    def test_pinned_compares_kv_on_the_device_with_kv_in_the_hosts_memory(self):
        self.assertEqual(self.compare("pinned", "--host-bytes", "1GiB"),
                         [["--device", "cuda"], ["--device", "cuda", "--host-bytes", "1GiB"]])

    def test_servers_that_are_compared_keep_kv_of_the_same_type(self):
        for words in (["--kv-dtype", "int8"], ["--kv-dtype=fp8"]):
            flags = [*words, "--host-bytes", "1GiB"]
            left, right = ["--device", "cuda", *words], ["--device", "cuda", *flags]
            expected = {
                "tokens": [["--device", "cpu", *words], right],
                "graphs": [right, ["--device", "cuda", "--cuda-graphs", "off", *flags]],
                "pinned": [left, right],
                "resume": [right, right],
                "spill": [left, ["--device", "cuda", "--spill", "on", *flags]],
            }
            for command, servers in expected.items():
                self.run_gpu(command, *flags)  # those with a store end at the fake's metrics
                served = [call[:call.index("--disk-bytes")] if "--disk-bytes" in call else call for call in self.served()]
                self.assertEqual(served, servers, command)
                self.calls_file.unlink()

    def test_exact_asks_one_server_under_a_verified_policy_and_under_dense(self):
        self.assertEqual(self.compare("exact", "--max-running", "2"), [["--device", "cuda", "--max-running", "2"]])
        [first, *_] = [call for call in self.calls("winnow") if call[0] == "generate"]
        self.assertEqual(first[first.index("--policy") + 1], gpu.VERIFIED_POLICIES[0])
        self.assertTrue(all("verify=" in policy for policy in gpu.VERIFIED_POLICIES))

    def test_exact_asks_dense_drafts_too_where_they_have_weights_of_their_own(self):
        self.assertEqual(gpu.policies_of_exact(["--kv-dtype", "int8"]), gpu.VERIFIED_POLICIES)
        for flags in (["--draft-weights", "int8"], ["--draft-weights=int8"]):
            self.assertEqual(gpu.policies_of_exact(flags), [*gpu.VERIFIED_POLICIES, "dense:verify=4", "dense:verify=auto"])

    def test_a_server_that_does_not_start_shows_its_log(self):
        result = self.run_gpu("tokens", FAIL="serve")
        self.assertEqual(result.returncode, 1)
        self.assertIn("it is broken", result.stderr)
        self.assertIn("the server cpu did not start", result.stderr)


class ServersTest(unittest.TestCase):
    def test_servers_and_files_are_gone_at_the_end(self):
        with tempfile.TemporaryDirectory() as directory:
            winnow = pathlib.Path(directory, "winnow")
            winnow.write_text(FAKE)
            winnow.chmod(0o755)
            os.environ.update(CALLS=str(pathlib.Path(directory, "calls")), WINNOW_BIN=str(winnow), WINNOW_SEED="7")
            with gpu.Servers() as servers:
                servers.start("one", "--device", "cpu")
                servers.start("two")
                self.assertEqual(servers.address("one"), "127.0.0.1:12345")
                processes = list(servers._processes.values())
                servers.stop("one")
                self.assertTrue((servers.work / "document.txt").exists())
            self.assertIsNotNone(processes[1].poll())
            self.assertFalse(servers.work.exists())


if __name__ == "__main__":
    unittest.main()

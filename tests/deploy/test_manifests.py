#!/usr/bin/env python3
"""The manifests fit themselves and the program: ports, probes, selectors, times, rights, and every option that is set.

WINNOW_BIN is the program (CTest sets it). Needs PyYAML; the class Rendered needs kubectl 1.21 or newer, and without it the
script ends with 77, which CTest shows as skipped. Schemas and policies of others: deploy/check.sh.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import yaml

import manifests

BIN = os.environ.get("WINNOW_BIN", str(manifests.SOURCE / "build/release/winnow"))


def check_config(args, env=None, config=None):
    """`winnow serve` with these arguments, checked: (exit code, what it says)."""
    with tempfile.TemporaryDirectory() as directory:
        args = list(args)
        if "--config" in args:
            path = pathlib.Path(directory, "winnow.yaml")
            path.write_text(config)
            args[args.index("--config") + 1] = str(path)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WINNOW_")}
        done = subprocess.run([BIN, *map(str, args), "--check-config"], capture_output=True, text=True, env={**environment, **(env or {})})
        return done.returncode, done.stderr


def resolved_config(args, env, config):
    """The options that these give, as --print-config prints them."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "winnow.yaml")
        path.write_text(config or "")
        args = [str(path) if previous == "--config" else arg for previous, arg in zip([""] + list(args), args)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WINNOW_")}
        printed = subprocess.run([BIN, *args, "--print-config"], capture_output=True, text=True, check=True, env={**environment, **env}).stdout
        return yaml.safe_load(printed)


def seconds(text):
    total, rest = 0.0, text
    for number, unit in re.findall(r"([0-9.]+)(ms|h|m|s)", text):
        total += float(number) * {"ms": .001, "s": 1, "m": 60, "h": 3600}[unit]
        rest = rest.replace(number + unit, "", 1)
    assert not rest, text
    return total


POD_IP = "10.1.2.3"  # of each pod, here


def env_of(container):
    """As a kubelet resolves it: $(NAME) stands for a variable of an earlier line."""
    found = {}
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}, entry
            found[entry["name"]] = POD_IP
        else:
            found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found.get(match.group(1), match.group(0)), entry["value"])
    return found


def picker():
    """Values of the endpoint picker's chart, and its plugins."""
    values = yaml.safe_load((manifests.DEPLOY / "kubernetes/overlays/llm-d/picker-values.yaml").read_text())["router"]
    return values, yaml.safe_load(values["epp"]["pluginsCustomConfig"][values["epp"]["pluginsConfigFile"]])


def parameters_of(plugins, kind):
    return next(plugin for plugin in plugins["plugins"] if plugin["type"] == kind)["parameters"]


class Options(unittest.TestCase):
    """Whatever sets an option is accepted by `winnow serve --check-config`."""

    def accepted(self, *args, **kwargs):
        code, said = check_config(*args, **kwargs)
        self.assertEqual(code, 0, said)
        self.assertNotIn("warning", said)

    def test_the_packages_configuration(self):
        self.accepted(["serve", "--config", "winnow.yaml"], config=(manifests.DEPLOY / "winnow.yaml").read_text())

    def test_an_option_that_is_not_there_is_refused(self):
        code, said = check_config(["serve", "--config", "x"], config="model: /m\nkv_byte: 4GiB\n")
        self.assertEqual(code, 2)
        self.assertIn("kv_bytes", said)

    def test_compose(self):
        compose = yaml.safe_load((manifests.DEPLOY / "compose.yaml").read_text())
        service = compose["services"]["winnow"]
        args = [re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", arg) for arg in service["command"]]
        self.accepted(args)
        overrides = yaml.safe_load((manifests.DEPLOY / "compose.cuda.yaml").read_text())["services"]["winnow"]
        self.accepted(args, env=overrides["environment"])
        options = resolved_config(args, {}, "")
        self.assertGreater(seconds(service["stop_grace_period"]), seconds(options["drain_grace"]))
        for port in ("8000:8000", "50051:50051"):
            self.assertIn("127.0.0.1:" + port, service["ports"])
        self.assertEqual({v.partition(":")[0] for name in compose["services"] for v in compose["services"][name].get("volumes", [])
                          if not v.startswith((".", "$"))}, set(compose["volumes"]))
        for name, service in compose["services"].items():
            for volume in service.get("volumes", []):
                if volume.startswith("./"):
                    self.assertTrue((manifests.DEPLOY / volume.split(":")[0]).exists(), f"{name}: {volume}")

    def test_the_unit(self):
        unit = (manifests.DEPLOY / "systemd/winnow.service").read_text()
        config = (manifests.DEPLOY / "winnow.yaml").read_text()
        commands = re.findall(r"^Exec\w+=/usr/bin/winnow (.*)$", unit, re.M)
        self.assertEqual(len(commands), 2)
        for command in commands:
            self.accepted([arg for arg in command.split() if arg != "--check-config"], config=config)
        stop = float(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M).group(1))
        self.assertGreater(stop, seconds(resolved_config(["serve", "--config", "x"], {}, config)["drain_grace"]))
        for path in (yaml.safe_load(config)["store_dir"], re.search(r"XDG_CACHE_HOME=(\S+)", unit).group(1)):
            self.assertIn(path.removeprefix("/var/lib/"), re.search(r"^StateDirectory=(.*)$", unit, re.M).group(1).split())

    def test_the_kserve_example(self):
        service = yaml.safe_load((manifests.DEPLOY / "kubernetes/examples/kserve.yaml").read_text())
        container = service["spec"]["template"]["containers"][0]
        self.accepted(container["args"], env=env_of(container))
        self.assertEqual(container["name"], "main")
        options = resolved_config(container["args"], env_of(container), "")
        self.assertEqual(options["http"], "0.0.0.0:8000")
        self.assertGreater(service["spec"]["template"]["terminationGracePeriodSeconds"], seconds(options["drain_grace"]) + 5)

    def test_the_image(self):
        dockerfile = (manifests.DEPLOY / "docker/Dockerfile").read_text()
        self.assertIn("\nUSER 64646:64646", dockerfile.split(" AS cpu\n")[1])
        self.assertIn("\nUSER 64646:64646", dockerfile.split(" AS cuda\n")[1])
        for copied in re.findall(r"^COPY (?!--from|\. )(\S+)", dockerfile, re.M):
            self.assertTrue((manifests.SOURCE / copied).exists(), copied)
        ignored = set(re.findall(r"^([^#\s]\S*)$", (manifests.DEPLOY / "docker/Dockerfile.dockerignore").read_text(), re.M))
        self.assertLessEqual({".git", "build"}, ignored)
        # Each folder that the build reads, tests apart, which the image's build leaves out.
        cmake = (manifests.SOURCE / "CMakeLists.txt").read_text() + (manifests.DEPLOY / "install.cmake").read_text()
        read = set(re.findall(r"(?:CONFIGURE_DEPENDS|add_subdirectory\(|include\(|FILES|DIRECTORY)\s+?([a-z]+)/", cmake))
        self.assertLessEqual({"server", "storage", "docs", "proto", "deploy"}, read)
        self.assertEqual(read & ignored, {"tests"})
        self.assertEqual(dockerfile.count("-DWINNOW_TESTS=OFF"), 2)


class Plain(unittest.TestCase):
    """What needs no rendering."""

    def test_no_image_is_unversioned(self):
        for path, document in manifests.plain_documents():
            for image in re.findall(r"image: (\S+)", path.read_text()):
                self.assertRegex(image, r":[^/]+$", path)
                self.assertFalse(image.endswith(":latest"), path)

    def test_kustomizations_name_files_that_are_there(self):
        for path in manifests.DEPLOY.rglob("kustomization.yaml"):
            kustomization = yaml.safe_load(path.read_text())
            named = [*kustomization.get("resources", []), *(p["path"] for p in kustomization.get("patches", [])),
                     *(f for g in kustomization.get("configMapGenerator", []) for f in g["files"])]
            for name in named:
                self.assertTrue((path.parent / name).exists(), f"{path}: {name}")

    def test_the_endpoint_pickers_values(self):
        _, plugins = picker()
        known = {plugin["type"] for plugin in plugins["plugins"]}
        self.assertEqual(len(known), len(plugins["plugins"]))
        for profile in plugins["schedulingProfiles"]:
            self.assertLessEqual({plugin["pluginRef"] for plugin in profile["plugins"]}, known)
        sources = {source["pluginRef"]: [one["pluginRef"] for one in source["extractors"]] for source in plugins["dataLayer"]["sources"]}
        self.assertLessEqual({*sources, *sum(sources.values(), [])}, known)
        # Without these three the picker would match prefixes by what it has routed, or nothing.
        precise = "precise-prefix-cache-producer"
        self.assertEqual(parameters_of(plugins, "prefix-cache-scorer")["prefixMatchInfoProducerName"], precise)
        self.assertIn(precise, sources["endpoint-notification-source"])
        self.assertIn("vllm", parameters_of(plugins, "token-producer"))
        block = parameters_of(plugins, precise)["tokenProcessorConfig"]["blockSizeTokens"]
        self.assertEqual(block, resolved_config(["serve"], {}, "")["block_tokens"])
        tiers = [tier["weight"] for tier in parameters_of(plugins, precise)["indexerConfig"]["kvCacheBackendConfigs"]]
        self.assertEqual(tiers, sorted(tiers, reverse=True))


class Rendered(unittest.TestCase):
    """Each overlay as a cluster gets it."""

    @classmethod
    def setUpClass(cls):
        cls.overlays = {name: manifests.overlay(name) for name in manifests.OVERLAYS}
        # A folder without overlays would pass everything below.
        assert len(manifests.OVERLAYS) == 6, manifests.OVERLAYS

    def each_pod(self):
        for overlay, documents in self.overlays.items():
            for document, template in manifests.pod_specs(documents):
                with self.subTest(overlay=overlay, name=document["metadata"]["name"]):
                    yield documents, document, template

    def each_server(self):
        """(documents, template, container, resolved options) of winnow's pods."""
        for documents, document, template in self.each_pod():
            if document["metadata"]["name"] != "winnow":
                continue
            container = template["spec"]["containers"][0]
            config_map = next(d for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"].startswith("winnow-config"))
            config = config_map["data"]["winnow.yaml"]
            code, said = check_config(container["args"], env_of(container), config)
            self.assertEqual(code, 0, said)
            self.assertNotIn("warning", said)
            yield documents, template, container, resolved_config(container["args"], env_of(container), config)

    def test_options_are_accepted_and_ports_are_those_that_it_listens_on(self):
        for _, _, container, options in self.each_server():
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            listening = {"grpc": options["listen"], "http": options["http"], "metrics": options["metrics"]}
            listening |= {name: options[option] for name, option in (("kv-events", "kv_events_zmq"), ("kv-replay", "kv_events_replay"))
                          if options[option]}  # YAML's off is false
            self.assertEqual(ports, {name: int(address.rpartition(":")[2]) for name, address in listening.items()})
            for address in listening.values():
                self.assertTrue(address.startswith("0.0.0.0:"), address)  # or no probe would reach it

    def test_grace_is_longer_than_the_drain(self):
        for _, template, container, options in self.each_server():
            sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            self.assertGreater(template["spec"]["terminationGracePeriodSeconds"], sleep + seconds(options["drain_grace"]) + 5)

    def test_what_is_written_is_a_volume(self):
        for _, template, container, options in self.each_server():
            writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
            for path in (options["store_dir"], env_of(container)["XDG_CACHE_HOME"]):
                self.assertTrue(any(path.startswith(mount + "/") for mount in writable), path)
            readable = [m["mountPath"] for m in container["volumeMounts"] if m.get("readOnly")]
            self.assertTrue(any(options["model"].startswith(mount + "/") for mount in readable))
            claims = {c["metadata"]["name"] for c in []} | {v["name"] for v in template["spec"]["volumes"]}
            for mount in container["volumeMounts"]:
                self.assertIn(mount["name"], claims | {"store"})

    def test_the_store_fits_its_volume_and_kv_the_memory(self):
        gib = 2 ** 30
        units = {"Ki": 2 ** 10, "Mi": 2 ** 20, "Gi": gib}
        size = lambda text: int(text[:-2]) * units[text[-2:]]
        for documents, _, container, options in self.each_server():
            claim = manifests.find(documents, "StatefulSet", "winnow")["spec"]["volumeClaimTemplates"][0]
            self.assertLess(options["disk_bytes"], size(claim["spec"]["resources"]["requests"]["storage"]))
            if options["device"] == "cpu":
                self.assertLess(options["kv_bytes"], size(container["resources"]["requests"]["memory"]))

    def test_probes_ask_ports_of_the_container(self):
        probed = 0
        for _, _, template in self.each_pod():
            for container in template["spec"]["containers"]:
                names = {port["name"] for port in container["ports"]}
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    self.assertIn(container[probe]["httpGet"]["port"], names, probe)
                    probed += 1
        self.assertGreater(probed, 0)

    def test_probes_of_a_replica(self):
        for _, _, container, options in self.each_server():
            self.assertEqual(container["startupProbe"]["httpGet"]["path"], "/v1/models")
            self.assertEqual(options["api_keys"] or "", "", "with keys /v1/models is 401: probe /health")
            for probe in ("readinessProbe", "livenessProbe"):
                self.assertEqual(container[probe]["httpGet"]["path"], "/health")
            liveness = container["livenessProbe"]
            self.assertGreater(liveness["periodSeconds"] * liveness["failureThreshold"], 2 * seconds(options["heartbeat_timeout"]))

    def test_services_and_budgets_select_pods_and_ports(self):
        for overlay, documents in self.overlays.items():
            if not any(True for _ in manifests.pod_specs(documents)):
                continue
            pods = [template for _, template in manifests.pod_specs(documents)]
            for document in documents:
                with self.subTest(overlay=overlay, kind=document["kind"], name=document["metadata"]["name"]):
                    if document["kind"] == "Service":
                        selector = document["spec"]["selector"]
                    elif document["kind"] in ("PodDisruptionBudget", "InferencePool"):
                        selector = document["spec"]["selector"]["matchLabels"]
                    elif document["kind"] == "NetworkPolicy":
                        selector = document["spec"]["podSelector"]["matchLabels"]
                    else:
                        continue
                    chosen = [p for p in pods if selector.items() <= p["metadata"]["labels"].items()]
                    self.assertEqual(len(chosen), 1)
                    ports = {port["name"]: port["containerPort"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
                    for port in document["spec"].get("ports", []):
                        self.assertEqual(ports[port["targetPort"]], port["port"])
                    for port in document["spec"].get("targetPorts", []):
                        self.assertEqual(port["number"], ports["http"])
                    for rule in document["spec"].get("ingress", []):
                        self.assertLessEqual({p["port"] for p in rule["ports"]}, ports.keys())
                    if document["kind"] == "PodDisruptionBudget":
                        self.assertEqual(document["spec"].get("maxUnavailable"), 1)

    def test_a_set_selects_its_own_pods(self):
        for documents, document, template in self.each_pod():
            self.assertLessEqual(document["spec"]["selector"]["matchLabels"].items(), template["metadata"]["labels"].items())
            if document["kind"] == "StatefulSet":
                self.assertIsNone(None if manifests.find(documents, "Service", document["spec"]["serviceName"])["spec"]["clusterIP"] == "None" else 1)
            for constraint in template["spec"].get("topologySpreadConstraints", []):
                self.assertLessEqual(constraint["labelSelector"]["matchLabels"].items(), template["metadata"]["labels"].items())

    def test_pods_are_restricted(self):
        for _, _, template in self.each_pod():
            pod = template["spec"]["securityContext"]
            self.assertTrue(pod["runAsNonRoot"])
            self.assertGreater(pod["runAsUser"], 0)
            self.assertIn(pod["seccompProfile"]["type"], ("RuntimeDefault", "Localhost"))
            for key in ("hostNetwork", "hostPID", "hostIPC"):
                self.assertFalse(template["spec"].get(key, False))
            for container in template["spec"]["containers"]:
                context = container["securityContext"]
                self.assertFalse(context["allowPrivilegeEscalation"])
                self.assertTrue(context["readOnlyRootFilesystem"])
                self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
                for kind in ("requests", "limits"):
                    self.assertLessEqual({"cpu", "memory"}, container["resources"][kind].keys())

    def test_the_gateway_finds_the_replicas_and_may_reach_them(self):
        documents = self.overlays["smg"]
        gateway = manifests.find(documents, "Deployment", "winnow-gateway")["spec"]["template"]
        flags = dict(arg.removeprefix("--").split("=", 1) for arg in gateway["spec"]["containers"][0]["args"] if "=" in arg)
        replica = manifests.find(documents, "StatefulSet", "winnow")["spec"]["template"]
        name, _, value = flags["selector"].partition("=")
        self.assertEqual(replica["metadata"]["labels"][name], value)
        self.assertEqual(flags["service-discovery-namespace"], manifests.find(documents, "StatefulSet", "winnow")["metadata"]["namespace"])
        # gRPC, on which it hears of KV events: tests/cluster shows that it finds out by itself that this port speaks gRPC.
        ports = {p["name"]: p["containerPort"] for p in replica["spec"]["containers"][0]["ports"]}
        self.assertEqual(int(flags["service-discovery-port"]), ports["grpc"])
        policy = manifests.find(documents, "NetworkPolicy", "winnow")
        allowed = [f["podSelector"]["matchLabels"] for rule in policy["spec"]["ingress"] for f in rule["from"] if "podSelector" in f]
        self.assertTrue(any(labels.items() <= gateway["metadata"]["labels"].items() for labels in allowed))
        role = manifests.find(documents, "Role", "winnow-gateway")
        self.assertEqual(role["rules"], [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}])

    def test_replicas_behind_a_router_tell_it_of_kv_events_and_others_nobody(self):
        told = {}
        for documents, _, container, options in self.each_server():
            name = next(name for name, those in self.overlays.items() if those is documents)
            told[name] = [bool(options[option]) for option in ("kv_events", "kv_events_zmq", "kv_events_replay")]  # YAML's off is false
            told[name].append(options["anonymous_prefixes"] == "shared")  # of what is not shared nothing is told
        nobody = [False, False, False, False]
        self.assertEqual(told, {"cpu": nobody, "cuda": nobody, "io-uring": nobody, "smg": [True, False, False, True], "llm-d": [True, True, True, True]})

    def test_the_picker_hears_of_the_replicas_kv_events(self):
        documents = self.overlays["llm-d"]
        container = manifests.find(documents, "StatefulSet", "winnow")["spec"]["template"]["spec"]["containers"][0]
        config = next(d for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"].startswith("winnow-config"))["data"]["winnow.yaml"]
        options = resolved_config(container["args"], env_of(container), config)
        values, plugins = picker()
        events = parameters_of(plugins, "precise-prefix-cache-producer")["kvEventsConfig"]
        port = lambda option: int(options[option].rpartition(":")[2])
        self.assertTrue(events["discoverPods"])
        self.assertEqual(events["podDiscoveryConfig"], {"socketPort": port("kv_events_zmq"), "replaySocketPort": port("kv_events_replay")})
        model = options["model_name"] or pathlib.PurePath(options["model"]).name
        self.assertEqual(options["kv_events_topic"], f"kv@{POD_IP}:{port('http')}@{model}")
        self.assertTrue(options["kv_events_topic"].startswith(events["topicFilter"]))
        # Token ids come from the replicas themselves, by their Service.
        tokens = parameters_of(plugins, "token-producer")
        self.assertEqual(tokens["modelName"], model)
        service = manifests.find(documents, "Service", "winnow")
        namespace = service["metadata"]["namespace"]
        http = next(p["port"] for p in service["spec"]["ports"] if p["name"] == "http")
        self.assertEqual(tokens["vllm"]["url"], f"http://winnow.{namespace}.svc:{http}")
        # The chart makes the picker's names of the release's.
        text = (manifests.DEPLOY / "kubernetes/overlays/llm-d/kustomization.yaml").read_text()
        release = re.search(r"helm install (\S+) ", text).group(1)
        pool = manifests.find(documents, "InferencePool", "winnow")["spec"]
        self.assertEqual(pool["endpointPickerRef"]["name"], f"{release}-epp")
        self.assertFalse(values["inferencePool"]["create"])
        self.assertEqual(values["modelServers"]["matchLabels"], pool["selector"]["matchLabels"])
        self.assertEqual(values["modelServers"]["targetPorts"], pool["targetPorts"])
        # The picker, and nobody else, reaches the ports that tell the tokens of prompts.
        policy = manifests.find(documents, "NetworkPolicy", "winnow")["spec"]
        who = {port: [f for rule in policy["ingress"] if port in {p["port"] for p in rule["ports"]} for f in rule["from"]]
               for port in ("kv-events", "kv-replay", "http")}
        itself = {"podSelector": {"matchLabels": {"llm-d-router-standalone": f"{release}-epp"}}}
        self.assertEqual(who["kv-events"], [itself])
        self.assertEqual(who["kv-replay"], [itself])
        self.assertIn(itself, who["http"])

    def test_io_uring_asks_for_it_and_for_the_profile(self):
        pod = manifests.find(self.overlays["io-uring"], "StatefulSet", "winnow")["spec"]["template"]["spec"]
        self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "Localhost", "localhostProfile": "winnow/io-uring.json"})
        self.assertEqual(env_of(pod["containers"][0])["WINNOW_IO"], "uring")
        for name in ("cpu", "cuda", "smg", "llm-d"):
            pod = manifests.find(self.overlays[name], "StatefulSet", "winnow")["spec"]["template"]["spec"]
            self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})

    def test_metrics_are_scraped_where_they_are(self):
        monitor = manifests.find(self.overlays["monitoring"], "PodMonitor", "winnow")
        replica = manifests.find(self.overlays["cpu"], "StatefulSet", "winnow")["spec"]["template"]
        self.assertLessEqual(monitor["spec"]["selector"]["matchLabels"].items(), replica["metadata"]["labels"].items())
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            self.assertIn(endpoint["port"], [p["name"] for p in replica["spec"]["containers"][0]["ports"]])


if __name__ == "__main__":
    if "Rendered" in sys.argv[1:] or not sys.argv[1:]:
        try:
            manifests.overlay_text("cpu")
        except manifests.LeftOut as why:
            print(f"LEFT OUT: rendered manifests are not checked, because {why}", flush=True)
            sys.exit(77)
    unittest.main(verbosity=2)

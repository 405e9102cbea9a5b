"""The manifests of deploy/, rendered: shared by the tests of this folder and deploy/check.sh.

Rendering is Kustomize's business (`kubectl kustomize`). Where kubectl is not there, Overlay() raises LeftOut, and whoever
asks says so.
"""
import functools
import pathlib
import shutil
import subprocess

import yaml

SOURCE = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = SOURCE / "deploy"
OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("kubernetes/overlays/*/kustomization.yaml"))
# Kinds that no Kubernetes release has a schema of.
CUSTOM = {"PodMonitor", "PrometheusRule", "InferencePool", "HTTPRoute", "LLMInferenceService"}


class LeftOut(Exception):
    pass


@functools.lru_cache(None)
def overlay_text(name):
    if shutil.which("kubectl") is None:
        raise LeftOut("kubectl is not there")
    return subprocess.run(["kubectl", "kustomize", DEPLOY / "kubernetes/overlays" / name], check=True, capture_output=True, text=True).stdout


def overlay(name):
    return [document for document in yaml.safe_load_all(overlay_text(name)) if document]


def plain_documents():
    """All documents of deploy/kubernetes as they lie there, patches included: (path, document)."""
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        if path.name in ("winnow.yaml", "kustomization.yaml", "picker-values.yaml"):
            continue
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def find(documents, kind, name):
    found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def pod_specs(documents):
    for document in documents:
        if document["kind"] in ("StatefulSet", "Deployment", "DaemonSet", "Job"):
            yield document, document["spec"]["template"]

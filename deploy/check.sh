#!/usr/bin/env bash
# Checks deploy/ and docs/ with tools of others, which CTest does not have:
#
#   deploy/check.sh
#
# Makes an environment of deploy/requirements.txt (PyPI) in build/deploy-venv. Needs kubectl 1.21 or newer, and promtool and the
# program where they are: PROMTOOL=FILE, WINNOW_BIN=FILE. What could not be checked is said at the end, and the exit code is 3 then.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE=1

venv=${WINNOW_DEPLOY_VENV:-build/deploy-venv}
if [ ! -x "$venv/bin/mkdocs" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" -q install -r deploy/requirements.txt
fi
export WINNOW_BIN=${WINNOW_BIN:-$PWD/build/release/winnow}
promtool=${PROMTOOL:-$(command -v promtool || true)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
left_out=()
step() { printf '==> %s\n' "$*"; }

step "YAML"
"$venv/bin/yamllint" -s -d '{extends: default, rules: {line-length: disable, document-start: disable, braces: {max-spaces-inside: 1},
  brackets: {max-spaces-inside: 1}, truthy: {allowed-values: ["true", "false"]}, comments: {min-spaces-from-content: 1}, indentation: disable}}' deploy mkdocs.yml

step "Schemas: the oldest and the newest Kubernetes that is supported"
overlays=$(ls deploy/kubernetes/overlays)
for overlay in $overlays; do kubectl kustomize "deploy/kubernetes/overlays/$overlay" >"$work/$overlay.yaml"; done
"$venv/bin/python" - "$work" <<'PY'
import pathlib, sys
sys.path.insert(0, "tests/deploy")
import kubernetes_validate
import manifests
newest = kubernetes_validate.latest_version()
minor = int(newest.split(".")[1])
versions = [f"1.{minor - 2}", f"1.{minor}"]
count = custom = 0
for overlay in manifests.OVERLAYS:
    for document in manifests.overlay(overlay):
        if document["kind"] in manifests.CUSTOM:
            custom += 1
            continue
        for version in versions:
            kubernetes_validate.validate(document, version, strict=True)
            count += 1
assert count > 50
print(f"    {count} documents are valid for {' and '.join(versions)}; {custom} of custom kinds have no schema here")
PY
left_out+=("schemas of custom kinds (PodMonitor, PrometheusRule, InferencePool, HTTPRoute, LLMInferenceService)")

step "Checkov"
"$venv/bin/checkov" --framework kubernetes --skip-download --quiet --compact -o json -d "$work" >"$work/checkov.json" || true
"$venv/bin/checkov" --framework dockerfile --skip-download --quiet --compact -o json -f deploy/docker/Dockerfile deploy/docker/smg.Dockerfile >"$work/checkov-docker.json" || true
"$venv/bin/python" - "$work" <<'PY'
import json, pathlib, re, sys, yaml
meant = yaml.safe_load(pathlib.Path("deploy/checkov.yaml").read_text())
used, bad, passed = set(), [], 0
for name in ("checkov.json", "checkov-docker.json"):
    report = json.loads(pathlib.Path(sys.argv[1], name).read_text())
    for part in report if isinstance(report, list) else [report]:
        passed += part["summary"]["passed"]
        if part["summary"]["parsing_errors"]:
            sys.exit(f"{name}: parsing errors")
        for finding in part["results"]["failed_checks"]:
            which = [i for i, m in enumerate(meant) if m["check"] == finding["check_id"] and re.fullmatch(m["resources"], finding["resource"])]
            used.update(which)
            if not which:
                bad.append(f"{finding['check_id']} {finding['resource']} {finding['file_path']}: {finding['check_name']}")
unused = [m["check"] for i, m in enumerate(meant) if i not in used]
if bad or unused:
    sys.exit("\n".join(bad + [f"deploy/checkov.yaml: {check} finds nothing" for check in unused]))
assert passed > 300
print(f"    {passed} checks passed; what failed is meant (deploy/checkov.yaml has {len(meant)} reasons)")
PY

step "The project's own"
python=/usr/bin/python3
[ -x "$python" ] || python=python3
for test in manifests monitoring docs; do "$python" "tests/deploy/test_$test.py" 2>"$work/log" >"$work/out" || { cat "$work/log" >&2; exit 1; }; done
echo "    ports, probes, selectors, times, rights, options, metrics, links, commands"

step "Alerts"
if [ -n "$promtool" ]; then
  PROMTOOL=$promtool "$python" tests/deploy/test_alerts.py | sed 's/^/    /'
else
  left_out+=("alerts: promtool is not there (Debian's package prometheus, or PROMTOOL=FILE)")
fi

step "Seccomp profile of the overlay io-uring"
"$python" tests/deploy/test_seccomp.py | sed 's/^/    /'

step "The site"
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build -q --strict -d "$work/site"
if grep -rhoE '(src|href)="https?://[^"]+\.(js|css|woff2?|png|svg)"' "$work/site" --include=*.html | sort -u | grep .; then
  echo "check.sh: the site asks other hosts for the above" >&2
  exit 1
fi
echo "    $(find "$work/site" -name '*.html' | wc -l) pages, $(du -sh "$work/site" | cut -f1)"

printf 'Left out: %s\n' "${left_out[@]}"
if [ ${#left_out[@]} -gt 1 ]; then exit 3; fi

#!/usr/bin/env python3
"""Makes Grafana's dashboards and the PrometheusRule from panels.py and alerts.yaml:

    deploy/monitoring/generate.py            writes them
    deploy/monitoring/generate.py --check    exit code 1 and the names of those that are not current

Needs PyYAML (Debian's python3-yaml).
"""
import json
import math
import pathlib
import re
import sys

import yaml

import panels

HERE = pathlib.Path(__file__).resolve().parent
OVERLAY = HERE.parent / "kubernetes/overlays/monitoring"
SELECTION = 'job=~"$job",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def with_selection(query):
    """metric@{labels} or metric@labels[ as PromQL: the dashboard's selection, and what a query adds to it."""
    def replace(match):
        metric, labels = match.group(1), match.group(2) or ""
        return metric + "{" + SELECTION + ("," + labels if labels else "") + "}"
    return re.sub(r'([a-z_:][a-z0-9_:]*)@((?:[a-z_]+=~?"[^"]*",?)*)', replace, query)


def thresholds():
    """Sign and limit of each alert whose expression ends with a comparison to a number, or a product of numbers."""
    found = {}
    for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            end = re.search(r"([<>])=?\s*([0-9.]+(?:\s*\*\s*[0-9.]+)*)\s*$", rule["expr"])
            if end:
                found[rule["alert"]] = (end.group(1), math.prod(float(factor) for factor in end.group(2).split("*")))
    return found


def field_config(panel, limits):
    defaults = {"unit": panel.unit, "min": 0, "custom": {}}
    if panel.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 20 if panel.stack else 5, "showPoints": "never", "spanNulls": True}
        if panel.stack:
            defaults["custom"]["stacking"] = {"mode": "normal"}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    steps = [{"color": "green", "value": None}]
    if panel.limit:
        sign, limit = limits[panel.limit]
        steps = [{"color": "green", "value": None}, {"color": "red", "value": limit}]
        if sign == "<":
            steps = [{"color": "red", "value": None}, {"color": "green", "value": limit}]
        defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {"defaults": defaults, "overrides": []}


def panel_json(number, panel, x, y, limits):
    out = {"id": number, "type": panel.kind, "title": panel.title, "description": panel.description, "datasource": DATASOURCE,
           "gridPos": {"x": x, "y": y, "w": panel.width, "h": 8}, "fieldConfig": field_config(panel, limits),
           "targets": [{"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": with_selection(query), "legendFormat": legend,
                        "instant": panel.kind == "stat", "range": panel.kind != "stat"} for i, (legend, query) in enumerate(panel.queries)]}
    if panel.kind == "stat":
        out["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name", "colorMode": "value"}
    else:
        out["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return out


def variable(name, label, query):
    """No allValue: Grafana makes All of the values that the query finds. As .*, All replicas would be those of all models."""
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name}, "definition": query,
            "refresh": 2, "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}, "sort": 1}


def dashboard(uid, title, description, rows, limits):
    out, number, y = [], 0, 0
    for heading, row in rows.items():
        number += 1
        out.append({"id": number, "type": "row", "title": heading, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y, x = y + 1, 0
        for panel in row:
            if x + panel.width > 24:
                x, y = 0, y + 8
            number += 1
            out.append(panel_json(number, panel, x, y, limits))
            x += panel.width
        y += 8
    return {
        "uid": "winnow-" + uid, "title": title, "description": description, "tags": ["winnow"], "schemaVersion": 38, "version": 1, "editable": False,
        "graphTooltip": 1, "refresh": "30s", "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "links": [{"type": "dashboards", "title": "winnow", "tags": ["winnow"], "includeVars": True, "keepTime": True}],
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}, "refresh": 1},
            variable("job", "Job", "label_values(winnow_build_info, job)"),
            variable("model", "Model", 'label_values(winnow_build_info{job=~"$job"}, model)'),
            variable("instance", "Replica", 'label_values(winnow_build_info{job=~"$job",model=~"$model"}, instance)')]},
        "annotations": {"list": []}, "panels": out,
    }


def prometheus_rule():
    rules = yaml.safe_load((HERE / "alerts.yaml").read_text())
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
            "metadata": {"name": "winnow", "labels": {"app.kubernetes.io/name": "winnow"}}, "spec": rules}


def outputs():
    limits = thresholds()
    out = {}
    for name, (title, description, rows) in panels.DASHBOARDS.items():
        text = json.dumps(dashboard(name, title, description, rows, limits), indent=1) + "\n"
        out[HERE / "dashboards" / (name + ".json")] = text
        out[OVERLAY / "dashboards" / (name + ".json")] = text
    out[OVERLAY / "prometheusrule.yaml"] = (
        "# Made of deploy/monitoring/alerts.yaml by deploy/monitoring/generate.py.\n" +
        yaml.safe_dump(prometheus_rule(), sort_keys=False, width=1000))
    return out


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    stale = []
    for path, text in outputs().items():
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(str(path.relative_to(HERE.parents[1])))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        sys.exit("not current, run deploy/monitoring/generate.py: " + ", ".join(stale))


if __name__ == "__main__":
    main()

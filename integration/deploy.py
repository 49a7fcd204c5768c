#!/usr/bin/env python3
"""Checks the deployment templates in examples/deploy: the schemas of Kubernetes, and that they agree with rekindle.

    deploy.py        (with .deps/k8s/bin/python: scripts/deps.sh k8s)
"""

import json
import pathlib
import re
import sys
import tomllib

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "examples/deploy"
# The oldest that has what the manifest uses without a feature gate, and the newest there is a schema of.
VERSIONS = ["1.31", kubernetes_validate.latest_version()]


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)([smh])", text).groups()
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def exit_codes():
    """The codes that rekindle ends with by itself, from its source. That for a requeue is the scheduler's: 75 without one."""
    source = (ROOT / "src/cli/exit.rs").read_text()
    return {name: int(code) for name, code in re.findall(r"Exit::(\w+) => (\d+),", source)}


def essential_capabilities():
    source = (ROOT / "src/doctor/rights.rs").read_text()
    lists = re.findall(r"const (?:ESSENTIAL|USEFUL).*?=\s*\[(.*?)\];", source, re.S)
    assert len(lists) == 2
    return set(re.findall(r'"CAP_(\w+)"', "".join(lists)))


def exported_metrics():
    """The names that rekindle exports, from its source: a counter gets the suffix _total, a histogram three others."""
    names = set()
    for file in (ROOT / "src/telemetry").rglob("*.rs"):
        names.update(re.findall(r'"(rekindle_\w+)"', file.read_text()))
    return names


def check_dashboard():
    dashboard = json.loads((DEPLOY / "grafana/rekindle.json").read_text())
    exported = exported_metrics()
    assert len(exported) > 20, exported
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    assert len(expressions) > 10
    for name in {name for expression in expressions for name in re.findall(r"rekindle_\w+", expression)}:
        assert name in exported or re.sub(r"_(total|bucket|sum|count)$", "", name) in exported, f"no metric is named {name}"
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})


def main():
    check_dashboard()
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/job.yaml").read_text()))
    for document in documents:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    # The validator is worth something only if it refuses.
    broken = yaml.safe_load((DEPLOY / "kubernetes/job.yaml").read_text().split("---")[2])
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    try:
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)
        sys.exit("deploy: the validator takes what is wrong")
    except kubernetes_validate.ValidationError:
        pass

    configmap, claim, job = documents
    config = tomllib.loads(configmap["data"]["rekindle.toml"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > 2 * seconds(config["snapshot"]["grace"])
    assert pod["restartPolicy"] == "Never" and spec["parallelism"] == 1
    rules = {rule["action"]: rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    codes = exit_codes()
    assert rules["Ignore"] == [75, 128 + 15]
    again = ["Usage", "NoUsableImage", "Missing", "Config", "NotExecutable", "NotFound"]
    assert sorted(rules["FailJob"]) == sorted(codes[name] for name in again), (rules, codes)
    added = set(container["securityContext"]["capabilities"]["add"])
    assert added == essential_capabilities(), added ^ essential_capabilities()
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["store"] == config["store"]["directory"]
    assert mounts["configuration"] == "/etc/rekindle"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["store"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["configuration"]["configMap"]["name"] == configmap["metadata"]["name"]
    assert container["args"][:2] == ["run", "--"]

    # Each line of the Containerfile is an instruction that there is, and what it copies is there or made before.
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = "ARG FROM COPY RUN ENV VOLUME STOPSIGNAL ENTRYPOINT CMD".split()
    assert all(line.split()[0] in known for line in lines), lines
    assert lines[0].startswith("ARG BASE=") and lines[1] == "FROM ${BASE}"
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert all((ROOT / path).exists() or path.startswith("dist/") for path in copied), copied
    print(f"deploy: ok, by the schemas of {' and '.join(VERSIONS)}")
    if len(sys.argv) > 1:
        # For rekindle itself to judge.
        pathlib.Path(sys.argv[1]).write_text(configmap["data"]["rekindle.toml"])


main()

#!/usr/bin/env python3
"""Checks the deployment templates in examples/deploy: the schemas of Kubernetes, and that they agree with rekindle.

    deploy.py [--helm FILE] [--out FOLDER]     (with .deps/k8s/bin/python: scripts/deps.sh k8s)

With --helm the chart is rendered, too. --out gets every configuration of rekindle in them.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "examples/deploy"
# The oldest that has what the manifest uses without a feature gate, and the newest there is a schema of.
VERSIONS = ["1.31", kubernetes_validate.latest_version()]


options = argparse.ArgumentParser()
options.add_argument("--helm")
options.add_argument("--out", type=pathlib.Path)
HELM, FOLDER = vars(options.parse_args()).values()


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


def valid(documents):
    for document in documents:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def check_job(documents):
    """A job and its configuration agree with each other and with rekindle; returns the configuration's text."""
    by_kind = {document["kind"]: document for document in documents}
    job, configmap, claim = by_kind["Job"], by_kind["ConfigMap"], by_kind.get("PersistentVolumeClaim")
    text = configmap["data"]["rekindle.toml"]
    config = tomllib.loads(text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > 2 * seconds(config["snapshot"]["grace"])
    members = config.get("group", {}).get("nodes", 1)
    assert spec["completions"] == spec["parallelism"] == members and (members == 1 or spec["completionMode"] == "Indexed")
    assert pod["restartPolicy"] == "Never" and spec["podReplacementPolicy"] == "Failed"
    assert pod["automountServiceAccountToken"] is False
    rules = {rule["action"]: rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert all(rule["containerName"] == container["name"] for rule in rules.values())
    codes = exit_codes()
    assert rules["Ignore"]["values"] == [75, 128 + 15]
    # Not "Missing": another supervisor may be gone when the next pod comes, and a replica may answer again.
    again = ["Usage", "NoUsableImage", "Config", "NotExecutable", "NotFound"]
    assert sorted(rules["FailJob"]["values"]) == sorted(codes[name] for name in again), (rules, codes)
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    added = set(container["securityContext"]["capabilities"]["add"])
    assert added == essential_capabilities(), added ^ essential_capabilities()
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["store"] == config["store"]["directory"]
    # A file, not a folder: that of a ConfigMap has mode 0777, which root refuses.
    files = [mount["subPath"] for mount in container["volumeMounts"] if mount["name"] == "configuration"]
    assert mounts["configuration"] == "/etc/rekindle/rekindle.toml" and files == ["rekindle.toml"]
    assert "/run/rekindle" not in mounts.values()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == mounts.keys()
    # NCCL uses it instead of what rekindle turns off, and by default it has 64 MiB.
    assert mounts["shm"] == "/dev/shm" and volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    check_ownership(pod, container)
    if claim:
        assert volumes["store"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["configuration"]["configMap"]["name"] == configmap["metadata"]["name"]
    words = ["run", "--"] if members == 1 else ["run", "--group", "--"]
    assert container["args"][: len(words)] == words and len(container["args"]) > len(words)
    if members > 1:
        check_group(by_kind, config)
    return text


def check_ownership(pod, container):
    """Before rekindle starts, the root of the volume belongs to root alone: many provisioners create it with mode 0777, which
    rekindle refuses. The command is run here, on a folder."""
    (first,) = pod["initContainers"]
    assert first["image"] == container["image"] and first["volumeMounts"] == [{"name": "store", "mountPath": "/store"}]
    assert first["securityContext"]["runAsUser"] == 0 and first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    if os.geteuid() != 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        os.chown(folder, 65534, 65534)
        # Root with no capability but CHOWN, as in the pod.
        few = ["setpriv", "--bounding-set", "-all,+chown", "--inh-caps", "-all", "--"]
        subprocess.run([*few, *(word.replace("/store", folder) for word in first["command"])], check=True, timeout=60)
        now = os.stat(folder)
        assert (now.st_uid, now.st_gid, now.st_mode & 0o7777) == (0, 0, 0o700), now


def check_group(by_kind, config):
    """Only pods of the job reach the port of its network, and the store is one for all."""
    policy, labels = by_kind["NetworkPolicy"]["spec"], by_kind["Job"]["spec"]["template"]["metadata"]["labels"]
    ((rule,), to) = policy["ingress"], policy["podSelector"]["matchLabels"]
    assert to == labels and rule["from"] == [{"podSelector": {"matchLabels": labels}}]
    assert rule["ports"] == [{"protocol": "UDP", "port": config["group"].get("port", 4789)}]
    assert by_kind["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


REQUIRED = {"image": {"repository": "registry/train"}, "command": ["python3", "/job/train.py", "--name", 'a "b" c: d']}
# Values for the chart, and what must then be true of the documents by their kind.
CHART = {
    "only what is required": ({}, lambda kinds: kinds["PersistentVolumeClaim"]["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"),
    "eight GPUs": ({"gpus": 8}, lambda kinds: container_of(kinds)["resources"]["limits"]["nvidia.com/gpu"] == "8"),
    "no GPU": ({"gpus": 0}, lambda kinds: list(container_of(kinds)["resources"]["limits"]) == ["memory"]),
    "a claim that exists": (
        {"store": {"existingClaim": "mine"}},
        lambda kinds: "PersistentVolumeClaim" not in kinds and volume_of(kinds)["persistentVolumeClaim"]["claimName"] == "mine",
    ),
    "a folder of the node": (
        {"store": {"hostPath": "/srv/images"}, "nodeSelector": {"kubernetes.io/hostname": "node7"}},
        lambda kinds: "PersistentVolumeClaim" not in kinds and volume_of(kinds)["hostPath"] == {"path": "/srv/images", "type": "Directory"},
    ),
    "a replica": (
        {"replica": {"url": "s3://bucket/jobs", "credentialsSecret": "s3"}},
        lambda kinds: container_of(kinds)["envFrom"] == [{"secretRef": {"name": "s3"}}] and config_of(kinds)["replica"]["url"] == "s3://bucket/jobs",
    ),
    "everything else": (
        {
            "user": "alice",
            "interval": "auto",
            "graceSeconds": 120,
            "image": {"pullSecrets": [{"name": "registry"}]},
            "store": {"keep": False, "storageClass": "fast", "accessMode": "ReadWriteMany", "size": "2Ti", "keepLast": 5},
            "extraConfig": "[watch]\nno-output-for = \"20m\"\naction = \"restart\"\n",
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/job/out"}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "low",
        },
        lambda kinds: config_of(kinds)["watch"]["action"] == "restart" and "annotations" not in kinds["PersistentVolumeClaim"]["metadata"],
    ),
}
# Values that the chart refuses, and words of the reason.
REFUSED = [
    ({"command": []}, "/command"),
    ({"image": {"repository": ""}}, "/image/repository"),
    ({"gpu": 1}, "'gpu'"),
    ({"gpus": -1}, "/gpus"),
    ({"interval": "soon"}, "/interval"),
    ({"graceSeconds": 300}, "more than twice graceSeconds"),
    ({"store": {"existingClaim": "a", "hostPath": "/b"}}, "exclude each other"),
    ({"replica": {"credentialsSecret": "s3"}}, "needs replica.url"),
]


def container_of(kinds):
    return kinds["Job"]["spec"]["template"]["spec"]["containers"][0]


def volume_of(kinds):
    return next(volume for volume in kinds["Job"]["spec"]["template"]["spec"]["volumes"] if volume["name"] == "store")


def config_of(kinds):
    return tomllib.loads(kinds["ConfigMap"]["data"]["rekindle.toml"])


def merged(first, second):
    return {**first, **{name: merged(first[name], value) if isinstance(first.get(name), dict) else value for name, value in second.items()}}


def helm(command, values):
    chart = [command, *(["train"] if command != "lint" else []), str(DEPLOY / "helm/rekindle-job")]
    dry = ["--dry-run=client"] if command == "install" else []
    return subprocess.run([HELM, *chart, *dry, "--values", "-"], input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False)


def check_chart():
    """Renders the chart with the real helm; returns the configurations of all renderings."""
    configurations = []
    for name, (values, holds) in CHART.items():
        values = merged(REQUIRED, values)
        for command in ("lint", "template"):
            done = helm(command, values)
            assert done.returncode == 0, f"helm {command}, {name}: {done.stdout}{done.stderr}"
        documents = [document for document in yaml.safe_load_all(done.stdout) if document]
        valid(documents)
        configurations.append(check_job(documents))
        kinds = {document["kind"]: document for document in documents}
        assert container_of(kinds)["args"] == ["run", "--", *REQUIRED["command"]], name
        assert holds(kinds), f"{name}: {done.stdout}"
    for values, words in REFUSED:
        done = helm("template", merged(REQUIRED, values))
        assert done.returncode != 0 and words in done.stderr, f"{values}: {done.stderr}"
    # Its values.yaml names each value that the schema has, and no other: a user reads only that file.
    schema = json.loads((DEPLOY / "helm/rekindle-job/values.schema.json").read_text())["properties"]
    written = yaml.safe_load((DEPLOY / "helm/rekindle-job/values.yaml").read_text())
    assert schema.keys() - {"global"} == written.keys()
    for name in (name for name, value in schema.items() if "properties" in value):
        assert schema[name]["properties"].keys() == written[name].keys(), name
    return configurations


def main():
    check_dashboard()
    text = (DEPLOY / "kubernetes/job.yaml").read_text()
    documents = list(yaml.safe_load_all(text))
    valid(documents)
    # The validator is worth something only if it refuses.
    broken = yaml.safe_load(text.split("---")[2])
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    try:
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)
        sys.exit("deploy: the validator takes what is wrong")
    except kubernetes_validate.ValidationError:
        pass
    group = list(yaml.safe_load_all((DEPLOY / "kubernetes/group.yaml").read_text()))
    valid(group)
    configurations = [check_job(documents), check_job(group)]
    if HELM:
        configurations += check_chart()

    # Each line of the Containerfile is an instruction that there is, and what it copies is there or made before.
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = "ARG FROM COPY RUN ENV VOLUME STOPSIGNAL ENTRYPOINT CMD".split()
    assert all(line.split()[0] in known for line in lines), lines
    assert lines[0].startswith("ARG BASE=") and lines[1] == "FROM ${BASE}"
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert all((ROOT / path).exists() or path.startswith("dist/") for path in copied), copied
    chart = f", and the chart with {len(CHART)} sets of values" if HELM else ""
    print(f"deploy: ok, by the schemas of {' and '.join(VERSIONS)}{chart}")
    if FOLDER:
        # For rekindle itself to judge.
        FOLDER.mkdir(exist_ok=True)
        for number, configuration in enumerate(configurations):
            (FOLDER / f"{number}.toml").write_text(configuration)


main()

"""The manifests for Kubernetes: valid in every version, safe in every setting, and their command is the command."""

from __future__ import annotations

import os
import subprocess

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from pgreaper.cli import main
from pgreaper.deploy import yaml_word
from tests.deploy.conftest import HOSTILE, PROGRAM, container, drawn, expanded

VERSIONS = ["1.25", "1.28", "1.31", "1.34", "1.37"]
SECRET = {"secretKeyRef": {"name": "shop-db", "key": "url"}}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid(printed, version):
    """Strictly: a field that Kubernetes does not know is refused."""
    manifests = printed("k8s", "--namespace=shop", "--name=no", "--handler=shop.x:release", "--", *HOSTILE)
    assert list(manifests) == ["cronjob.yaml", "deployment.yaml"]
    for manifest in manifests.values():
        kubernetes_validate.validate(yaml.safe_load(manifest), version, strict=True)


def test_the_validator_minds(printed):
    """A field that is misspelt does not pass it: the test above can fail."""
    document = yaml.safe_load(printed("k8s")["cronjob.yaml"].replace("backoffLimit", "backofLimit"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


def test_what_is_printed_is_what_kubectl_reads(capsys):
    """Both documents in one stream; with --kind the one."""
    assert main(["deploy", "print", "k8s"]) == 0
    assert [d["kind"] for d in yaml.safe_load_all(capsys.readouterr().out)] == ["CronJob", "Deployment"]
    for kind in ("cronjob", "deployment"):
        assert main(["deploy", "print", "k8s", "--kind", kind]) == 0
        assert [d["kind"].lower() for d in yaml.safe_load_all(capsys.readouterr().out)] == [kind]


def test_hostile_words_arrive_unchanged(printed):
    """Through YAML and through Kubernetes' own $(…): the program is given the very names."""
    names = ["plain", *HOSTILE, *drawn(200)]
    for manifest in printed("k8s", "--", *names).values():
        command = container(manifest)["command"]
        assert isinstance(command, list)
        words = [expanded(word) for word in command]
        assert words[:2] == ["pgreaper", "work"]
        assert words[words.index("--") + 1 :] == names


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_every_text_is_read_back_from_yaml(text):
    assert yaml.safe_load(f"a: {yaml_word(text)}\nb:\n  - {yaml_word(text)}") == {"a": text, "b": [text]}


def test_the_words_stand_where_they_belong(printed):
    """Names, image, secret, schedule: also those that YAML would read as something else."""
    manifests = printed(
        "k8s", "--name=y", "--namespace=null", "--image=registry.local:5000/shop/reaper@sha256:00", "--secret=shop-db",
        "--secret-key=url", "--schedule=*/5  8-18 * * mon-fri",
    )  # fmt: skip
    for text in manifests.values():
        document = yaml.safe_load(text)
        assert (document["metadata"]["name"], document["metadata"]["namespace"]) == ("y", "null")
        only = container(text)
        assert only["image"] == "registry.local:5000/shop/reaper@sha256:00"
        assert only["env"] == [{"name": "PGREAPER_DATABASE_URL", "valueFrom": SECRET}]
    assert yaml.safe_load(manifests["cronjob.yaml"])["spec"]["schedule"] == "*/5 8-18 * * mon-fri"


def test_c081_a_schedule_does_not_stop(printed):
    """At most a hundred starts fit into startingDeadlineSeconds, or Kubernetes gives the CronJob up."""
    spec = yaml.safe_load(printed("k8s")["cronjob.yaml"])["spec"]
    assert 10 <= spec["startingDeadlineSeconds"] < 100 * 60
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize(("run", "stop"), [("50", "20"), ("0.5", "0.5"), ("3600", "300")])
def test_the_deadlines_fit_each_other(printed, run, stop):
    """The scheduler gives up after --max-seconds, and kills after --shutdown-timeout: never before."""
    manifests = printed("k8s", f"--max-seconds={run}", f"--shutdown-timeout={stop}")
    job = yaml.safe_load(manifests["cronjob.yaml"])["spec"]["jobTemplate"]["spec"]
    daemon = yaml.safe_load(manifests["deployment.yaml"])["spec"]
    assert job["activeDeadlineSeconds"] > float(run) + 60
    for pod in (job["template"]["spec"], daemon["template"]["spec"]):
        assert pod["terminationGracePeriodSeconds"] > float(stop) + 5
        assert f"--shutdown-timeout={stop}" in pod["containers"][0]["command"]
    assert f"--max-seconds={run}" in job["template"]["spec"]["containers"][0]["command"]


def test_the_pods_have_no_power(printed):
    """Nobody, on a file system that cannot be written, without capabilities or a token, within limits."""
    for text in printed("k8s").values():
        document = yaml.safe_load(text)
        outer = document["spec"].get("jobTemplate", document)["spec"]
        pod, only = outer["template"]["spec"], container(text)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        resources = only["resources"]
        assert isinstance(resources, dict)
        assert resources["requests"].keys() == {"cpu", "memory"}
        assert "memory" in resources["limits"]


def test_no_probe_asks_the_database(printed):
    """Liveness reads the heartbeat that the daemon writes, in a volume that can be written; readiness has no say."""
    only = container(printed("k8s")["deployment.yaml"])
    assert "readinessProbe" not in only
    probe, mounts, command = only["livenessProbe"], only["volumeMounts"], only["command"]
    assert isinstance(probe, dict)
    assert isinstance(mounts, list)
    assert isinstance(command, list)
    program, *arguments, file = probe["exec"]["command"]
    assert (program, arguments) == ("pgreaper", ["heartbeat"])
    assert f"--heartbeat={file}" in command
    assert [os.path.dirname(file)] == [mount["mountPath"] for mount in mounts]  # noqa: PTH120


def test_the_selector_does_not_take_the_runs(printed):
    """The Deployment's selector fits its own pods and not the CronJob's, and both know their instance."""
    manifests = {name: yaml.safe_load(text)["spec"] for name, text in printed("k8s", "--name=shop").items()}
    wanted = manifests["deployment.yaml"]["selector"]["matchLabels"].items()
    assert wanted <= manifests["deployment.yaml"]["template"]["metadata"]["labels"].items()
    runs = manifests["cronjob.yaml"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    assert not wanted <= runs.items()
    assert runs["app.kubernetes.io/instance"] == "shop"


def test_the_command_of_the_cronjob_works(printed, dsn, holds):
    """The very words, with the variable that the secret fills."""
    holds.due(3)
    name = '100% $(HOME) of "it\'s"'
    holds.register(name)
    only = container(printed("k8s", name)["cronjob.yaml"])
    command, env = only["command"], only["env"]
    assert isinstance(command, list)
    assert isinstance(env, list)
    words = [expanded(word) for word in command]
    done = subprocess.run(
        words, env={"PATH": str(PROGRAM.parent), env[0]["name"]: dsn}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(holds.states().values()) == {"expired"}


REFUSED = [
    (["--name=Shop"], "Shop is not a name of at most 52"),
    (["--name=a\nb: c"], r"a\nb: c is not a name"),
    (["--name=" + "x" * 53], f"{'x' * 53} is not a name"),
    (["--namespace=-"], "- is not the name of a namespace"),
    (["--image=a b"], "a b is not the name of an image"),
    (["--image=a\n  x: y"], "is not the name of an image"),
    (["--secret=a_b"], "a_b is not the name of a secret"),
    (["--secret-key='"], "' is not a key of a secret"),
    (["--handler=shop"], "shop is not written as MODULE:FUNCTION"),
    (["--concurrency=2"], "--concurrency is for a --handler"),
    (["--schedule=minutely"], "minutely is not a schedule: it has 1 fields"),
    (["--schedule=* * * * 7"], "Kubernetes has no weekday 7"),
    (["--schedule=10 seconds"], "10 seconds is a schedule that only pg_cron knows"),
    (["--schedule=@reboot"], "@reboot is a schedule that only pg_cron knows"),
    (["--max-seconds=0"], "0 is not a number of seconds above 0"),
    (["--kind=pod"], "'pod' is not one of"),
    (["\udcff"], r"\udcff is not text in UTF-8"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=[a[0].split("=")[0] + str(i) for i, (a, _) in enumerate(REFUSED)]
)
def test_refused(capsys, arguments, message):
    assert main(["deploy", "print", "k8s", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[0]

"""The container file and the examples for Kubernetes and Ray fit the repository, the command and the application."""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from bertsmith.serve.settings import DRAIN_SECONDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file, with what follows them."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def last(name: str) -> str:
    return [rest for instruction, rest in instructions() if instruction == name][-1]


def kubernetes() -> dict[str, dict]:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.fixture
def options(run_command, monkeypatch):
    """Run `bertsmith serve` with arguments as far as its options are known; return them by their names."""
    seen: dict[str, object] = {}

    def run(models, host, port, workers, **options) -> None:
        seen.update(options, models=models, host=host, port=port, workers=workers)

    monkeypatch.setattr("bertsmith.serve.run.run", run)

    def parsed(arguments: list[str]) -> dict[str, object]:
        code, _, err = run_command(*arguments)
        assert code == 0, err
        return seen

    return parsed


def test_container_copies_files_that_exist_and_are_not_ignored() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignored[0] == "*"
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [
        rest.split()[:-1] for instruction, rest in instructions() if instruction == "COPY" and "--from" not in rest
    ]
    sources = [source for each in copied for source in each]
    assert {"pyproject.toml", "constraints.txt", "bertsmith"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in kept), source
    assert set(kept) == set(sources)  # nothing else goes to the builder
    named = {PROJECT["readme"], *PROJECT["license-files"]}  # the build of the package needs them
    assert named <= set(sources)


def test_container_installs_extras_that_exist_with_the_pins() -> None:
    extras = dict(rest.split("=", 1) for instruction, rest in instructions() if instruction == "ARG")["EXTRAS"]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    installs = [rest for instruction, rest in instructions() if instruction == "RUN" and "pip install" in rest]
    assert all("--constraint constraints.txt" in line for line in installs)
    version = re.fullmatch(r"python:(3\.\d+)-slim", last("FROM"))
    assert version
    assert tuple(map(int, version[1].split("."))) >= (3, 11)


def test_container_runs_a_command_that_is_accepted_without_root(options) -> None:
    command, *rest = json.loads(last("ENTRYPOINT"))
    assert command in PROJECT["scripts"]
    found = options([*rest, *json.loads(last("CMD"))])
    assert (found["host"], found["port"], found["models"]) == ("0.0.0.0", int(last("EXPOSE")), ["/model"])
    assert int(last("USER")) > 0
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    example = re.search(r"bertsmith (/model --api-key-file \S+)$", text, re.M)
    assert options([*rest, *shlex.split(example[1])])["api_key_file"] == "/run/secrets/keys"


def test_health_check_of_the_container_asks_the_server(client) -> None:
    """The script of HEALTHCHECK fails where the server does not answer."""
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[2])
    assert int(url[1]) == int(last("EXPOSE"))
    assert client.get(url[2]).status_code == 200
    with pytest.raises(OSError, match="refused"):
        exec(command[2].replace(url[1], "9"))


def test_kubernetes_fits_the_server(client) -> None:
    found = kubernetes()
    assert set(found) == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    pod = found["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == int(last("EXPOSE"))
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    for probe in probes.values():
        assert client.get(probe["path"]).status_code == 200  # without a key
        assert probe["port"] == port["name"] == found["Service"]["spec"]["ports"][0]["targetPort"]


def test_kubernetes_runs_a_command_that_is_accepted_and_has_time_to_drain(options) -> None:
    spec = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    parsed = options([*json.loads(last("ENTRYPOINT"))[1:], *container["args"]])
    assert parsed["threads"] == int(container["resources"]["limits"]["cpu"])
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert parsed["models"] == ["/model"]
    assert mounts["/model"]["readOnly"]
    assert str(Path(parsed["api_key_file"]).parent) in mounts
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    assert "secret" in volumes[mounts[str(Path(parsed["api_key_file"]).parent)]["name"]]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= pause + DRAIN_SECONDS + 5
    assert spec["securityContext"]["runAsUser"] == int(last("USER"))


def test_ray_example_is_valid_for_ray_and_for_the_builder() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    from bertsmith.serve.ray import Arguments, bounds

    text = (ROOT / "deploy" / "ray.yaml").read_text(encoding="utf-8")
    (application,) = schema.ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "bertsmith.serve.ray:app"
    assert bounds(Arguments.model_validate(application.args).replicas) == (1, 4)
    unquoted = yaml.safe_load(text.replace('"1:4"', "1:4"))["applications"][0]["args"]
    with pytest.raises(ValueError, match="in quotes"):
        Arguments.model_validate(unquoted)

"""Settings: what Kubernetes would refuse is refused here, with the key and what was expected."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext, quantity
from recmill.stages.deploy.settings import DeployConfig, DeployError, defaults, number_of

DOCS = Path(__file__).parent.parent.parent / "docs"


def problem(*pairs: str) -> str:
    with pytest.raises(DeployError) as refused:
        DeployConfig.of(pairs)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_without_pairs_everything_is_at_its_default() -> None:
    assert DeployConfig.of([]) == DeployConfig()


def test_values_are_read_as_the_type_of_their_key() -> None:
    pairs = [
        "serve.replicas=3",
        "serve.cpus=2",
        "ray.version=2.60.1",
        "rate=12",
        "serve.split=true",
        "name=a1",
    ]
    settings = DeployConfig.of(pairs)
    assert settings.serve.replicas == 3
    assert settings.serve.cpus == "2"
    assert settings.ray.version == "2.60.1"
    assert settings.rate == 12.0
    assert settings.serve.split is True
    assert settings.name == "a1"


def test_of_two_values_for_one_key_the_last_holds() -> None:
    assert DeployConfig.of(["namespace=a", "namespace=b"]).namespace == "b"


def test_a_value_may_hold_equals_signs() -> None:
    assert DeployConfig.of(["gate=auc>=0.7, ne<=live"]).gate == "auc>=0.7, ne<=live"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("serve.replica=2", 'serve.replica is not a known key; did you mean "replicas"?'),
        ("namespce=x", 'namespce is not a known key; did you mean "namespace"?'),
        ("serve=3", 'serve must be a table, got "3"'),
        ("serve.replicas.most=3", "serve.replicas must be a positive integer, got { most = ... }"),
        ("serve.replicas=-1", "serve.replicas must be a positive integer, got -1"),
        ("serve.replicas=0", "serve.replicas must be a positive integer, got 0"),
        ("serve.replicas=two", 'serve.replicas must be a positive integer, got "two"'),
        ("serve.replicas=", 'serve.replicas must be a positive integer, got ""'),
        ("serve.split=yes", 'serve.split must be true or false, got "yes"'),
        ("user=0", "user must be a number from 1 to 4294967294; 0 is root, got 0"),
        ("group=0", "group must be a number from 1 to 4294967294; 0 is root, got 0"),
        ("image.train=recmill-train", "image.train must be an image with its tag"),
        ("image.serve=Recmill:1", "image.serve must be an image with its tag"),
        ("image.pull_policy=always", 'image.pull_policy must be one of Always, IfNotPresent, Never, got "always"'),
        ("storage.class_name=", "storage.class_name must be the name of a storage class; leave it out for"),
        ("storage.kind=local", 'storage.kind must be one of pvc, nfs, hostpath, got "local"'),
        ("storage.size=10GB", 'storage.size must be a quantity of bytes, such as 2Gi or 512Mi, got "10GB"'),
        ("storage.size=0Gi", "storage.size must be a quantity of bytes"),
        ("train.memory=500m", "train.memory must be a quantity of bytes"),
        ("train.cpus=2Gi", "train.cpus must be a number of cores"),
        ("storage.nfs.path=exports", "storage.nfs.path must be an absolute path"),
        ("data.path=../other", "data.path must be a path inside the volume"),
        ("data.path=/logs", "data.path must be a path inside the volume"),
        ("publish.url=http://models/shop", "publish.url must be a URL such as s3://models/shop/bundle"),
        ("gate=auc>0.7", 'gate must be conditions such as "auc>=0.80,ne<=live", got "auc>0.7"'),
        ("retry_limit=-1", "retry_limit must be a whole number from 0, got -1"),
        ("serve.node_port=8080", "serve.node_port must be a port from 30000 to 32767, got 8080"),
        ("serve.ingress.host=my_host", "serve.ingress.host must be a host name"),
        ("serve.token_secret=My_Secret", "serve.token_secret must be the name of a Kubernetes object"),
        ("replicas", 'replicas: expected key=value, for example --set "namespace=shop"'),
        ("=3", "=3: expected key=value"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_key_and_what_was_expected(pair: str, message: str) -> None:
    assert f"--set: {message}" in problem(pair)


@pytest.mark.parametrize(
    "template", ["{{workflow.name}}", "$(TOKEN)", "${TOKEN}", "a}}", "a\nb", "a\x00", "a\x85"]
)
@pytest.mark.parametrize("key", defaults())
def test_no_setting_takes_a_template_or_a_control_character(key: str, template: str) -> None:
    default = defaults()[key]
    value = f"{'' if default is None else default}{template}"
    assert f"--set: {key} must not hold " in problem(f"{key}={value}")


def test_white_space_around_a_gate_is_no_line_end() -> None:
    assert "gate must not hold" in problem("gate=auc>=0.8,\nne<=live")


@pytest.mark.parametrize("path", ["logs/$x", "logs/`id`", "logs/{x}", "logs/a;b", "logs/*", "logs/a&b"])
def test_paths_hold_nothing_that_a_shell_would_read(path: str) -> None:
    assert "data.path must be a path inside the volume" in problem(f"data.path={path}")
    assert "storage.nfs.path must be an absolute path" in problem(f"storage.nfs.path=/{path}")


@pytest.mark.parametrize("name", ["My-App", "my_app", "1app", "-app", "app-", "a" * 41, "a.b", ""])
def test_a_name_that_kubernetes_would_refuse_is_refused(name: str) -> None:
    assert "name must be lower-case letters, digits and -" in problem(f"name={name}")


@pytest.mark.parametrize("namespace", ["Team", "a" * 64, "team_a", ""])
def test_a_namespace_that_kubernetes_would_refuse_is_refused(namespace: str) -> None:
    assert "namespace must be" in problem(f"namespace={namespace}")


@pytest.mark.parametrize(
    "schedule",
    [
        "0 25 * * *", "60 * * * *", "* * * *", "* * * * * *", "0 3 * * 7", "0 3 0 * *",
        "*/0 * * * *", "5-1 * * * *", "@daily", "a * * * *",
    ],
)  # fmt: skip
def test_a_schedule_that_cron_would_refuse_is_refused(schedule: str) -> None:
    assert "schedule must be five fields of cron" in problem(f"schedule={schedule}")


@pytest.mark.parametrize(
    "schedule", ["*/15 * * * *", "0 3 * * MON-FRI", "0,30 0-6/2 1 jan 0", "59 23 31 12 6"]
)
def test_a_right_schedule_is_taken(schedule: str) -> None:
    assert DeployConfig.of([f"schedule={schedule}"]).schedule == schedule


@pytest.mark.parametrize(
    "image",
    ["a:1", "registry.example.com:5000/team/a:v1.0_x", "a@sha256:" + "0" * 64, "ghcr.io/a/b:1@sha256:" + "f" * 64],
)  # fmt: skip
def test_images_with_a_tag_or_a_digest_are_taken(image: str) -> None:
    assert DeployConfig.of([f"image.train={image}"]).image.train == image


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["storage.kind=nfs"], "storage.nfs.server is missing"),
        (
            ["storage.kind=nfs", "storage.nfs.server=10.0.0.5", "storage.class_name=fast"],
            "storage.class_name is for storage.kind=pvc",
        ),
        (["publish.secret=s3"], "publish.url, which is missing"),
        (["storage.kind=hostpath", "storage.class_name=fast"], "volumes of hostpath have none"),
        (
            ["serve.replicas=4", "serve.max_replicas=2"],
            "serve.max_replicas must be at least serve.replicas (4)",
        ),
        (["serve.hpa.target=150"], "serve.hpa.target must be a percentage up to 100"),
        (["storage.access=ReadWriteOnce", "serve.replicas=2"], "serve.replicas must then be 1, got 2"),
    ],
)
def test_values_that_contradict_each_other_are_refused(pairs: list[str], message: str) -> None:
    assert message in problem(*pairs)


def test_all_problems_are_told_at_once_and_survive_pickling() -> None:
    with pytest.raises(DeployError) as refused:
        DeployConfig.of(["user=0", "serve.replicas=-1", "what"])
    assert len(refused.value.problems) == 3
    assert pickle.loads(pickle.dumps(refused.value)).problems == refused.value.problems


def test_a_recipe_whose_name_kubernetes_would_refuse_needs_another(quickstart: Recipe) -> None:
    with pytest.raises(
        DeployError, match=r'"My_Shop 2", is none for Kubernetes. Add one, such as --set name=my-shop-2'
    ):
        DeployContext.of(replace(quickstart, name="My_Shop 2"), DeployConfig())
    assert (
        DeployContext.of(replace(quickstart, name="My_Shop 2"), DeployConfig.of(["name=shop"])).name == "shop"
    )


def test_memory_of_prepare_must_hold_its_fixed_part_and_its_least_bound(quickstart: Recipe) -> None:
    with pytest.raises(
        DeployError, match=r"prepare\.memory must be at least \d+Mi for this recipe, got 300Mi"
    ):
        DeployContext.of(quickstart, DeployConfig.of(["prepare.memory=300Mi"]))
    assert DeployContext.of(quickstart, DeployConfig.of(["prepare.memory=1Gi"])).prepare_bound == "723MB"


def test_quantities_are_numbers() -> None:
    assert [number_of(text) for text in ("500m", "2", "1k", "1Ki", "1.5Gi")] == [
        0.5,
        2,
        1000,
        1024,
        1.5 * 2**30,
    ]
    assert [quantity(number) for number in (1, 2**20, 2**20 + 1, 3 * 2**30)] == ["1Mi", "1Mi", "2Mi", "3Gi"]


def test_every_setting_stands_in_the_documentation() -> None:
    page = (DOCS / "deploy.md").read_text(encoding="utf-8")
    table = page.partition("## Settings")[2]
    documented = set(re.findall(r"^\| `([a-z_.]+)` \|", table, re.MULTILINE))
    assert documented == set(defaults())

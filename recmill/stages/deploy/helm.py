"""helm: the same objects as target `serve`, as a chart whose values are the settings of `recmill deploy` for serving.

The objects are built by `serving`, with placeholders where a setting would stand; placeholders become expressions.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recmill import __version__
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.parts import (
    HTTP_PORT,
    Files,
    Object,
    Site,
    container,
    pod_spec,
    quantity,
    resources,
)
from recmill.stages.deploy.serve import ALWAYS, GROUPS, check, misfit, runs_claim
from recmill.stages.deploy.serving import (
    CPU_PERCENT,
    SERVE,
    ServeParts,
    Serving,
    max_servers,
    rate_of_a_server,
    redis_disk_bytes,
    startup_seconds,
)
from recmill.stages.deploy.settings import FOLDER, MAX_NAME, DeployConfig
from recmill.stages.deploy.yaml import dumps

CHART = "recmill"
_DASHBOARD = "files/dashboard.json"
_CONDITIONS = {
    "split": ".Values.serve.split",
    "redis": ".Values.redis.enabled",
    "monitoring": ".Values.monitoring.enabled",
    "ingress": ".Values.serve.ingress.host",
    "ingress_class": ".Values.serve.ingress.class_name",
    "nodeport": ".Values.serve.node_port",
    "tokens": "(or .Values.serve.token_secret .Values.serve.ingress.host .Values.serve.node_port)",
    "tls": ".Values.serve.tls_secret",
    "rate": '(eq .Values.serve.hpa.metric "rate")',
    "pull_secret": ".Values.image.pull_secret",
    "storage_class": ".Values.storage.class_name",
    "pvc": '(eq .Values.storage.kind "pvc")',
    "nfs": '(eq .Values.storage.kind "nfs")',
}
_NAME = 'include "recmill.name" .'
_TEST_SCRIPT = """\
import ssl, sys, urllib.request
trusting = ssl._create_unverified_context() if sys.argv[1].startswith("https") else None
for path in ("/health/ready", "/openapi.json"):
    print(path, urllib.request.urlopen(sys.argv[1] + path, timeout=10, context=trusting).status)
"""


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """The chart; its values are what the settings say, and what `recmill size` says for the recipe."""
    site = Site.of(recipe, settings)
    check(site)
    chart = _Chart(site)
    files = {
        "Chart.yaml": dumps([_about()]),
        "values.yaml": _VALUES_HEAD + dumps([values(site)]),
        "values.schema.json": json.dumps(schema(recipe), indent=2) + "\n",
        ".helmignore": "*.tgz\n",
        _DASHBOARD: chart.concrete.dashboard,
        "templates/_helpers.tpl": _HELPERS,
        "templates/NOTES.txt": _NOTES,
        **chart.templates(),
    }
    return {f"{CHART}/{name}": text for name, text in files.items()}


def _about() -> Object:
    return {
        "apiVersion": "v2",
        "name": CHART,
        "description": "Servers of a recmill bundle, with scaling, Redis, monitoring and ingress by choice.",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }


# values


def values(site: Site) -> Object:
    """Values by the names that `recmill deploy --set` knows; an empty text or 0 stands for "not set"."""
    asked, sizing = site.settings, site.sizing
    serve, storage, limits = asked.serve, asked.storage, resources(sizing.serve)["limits"]
    return {
        "name": asked.name or "",
        "user": asked.user,
        "group": asked.group,
        "image": {
            "serve": asked.image.serve,
            "redis": asked.image.redis,
            "pull_policy": asked.image.pull_policy,
            "pull_secret": asked.image.pull_secret or "",
        },
        "storage": {
            "kind": "none",
            "class_name": storage.class_name or "",
            "size": quantity(sizing.runs_bytes),
            "access": storage.access,
            "nfs": {"server": storage.nfs.server, "path": storage.nfs.path},
        },
        "serve": {
            "replicas": sizing.replicas,
            "max_replicas": max_servers(site),
            "cpus": limits["cpu"],
            "memory": limits["memory"],
            "startup_seconds": startup_seconds(sizing.bundle_bytes),
            "split": serve.split,
            "hpa": {"metric": serve.hpa.metric, "target": serve.hpa.target or 0},
            "node_port": serve.node_port or 0,
            "ingress": {
                "host": serve.ingress.host or "",
                "class_name": serve.ingress.class_name or "",
            },
            "tls_secret": serve.tls_secret or "",
            "token_secret": serve.token_secret or "",
        },
        "redis": {
            "enabled": asked.redis.enabled,
            "auth_secret": asked.redis.auth_secret or "",
            "memory": quantity(sizing.redis_bytes),
            "disk": quantity(redis_disk_bytes(sizing.redis_bytes)),
        },
        "monitoring": {"enabled": asked.monitoring.enabled},
    }


def schema(recipe: Recipe) -> Object:
    """What values may be. Helm refuses others, names that it does not know, and choices that do not fit the recipe."""
    name = _text(rf"^$|^{_HOST}$")
    return _record(
        {
            "name": _text(rf"^$|^[a-z]([-a-z0-9]{{0,{MAX_NAME - 2}}}[a-z0-9])?$"),
            "user": _number(1, 2**32 - 2),
            "group": _number(1, 2**32 - 2),
            "image": _record(
                {
                    "serve": _text(_IMAGE),
                    "redis": _text(_IMAGE),
                    "pull_policy": {"enum": ["Always", "IfNotPresent", "Never"]},
                    "pull_secret": name,
                }
            ),
            "storage": _record(
                {
                    "kind": {"enum": ["none", "pvc", "nfs"]},
                    "class_name": name,
                    "size": _text(_BYTES),
                    "access": {"enum": ["ReadWriteMany", "ReadWriteOnce"]},
                    "nfs": _record({"server": _text(rf"^{_HOST}$"), "path": _text(f"^{FOLDER}$")}),
                }
            ),
            "serve": _record(
                {
                    "replicas": _number(1, 10_000),
                    "max_replicas": _number(1, 10_000),
                    "cpus": _text(r"^[1-9][0-9]{0,5}(\.[0-9]{1,3}|m)?$|^0\.[0-9]{0,2}[1-9]$"),
                    "memory": _text(_BYTES),
                    "startup_seconds": _number(1, 86_400),
                    "split": _choice(recipe, "split"),
                    "hpa": _record({"metric": {"enum": ["cpu", "rate"]}, "target": _number(0, 1_000_000)}),
                    "node_port": {"anyOf": [{"const": 0}, _number(30_000, 32_767)]},
                    "ingress": _record({"host": name, "class_name": name}),
                    "tls_secret": name,
                    "token_secret": name,
                }
            ),
            "redis": _record(
                {
                    "enabled": _choice(recipe, "redis"),
                    "auth_secret": name,
                    "memory": _text(_BYTES),
                    "disk": _text(_BYTES),
                }
            ),
            "monitoring": _record({"enabled": {"type": "boolean"}}),
            "global": {"type": "object"},  # that Helm adds for charts inside others
        },
        optional=("global",),
        **{"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of recmill's chart"},
    )


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTES = r"^[1-9][0-9]{0,14}(\.[0-9]{1,6})?(k|M|G|T|Ki|Mi|Gi|Ti)?$"
_DIGEST = "@sha256:[0-9a-f]{64}"
_IMAGE = rf"^[a-z0-9][a-zA-Z0-9._/:-]*[a-z0-9](:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}({_DIGEST})?|{_DIGEST})$"


def _choice(recipe: Recipe, name: str) -> Object:
    return {"const": False} if misfit(recipe, name) else {"type": "boolean"}


def _record(fields: Mapping[str, Object], optional: Sequence[str] = (), **more: Any) -> Object:
    return {
        **more,
        "type": "object",
        "additionalProperties": False,
        "required": [name for name in fields if name not in optional],
        "properties": dict(fields),
    }


def _text(pattern: str) -> Object:
    return {"type": "string", "maxLength": 1024, "pattern": pattern}


def _number(least: int, most: int) -> Object:
    return {"type": "integer", "minimum": least, "maximum": most}


# templates


class _Templates(ServeParts):
    """Choices that are left to the values, and expressions in the place of what they say."""

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.expressions: list[str] = []

    def text(self, expression: str) -> str:
        self.expressions.append(expression)
        return f"HelmText{len(self.expressions) - 1}x"

    def number(self, expression: str) -> Any:
        self.expressions.append(expression)
        return f"HelmNumber{len(self.expressions) - 1}x"

    def file(self, path: str) -> str:
        self.expressions.append(f'.Files.Get "{path}"')
        return f"HelmFile{len(self.expressions) - 1}x"

    def when(self, choice: str, then: Sequence[Any], otherwise: Sequence[Any] = ()) -> list[Any]:
        begin = [f"HelmIf {choice}"] if then else [f"HelmUnless {choice}"]
        between = ["HelmElse"] if then and otherwise else []
        return [*begin, *then, *between, *otherwise, "HelmEnd"]

    def fields(self, choice: str, then: Mapping[str, Any]) -> Object:
        # Keys of markers differ, for several may stand in one object.
        number = len(self.expressions)
        self.expressions.append("")
        return {f"HelmIf {choice} {number}": None, **then, f"HelmEnd {number}": None}

    def pick(self, choice: str, then: str, otherwise: str) -> str:
        return self.text(f'ternary "{then}" "{otherwise}" (not (empty {_CONDITIONS[choice]}))')

    def template(self, objects: Sequence[Object], choice: str | None = None) -> str:
        """The text of a template that makes these objects, if this was chosen."""
        lines = [self._line(line) for line in dumps(objects).splitlines()]
        body = "\n".join(lines) + "\n"
        return body if choice is None else f"{{{{- if {_CONDITIONS[choice]} }}}}\n{body}{{{{- end }}}}\n"

    def _line(self, line: str) -> str:
        if marker := _MARKER.fullmatch(line):
            return "{{- " + self._word(marker["word"], marker["choice"]) + " }}"
        if file := _FILE.fullmatch(line):
            indent = len(file["indent"]) + 2
            expression = self.expressions[int(file["number"])]
            return f"{file['indent']}{file['key']}: |\n{{{{ {expression} | indent {indent} }}}}"
        if "HelmText" in line:
            line = _VALUE.sub(lambda found: f'{found["key"]}"{found["value"]}"', line)
        return _PLACE.sub(lambda found: f"{{{{ {self.expressions[int(found['number'])]} }}}}", line)

    def _word(self, word: str, choice: str | None) -> str:
        condition = _CONDITIONS.get(choice or "", "")
        return {
            "If": f"if {condition}",
            "Unless": f"if not {condition}",
            "Else": "else",
            "End": "end",
        }[word]


_MARKER = re.compile(
    r" *(?:- )?Helm(?P<word>If|Unless|Else|End)(?: (?P<choice>[a-z_]+))?(?: \d+)?(?:: null)?"
)
_FILE = re.compile(r"(?P<indent> *)(?P<key>[\w.]+): HelmFile(?P<number>\d+)x")
_VALUE = re.compile(r"(?P<key>^ *(?:- )?(?:[\w./~-]+: )?)(?P<value>.*)$")
_PLACE = re.compile(r"Helm(?:Text|Number)(?P<number>\d+)x")


@dataclass(frozen=True)
class _ChartSite(Site):
    """A site whose name and settings are expressions; its objects say who made them."""

    def metadata(self, component: str, name: str | None = None, **more: Any) -> Object:
        made = super().metadata(component, name, **more)
        labels = {"app.kubernetes.io/managed-by": "Helm", "helm.sh/chart": f"{CHART}-{__version__}"}
        return {**made, "labels": {**made["labels"], **labels}}


class _Chart:
    """The templates of a chart for a site."""

    def __init__(self, site: Site) -> None:
        self.concrete = Serving.of(site, frozenset())
        self.on = _Templates()
        self.site = self._site(site)
        self.serving = self._serving()

    def templates(self) -> Files:
        files = {
            f"templates/{name}.yaml": self.on.template(make(self.serving), None if name in ALWAYS else name)
            for name, make in GROUPS.items()
        }
        for kind in ("pvc", "nfs"):
            files[f"templates/storage-{kind}.yaml"] = self.on.template(self._storage(kind), kind)
        files["templates/tests/ready.yaml"] = self.on.template([self._test()])
        return files

    def _site(self, site: Site) -> Site:
        text, number, asked = self.on.text, self.on.number, site.settings
        settings = dataclasses.replace(
            asked,
            namespace=text(".Release.Namespace"),
            user=number("int64 .Values.user"),
            group=number("int64 .Values.group"),
            image=dataclasses.replace(
                asked.image,
                serve=text(".Values.image.serve"),
                redis=text(".Values.image.redis"),
                pull_policy=_any(text(".Values.image.pull_policy")),
                pull_secret=None,
            ),
            storage=dataclasses.replace(
                asked.storage,
                class_name=text(".Values.storage.class_name"),
                access=_any(text(".Values.storage.access")),
                nfs=dataclasses.replace(
                    asked.storage.nfs,
                    server=text(".Values.storage.nfs.server"),
                    path=text('.Values.storage.nfs.path | trimSuffix "/"'),
                ),
            ),
        )
        return _ChartSite(site.recipe, settings, text(_NAME), site.sizing)

    def _serving(self) -> Serving:
        text, number, serve = self.on.text, self.on.number, ".Values.serve"
        amounts = {"cpu": text(f"{serve}.cpus"), "memory": text(f"{serve}.memory")}
        rate = rate_of_a_server(self.concrete.site)
        return Serving(
            site=self.site,
            on=self.on,
            resources={"requests": amounts, "limits": dict(amounts)},
            redis_memory=text(".Values.redis.memory"),
            redis_disk=text(".Values.redis.disk"),
            min_servers=number(f"int64 {serve}.replicas"),
            max_servers=number(f"int64 {serve}.max_replicas"),
            startup_seconds=number(f"int64 {serve}.startup_seconds"),
            progress_seconds=number(f"add 600 {serve}.startup_seconds"),
            cpu_percent=number(f"{serve}.hpa.target | default {CPU_PERCENT} | int64"),
            rate=text(f"{serve}.hpa.target | default {rate} | int64"),
            node_port=number(f"int64 {serve}.node_port"),
            host=text(f"{serve}.ingress.host"),
            ingress_class=text(f"{serve}.ingress.class_name"),
            tls_secret=text(_or_named(f"{serve}.tls_secret", "tls")),
            token_secret=text(_or_named(f"{serve}.token_secret", "tokens")),
            redis_secret=text(_or_named(".Values.redis.auth_secret", "redis")),
            pull_secret=text(".Values.image.pull_secret"),
            load_name=f"{self.site.name}-load-{text('.Release.Revision')}",  # a Job cannot be changed, only made
            dashboard=self.on.file(_DASHBOARD),
        )

    def _storage(self, kind: Any) -> list[Object]:
        """As the overlays have it. `helm uninstall` leaves it alone: bundles are in it."""
        made = runs_claim(self.site, kind)
        for one in made:
            one["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
            spec = one["spec"]
            place = spec["capacity"] if one["kind"] == "PersistentVolume" else spec["resources"]["requests"]
            place["storage"] = self.on.text(".Values.storage.size")
            if kind == "pvc":
                one["spec"] = {
                    **{name: value for name, value in spec.items() if name != "storageClassName"},
                    **self.on.fields("storage_class", {"storageClassName": spec["storageClassName"]}),
                }
        return made

    def _test(self) -> Object:
        """`helm test`: the servers answer by the name of their Service."""
        site, scheme = self.site, self.on.pick("tls", "https", "http")
        address = f"{scheme}://{self.serving.service(SERVE)}:{HTTP_PORT}"
        amounts = {"cpu": "100m", "memory": "128Mi"}
        asks = container(
            site,
            "ready",
            ["python", "-c", _TEST_SCRIPT, address],
            site.sizing.serve,
            image=site.settings.image.serve,
            runs="none",
            resources={"requests": amounts, "limits": dict(amounts)},
            volumeMounts=[],
        )
        spec = pod_spec(
            site,
            [asks],
            volumes=[],
            restart_policy="Never",
            **self.on.fields("pull_secret", {"imagePullSecrets": [{"name": self.serving.pull_secret}]}),
        )
        hook = {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": site.metadata("test", annotations=hook),
            "spec": spec,
        }


def _any(value: Any) -> Any:
    """A placeholder where one of a few words is expected."""
    return value


def _or_named(value: str, suffix: str) -> str:
    return f'{value} | default (printf "%s-{suffix}" ({_NAME}))'


_VALUES_HEAD = """\
# Values by the names that `recmill deploy --set` knows, computed for one recipe by `recmill size`.
# An empty text or 0: not set. docs/deploy-serve.md says what each means.
"""
_NAME_PATTERN = f"^[a-z]([-a-z0-9]{{0,{MAX_NAME - 2}}}[a-z0-9])?$"
_HELPERS = f"""\
{{{{/* What every name begins with: `name`, or else the release's. Values that do not go together end here. */}}}}
{{{{- define "recmill.name" -}}}}
{{{{- $name := .Values.name | default .Release.Name -}}}}
{{{{- $least := int .Values.serve.replicas -}}}}
{{{{- $most := int .Values.serve.max_replicas -}}}}
{{{{- $target := int .Values.serve.hpa.target -}}}}
{{{{- if not (regexMatch "{_NAME_PATTERN}" $name) -}}}}
  {{{{- $expected := "lower-case letters, digits and -, from a letter on, at most {MAX_NAME} characters" -}}}}
  {{{{- fail (printf "name must be %s, got %s. Add --set name=..." $expected $name) -}}}}
{{{{- end -}}}}
{{{{- if lt $most $least -}}}}
  {{{{- fail (printf "serve.max_replicas must be at least serve.replicas (%d), got %d" $least $most) -}}}}
{{{{- end -}}}}
{{{{- if and (eq .Values.serve.hpa.metric "cpu") (gt $target 100) -}}}}
  {{{{- fail (printf "serve.hpa.target must be a percentage with serve.hpa.metric=cpu, got %d" $target) -}}}}
{{{{- end -}}}}
{{{{- if and (eq .Values.storage.access "ReadWriteOnce") (gt $most 1) -}}}}
  {{{{- fail (printf "storage.access=ReadWriteOnce wants serve.max_replicas of 1, got %d" $most) -}}}}
{{{{- end -}}}}
{{{{- $name -}}}}
{{{{- end -}}}}
"""
_NOTES = f"""\
{{{{- $name := {_NAME} -}}}}
Servers of /runs/bundle in claim {{{{ $name }}}}-runs start now; they are ready once a bundle is published there.

  kubectl --namespace {{{{ .Release.Namespace }}}} rollout status deployment/{{{{ $name }}}}-serve
  helm --namespace {{{{ .Release.Namespace }}}} test {{{{ .Release.Name }}}}
  kubectl --namespace {{{{ .Release.Namespace }}}} port-forward service/{{{{ $name }}}}-serve {HTTP_PORT}:{HTTP_PORT}
{{{{- if {_CONDITIONS["tokens"]} }}}}

Clients send a token of secret {{{{ {_or_named(".Values.serve.token_secret", "tokens")} }}}} (keys tokens, read-token).
{{{{- end }}}}
{{{{- if {_CONDITIONS["redis"]} }}}}

Redis takes its password from secret {{{{ {_or_named(".Values.redis.auth_secret", "redis")} }}}} (key password).
{{{{- end }}}}
"""

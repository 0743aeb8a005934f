"""What Kubernetes would refuse of the manifests in ``examples/kubernetes``, without Kubernetes.

``kubernetes_schemas.json`` has the facts of the published schemas that these manifests reach: the names of fields,
their types and bounds, out of the CustomResourceDefinitions of kubeflow/trainer (``manifests/base/crds``) and of
kubernetes-sigs/jobset (``config/components/crd/bases``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["MANIFESTS", "documents", "mistakes"]

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
_FACTS = Path(__file__).with_suffix(".json")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def documents(path: Path) -> list[dict[str, Any]]:
    """Of one file."""
    return list(yaml.safe_load_all(path.read_text()))


def mistakes(document: Mapping[str, Any]) -> list[str]:
    """One line each."""
    schemas, kind = json.loads(_FACTS.read_text()), f"{document.get('apiVersion')} {document.get('kind')}"
    return list(_check(document, schemas[kind], document["kind"])) if kind in schemas else [f"{kind} isn't known"]


def _check(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    types = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if types and not any(isinstance(value, _TYPES[t]) and isinstance(value, bool) == (t == "boolean") for t in types):
        yield f"{where}: {value!r} is no {' or '.join(types)}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{where}: {value!r} doesn't match {schema['pattern']}"
    elif not _is_within(value, schema):
        yield f"{where}: {value!r} is out of bounds"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check(item, schema.get("items", {}), f"{where}[{index}]")
    elif isinstance(value, dict):
        yield from _check_fields(value, schema, where)


def _is_within(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, (str, list)):
        least, most = ("minItems", "maxItems") if isinstance(value, list) else ("minLength", "maxLength")
        return bool(schema.get(least, 0) <= len(value) <= schema.get(most, len(value)))
    if isinstance(value, dict):
        return True
    return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))


def _check_fields(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    yield from (f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value)
    named, more = schema.get("properties", {}), schema.get("additionalProperties")
    for name, item in value.items():
        if name not in named and more is None and named:
            yield f"{where}.{name} isn't known"
        else:
            yield from _check(item, named.get(name, more or {}), f"{where}.{name}")

"""The manifests in ``examples/kubernetes``: Kubernetes would take them, and they say what the documentation says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from megatron_ft.exit_codes import MISTAKE_CODE, NO_PROGRESS_CODE, TRY_AGAIN_CODE
from megatron_ft.launcher.arguments import parse
from tests.support.kubernetes_schemas import MANIFESTS, documents, mistakes

ALL = [document for path in sorted(MANIFESTS.glob("*.yaml")) for document in documents(path)]
DOCS = (MANIFESTS.parents[1] / "docs" / "kubernetes.md").read_text()
NO_RESTART_CODE = NO_PROGRESS_CODE
STOPPED_CODE = 143


def found(document: Any, name: str) -> Iterator[Any]:
    """All values of a field of that name."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == name:
                yield value
            yield from found(value, name)
    elif isinstance(document, list):
        for item in document:
            yield from found(item, name)


@pytest.mark.parametrize("document", ALL, ids=lambda document: document["kind"])
def test_manifests_match_the_published_schemas(document: dict[str, Any]) -> None:
    assert mistakes(document) == []


def test_manifests_and_documentation_have_the_same_exit_code_policy() -> None:
    page = [
        yaml.safe_load(block)
        for block in re.findall(r"^    (?:podF|f)ailurePolicy:\n(?:    .*\n)+", DOCS, re.MULTILINE)
    ]
    for name in ("podFailurePolicy", "failurePolicy"):
        (told,) = (each[name] for each in page if name in each)
        policies = [policy for document in ALL for policy in found(document, name)]
        assert policies == [told, told]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in page[0]["podFailurePolicy"]["rules"][:2]}
    assert codes == {"FailJob": [MISTAKE_CODE, NO_RESTART_CODE], "Ignore": [TRY_AGAIN_CODE, STOPPED_CODE]}


def test_command_lines_of_the_manifests_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MANIFESTS.parents[1] / "examples" / "autoresume")  # which has a train.py
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (jobset,) = documents(MANIFESTS / "jobset.yaml")
    _, trainjob = documents(MANIFESTS / "trainjob.yaml")
    (command,) = found(jobset, "command")
    trainer = trainjob["spec"]["trainer"]
    for program, *words in (command, [*trainer["command"], *trainer["args"]]):
        assert program == "ft_launcher"
        line = parse(words)
        assert line.where.stopped_code == STOPPED_CODE
        for grace in (grace for document in ALL for grace in found(document, "terminationGracePeriodSeconds")):
            assert grace > line.options.term_timeout
    name = jobset["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-node-0-0.{name}:29500" in command

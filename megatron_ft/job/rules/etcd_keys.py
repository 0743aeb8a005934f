"""What a job keeps in etcd (v3), and the transactions that change it. Pure: ``call`` has the connection.

megatron_ft/JOB/leader    address of the leader, on its lease; its create revision is the leader's epoch
megatron_ft/JOB/decision  record of the last decision, on a lease of 24 h that each leader renews
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

from msgspec.structs import replace

from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.link.base.codec import decode, encode

LEASE_S = 8
"""Seconds after which a leader that doesn't renew its lease has lost the lock."""
RENEW_S = 2.0
_KEPT_S = 24 * 3600
"""Seconds for which the last decision is kept after a leader has renewed its lease."""

Body = dict[str, Any]
Call = Callable[[str, Body], Body]
"""Sends a body to a path of etcd's JSON gateway, and returns the answer: an empty one if there is no such lease."""


class EtcdAway(Exception):
    """Raised if etcd doesn't answer, or can't do now what it was asked for. What was asked may have been done."""


class Seen(NamedTuple):
    """The lock, as a launcher sees it. ``revision``: of etcd's whole store; ``address`` is empty if nobody leads.

    ``lease``: that of the launcher which has just taken the lock; empty for the others.
    """

    address: str
    epoch: int
    revision: int
    lease: str = ""


def look(call: Call, job: str) -> Seen:
    """Return who leads."""
    answer = call("kv/range", {"key": _key(job, "leader")})
    revision = int(answer["header"]["revision"])
    if (leader := _first(answer)) is None:
        return Seen("", 0, revision)
    return Seen(base64.b64decode(leader["value"]).decode(errors="replace"), int(leader["create_revision"]), revision)


def take(call: Call, job: str, address: str) -> Seen | None:
    """Take the lock, if nobody leads."""
    lease = call("lease/grant", {"TTL": str(LEASE_S)})["ID"]
    key = _key(job, "leader")
    answer = call("kv/txn", {"compare": [_is(key, "create", 0)], "success": [_put(key, address.encode(), lease)]})
    if answer.get("succeeded"):
        revision = int(answer["header"]["revision"])
        return Seen(address, revision, revision, lease)
    release(call, lease)
    return None


def release(call: Call, lease: str) -> None:
    """Give up a lease, and the keys that hang on it."""
    call("lease/revoke", {"ID": lease})


class Ledger:
    """The last decision of a job, in the hands of the leader that holds the lock by ``lease``.

    `renew` and `keep` return False if this leader has lost the lock: it is to end at once. They may be called again
    after `EtcdAway`, which leaves open if the change was made.
    """

    def __init__(self, call: Call, job: str, epoch: int, lease: str) -> None:
        self._call, self._epoch, self._lease = call, epoch, lease
        self._leader, self._decision = _key(job, "leader"), _key(job, "decision")
        self._kept = ""
        """Lease of the decision; empty if there is none yet."""
        self._revision = 0
        """Revision of the decision: a request that comes late to etcd changes none that followed."""

    def enter(self) -> DecisionRecord | None:
        """Return the last decision that an earlier leader has made, maybe in an earlier run of the job."""
        found = _first(self._call("kv/range", {"key": self._decision}))
        if found is None:
            return None
        self._kept, self._revision = found["lease"], int(found["mod_revision"])
        return replace(decode(DecisionRecord, base64.b64decode(found["value"])), revision=self._revision)

    def renew(self) -> bool:
        """Renew the leader's lease, and that of the decision."""
        for lease in filter(None, (self._lease, self._kept)):
            answer = self._call("lease/keepalive", {"ID": lease})
            if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                return False
        return True

    def keep(self, record: DecisionRecord) -> bool:
        """Make a decision durable, in place of the last one, or find that this was done when it was tried before."""
        value = encode(record)
        if not self._kept:
            self._kept = self._call("lease/grant", {"TTL": str(_KEPT_S)})["ID"]
        compare = [_is(self._leader, "create", self._epoch), _is(self._decision, "mod", self._revision)]
        read = {"request_range": {"key": self._decision}}
        put = _put(self._decision, value, self._kept)
        answer = self._call("kv/txn", {"compare": compare, "success": [put, read], "failure": [read]})
        found = _first(answer["responses"][-1]["response_range"]) if answer else None
        if found is None or base64.b64decode(found["value"]) != value:
            return False
        self._revision = int(found["mod_revision"])
        return True


def _key(job: str, name: str) -> str:
    return _text(f"megatron_ft/{quote(job, safe='')}/{name}".encode())


def _is(key: str, what: str, value: int) -> Body:
    """Return the condition that a key was created or modified at this revision; 0: it is absent."""
    return {"key": key, "target": what.upper(), "result": "EQUAL", f"{what}_revision": str(value)}


def _put(key: str, value: bytes, lease: str) -> Body:
    return {"request_put": {"key": key, "value": _text(value), "lease": lease}}


def _first(answer: Body) -> Body | None:
    found: list[Body] = answer.get("kvs", [])
    return found[0] if found else None


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()

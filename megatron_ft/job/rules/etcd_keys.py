"""What a job keeps in etcd (v3), and the transactions that change it. Pure: ``call`` has the connection.

megatron_ft/JOB/leader       address of the leader, on its lease; its create revision is the leader's epoch
megatron_ft/JOB/life         name of the job's life, on the lease of 24 h that the decisions hang on, too
megatron_ft/JOB/LIFE/NUMBER  record of a decision
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

from msgspec.structs import replace

from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.messages import LeaseHeld
from megatron_ft.link.base.codec import decode, encode

LEASE_S = 8
"""Seconds after which a leader that doesn't renew its lease has lost the lock."""
RENEW_S = 2.0
_KEPT_S = 24 * 3600
"""Seconds for which decisions are kept after the last leader has renewed their lease."""

Body = dict[str, Any]
Call = Callable[[str, Body], Body]
"""Sends a body to a path of etcd's JSON gateway, and returns the answer."""


class EtcdAway(Exception):
    """Raised if etcd doesn't answer, or can't do now what it was asked for. What was asked may have been done."""


class LeaseGone(Exception):
    """Raised if etcd doesn't know a lease any more."""


class Seen(NamedTuple):
    """The lock, as a launcher sees it. ``revision``: of etcd's whole store; ``address`` is empty if nobody leads."""

    address: str
    epoch: int
    revision: int


def look(call: Call, job: str) -> Seen:
    """Return who leads."""
    answer = call("kv/range", {"key": _text(_key(job, "leader"))})
    revision = int(answer["header"]["revision"])
    if (leader := _first(answer)) is None:
        return Seen("", 0, revision)
    return Seen(_plain(leader["value"]).decode(errors="replace"), int(leader["create_revision"]), revision)


def take(call: Call, job: str, address: str) -> LeaseHeld | None:
    """Take the lock, if nobody leads."""
    lease = call("lease/grant", {"TTL": str(LEASE_S)})["ID"]
    key = _key(job, "leader")
    answer = call("kv/txn", {"compare": [_is(key, "create_revision", 0)], "success": [_put(key, address, lease)]})
    if answer.get("succeeded"):
        return LeaseHeld(int(answer["header"]["revision"]), lease)
    release(call, lease)
    return None


def release(call: Call, lease: str) -> None:
    """Give up a lease, and the keys that hang on it."""
    with contextlib.suppress(LeaseGone):  # it has expired
        call("lease/revoke", {"ID": lease})


class Ledger:
    """The decisions of a job, in the hands of one leader.

    Methods that change something return False if this leader has lost the lock: it is to end at once. They may be
    called again after `EtcdAway`, which leaves open if the change was made.
    """

    def __init__(self, call: Call, job: str, held: LeaseHeld, *, new_name: Callable[[], str]) -> None:
        self._call, self._job, self._held, self._new_name = call, job, held, new_name
        self._life = self._lease = ""
        self.former: DecisionRecord | None = None
        """The last decision that `enter` has found."""

    def enter(self) -> bool:
        """Read the job's life and its last decision. If there is none, the first life begins."""
        life = _first(self._call("kv/range", {"key": _text(_key(self._job, "life"))}))
        if life is None:
            return self.begin_life()
        self._life, self._lease = _plain(life["value"]).decode(), life["lease"]
        prefix = _key(self._job, self._life, "")
        search = {"range_end": _text(prefix[:-1] + "0"), "sort_order": "DESCEND", "sort_target": "KEY", "limit": "1"}
        last = _first(self._call("kv/range", {"key": _text(prefix), **search}))
        if last is not None:
            record = decode(DecisionRecord, _plain(last["value"]))
            self.former = replace(record, revision=int(last["mod_revision"]))
        return self.renew()

    def renew(self) -> bool:
        """Renew the leader's lease, and that of the decisions."""
        for lease in (self._held.lease, self._lease):
            answer = self._call("lease/keepalive", {"ID": lease})
            is_over = int(answer.get("result", {}).get("TTL", 0)) <= 0
            if is_over and lease in (self._held.lease, self._lease):  # another thread may have begun a life
                return False
        return True

    def keep(self, record: DecisionRecord) -> bool:
        """Make a decision durable."""
        number, value = record.decision.number, encode(record)
        key, former = (_key(self._job, self._life, f"{each:012d}") for each in (number, number - 2))  # in their order
        changes = [_put(key, value, self._lease)]
        if number >= 2:  # the last two tell all
            changes.append({"request_delete_range": {"key": _text(former)}})
        return self._change(key, value, [_is(key, "version", 0)], changes)

    def begin_life(self) -> bool:
        """Begin another life of the job, without decisions; those of the last one go."""
        key, name, former = _key(self._job, "life"), self._new_name(), self._lease
        lease = self._call("lease/grant", {"TTL": str(_KEPT_S)})["ID"]
        if not self._change(key, name.encode(), [], [_put(key, name, lease)]):
            return False
        self._life, self._lease = name, lease
        if former:
            release(self._call, former)
        return True

    def _change(self, key: str, value: bytes, compare: list[Body], changes: list[Body]) -> bool:
        """Make changes that give ``key`` that value, or find that they were made when it was tried before."""
        compare = [_is(_key(self._job, "leader"), "create_revision", self._held.epoch), *compare]
        failure = [{"request_range": {"key": _text(key)}}]
        try:
            answer = self._call("kv/txn", {"compare": compare, "success": changes, "failure": failure})
        except LeaseGone:
            return False
        if answer.get("succeeded"):
            return True
        found = _first(answer["responses"][0]["response_range"])
        return found is not None and _plain(found["value"]) == value


def _key(job: str, *parts: str) -> str:
    """Return a key of the job, or what those of a life begin with."""
    return "/".join(("megatron_ft", quote(job, safe=""), *parts))


def _is(key: str, what: str, value: int) -> Body:
    """Return the condition that a key has this revision or version; 0: it is absent."""
    target = {"create_revision": "CREATE", "version": "VERSION"}[what]
    return {"key": _text(key), "target": target, "result": "EQUAL", what: str(value)}


def _put(key: str, value: str | bytes, lease: str) -> Body:
    return {"request_put": {"key": _text(key), "value": _text(value), "lease": lease}}


def _first(answer: Body) -> Body | None:
    found: list[Body] = answer.get("kvs", [])
    return found[0] if found else None


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _plain(value: str) -> bytes:
    return base64.b64decode(value)
